"""Finished groups on their way to the coordinator: kept and sent again until it has answered for each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass

from scalerl_api.wire import Group, PushResult
from scalerl_generator.coordinator_client import Backoff, CoordinatorClient, CoordinatorDown, UnknownMember
from scalerl_generator.join import Membership
from scalerl_generator.metrics import ActorMetrics

logger = logging.getLogger("scalerl.actor.delivery")

_PUSH_GROUPS = 64
_PUSH_BYTES = 16 << 20


@dataclass(frozen=True)
class _Parcel:
    group: Group
    deadline: float
    nbytes: int


class Delivery:
    """One queue, one push at a time: what is finished meanwhile goes along with the next.

    A group leaves the queue when the coordinator has answered for it or its lease is over. Pushing is
    idempotent, so an answer that got lost costs a second push and nothing else.
    """

    def __init__(self, coordinator: CoordinatorClient, membership: Membership, metrics: ActorMetrics) -> None:
        self._coordinator, self._membership, self._metrics = coordinator, membership, metrics
        self._queue: deque[_Parcel] = deque()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        """Groups not yet answered for."""
        return len(self._queue)

    def put(self, group: Group, deadline: float) -> None:
        """Take charge of a group until ``deadline`` (``time.monotonic``), when its lease is over."""
        nbytes = sum(len(c.token_ids) + len(c.logprobs) + 64 for c in group.completions) + 256
        self._queue.append(_Parcel(group, deadline, nbytes))
        self._filled.set()
        self._emptied.clear()

    async def flush(self, timeout_seconds: float) -> bool:
        """Wait until the queue is empty; False if it is not by then. :meth:`run` must be running."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            Refused: the coordinator refuses pushes as such (it answers for single groups otherwise).
        """
        backoff = Backoff()
        while True:
            await self._filled.wait()
            self._drop_expired()
            batch = self._batch()
            if not batch:
                continue
            member_id = await self._membership.member()
            try:
                reply = await self._coordinator.push(member_id, [parcel.group for parcel in batch])
            except UnknownMember:
                self._membership.disown(member_id)
                await backoff.wait()
                continue
            except CoordinatorDown as error:
                if backoff.fresh:
                    logger.warning("keeping %d finished groups: %s", len(self._queue), error)
                await backoff.wait()
                continue
            backoff.reset()
            self._account(batch, reply.results, reply.reasons)

    def _batch(self) -> list[_Parcel]:
        batch: list[_Parcel] = []
        nbytes = 0
        for parcel in self._queue:
            nbytes += parcel.nbytes
            if batch and (len(batch) == _PUSH_GROUPS or nbytes > _PUSH_BYTES):
                break
            batch.append(parcel)
        return batch

    def _account(self, batch: list[_Parcel], results: list[PushResult], reasons: list[str | None]) -> None:
        dropped: Counter[str] = Counter()
        for parcel, result, reason in zip(batch, results, reasons, strict=True):
            assert self._queue[0] is parcel
            self._queue.popleft()
            self._membership.held_leases.discard(parcel.group.lease_id)
            self._metrics.groups.labels(result.value).inc()
            if result not in (PushResult.ACCEPTED, PushResult.DUPLICATE):
                dropped[f"{result.value}: {reason or 'no reason given'}"] += 1
        for text, count in dropped.items():
            logger.warning("%d groups not taken, %s", count, text)
        self._note_empty()

    def _drop_expired(self) -> None:
        now = time.monotonic()
        over = [parcel for parcel in self._queue if parcel.deadline <= now]
        if not over:
            return
        logger.warning(
            "%d finished groups dropped: their leases ran out before they could be pushed", len(over)
        )
        self._metrics.groups.labels("expired").inc(len(over))
        self._membership.held_leases.difference_update(parcel.group.lease_id for parcel in over)
        self._queue = deque(parcel for parcel in self._queue if parcel.deadline > now)
        self._note_empty()

    def _note_empty(self) -> None:
        if not self._queue:
            self._filled.clear()
            self._emptied.set()
