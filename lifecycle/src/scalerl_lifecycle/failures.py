"""Failures: what ends or holds a run, whether an edit or a resumption may be the cause, and the attempts of the trainer. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scalerl_api.process import BAD_INPUT_EXIT_CODE, DIVERGED_EXIT_CODE, PUBLISH_REFUSED_EXIT_CODE
from scalerl_api.reasons import Reason
from scalerl_api.spec import RunSpec
from scalerl_lifecycle import restarts
from scalerl_lifecycle.edits_of_run import restarts_a_role
from scalerl_lifecycle.lifecycle_types import (
    ASK_AGAIN_SECONDS,
    POLL_SECONDS,
    START_DELAY_SECONDS,
    ContainerExit,
    Job,
    JobState,
    LifecycleInput,
    OutcomeKind,
    PersistedState,
    RunOutcome,
    is_pending,
)

EXIT_CODE_GRACE_SECONDS: Final = 30.0
"""How long after the failure of a Job the exit codes of its pods may arrive."""
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


# --- attempts of the trainer ---------------------------------------------------------------------


def record_end(spec: RunSpec, observed: LifecycleInput, persisted: PersistedState) -> PersistedState:
    """Records the end of the present attempt, once."""
    trainer = observed.trainer
    ended = trainer.state in (JobState.COMPLETE, JobState.FAILED)
    if (
        not ended
        or persisted.last_recorded_attempt == persisted.attempt
        or trainer.attempt != persisted.attempt
    ):
        return persisted
    if trainer.state is JobState.COMPLETE and observed.status is None:
        return persisted  # only the coordinator knows whether the run is complete
    if awaits_exit_code(trainer, observed.unix_seconds):
        return persisted
    worst = worst_exit(trainer.exits)
    ready_seconds = (
        None if persisted.ready_since is None else max(0.0, observed.unix_seconds - persisted.ready_since)
    )
    policy = restart_policy(spec)
    decision: restarts.Restart | restarts.GiveUp
    # Before the end of the run, all ranks exit with 0 only when one of them got SIGTERM.
    if trainer.disrupted or trainer.state is JobState.COMPLETE:
        decision = restarts.disrupted(policy, persisted.record, ready_seconds)
    else:
        end = restarts.ProcessExit(restarts.Cause.EXIT, worst.exit_code, ready_seconds)
        decision = restarts.decide(policy, persisted.record, end)
    if isinstance(decision, restarts.GiveUp):
        reason = Reason.BAD_INPUT if decision.bad_input else Reason.BACKOFF_LIMIT_EXCEEDED
        if worst.exit_code == DIVERGED_EXIT_CODE:
            reason = Reason.DIVERGED
        elif worst.exit_code == PUBLISH_REFUSED_EXIT_CODE:
            reason = Reason.PUBLISH_REFUSED
        elif ready_seconds is None and not (decision.bad_input or persisted.record.has_been_ready):
            reason = Reason.STARTS_FAILED
        message = f"trainer: {decision.reason}" + (f": {worst.message}" if worst.message else "")
        outcome = failed_outcome(observed, persisted, reason, message)
        return replace(persisted, outcome=outcome, last_recorded_attempt=persisted.attempt)
    return replace(
        persisted,
        last_recorded_attempt=persisted.attempt,
        record=decision.record,
        restarts=persisted.restarts + 1,
        next_at=observed.unix_seconds + decision.delay_seconds,
    )


def next_attempt(
    observed: LifecycleInput, persisted: PersistedState, *, finished: bool
) -> tuple[PersistedState, int | None, float]:
    """The state, the attempt that is to exist, and the seconds until the next one."""
    state = observed.trainer.state
    if state is JobState.TERMINATING or (state is JobState.ACTIVE and observed.trainer.stale):
        # Its pods save and terminate; two attempts never run at the same time.
        return persisted, None, ASK_AGAIN_SECONDS
    if state is JobState.ACTIVE and observed.trainer.attempt == persisted.attempt:
        return persisted, persisted.attempt, POLL_SECONDS
    if state is not JobState.ABSENT and persisted.last_recorded_attempt != persisted.attempt:
        return persisted, persisted.attempt, ASK_AGAIN_SECONDS
    if finished:
        return persisted, persisted.attempt or None, ASK_AGAIN_SECONDS
    wait = persisted.next_at - observed.unix_seconds
    if is_pending(wait):
        return persisted, persisted.attempt if state is not JobState.ABSENT else None, wait
    if state is not JobState.ABSENT:
        return persisted, None, ASK_AGAIN_SECONDS  # first the Job and its pods are deleted
    if persisted.attempt > persisted.last_recorded_attempt:
        # Recorded but not observed yet, or deleted: the same attempt is created again.
        return replace(persisted, ready_since=None), persisted.attempt, POLL_SECONDS
    attempt = persisted.attempt + 1
    return replace(persisted, attempt=attempt, ready_since=None, next_at=0.0), attempt, POLL_SECONDS


def restart_policy(spec: RunSpec) -> restarts.RestartPolicy:
    """Of the trainer."""
    return restarts.RestartPolicy(
        max_restarts=spec.trainer.max_restarts, max_start_delay_seconds=START_DELAY_SECONDS
    )


def awaits_exit_code(job: Job, now: float) -> bool:
    """Whether a Job has failed and the exit code of its pods may still arrive; the decision on it is final."""
    without_code = job.state is JobState.FAILED and not job.disrupted and not job.exits
    return without_code and is_pending(job.failed_at + EXIT_CODE_GRACE_SECONDS - now)


def worst_exit(exits: tuple[ContainerExit, ...]) -> ContainerExit:
    """The most informative end: wrong input, then divergence or refused weights, then the first. The other ranks of a gang only report a lost
    rank."""
    order = {BAD_INPUT_EXIT_CODE: 0, DIVERGED_EXIT_CODE: 1, PUBLISH_REFUSED_EXIT_CODE: 1}
    return min(exits, key=lambda end: order.get(end.exit_code, 2), default=ContainerExit(1))
