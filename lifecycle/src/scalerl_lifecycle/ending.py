"""Suspension, deletion and end of a run: its trainer saves before its objects are deleted; what it loses without its trainer, what stays,
and what continues it. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.process import COORDINATOR_TIMEOUT_SECONDS
from scalerl_api.wire import BROKEN, FORECAST, INTERRUPTED, Status
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_lifecycle import budget
from scalerl_lifecycle.lifecycle_types import (
    ASK_AGAIN_SECONDS,
    DRAIN_SECONDS,
    JobState,
    LifecycleDecision,
    LifecycleInput,
    OutcomeKind,
    PersistedState,
    RunOutcome,
    Suspension,
    Wanted,
    no_later,
)

EARLIER_JOBS: Final = "the Jobs of its earlier start to be deleted"


def suspended(observed: LifecycleInput, persisted: PersistedState) -> LifecycleDecision:
    """Drains the run; then it has no workloads."""
    draining = draining_trainer(observed, persisted, Phase.SUSPENDING)
    if draining is not None:
        return draining
    if observed.deleting:
        return LifecycleDecision(Phase.SUSPENDING, persisted, release=True)
    if observed.suspend:
        return LifecycleDecision(
            Phase.SUSPENDED, replace(without_drain(persisted), suspension=Suspension.YES)
        )
    if persisted.suspension is Suspension.REQUESTED:
        return LifecycleDecision(Phase.SUSPENDED, persisted, set_suspend=True)
    if {observed.prepare.state, observed.trainer.state} != {JobState.ABSENT}:
        return LifecycleDecision(
            Phase.PENDING, persisted, again_seconds=ASK_AGAIN_SECONDS, waiting_for=EARLIER_JOBS
        )
    # A user who resumes a run has removed the cause of its failures.
    unproven_since = observed.steps if persisted.has_trained else None
    persisted = reset_failures(without_drain(persisted))
    persisted = replace(persisted, suspension=Suspension.NO, resumed=True, unproven_since=unproven_since)
    return LifecycleDecision(Phase.PENDING, persisted, Wanted(prepare=True), again_seconds=0.0)


def without_drain(persisted: PersistedState) -> PersistedState:
    """The state of a run that does not drain."""
    return replace(persisted, drain_since=None, unreachable_since=None, suspending_for=None)


def reset_failures(persisted: PersistedState) -> PersistedState:
    """Resets the back-off and the failure counts."""
    return replace(persisted, next_at=0.0, awaited_since=None, record=persisted.record.reset())


def draining_trainer(
    observed: LifecycleInput, persisted: PersistedState, phase: Phase
) -> LifecycleDecision | None:
    """The decision while the trainer drains; None when it has ended, has nothing to save, or has timed out."""
    now, trainer = observed.unix_seconds, observed.trainer
    since = no_later(persisted.drain_since, now)
    # A trainer whose ranks were never all ready has trained nothing: it waits for a queue, a node or an image.
    was_ready = trainer.ready or persisted.ready_since is not None
    draining = trainer.state is JobState.TERMINATING or (
        trainer.state is JobState.ACTIVE and was_ready and (trainer.pods_terminating or not trainer.gated)
    )
    if not draining or persisted.suspension is not Suspension.NO or now - since >= observed.drain_seconds:
        return None
    unreachable = None if observed.status is not None else no_later(persisted.unreachable_since, now)
    # Without the coordinator no stop request reaches the trainer, and none of its checkpoints, which have the coordinator's state,
    # is written: the steps since the last one are trained again.
    abandoned = unreachable is not None and now - unreachable >= COORDINATOR_TIMEOUT_SECONDS
    # A trainer that no queue has admitted has nothing to save, so nothing is created for its drain.
    serving = observed.serving or not observed.queued or trainer.state is JobState.ACTIVE
    waiting_for = "the trainer to finish its step and to write a checkpoint"
    if observed.status is not None and observed.status.unsaved_version >= 0:
        waiting_for = f"space on the volume for the last checkpoint, up to {DRAIN_SECONDS / 60:g} minutes: {observed.status.checkpoint_problem}"
    if abandoned:
        waiting_for = f"the trainer to end: its Job is deleted, no answer from the coordinator in {COORDINATOR_TIMEOUT_SECONDS:g} s"
    return LifecycleDecision(
        phase,
        replace(persisted, drain_since=since, unreachable_since=unreachable),
        Wanted(
            prepare=True,
            coordinator=serving,
            generators=serving and not only_saves(observed.status),
            trainer=trainer.attempt if trainer.state is JobState.ACTIVE and not abandoned else None,
        ),
        update_existing=False,
        request_stop=request_of_stop(INTERRUPTED, observed.status, resumed=False),
        again_seconds=ASK_AGAIN_SECONDS,
        waiting_for=waiting_for,
    )


def only_saves(status: Status | None) -> bool:
    """Whether the trainer only waits for space on the volume, to save its last weights: it needs no generator."""
    return status is not None and status.unsaved_version >= 0


def request_of_stop(wanted: str, status: Status | None, *, resumed: bool) -> str | None:
    """The stop request to send to the coordinator; None if it has it already, or does not answer."""
    # A trainer that keeps weights in memory has ended training; only the end of its Job ends it.
    if status is None or status.unsaved_version >= 0:
        return None
    revocable = (*budget.REVOCABLE, FORECAST, BROKEN) if resumed else budget.REVOCABLE
    return wanted if budget.must_send_stop(wanted, status.stop_reason, revocable) else None


def note_missing_trainer(
    observed: LifecycleInput, persisted: PersistedState, request_stop: str | None
) -> PersistedState:
    """Notes since when a run that ends has had no trainer: its pods wait for a node, or never become ready."""
    status, trainer = observed.status, observed.trainer
    if status is None:
        return persisted
    ending = status.phase is CoordinatorPhase.FINISHING and request_stop is None
    gone = not trainer.ready and persisted.ready_since is None and trainer.state is not JobState.TERMINATING
    since = no_later(persisted.awaited_since, observed.unix_seconds) if ending and gone else None
    return replace(persisted, awaited_since=since)


def gives_up_trainer(observed: LifecycleInput, persisted: PersistedState) -> bool:
    """Whether a run that ends has been without its trainer for too long: the coordinator alone waits for it without end."""
    if observed.status is None or persisted.awaited_since is None:
        return False
    return observed.unix_seconds - persisted.awaited_since >= DRAIN_SECONDS


def _is_saved(status: Status) -> bool:
    """Whether the last checkpoint has all training."""
    return (
        status.checkpoint_version >= status.step
        if status.step
        else not status.supervised_steps or status.checkpoint_version >= 0
    )


def what_is_lost(status: Status) -> str:
    """What a run loses that ends without its trainer, for users."""
    text = f"the trainer was not ready within {DRAIN_SECONDS / 60:g} minutes to end training, and "
    if _is_saved(status):
        return f"{text}the last checkpoint has all steps; a last evaluation or export may be missing"
    if not status.step:
        return f"{text}mid-training since its last checkpoint is lost"
    return f"{text}the steps after {max(status.checkpoint_version, 0)}, the last checkpoint, of {status.step} are lost"


def after_outcome(
    observed: LifecycleInput, persisted: PersistedState, outcome: RunOutcome
) -> LifecycleDecision:
    """The decision for a run that has ended, or is suspended: it may continue."""
    if outcome.kind is OutcomeKind.COMPLETED:
        continues = observed.edit.raises_limit
    else:
        # A run may fail when it is suspended already: only the edit continues it.
        suspends = outcome.kind is OutcomeKind.SUSPENDED or "suspend" in observed.edit.fields
        continues = (observed.suspend and suspends) or observed.edit.may_fix
    if observed.deleting or not continues:
        return _ended(observed, persisted, outcome)
    persisted = replace(persisted, outcome=None, suspension=Suspension.YES)
    phase = Phase.SUSPENDED if observed.suspend else Phase.PENDING
    return LifecycleDecision(phase, persisted, again_seconds=0.0, waiting_for=EARLIER_JOBS)


def _ended(observed: LifecycleInput, persisted: PersistedState, outcome: RunOutcome) -> LifecycleDecision:
    """Jobs that have ended have only their logs, and stay until the run continues or is deleted."""
    ended = (JobState.COMPLETE, JobState.FAILED)
    return LifecycleDecision(
        Phase(outcome.kind.value),
        persisted,
        Wanted(
            prepare=observed.prepare.state in ended,
            trainer=observed.trainer.attempt if observed.trainer.state in ended else None,
        ),
        release=observed.deleting,
    )


def end_run(observed: LifecycleInput, persisted: PersistedState, outcome: RunOutcome) -> LifecycleDecision:
    """Ends, or suspends, the run; what stays is decided at once."""
    return replace(_ended(observed, replace(persisted, outcome=outcome), outcome), again_seconds=0.0)
