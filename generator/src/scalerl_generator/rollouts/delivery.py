"""Pushes finished groups to the coordinator, and retries each until it is acknowledged or its lease expires."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass

from scalerl_api.http_client import Backoff
from scalerl_api.wire import Group, PushResult
from scalerl_generator.coordinator_client import CoordinatorClient, CoordinatorUnreachable, UnknownMember
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import Registration
from scalerl_processes.waiting import pause

logger = logging.getLogger("scalerl.actor.delivery")

_PUSH_GROUPS = 64
_PUSH_BYTES = 16 << 20


@dataclass(frozen=True)
class _PendingGroup:
    group: Group
    deadline: float
    nbytes: int


class Delivery:
    """A queue of finished groups with one push at a time: groups finished during a push go into the next one.

    A group leaves the queue when the coordinator acknowledges it or its lease expires. Pushes are idempotent, so a lost
    response only costs a second push.
    """

    def __init__(
        self, coordinator: CoordinatorClient, registration: Registration, metrics: ActorMetrics
    ) -> None:
        self._coordinator, self._registration, self._metrics = coordinator, registration, metrics
        self._queue: deque[_PendingGroup] = deque()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        """Number of groups that are not acknowledged."""
        return len(self._queue)

    def put(self, group: Group, deadline: float) -> None:
        """Queue a group until ``deadline`` (``time.monotonic``), when its lease expires."""
        nbytes = 256 + sum(
            len(c.token_ids)
            + len(c.logprobs)
            + len(c.teacher_logprobs)
            + (len(c.routed.experts) if c.routed else 0)
            + 64
            for c in group.completions
        )
        self._queue.append(_PendingGroup(group, deadline, nbytes))
        self._filled.set()
        self._emptied.clear()

    async def flush(self, timeout_seconds: float) -> bool:
        """Wait until the queue is empty; False on timeout. :meth:`run` must be running."""
        await pause(timeout_seconds, until=self._emptied)
        return self._emptied.is_set()

    async def run(self) -> None:
        """Push groups until cancelled.

        Raises:
            Refused: the coordinator refuses the whole push (the reply has the rejections of single groups).
        """
        backoff = Backoff()
        while True:
            await self._filled.wait()
            self._drop_expired()
            batch = self._batch()
            if not batch:
                continue
            member_id = await self._registration.member()
            try:
                reply = await self._coordinator.push(member_id, [pending.group for pending in batch])
            except UnknownMember:
                self._registration.invalidate(member_id)
                await backoff.wait()
                continue
            except CoordinatorUnreachable as error:
                if backoff.is_reset:
                    logger.warning("keeping %d finished groups: %s", len(self._queue), error)
                await backoff.wait()
                continue
            backoff.reset()
            self._process_results(batch, reply.results, reply.reasons)

    def _batch(self) -> list[_PendingGroup]:
        batch: list[_PendingGroup] = []
        nbytes = 0
        for pending in self._queue:
            nbytes += pending.nbytes
            if batch and (len(batch) == _PUSH_GROUPS or nbytes > _PUSH_BYTES):
                break
            batch.append(pending)
        return batch

    def _process_results(
        self, batch: list[_PendingGroup], results: list[PushResult], reasons: list[str | None]
    ) -> None:
        dropped: Counter[str] = Counter()
        for pending, result, reason in zip(batch, results, reasons, strict=True):
            assert self._queue[0] is pending
            self._queue.popleft()
            self._registration.held_leases.discard(pending.group.lease_id)
            self._metrics.groups.labels(result.value).inc()
            if result not in (PushResult.ACCEPTED, PushResult.DUPLICATE):
                dropped[f"{result.value}: {reason or 'no reason given'}"] += 1
        for text, count in dropped.items():
            logger.warning("%d groups not accepted, %s", count, text)
        self._signal_if_empty()

    def _drop_expired(self) -> None:
        now = time.monotonic()
        expired = [pending for pending in self._queue if pending.deadline <= now]
        if not expired:
            return
        logger.warning(
            "dropped %d finished groups: their leases expired before they could be pushed", len(expired)
        )
        self._metrics.groups.labels("expired").inc(len(expired))
        self._registration.held_leases.difference_update(pending.group.lease_id for pending in expired)
        self._queue = deque(pending for pending in self._queue if pending.deadline > now)
        self._signal_if_empty()

    def _signal_if_empty(self) -> None:
        if not self._queue:
            self._filled.clear()
            self._emptied.set()
