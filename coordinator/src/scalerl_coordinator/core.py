"""The coordinator's decision logic, free of I/O: the state, and the only way to change it.

Every call takes the logical time as an argument. It reads the state, decides, and passes every change to
:meth:`Core.commit`, which applies the change and queues it for the journal in ``outbox``. The caller journals the outbox
and answers only once it is on disk, so no answer depends on a change that a crash can undo. If a write to disk fails,
:meth:`Core.rebase` returns the state to what the journal holds.

Requests of generators are in :class:`~.generator_requests.GeneratorRequests`, those of the trainer in
:class:`~.trainer_requests.TrainerRequests`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from scalerl_api.compute import REFERENCE_COST, TOKEN_COST
from scalerl_api.wire import INTERRUPTED, CheckpointFailed, EvaluationPoint, PromptRef, Split, Uploads
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.evaluation import Evaluation
from scalerl_coordinator.leases import (
    MAX_FAILURES,
    MAX_FINAL_ATTEMPTS,
    REPORTED_ATTEMPTS,
    LeaseBook,
    SlotKey,
    slot_key,
)
from scalerl_coordinator.membership import Member, Membership, name_of
from scalerl_coordinator.samplers import TaskSamplers
from scalerl_coordinator.settings import Settings
from scalerl_coordinator.state import CoordinatorState, OpenLease
from scalerl_coordinator.transitions import apply
from scalerl_coordinator.weighted_mean import MEAN_TASK, weighted_mean

log = logging.getLogger(__name__)

_USAGE_SECONDS = 5.0
"""Usage is journaled at this interval: a crash loses at most that much."""

_WAITING_SECONDS = 30.0
"""The same for the time before the first lease."""

WORK = "work"
"""Topic of the actors' long polls, which wait for leases."""
TRAINER = "trainer"
"""Topic of the trainer's long polls."""

MAX_STEPS = "maxSteps"
"""End reason of a run that reached its maximum of steps: the name of the spec's budget field."""
MAX_COMPUTE_TOKENS = "maxComputeTokens"
"""End reason of a run that used up its compute: the name of the spec's budget field."""


class Refusal(Exception):
    """A well-formed request that the coordinator refuses; ``error`` is the code of :class:`scalerl_api.wire.Problem`."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


@dataclass(slots=True)
class _Meter:
    """Usage since the last ``UsageAdded`` record."""

    last: float
    """Logical time up to which the usage is counted."""
    wall: float = 0.0
    """Seconds of the run."""
    device: float = 0.0
    """Device-seconds of generators and trainer."""
    alive: float = 0.0
    """Seconds of registered generators, summed over them."""
    busy: float = 0.0
    """Seconds in which generators had requests, summed over them."""
    tokens: int = 0
    """Generated tokens."""
    waiting: float = 0.0
    """Seconds before the run's first lease."""


