"""Leases enough groups to keep the server's batch full, with a bounded surplus (:mod:`.occupancy`).

======================  =====================================================================
quantity                bound
======================  =====================================================================
groups at the server    the limit of :mod:`.concurrency` over occupancy, plus an eighth (or one group)
groups held             twice that, so slow grading or an unreachable coordinator stops new leases.
                        Groups that wait for the teacher do not count, so that evaluations, which
                        need no teacher, continue; the coordinator's staleness bound limits them
open lease requests     one; it covers all groups that became free during the previous one
age of a lease          the lease's time, which restarts with progress; then the slot is reassigned
======================  =====================================================================

If a response with leases is lost, no actor works on them. Heartbeats list the held leases
(:attr:`Registration.held_leases`), so the coordinator detects the others and reassigns them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from scalerl_api.http_client import Backoff
from scalerl_api.wire import Lease, LeaseRequest, PartialGroup, ReleaseCause, Split
from scalerl_generator.coordinator_client import CoordinatorClient, CoordinatorUnreachable, UnknownMember
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import Registration
from scalerl_generator.rollouts.completion_streams import ServerLost
from scalerl_generator.rollouts.concurrency import Concurrency
from scalerl_generator.rollouts.delivery import Delivery
from scalerl_generator.rollouts.generation import Generated, PromptMismatch, RolloutGenerator
from scalerl_generator.rollouts.occupancy import Occupancy, groups_wanted
from scalerl_generator.rollouts.partial_reports import PartialReports
from scalerl_generator.rollouts.prompt_codec import PromptTooLong
from scalerl_generator.server_state import ServerState
from scalerl_generator.vllm_replies import VllmError
from scalerl_processes.waiting import pause
from scalerl_tasks.errors import TaskError

logger = logging.getLogger("scalerl.actor.leasing")

LEASE_WAIT_SECONDS = 10.0
_IDLE_SECONDS = 1.0
_EMPTY_ANSWER_SECONDS = 0.05
"""The next lease request waits this long if the coordinator answered without leases and without waiting."""
_MAX_FAILED = 16
"""After this many failed slots without a success between them, the server is considered the cause."""


@dataclass(eq=False)
class _HeldLease:
    lease: Lease
    member_id: str
    """The registration that requested it."""
    deadline: float
    """In the time of ``time.monotonic()``."""
    task: asyncio.Task[None] | None = field(default=None)
    timeout: asyncio.Timeout | None = None
    generating: bool = True
    """False once its completions are sampled."""
    has_tokens: bool = False
    """Whether the server has reported a token of this lease."""
    queued: bool = True
    """Whether it waits for its first token, or the first after a step of its environment."""
    steps: int = 0
    """Number of steps that its environment is making."""
    waits_for_teacher: bool = False

    def renew(self) -> None:
        """Restart the lease's time after progress; does nothing within a hundredth of that time, since it is called often."""
        deadline = time.monotonic() + self.lease.remaining_seconds
        if deadline - self.deadline < self.lease.remaining_seconds / 100:
            return
        self.deadline = deadline
        if self.timeout is not None and not self.timeout.expired():
            loop = asyncio.get_running_loop()
            self.timeout.reschedule(loop.time() + self.lease.remaining_seconds)


