"""Failures that end or hold a run, and whether an edit or a resumption may be their cause. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scalerl_api.reasons import Reason
from scalerl_api.spec import RunSpec
from scalerl_lifecycle import restarts
from scalerl_lifecycle.edits_of_run import restarts_a_role
from scalerl_lifecycle.lifecycle_types import LifecycleInput, OutcomeKind, PersistedState, RunOutcome

PROVEN_STEPS: Final = 10
"""Steps after which an edit is no longer taken for the cause of a failure. At least 2: the first may have been in progress."""
MAX_FIELDS: Final = 5
"""Most edited fields in a message."""
MAX_CHARACTERS: Final = 1200
"""Of a failure, in a message with edited fields."""


def failed_outcome(
    observed: LifecycleInput, persisted: PersistedState, reason: Reason, message: str
) -> RunOutcome:
    """The outcome after a failure: a run that has trained is suspended if an edit or a resumption may be its cause."""
    if reason is not Reason.PUBLISH_REFUSED and persisted.unproven_since is None:
        return RunOutcome(OutcomeKind.FAILED, reason, message)
    edited = tuple(field for field in observed.unproven if restarts_a_role(field))
    if edited:
        fields = ", ".join(f"spec.{field}" for field in edited[:MAX_FIELDS])
        fields += f" and {len(edited) - MAX_FIELDS} more" if len(edited) > MAX_FIELDS else ""
        message = f"{message[:MAX_CHARACTERS]}; revert or fix the edit of {fields}"
        if reason is not Reason.PUBLISH_REFUSED:
            return RunOutcome(OutcomeKind.SUSPENDED, Reason.EDIT_FAILED, f"{reason}: {message}")
    return RunOutcome(OutcomeKind.SUSPENDED, reason, message)


def coordinator_failure(observed: LifecycleInput, persisted: PersistedState) -> RunOutcome | None:
    """The outcome of a coordinator that cannot continue."""
    coordinator = observed.coordinator
    if coordinator.bad_input is not None:
        message = coordinator.bad_input.message or "its input is wrong"
        return failed_outcome(observed, persisted, Reason.BAD_INPUT, f"coordinator: {message}")
    if coordinator.restarts > restarts.MAX_POD_RESTARTS:
        message = f"{coordinator.restarted or 'coordinator'} was restarted {coordinator.restarts} times"
        return failed_outcome(observed, persisted, Reason.BACKOFF_LIMIT_EXCEEDED, message)
    if coordinator.given_up is not None:
        message = f"coordinator: {coordinator.given_up.message}"
        return failed_outcome(observed, persisted, Reason.BACKOFF_LIMIT_EXCEEDED, message)
    return None


def generator_failure(
    spec: RunSpec, observed: LifecycleInput, persisted: PersistedState
) -> RunOutcome | None:
    """The outcome of a run whose generators all reject their input, or are given up, after an edit or before any of them has held
    weights, which only the coordinator knows. Otherwise, the others go on, and mid-training, which ends with the first checkpoint,
    needs none."""
    generators, status = observed.generators, observed.status
    end = generators.bad_input or generators.given_up
    if end is None or generators.ready or generators.starting:
        return None
    if status is None or (status.published_version >= 0 and persisted.unproven_since is None):
        return None
    if spec.warm_start is not None and status.checkpoint_version < 0:
        return None
    reason = Reason.BAD_INPUT if generators.bad_input else Reason.BACKOFF_LIMIT_EXCEEDED
    return failed_outcome(observed, persisted, reason, f"generator: {end.message or 'its input is wrong'}")


def environment_failure(observed: LifecycleInput, persisted: PersistedState) -> RunOutcome | None:
    """The outcome of a run whose environment servers all fail for good, so that no episode goes on. One that has trained is suspended, to save
    it: what fails is no role of the run."""
    environment = observed.environment
    if environment is None or environment.ready:
        return None
    if environment.restarts > restarts.MAX_POD_RESTARTS:
        message = f"{environment.restarted} was restarted {environment.restarts} times"
    elif environment.given_up is not None and not environment.starting:
        message = environment.given_up.message or f"exited with {environment.given_up.exit_code}"
    else:
        return None
    end = OutcomeKind.SUSPENDED if persisted.has_trained else OutcomeKind.FAILED
    return RunOutcome(end, Reason.BACKOFF_LIMIT_EXCEEDED, f"environment: {message}")


def note_training(observed: LifecycleInput, persisted: PersistedState) -> PersistedState:
    """Notes that the run has trained, and until when: with the spec before its last edit, or still while it drains for that edit.
    The recorded steps may be older than the coordinator's."""
    status, steps = observed.status, observed.steps
    if status is not None:
        steps = max(steps, status.step)
    trained = persisted.has_trained or steps > 0 or (status is not None and status.supervised_steps > 0)
    edited = trained and (observed.edit.restarts or observed.prepare.stale)
    return replace(
        persisted, has_trained=trained, unproven_since=steps if edited else persisted.unproven_since
    )


def note_proof(observed: LifecycleInput, persisted: PersistedState) -> PersistedState:
    """Notes that the run has trained enough steps with its last edit: one of generators restarts them while training continues."""
    status, since = observed.status, persisted.unproven_since
    if status is None or since is None:
        return persisted
    if not observed.started:
        return replace(persisted, unproven_since=max(since, status.step))
    proven = observed.trainer.ready and status.step >= since + PROVEN_STEPS
    return replace(persisted, unproven_since=None if proven else since)