@dataclass(slots=True)
class Core:
    """The state, the clocks and the counters that all decisions share."""

    settings: Settings
    samplers: TaskSamplers
    state: CoordinatorState
    membership: Membership
    book: LeaseBook
    meter: _Meter
    nonce: str
    """Unique to this process."""
    labels: Mapping[int, Sequence[dict[str, str]]] = field(default_factory=dict)
    """Labels of the prompts of each evaluation set, by the set's task."""
    outbox: list[tuple[r.AnyRecord, bytes]] = field(default_factory=list)
    """Records that are applied but not yet journaled, each with its blob."""
    forgotten: set[str] = field(default_factory=set)
    """Ids of the leases whose blobs are no longer needed."""
    closed_slots: Counter[str] = field(default_factory=Counter)
    """Number of training slots closed since the process began, on any lineage, by cause: ``""`` if served, else why given up."""
    wake: set[str] = field(default_factory=set)
    """Topics (``WORK``, ``TRAINER``) whose long polls are to be woken."""
    changes: int = 0
    """Counts the records and rollbacks that may change which slots can be leased: all but ``LeasesIssued``."""
    updated_since_restore: set[str] | None = None
    """Names of the members that received weights since this process restored a checkpoint; None if it restored none."""
    failed_checkpoint: CheckpointFailed | None = None
    """The trainer's last attempt to write a checkpoint, if it failed. Not journaled, as the disk may be full; the trainer
    repeats it."""
    uploads: Uploads | None = None
    """Copies of the checkpoints, as the trainer last reported."""
    steps_lost: bool = False
    """The run has trained, and its volume was empty when this process began: only a checkpoint of the trainer continues it."""
    publish_problem: str = ""
    """Why the last publish reached no generator that computes correctly; empty after a success."""
    _mean_of: list[EvaluationPoint] = field(default_factory=list)
    """The points from which ``_mean`` was computed."""
    _mean: list[EvaluationPoint] = field(default_factory=list)
    """Cached points of the weighted mean."""

    @classmethod
    def begin(
        cls,
        settings: Settings,
        samplers: TaskSamplers,
        state: CoordinatorState,
        nonce: str,
        now: float,
        labels: Mapping[int, Sequence[dict[str, str]]] | None = None,
    ) -> Core:
        """Start from ``state`` (empty for a new run). ``nonce`` is unique to this process and prefixes its lease ids.

        Raises:
            Refusal: ``identity``: the journal belongs to a run with other prompts or another seed.
        """
        check_identity(state, settings)
        before = state.identity
        core = cls(
            settings,
            samplers,
            state,
            Membership(settings.heartbeat_seconds),
            LeaseBook(settings.lease_seconds),
            _Meter(now),
            nonce,
            labels or {},
        )
        core.rebase(state, now)
        core.membership.expect({lease.holder for lease in state.leases.values()}, now)
        core.journal_start()
        changed = [
            f"{name} {getattr(before, name)} → {getattr(settings.identity, name)}"
            for name in settings.identity.__struct_fields__
            if before is not None and getattr(before, name) != getattr(settings.identity, name)
        ]
        if changed:
            log.info("from step %d on: %s", state.batch_sizes[-1].first_step, ", ".join(changed))
        return core

    def rebase(self, state: CoordinatorState, now: float) -> None:
        """Replace the state; keep the members, and the deadlines of leases that are still open."""
        self.state = state
        self.changes += 1
        for member in self.membership.members.values():
            # The records that followed from its report may be lost, so its next report counts as its first.
            member.version_reported = False
        self.outbox.clear()
        self.book.resync({i: lease.holder for i, lease in state.leases.items()}, now)
        self.wake |= {WORK, TRAINER}

    def journal_start(self) -> None:
        """Commit this process's start, unless the state has it: the disk may have refused it."""
        if self.state.nonce != self.nonce:
            self.commit(r.Started(self.settings.identity, self.nonce))

    # --- changes --------------------------------------------------------------------------------

    def commit(self, record: r.AnyRecord, blob: bytes = b"") -> None:
        """Apply one record, and queue it for the journal."""
        state = self.state
        may_delete_groups = isinstance(
            record, r.Started | r.CheckpointCommitted | r.TrainerJoined | r.Restored | r.Published
        )
        before = {g.lease_id for g in state.groups.values()} if may_delete_groups else set()
        evaluations = len(state.evaluations)
        apply(state, record)
        self.changes += not isinstance(record, r.LeasesIssued)
        self.outbox.append((record, blob))
        if may_delete_groups:
            self.forgotten |= before - {g.lease_id for g in state.groups.values()}
            self.book.resync({i: lease.holder for i, lease in state.leases.items()}, self.meter.last)
        match record:
            case r.GroupAccepted(next_prompt=prompt) if prompt is not None:
                self.forgotten.add(record.lease_id)
                self.wake.add(WORK)
            case r.GroupAccepted():
                self.closed_slots[""] += 1
                if state.closed(state.step_of(record.slot)):
                    self.wake.add(TRAINER)
            case r.EvaluationAccepted():
                if len(state.evaluations) < evaluations:
                    self.wake.add(TRAINER)
            case r.LeaseClosed() | r.EvaluationStarted() | r.EvaluationReleased():
                self.wake.add(WORK)
            case (
                r.LeasesIssued()
                | r.UsageAdded()
                | r.Dropped()
                | r.CheckpointCommitted()
                | r.SupervisedTrained()
            ):
                pass
            case _:
                if isinstance(record, r.GivenUp) and record.split is Split.TRAIN:
                    self.closed_slots[record.cause.value] += 1
                self.wake |= {WORK, TRAINER}

    def close_lease(self, lease_id: str, reason: r.CloseReason, rollouts: int = 0) -> None:
        self.commit(r.LeaseClosed(lease_id, reason, rollouts))
        self.book.remove(lease_id)

    def retry_slot(self, lease: OpenLease, reason: str, now: float, *, failed: bool) -> None:
        """Count a failed attempt for a lease that was closed without a group.

        The slot is given up once two proven members (those that served other slots) failed with it, or after
        ``MAX_FAILURES`` failures if no other member should try it. If those that hold the version under evaluation are exhausted, and
        others have newer weights, the evaluation is released to them instead.

        Args:
            failed: the holder is healthy and still could not serve the slot.
        """
        key = slot_key(lease.prompt, lease.slot)
        member = self.membership.named(lease.holder)
        proven = member is not None and member.proven
        failed_by = lease.holder if failed else None
        retries = self.book.add_retry(key, reason, now, failed_by=failed_by, proven=proven)
        failures = retries.proven_failures if proven else retries.failures
        exhausted = failures >= MAX_FAILURES and not (
            member is not None and self.others_should_try(key, member, lease.policy_version)
        )
        if exhausted and len(retries.proven) <= 1 and self._only_newer_weights_are_left(key, lease):
            text = "%s failed %d times with the generators that have version %d, last: %s; newer weights will complete the evaluation"
            log.error(text, self.describe(key), retries.failures, lease.policy_version, reason)
            self.commit(r.EvaluationReleased(lease.policy_version, lease.prompt.task))
        elif len(retries.proven) > 1 or exhausted:
            self.give_up(
                lease, r.GiveUpReason.FAILED, f"failed {retries.failures} times, last: {reason}", now
            )
        elif retries.attempts == REPORTED_ATTEMPTS:
            log.error("%s failed %d times, last reason: %s", self.describe(key), retries.attempts, reason)
        if retries.attempts >= MAX_FINAL_ATTEMPTS:
            self.wake.add(TRAINER)

    def give_up(self, lease: OpenLease, cause: r.GiveUpReason, reason: str, now: float) -> None:
        """Stop issuing the slot of a closed lease. The slot's step or evaluation proceeds without it."""
        self.book.retries.pop(slot_key(lease.prompt, lease.slot), None)
        held_out = lease.split is Split.HELD_OUT
        log.error(
            "gave up %s (prompt %d): %s",
            *(self.describe(slot_key(lease.prompt, lease.slot)), lease.prompt.index, reason),
        )
        if held_out:
            self.flush_usage(now)  # this may complete the evaluation, whose point records the run's time
        self.commit(
            r.GivenUp(
                *(lease.split, lease.slot, lease.policy_version if held_out else -1),
                *(cause, reason[:500]),
                *((lease.prompt.task, self.labels_of(lease.prompt)) if held_out else ()),
            )
        )

    def reassign_leases(self, holder: str) -> None:
        """Close all leases of a member that will not deliver them, so that their slots are issued to others."""
        for lease_id in sorted(self.book.of(holder), key=self._lease_order):
            self.close_lease(lease_id, r.CloseReason.EXPIRED)

    def _lease_order(self, lease_id: str) -> SlotKey:
        lease = self.state.leases[lease_id]
        return slot_key(lease.prompt, lease.slot)

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Handle timeouts: lost members, expired leases, ended back-offs. Call it a few times a second."""
        before = self.meter.last
        self._measure(now)
        for name in self.membership.lost(now):
            self.reassign_leases(name)
            self.wake.add(TRAINER)
        for lease_id in self.book.expired(now):
            lease = self.state.leases[lease_id]
            self.close_lease(lease_id, r.CloseReason.TIMED_OUT)
            seconds = self.settings.lease_seconds
            self.retry_slot(lease, f"{lease.holder} made no progress for {seconds:g} s", now, failed=True)
        if self.book.wait_over(before, now):
            self.wake.add(WORK)
        if self.membership.backoff_over(before, now):
            self.wake.add(TRAINER)
        if self.meter.wall >= _USAGE_SECONDS or self.meter.waiting >= _WAITING_SECONDS:
            self.flush_usage(now)

    def _measure(self, now: float) -> None:
        meter, members = self.meter, len(self.membership.members)
        elapsed = now - meter.last
        meter.last = now
        if self.finished:
            return
        if not self.state.leased:
            meter.waiting += elapsed
            return
        meter.wall += elapsed
        meter.alive += elapsed * members
        meter.device += elapsed * (members * self.settings.generator_devices + self.settings.trainer_devices)

    def run_seconds(self, now: float) -> float:
        """Seconds of the run up to ``now``: the ``wall_seconds`` that the status would report after a tick."""
        clock_runs = self.state.leased and not self.finished
        since_last = now - self.meter.last if clock_runs else 0.0
        return self.state.usage.wall_seconds + self.meter.wall + since_last

    def flush_usage(self, now: float) -> None:
        """Journal the usage so far. Call it before committing a record that depends on the run's time."""
        self._measure(now)
        meter = self.meter
        if meter.wall or meter.busy or meter.tokens or meter.waiting:
            self.commit(
                r.UsageAdded(
                    *(meter.wall, meter.device, meter.alive, meter.busy, meter.tokens, meter.waiting)
                )
            )
            self.meter = _Meter(now)

    def may_issue(self, key: SlotKey, member: Member, now: float, version: int = -1) -> bool:
        """Whether ``key``, of the evaluation of ``version`` or of training, may be issued to ``member`` now. A slot that failed with a
        member goes to other members first."""
        return not self.book.waits(key, now) and not self.others_should_try(key, member, version)

    def others_should_try(self, key: SlotKey, member: Member, version: int = -1) -> bool:
        """Whether the slot failed with ``member`` and another healthy member is the better next choice.

        That is a member with weights at least as new that has not failed with the slot, or that is proven while ``member``
        is not. ``version``: the version under evaluation, of a prompt of an evaluation.
        """
        retries = self.book.retries.get(key)
        if retries is None or member.name not in retries.failed_by:
            return False
        evaluation = self.state.evaluations.get((version, key[0])) if key[1] is Split.HELD_OUT else None
        others = [
            other
            for other in self.membership.members.values()
            if other is not member
            and other.healthy
            and other.version >= member.version
            and (other.name not in retries.failed_by or (other.proven and not member.proven))
        ]
        if not others or evaluation is None or self.newer_may_complete(evaluation):
            return bool(others)
        chosen = self.evaluators(version)
        return any(m.version == version and self.may_evaluate(key, m, chosen) for m in others)

    def _only_newer_weights_are_left(self, key: SlotKey, lease: OpenLease) -> bool:
        """Whether the prompt of a closed lease waits for its version, and members that have not failed with it have newer ones."""
        evaluation = self.state.evaluations.get((lease.policy_version, key[0]))
        if lease.split is Split.TRAIN or self.settings.evaluation_generators is None:
            return False
        failed_by = self.book.retries[key].failed_by
        return (
            evaluation is not None
            and not self.newer_may_complete(evaluation)
            and any(
                m.healthy and m.version > lease.policy_version and m.name not in failed_by
                for m in self.membership.members.values()
            )
        )

    def newer_may_complete(self, evaluation: Evaluation) -> bool:
        """Whether members with newer weights may serve an evaluation: the forecast does not follow its set, or it is released."""
        return evaluation.released or not self.settings.follows(evaluation.task)

    def may_evaluate(self, key: SlotKey, member: Member, chosen: set[str]) -> bool:
        """Whether a member with the version under evaluation, of which ``chosen`` are the :meth:`evaluators`, may serve a prompt: one of
        those, or any other once the prompt failed with all of those."""
        if member.member_id in chosen:
            return True
        retries = self.book.retries.get(key)
        return (
            retries is not None
            and member.healthy
            and bool(chosen)
            and retries.failed_by.issuperset(map(name_of, chosen))
        )

    def evaluators(self, version: int) -> set[str]:
        """Ids of the members that generate an evaluation of ``version`` on a set that the forecast follows: ``evaluation.generators`` of
        those that hold it, or all of them without that field, and at the end of the run, for its last version.

        Members that have prompts of it come first, then the order is by name: a coordinator that restarts chooses the same.
        """
        holders = [m for m in self.membership.members.values() if m.healthy and m.version == version]
        count = self.settings.evaluation_generators
        if count is not None and not (self.end_reason and version == self.state.version):
            holders = sorted(holders, key=lambda m: (not self.evaluates(m), m.name))[:count]
        return {m.member_id for m in holders}

    def evaluates(self, member: Member) -> bool:
        """Whether a member has leases of an evaluation of its version on a set that the forecast follows."""
        leases = (self.state.leases[lease_id] for lease_id in self.book.of(member.name))
        return any(
            lease.split is Split.HELD_OUT
            and lease.policy_version == member.version
            and self.settings.follows(lease.prompt.task)
            for lease in leases
        )

    # --- queries --------------------------------------------------------------------------------

    def describe(self, key: SlotKey) -> str:
        """Name of a slot for log messages."""
        task, split, slot = key
        if split is Split.TRAIN:
            return f"slot {slot}"
        return f"{self.settings.identity.evaluation_set(task).name} prompt {slot}"

    def labels_of(self, prompt: PromptRef) -> dict[str, str]:
        """The labels of a prompt of an evaluation set."""
        labels = self.labels.get(prompt.task)
        return labels[prompt.index] if labels else {}

    @property
    def points(self) -> list[EvaluationPoint]:
        """Evaluation points of all sets, plus those of the weighted mean if that is the run's curve."""
        points = list(self.state.points)
        if self.settings.forecast_task != MEAN_TASK:
            return points
        # Cached: every tick and poll reads it, and computing it takes 0.2 ms per version.
        if points != self._mean_of:
            self._mean_of, self._mean = points, weighted_mean(points, self.settings.weights)
        return points + self._mean

    @property
    def curve(self) -> list[EvaluationPoint]:
        """The points that the forecast follows, by version."""
        return [point for point in self.points if point.task == self.settings.forecast_task]

    @property
    def end_reason(self) -> str:
        """Why no further step will be trained; empty while training continues."""
        if self.state.stop_reason:
            return self.state.stop_reason
        limit = self.settings.max_steps
        if limit is not None and self.state.version >= limit:
            return MAX_STEPS
        limit = self.settings.max_compute_tokens
        return MAX_COMPUTE_TOKENS if limit is not None and self.compute_tokens >= limit else ""

    @property
    def compute_tokens(self) -> Fraction:
        """Compute of trained and dropped groups, in equivalent tokens of supervised training (:mod:`scalerl_api.compute`)."""
        state = self.state
        lineage = state.lineage
        rl = TOKEN_COST * lineage.work_tokens + REFERENCE_COST * lineage.reference_tokens
        return state.supervised_tokens + rl

    @property
    def interrupted(self) -> bool:
        """Whether the user interrupted the run: it ends without further generation or evaluation."""
        return self.state.stop_reason == INTERRUPTED

    @property
    def finished(self) -> bool:
        """Whether the run has ended. Without a trainer so far, there is nothing to train, to evaluate or to save."""
        return bool(self.end_reason) and (self.state.finished or self.state.awaits_trainer)

    def report_version(self, member: Member, version: int, now: float) -> bool:
        """Record the weight version that a member reports. Returns whether it changed.

        The first weights of a member count from the commit of their publish on: the trainer probes them before.
        """
        is_first = not member.version_reported
        counted = -1 if self.state.unproven.get(member.name) == version else version
        changed = self.membership.report_version(member, counted, now)
        held = max(version, member.version)
        updated = self.updated_since_restore
        if updated is None:
            # Once a version later than the restored one is published, a member that registers again may hold that one.
            unaccounted = self.state.published <= self.state.restored
        else:
            unaccounted = member.name not in updated
        if (is_first and unaccounted) or held > self.newest_possible:
            self.mark_lost(held)
        return changed

    def mark_lost(self, version: int) -> None:
        """Mark versions up to ``version`` as ambiguous if it may have been published before the journal was lost.

        Restored state ends at its checkpoint. A generator with later weights may hold those of the lost lineage, even if
        the run has since trained the same version again.
        """
        if 0 <= self.state.restored < version and version > self.state.lost:
            log.warning(
                "a generator holds version %d; the state was restored from version %d, so versions up to %d may name two sets "
                "of weights",
                *(version, self.state.restored, version),
            )
            self.commit(r.WeightsLost(version))

    @property
    def newest_possible(self) -> int:
        """The newest weight version in use, of the current lineage or a lost one."""
        return max(self.state.version, self.state.published)

    def stop(self, reason: str, now: float) -> None:
        """Stop the run after its current step. An empty ``reason`` cancels the stop."""
        self.flush_usage(now)
        self.commit(r.StopRequested(reason))


def check_identity(state: CoordinatorState, settings: Settings) -> None:
    """Check that ``state`` belongs to this run.

    Raises:
        Refusal: ``identity``: it belongs to a run with other prompts or another seed. The message lists every difference.
    """
    current = settings.identity.fixed
    stored = current if state.identity is None else state.identity.fixed
    differences = ", ".join(
        f"{name} was {stored[name]!r}, is {current[name]!r}"
        for name in current
        if stored[name] != current[name]
    )
    if differences:
        raise Refusal(
            "identity",
            f"the journal belongs to a run with other settings ({differences}); "
            f"restore them, or start in an empty directory; if an upgrade removed one (CHANGELOG.md), finish the run with the release "
            f"that began it",
        )