class Leasing:
    """Requests leases, generates and grades the group of each, and passes it to delivery.

    Args:
        concurrency: limits the sequences at the server.
        per_group: ``recipe.completionsPerPrompt``.
        release_seconds: how long the end may take, once the grace is over, for grades and releases each.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        registration: Registration,
        state: ServerState,
        rollouts: RolloutGenerator,
        delivery: Delivery,
        metrics: ActorMetrics,
        partials: PartialReports,
        *,
        concurrency: Concurrency,
        per_group: int,
        release_seconds: float = 5.0,
    ) -> None:
        self._release_seconds = release_seconds
        self._coordinator, self._registration, self._state = coordinator, registration, state
        self._rollouts, self._delivery, self._metrics = rollouts, delivery, metrics
        self._partials = partials
        self._concurrency, self._per_group = concurrency, per_group
        self._wake = state.subscribe()
        self._occupancy = Occupancy()
        self._held: dict[str, _HeldLease] = {}
        self._request: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()
        self._backoff = Backoff()
        self._closing = False
        self._failed: set[tuple[Split, int]] = set()
        """Slots that failed after their first token; cleared when a group is graded."""
        self._refused: set[tuple[Split, int]] = set()
        """Slots that failed before their first token; cleared when the server reports a token."""
        self._failure: BaseException | None = None
        self._run_finished = False

    async def run(self) -> None:
        """Run until the coordinator reports the run's end. Call :meth:`close` afterwards in any case.

        Raises:
            PromptMismatch, TaskError, Refused: errors that a retry does not fix.
            Exception: a group's failure, after :data:`_MAX_FAILED` slots failed without a success between them.
        """
        try:
            while not self._run_finished:
                if self._failure is not None:
                    raise self._failure
                self._abandon_unservable()
                self._request_leases()
                await pause(_IDLE_SECONDS, until=self._wake)
                self._wake.clear()
        except asyncio.CancelledError:  # what the groups use is closed next
            serving = [held.task for held in self._held.values() if held.task is not None]
            for task in serving:
                task.cancel()
            if serving:
                await asyncio.wait(serving)
            raise

    async def close(self, grace_seconds: float, reason: str) -> None:
        """Stop requesting leases, and end those held.

        Leases not generated within ``grace_seconds`` are released. The others are graded and delivered, or released if that
        takes longer than ``release_seconds``.
        """
        self._closing = True
        if self._request is not None:
            self._request.cancel()
        if serving := [h.task for h in self._held.values() if h.task is not None]:
            await asyncio.wait(serving, timeout=grace_seconds)
        self._abandon([h for h in self._held.values() if h.generating], reason)
        grading = [h.task for h in self._held.values() if h.task is not None]
        if ending := [*grading, *self._releases]:
            await asyncio.wait(ending, timeout=self._release_seconds)
        # These wait for a teacher that does not answer. The release hands their completions over to another member.
        self._abandon(list(self._held.values()), reason)
        if self._releases:
            await asyncio.wait(self._releases, timeout=self._release_seconds)

    # --- leasing -------------------------------------------------------------------------------

    def _request_leases(self) -> None:
        member_id, version = self._registration.member_id, self._state.version
        if self._closing or self._request is not None or member_id is None or not self._state.is_serving:
            return
        wanted = groups_wanted(
            self._concurrency.limit,
            self._per_group,
            self._occupancy.fraction,
            at_server=sum(h.lease.completions for h in self._held.values() if h.generating),
            in_hand=sum(not h.waits_for_teacher for h in self._held.values()) + len(self._delivery),
        )
        if wanted > 0:
            self._request = asyncio.create_task(self._lease(member_id, version, wanted))
            self._request.add_done_callback(self._request_done)

    def _request_done(self, request: asyncio.Task[None]) -> None:
        self._request = None
        self._record_failure(request)
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
            self._registration.invalidate(member_id)
            await self._backoff.wait()
            return
        except CoordinatorUnreachable as error:
            if self._backoff.is_reset:
                logger.warning("no leases: %s", error)
            await self._backoff.wait()
            return
        self._backoff.reset()
        if reply.stop:
            self._run_finished = True
            self._wake.set()
        received = time.monotonic()
        for lease in sorted(reply.leases, key=lambda lease: lease.split is not Split.HELD_OUT):
            self._start_lease(lease, member_id, received)
        if not reply.leases and received - started < _EMPTY_ANSWER_SECONDS:
            await asyncio.sleep(_EMPTY_ANSWER_SECONDS)  # the coordinator did not wait; avoid a tight loop

    def _start_lease(self, lease: Lease, member_id: str, received: float) -> None:
        if lease.lease_id in self._registration.held_leases:
            return
        self._registration.held_leases.add(lease.lease_id)
        self._metrics.leases.labels(lease.split.value).inc()
        held = self._held[lease.lease_id] = _HeldLease(lease, member_id, received + lease.remaining_seconds)
        held.task = asyncio.create_task(self._serve_lease(held))
        held.task.add_done_callback(lambda task: self._lease_done(held, task))

    # --- serving -------------------------------------------------------------------------------

    async def _serve_lease(self, held: _HeldLease) -> None:
        lease = held.lease
        try:
            async with asyncio.timeout(held.deadline - time.monotonic()) as held.timeout:
                generated = await self._rollouts.generate(
                    lease, lambda tokens: self._on_tokens(held, tokens), lambda: self._step(held)
                )
                self._on_generated(held, generated)
                group = await self._rollouts.grade(
                    generated,
                    self._on_graded,
                    lambda: self._on_teacher_wait(held),
                    lambda: self._on_teacher_answer(held),
                )
                self._delivery.put(group, held.deadline)
                self._failed.clear()
        except TimeoutError:
            logger.warning(
                "dropped lease %s: no progress for %.0f s", lease.lease_id, lease.remaining_seconds
            )
            self._metrics.groups.labels("expired").inc()
            self._registration.held_leases.discard(lease.lease_id)
        except asyncio.CancelledError:
            raise
        except ServerLost as error:
            self._release([lease.lease_id], str(error))
        except PromptTooLong as error:
            self._metrics.skipped.inc()
            self._release([lease.lease_id], str(error), ReleaseCause.TOO_LONG)
        except (PromptMismatch, TaskError) as error:
            self._release([lease.lease_id], str(error))
            raise
        except Exception as error:
            # Only this group failed: the others continue, and the coordinator decides which member retries it.
            self._metrics.failed.inc()
            (self._failed if held.has_tokens else self._refused).add((lease.split, lease.slot))
            logger.warning("lease %s failed", lease.lease_id, exc_info=not isinstance(error, VllmError))
            self._release([lease.lease_id], f"{type(error).__name__}: {error}", ReleaseCause.FAILED)
            if len(self._failed | self._refused) >= _MAX_FAILED:
                raise
        finally:  # callbacks of other leases read these fields until the task is done
            held.timeout, held.generating = None, False

    def _on_tokens(self, held: _HeldLease, tokens: int) -> None:
        """Record progress after tokens of ``held`` were sampled: its own, and that of all leases queued behind it."""
        held.has_tokens, held.queued = True, False
        self._refused.clear()
        for other in self._held.values():
            if other is held or (other.generating and other.queued):
                self._registration.progress(other.lease.lease_id, tokens)
                other.renew()

    @contextlib.contextmanager
    def _step(self, held: _HeldLease) -> Iterator[Callable[[], None]]:
        """While its environment makes a step, ``held`` progresses as groups in grading do: steps and verdicts share processes."""
        held.steps, held.queued = held.steps + 1, False
        try:
            yield self._on_graded
        finally:
            held.steps -= 1
            held.queued = True

    def _on_graded(self) -> None:
        """Record progress of all groups in grading or in a step after one of their completions was graded."""
        for held in self._held.values():
            if held.timeout is not None and (held.steps or not held.generating):
                self._registration.progress(held.lease.lease_id, 1)
                held.renew()

    def _on_teacher_wait(self, held: _HeldLease) -> None:
        """Keep the lease of a group that waits for the teacher, since another member would wait for the same teacher."""
        held.waits_for_teacher = True
        self._registration.progress(held.lease.lease_id, 1)
        held.renew()

    def _on_teacher_answer(self, held: _HeldLease) -> None:
        held.waits_for_teacher = False

    def _on_generated(self, held: _HeldLease, generated: Generated) -> None:
        self._on_tokens(held, 1)  # restart the lease's time for grading and delivery
        held.generating = False
        lengths = [one.tokens for one in generated.completions]
        messages = [turn for one in generated.completions for turn in one.turns]
        self._registration.generated_tokens += sum(lengths) - sum(turn.end - turn.start for turn in messages)
        self._registration.generated_leases.add(held.lease.lease_id)
        if generated.completions and generated.task.episodes is not None:
            self._occupancy.observe_episodes(generated.completions, generated.seconds)
        else:
            self._occupancy.observe(lengths)
        self._metrics.occupancy.set(self._occupancy.fraction)
        self._wake.set()

    def _lease_done(self, held: _HeldLease, task: asyncio.Task[None]) -> None:
        self._held.pop(held.lease.lease_id, None)
        self._record_failure(task)
        self._wake.set()

    def _record_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self._wake.set()

    # --- releasing -----------------------------------------------------------------------------

    def _abandon_unservable(self) -> None:
        """Abandon leases if the server does not answer, or if the coordinator removed the member after a failed update.

        The coordinator reassigns the leases of such a member when the trainer reports the failure. A member that is unknown
        for another reason (a restart of the coordinator) may still deliver, so its leases continue.
        """
        held = [h for h in self._held.values() if h.generating]
        member_id = self._registration.member_id
        if not self._state.up:
            self._abandon(held, "the vLLM server does not answer")
        elif self._state.update_failed and not self._state.updating and member_id is not None:
            self._abandon([h for h in held if h.member_id != member_id], "a weight update failed")

    def _abandon(self, held: list[_HeldLease], reason: str) -> None:
        # The groups of tasks that are done are delivered or released already.
        held = [h for h in held if h.task is None or not h.task.done()]
        for h in held:
            self._held.pop(h.lease.lease_id, None)
            if h.task is not None:
                h.task.cancel()
        self._release([h.lease.lease_id for h in held], reason)

    def _release(
        self, lease_ids: list[str], reason: str, cause: ReleaseCause = ReleaseCause.UNSERVED
    ) -> None:
        """Release leases, in the background."""
        if not lease_ids:
            return
        self._registration.held_leases.difference_update(lease_ids)
        self._metrics.released.inc(len(lease_ids))
        logger.info("releasing %d leases: %s", len(lease_ids), reason)
        partials = self._partials.take(lease_ids)
        task = asyncio.create_task(self._send_release(lease_ids, reason, cause, partials))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        task.add_done_callback(self._record_failure)

    async def _send_release(
        self, lease_ids: list[str], reason: str, cause: ReleaseCause, partials: list[PartialGroup]
    ) -> None:
        """Send the release, with retries.

        The unfinished completions are sent first, because the leases must still be open then. If the release fails, no lease
        is lost, since the next heartbeat does not list them.
        """
        backoff = Backoff()
        with contextlib.suppress(TimeoutError, UnknownMember):
            async with asyncio.timeout(self._release_seconds):
                while True:
                    member_id = await self._registration.member()
                    with contextlib.suppress(CoordinatorUnreachable):
                        await self._partials.send(member_id, partials)
                        await self._coordinator.release(member_id, lease_ids, reason, cause)
                        return
                    await backoff.wait()
