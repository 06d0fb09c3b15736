"""The end of a run: what it loses without its trainer, what stays, and what continues it. Pure."""

from __future__ import annotations

from dataclasses import replace

from scalerl_api.conditions import Phase
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_api.wire import Status
from scalerl_lifecycle.drain import EARLIER_JOBS
from scalerl_lifecycle.lifecycle_types import (
    DRAIN_SECONDS,
    JobState,
    LifecycleDecision,
    LifecycleInput,
    OutcomeKind,
    PersistedState,
    RunOutcome,
    Suspension,
    Wanted,
)
from scalerl_lifecycle.waits import no_later


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
