"""How much work is in hand: enough to keep the server full and a little more, never a hoard.

A group is one request of n sequences, and they do not end together: while its longest one grows on,
the others' places are free. The share of a group's sequences that is still growing, averaged over its
life, is measured (*occupancy*: mean length over longest) and tells how many groups fill the server.

======================  =====================================================================
what grows              what bounds it
======================  =====================================================================
groups at the server    ``max_concurrent_sequences`` over occupancy, plus an eighth (or one group)
groups in hand          twice that: grading or a coordinator that is away hold up new leases
open lease requests     one; what becomes free meanwhile is asked for together
age of a lease          its time, which begins anew whenever it comes further; past it the group is someone else's
======================  =====================================================================

An answer that gets lost on its way leaves leases that nobody works on. Heartbeats name the leases in
hand (:attr:`Membership.held_leases`), so the coordinator notices and gives the others away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field

from scalerl_api.wire import Lease, LeaseRequest, ReleaseCause, Split
from scalerl_generator.coordinator_client import Backoff, CoordinatorClient, CoordinatorDown, UnknownMember
from scalerl_generator.delivery import Delivery
from scalerl_generator.join import Membership, wait_set
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.prompts import PromptTooLong
from scalerl_generator.rollouts import Generated, RolloutMaker, ServerLost, WrongPrompt
from scalerl_generator.state import ServerState
from scalerl_generator.vllm_replies import VllmError
from scalerl_tasks.errors import TaskError

logger = logging.getLogger("scalerl.actor.leasing")

LEASE_WAIT_SECONDS = 10.0
_IDLE_SECONDS = 1.0
_RELEASE_SECONDS = 5.0
_EMPTY_ANSWER_SECONDS = 0.05
_AHEAD = 0.125
_LEAST_OCCUPANCY = 0.2
_SMOOTHING = 0.05
_MOST_FAILED = 16
"""Slots that fail one after the other, with none that succeeds between them: it is not the slots."""


class Occupancy:
    """Running mean of how much of a group grows, from the lengths of finished groups; 1 at first.

    >>> occupancy = Occupancy(smoothing=0.5)
    >>> occupancy.learn([10, 2, 4, 4]); occupancy.share
    0.75
    """

    def __init__(self, smoothing: float = _SMOOTHING) -> None:
        self._smoothing = smoothing
        self.share = 1.0

    def learn(self, lengths: list[int]) -> None:
        growing = sum(lengths) / (len(lengths) * max(lengths)) if max(lengths, default=0) else 1.0
        self.share += self._smoothing * (growing - self.share)
        self.share = max(self.share, _LEAST_OCCUPANCY)


def groups_wanted(capacity: int, per_group: int, share: float, at_server: int, in_hand: int) -> int:
    """How many groups to ask for now (see the module's table).

    Args:
        capacity: sequences the server runs at once.
        per_group: completions of a training group.
        share: occupancy.
        at_server: sequences of the groups that are being generated, finished or not.
        in_hand: groups leased and not yet answered for by the coordinator.

    >>> groups_wanted(256, 16, 1.0, at_server=0, in_hand=0)
    18
    >>> groups_wanted(256, 16, 1.0, at_server=272, in_hand=17)
    1
    >>> groups_wanted(256, 16, 0.5, at_server=0, in_hand=0)
    36
    """
    one_group = per_group * share
    enough = max(capacity * (1 + _AHEAD), capacity + one_group)
    room = int((enough - at_server * share) / one_group)
    limit = 2 * int(enough / one_group) - in_hand
    return max(0, min(room, limit))


@dataclass(eq=False)
class _Held:
    lease: Lease
    member_id: str
    deadline: float
    task: asyncio.Task[None] | None = field(default=None)
    timeout: asyncio.Timeout | None = None
    generating: bool = True
    began: bool = False
    """The server has told of a token of its own."""

    def renew(self) -> None:
        """It came further: its whole time begins again."""
        self.deadline = time.monotonic() + self.lease.remaining_seconds
        if self.timeout is not None and not self.timeout.expired():
            loop = asyncio.get_running_loop()
            self.timeout.reschedule(loop.time() + self.lease.remaining_seconds)


class Leasing:
    """Takes leases, has each one generated and graded, and hands the groups to delivery.

    Args:
        capacity: the server's ``max_concurrent_sequences``.
        per_group: ``recipe.completionsPerPrompt``.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        membership: Membership,
        state: ServerState,
        maker: RolloutMaker,
        delivery: Delivery,
        metrics: ActorMetrics,
        *,
        capacity: int,
        per_group: int,
    ) -> None:
        self._coordinator, self._membership, self._state = coordinator, membership, state
        self._maker, self._delivery, self._metrics = maker, delivery, metrics
        self._capacity, self._per_group = capacity, per_group
        self._wake = state.subscribe()
        self._occupancy = Occupancy()
        self._held: dict[str, _Held] = {}
        self._request: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()
        self._backoff = Backoff()
        self._closing = False
        self._failed: set[tuple[Split, int]] = set()
        """Slots that failed after their first token, since a group was graded."""
        self._refused: set[tuple[Split, int]] = set()
        """Slots that failed before it, since the server told of any token."""
        self._failure: BaseException | None = None
        self._over = False

    async def run(self) -> None:
        """Until the coordinator says that the run is over. Then :meth:`close`, whatever ended this.

        Raises:
            WrongPrompt, TaskError, Refused: what no retry mends.
            Exception: the last failure of a group, when :data:`_MOST_FAILED` slots failed and none succeeded.
        """
        while not self._over:
            if self._failure is not None:
                raise self._failure
            self._drop_what_cannot_go_on()
            self._ask()
            await wait_set(self._wake, _IDLE_SECONDS)

    async def close(self, grace_seconds: float, reason: str) -> None:
        """Take nothing new; what is not generated within the grace is released, what is gets graded."""
        self._closing = True
        if self._request is not None:
            self._request.cancel()
        if serving := [h.task for h in self._held.values() if h.task is not None]:
            await asyncio.wait(serving, timeout=grace_seconds)
        self._abandon(list(self._held.values()), reason)
        grading = [h.task for h in self._held.values() if h.task is not None]
        if ending := [*grading, *self._releases]:
            await asyncio.wait(ending, timeout=_RELEASE_SECONDS)

    # --- taking --------------------------------------------------------------------------------

    def _ask(self) -> None:
        member_id, version = self._membership.member_id, self._state.version
        if self._closing or self._request is not None or member_id is None or not self._state.is_serving:
            return
        wanted = groups_wanted(
            self._capacity,
            self._per_group,
            self._occupancy.share,
            at_server=sum(h.lease.completions for h in self._held.values() if h.generating),
            in_hand=len(self._held) + len(self._delivery),
        )
        if wanted > 0:
            self._request = asyncio.create_task(self._lease(member_id, version, wanted))
            self._request.add_done_callback(self._answered)

    def _answered(self, request: asyncio.Task[None]) -> None:
        self._request = None
        self._note_failure(request)
        self._wake.set()

    async def _lease(self, member_id: str, version: int, wanted: int) -> None:
        started = time.monotonic()
        try:
            reply = await self._coordinator.lease(
                LeaseRequest(
                    member_id=member_id,
                    weight_version=version,
                    max_groups=wanted,
                    wait_seconds=LEASE_WAIT_SECONDS,
                )
            )
        except UnknownMember:
            self._membership.disown(member_id)
            await self._backoff.wait()
            return
        except CoordinatorDown as error:
            if self._backoff.fresh:
                logger.warning("no leases: %s", error)
            await self._backoff.wait()
            return
        self._backoff.reset()
        if reply.stop:
            self._over = True
            self._wake.set()
        received = time.monotonic()
        for lease in sorted(reply.leases, key=lambda lease: lease.split is not Split.HELD_OUT):
            self._take(lease, member_id, received)
        if not reply.leases and received - started < _EMPTY_ANSWER_SECONDS:
            await asyncio.sleep(_EMPTY_ANSWER_SECONDS)  # it did not wait; do not ask in a tight loop

    def _take(self, lease: Lease, member_id: str, received: float) -> None:
        if lease.lease_id in self._membership.held_leases:
            return
        self._membership.held_leases.add(lease.lease_id)
        self._metrics.leases.labels(lease.split.value).inc()
        held = self._held[lease.lease_id] = _Held(lease, member_id, received + lease.remaining_seconds)
        held.task = asyncio.create_task(self._serve(held))
        held.task.add_done_callback(lambda task: self._served(held, task))

    # --- serving -------------------------------------------------------------------------------

    async def _serve(self, held: _Held) -> None:
        lease = held.lease
        try:
            async with asyncio.timeout(held.deadline - time.monotonic()) as held.timeout:
                generated = await self._maker.generate(lease, lambda tokens: self._grew(held, tokens))
                self._generated(held, generated)
                group = await self._maker.grade(generated, self._graded)
                self._delivery.put(group, held.deadline)
                self._failed.clear()
        except TimeoutError:
            logger.warning(
                "lease %s came no further for %.0f s and is dropped", lease.lease_id, lease.remaining_seconds
            )
            self._metrics.groups.labels("expired").inc()
            self._membership.held_leases.discard(lease.lease_id)
        except asyncio.CancelledError:
            raise
        except ServerLost as error:
            self._release([lease.lease_id], str(error))
        except PromptTooLong as error:
            self._metrics.skipped.inc()
            self._release([lease.lease_id], str(error), ReleaseCause.TOO_LONG)
        except (WrongPrompt, TaskError) as error:
            self._release([lease.lease_id], str(error))
            raise
        except Exception as error:
            # One group's affair: the others go on, and the coordinator says who tries this one again.
            self._metrics.failed.inc()
            (self._failed if held.began else self._refused).add((lease.split, lease.slot))
            logger.warning("lease %s failed", lease.lease_id, exc_info=not isinstance(error, VllmError))
            self._release([lease.lease_id], f"{type(error).__name__}: {error}", ReleaseCause.FAILED)
            if len(self._failed | self._refused) >= _MOST_FAILED:
                raise
        finally:  # others look at it until its task is done
            held.timeout, held.generating = None, False

    def _grew(self, held: _Held, tokens: int) -> None:
        """The server sampled tokens of ``held``: it came further, and so did all that wait in its queue."""
        held.began = True
        self._refused.clear()
        for other in self._held.values():
            if other is held or (other.generating and not other.began):
                self._membership.progress(other.lease.lease_id, tokens)
                other.renew()

    def _graded(self) -> None:
        """A completion was graded: every group that is being graded, or waits for a grader, came further."""
        for held in self._held.values():
            if held.timeout is not None and not held.generating:
                self._membership.progress(held.lease.lease_id, 1)
                held.renew()

    def _generated(self, held: _Held, generated: Generated) -> None:
        self._grew(held, 1)  # what was generated has its whole time to be graded and delivered
        held.generating = False
        lengths = [len(c.token_ids) for c in generated.completions]
        self._membership.generated_tokens += sum(lengths)
        self._occupancy.learn(lengths)
        self._metrics.occupancy.set(self._occupancy.share)
        self._wake.set()

    def _served(self, held: _Held, task: asyncio.Task[None]) -> None:
        self._held.pop(held.lease.lease_id, None)
        self._note_failure(task)
        self._wake.set()

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self._wake.set()

    # --- giving back ---------------------------------------------------------------------------

    def _drop_what_cannot_go_on(self) -> None:
        """Requests of a dead server; and those of a member that was written off after a failed update.

        The coordinator gives the leases of such a member away when it hears of the failure. A member that
        was forgotten for another reason (a restart of the coordinator) may still deliver, and goes on.
        """
        held = list(self._held.values())
        member_id = self._membership.member_id
        if not self._state.up:
            self._abandon(held, "the vLLM server is gone")
        elif self._state.update_failed and not self._state.updating and member_id is not None:
            self._abandon([h for h in held if h.member_id != member_id], "a weight update failed")

    def _abandon(self, held: list[_Held], reason: str) -> None:
        dropped = [h for h in held if h.generating]
        for h in dropped:
            self._held.pop(h.lease.lease_id, None)
            if h.task is not None:
                h.task.cancel()
        self._release([h.lease.lease_id for h in dropped], reason)

    def _release(
        self, lease_ids: list[str], reason: str, cause: ReleaseCause = ReleaseCause.UNSERVED
    ) -> None:
        """Give leases back, in the background."""
        if not lease_ids:
            return
        self._membership.held_leases.difference_update(lease_ids)
        self._metrics.released.inc(len(lease_ids))
        logger.info("releasing %d leases: %s", len(lease_ids), reason)
        task = asyncio.create_task(self._give_back(lease_ids, reason, cause))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        task.add_done_callback(self._note_failure)

    async def _give_back(self, lease_ids: list[str], reason: str, cause: ReleaseCause) -> None:
        """A lease that cannot be released is still no loss: the next heartbeat no longer names it."""
        backoff = Backoff()
        with contextlib.suppress(TimeoutError, UnknownMember):
            async with asyncio.timeout(_RELEASE_SECONDS):
                while True:
                    member_id = await self._membership.member()
                    with contextlib.suppress(CoordinatorDown):
                        await self._coordinator.release(member_id, lease_ids, reason, cause)
                        return
                    await backoff.wait()
