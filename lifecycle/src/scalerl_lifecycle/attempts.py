"""The trainer's attempts: how one ended, and which one is to exist. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scalerl_api.process import BAD_INPUT_EXIT_CODE, DIVERGED_EXIT_CODE, PUBLISH_REFUSED_EXIT_CODE
from scalerl_api.reasons import Reason
from scalerl_api.spec import RunSpec
from scalerl_lifecycle import restarts
from scalerl_lifecycle.failures import failed_outcome
from scalerl_lifecycle.lifecycle_types import (
    ASK_AGAIN_SECONDS,
    POLL_SECONDS,
    START_DELAY_SECONDS,
    ContainerExit,
    Job,
    JobState,
    LifecycleInput,
    PersistedState,
    is_pending,
)

EXIT_CODE_GRACE_SECONDS: Final = 30.0
"""How long after the failure of a Job the exit codes of its pods may arrive."""


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
