"""The coordinator's decision logic, free of I/O: the state, and the only way to change it.

Every call takes the logical time as an argument. It reads the state, decides, and passes every change to
:meth:`Core.commit`, which applies the change and queues it for the journal in ``outbox``. The caller journals the outbox
and answers only once it is on disk, so no answer depends on a change that a crash can undo. If a write to disk fails,
:meth:`Core.rebase` returns the state to what the journal holds.

Requests of generators are in :class:`~.generator_requests.GeneratorRequests` and :class:`~.pushed_groups.PushedGroups`, those
of the trainer in :class:`~.trainer_requests.TrainerRequests`.
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
from scalerl_coordinator.leases import (
    LeaseBook,
    SlotKey,
    slot_key,
)
from scalerl_coordinator.membership import Member, Membership
from scalerl_coordinator.samplers import TaskSamplers
from scalerl_coordinator.settings import Settings
from scalerl_coordinator.state import CoordinatorState
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
    outbox: list[tuple[r.Record, bytes]] = field(default_factory=list)
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

    def commit(self, record: r.Record, blob: bytes = b"") -> None:
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

    def reassign_leases(self, holder: str) -> None:
        """Close all leases of a member that will not deliver them, so that their slots are issued to others."""
        for lease_id in sorted(self.book.of(holder), key=self._lease_order):
            self.close_lease(lease_id, r.CloseReason.EXPIRED)

    def _lease_order(self, lease_id: str) -> SlotKey:
        lease = self.state.leases[lease_id]
        return slot_key(lease.prompt, lease.slot)

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Count the time, and journal the usage at its interval. Call it a few times a second."""
        self._measure(now)
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
