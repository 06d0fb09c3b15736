"""Lifecycle of a run: which of its objects exist, the stop request to its coordinator, and its phase. Pure.

Level-triggered: the decision depends on the observation and on :class:`PersistedState`, which the run's status keeps from one reconcile
to the next. After a crash at any moment, the next reconcile makes the same decision.

=============  =====================================================  ==============================================
phase          exists                                                 ends when
=============  =====================================================  ==============================================
Pending        nothing; of a queued run, the Job that is queued       the spec is accepted, the queue admits the Job
Preparing      the prepare Job                                        it is complete
Running        coordinator, generators, the present trainer attempt   the coordinator gets a stop request, or finishes
Finishing      the same                                               the coordinator has finished and the trainer ended
Suspending     the same                                               the trainer has ended, or the drain timed out
Suspended      the volume and other kept objects                      ``suspend`` becomes false
Suspended      the same, and Jobs that have ended: after a failure    the spec is edited, or suspended and resumed
Completed      the same                                               a limit is raised
Failed         the same                                               the spec is fixed
=============  =====================================================  ==============================================

A failure after an edit, or after a resumption, suspends a run that has trained (``OutcomeKind.SUSPENDED``): its spec has worked, and can be fixed.
An ended run continues as a suspended one that is resumed: what is left of it is deleted first.

A queue (Kueue) admits trainer, coordinator and generators as one gang: none of them exists before, and all are deleted when it is
evicted, once the trainer has saved. Where there are no gangs, it admits each Job separately: the coordinator and the generators are
created once the trainer's Job is admitted, and deleted when it has been requeued for :data:`.GATED_SECONDS`. So a queued run holds no
devices, and its clock does not advance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.process import BAD_INPUT_EXIT_CODE
from scalerl_api.reasons import Reason
from scalerl_api.spec import RunSpec
from scalerl_api.wire import BROKEN, FORECAST, Status
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_lifecycle import budget, restarts
from scalerl_lifecycle.ending import (
    after_outcome,
    draining_trainer,
    end_run,
    gives_up_trainer,
    note_missing_trainer,
    only_saves,
    request_of_stop,
    reset_failures,
    suspended,
    what_is_lost,
    without_drain,
)
from scalerl_lifecycle.failures import (
    awaits_exit_code,
    coordinator_failure,
    environment_failure,
    failed_outcome,
    generator_failure,
    next_attempt,
    note_proof,
    note_training,
    record_end,
    restart_policy,
    worst_exit,
)
from scalerl_lifecycle.lifecycle_types import (
    ASK_AGAIN_SECONDS,
    DRAIN_SECONDS,
    POLL_SECONDS,
    JobState,
    LifecycleDecision,
    LifecycleInput,
    OutcomeKind,
    PersistedState,
    RunOutcome,
    Suspension,
    Wanted,
    is_pending,
    no_later,
)

_IN_QUEUE: Final = "the queue to admit it"


def decide(spec: RunSpec | None, observed: LifecycleInput, persisted: PersistedState) -> LifecycleDecision:
    """The decision for a run.

    Args:
        spec: as accepted; None only for a run that is being deleted, which needs none.
    """
    if observed.trainer.attempt > persisted.attempt:
        # A process created this attempt and ended before it recorded it.
        persisted = replace(persisted, attempt=observed.trainer.attempt, ready_since=None)
    if observed.trainer.abandoned > persisted.last_recorded_attempt:
        # Deleted before its end was recorded, as by a suspension. Its number is not used again: a greater one fences it out.
        persisted = replace(persisted, last_recorded_attempt=observed.trainer.abandoned)
    if observed.coordinator.lost >= persisted.coordinator_attempt:
        # It may still run: the next one takes the journal over by its greater number.
        persisted = replace(persisted, coordinator_attempt=observed.coordinator.lost + 1)
    persisted = note_training(observed, persisted)
    if persisted.outcome is not None:
        return after_outcome(observed, persisted, persisted.outcome)
    if observed.deleting or observed.suspend or observed.edit.may_fix:
        persisted = replace(persisted, suspending_for=None)
    if observed.deleting or observed.suspend or persisted.suspension is not Suspension.NO:
        return suspended(observed, persisted)
    assert spec is not None
    if observed.prepare.stale:
        # The roles' spec has changed: the run is drained with the old spec, then created again with the new one.
        waiting_for = "the objects of the earlier spec to be deleted"
        draining = draining_trainer(observed, persisted, Phase.PREPARING)
        return draining or LifecycleDecision(
            Phase.PREPARING, reset_failures(persisted), waiting_for=waiting_for
        )
    if observed.prepare.state is not JobState.COMPLETE:
        return _prepare(spec, observed, without_drain(persisted))
    if persisted.attempt == 0:  # disruptions of the preparation do not count for the trainer
        persisted = replace(persisted, record=replace(persisted.record, disruptions=0))
    failure = (
        persisted.suspending_for
        or coordinator_failure(observed, persisted)
        or generator_failure(spec, observed, persisted)
        or environment_failure(observed, persisted)
    )
    if failure is not None:
        # While the coordinator answers, a run that is suspended saves its training first. That drain goes on without an answer, and
        # when what has failed starts again: only a user ends it.
        saves = failure.kind is OutcomeKind.SUSPENDED and (
            observed.status is not None or persisted.suspending_for is not None
        )
        saving = replace(persisted, suspending_for=failure)
        draining = draining_trainer(observed, saving, Phase.SUSPENDING) if saves else None
        return draining or end_run(observed, without_drain(persisted), failure)
    return _run(spec, observed, without_drain(persisted))


# --- preparation --------------------------------------------------------------------------------


def _prepare(spec: RunSpec, observed: LifecycleInput, persisted: PersistedState) -> LifecycleDecision:
    job = observed.prepare
    if job.state is JobState.FAILED and job.disrupted:
        # After the delay, the Job is deleted, and then created again.
        again = restarts.disrupted(restart_policy(spec), persisted.record, ready_seconds=None)
        wait = job.failed_at + again.delay_seconds - observed.unix_seconds
        pending = is_pending(wait)
        return LifecycleDecision(
            Phase.PREPARING,
            persisted if pending else replace(persisted, record=again.record),
            Wanted(prepare=pending),
            again_seconds=wait if pending else ASK_AGAIN_SECONDS,
            waiting_for="the next attempt of the preparation",
        )
    if awaits_exit_code(job, observed.unix_seconds):
        waiting_for = "the exit code of the preparation"
        return LifecycleDecision(
            Phase.PREPARING,
            persisted,
            Wanted(prepare=True),
            again_seconds=ASK_AGAIN_SECONDS,
            waiting_for=waiting_for,
        )
    if job.state is JobState.FAILED:
        worst = worst_exit(job.exits)
        reason = Reason.BAD_INPUT if worst.exit_code == BAD_INPUT_EXIT_CODE else Reason.PREPARE_FAILED
        message = worst.message or f"prepare exited with {worst.exit_code}"
        return end_run(observed, persisted, failed_outcome(observed, persisted, reason, message))
    if job.gated:
        return LifecycleDecision(Phase.PENDING, persisted, Wanted(prepare=True), waiting_for=_IN_QUEUE)
    waiting_for = "the model and tokenizer to be prepared"
    return LifecycleDecision(
        Phase.PREPARING,
        persisted,
        Wanted(prepare=job.state is not JobState.TERMINATING),
        waiting_for=waiting_for,
    )


def _run(spec: RunSpec, observed: LifecycleInput, persisted: PersistedState) -> LifecycleDecision:
    status, persisted = observed.status, note_proof(observed, persisted)
    if status is not None and not status.stop_reason:
        persisted = replace(persisted, resumed=False)
    wanted = _stop_reason(spec, observed, resumed=persisted.resumed)
    request_stop = request_of_stop(wanted, status, resumed=persisted.resumed)
    # Before a stop request is sent, the coordinator's status does not reflect it.
    finished = status is not None and request_stop is None and status.phase is CoordinatorPhase.FINISHED
    # A rank that fails after the coordinator has recorded the last checkpoint loses nothing.
    requeued = observed.trainer.gated and not observed.trainer.pods_terminating
    ended = requeued or observed.trainer.state in (JobState.COMPLETE, JobState.FAILED, JobState.ABSENT)
    # A trainer that never registered, such as one that waits for a node, is deleted: it has nothing to save.
    ended |= status is not None and not status.trainer_registered
    persisted = note_missing_trainer(observed, persisted, request_stop)
    given_up = gives_up_trainer(observed, persisted)
    if ((finished and ended) or given_up) and persisted.attempt > 0 and status is not None:
        stop_reason = status.stop_reason
        by_forecast = stop_reason == FORECAST and spec.autoscaling.on_stop == "Suspend"
        if by_forecast or stop_reason == BROKEN:
            return LifecycleDecision(
                Phase.SUSPENDED,
                replace(persisted, suspension=Suspension.REQUESTED, drain_since=None),
                set_suspend=True,
            )
        reason = Reason.STOPPED_BY_FORECAST if stop_reason == FORECAST else Reason.BUDGET_REACHED
        untrained = "" if status.trainer_registered else " before the trainer registered: nothing was trained"
        text = f"{stop_reason}{untrained}" + (f"; {what_is_lost(status)}" if given_up else "")
        return end_run(
            observed, replace(persisted, awaited_since=None), RunOutcome(OutcomeKind.COMPLETED, reason, text)
        )
    persisted = _note_trainer(observed, persisted, requeued=requeued)
    persisted = record_end(spec, observed, persisted)
    if persisted.outcome is not None:
        return end_run(observed, persisted, persisted.outcome)
    persisted, trainer, wait = next_attempt(observed, persisted, finished=finished)
    if _waits_in_queue(observed, persisted):
        again = None if observed.trainer.gated else wait
        return LifecycleDecision(
            Phase.PENDING,
            persisted,
            Wanted(prepare=True, trainer=trainer),
            again_seconds=again,
            waiting_for=_IN_QUEUE,
        )
    # A run that continues after its end has the reason of that end until its trainer has started.
    ending = status is not None and status.phase in (CoordinatorPhase.FINISHING, CoordinatorPhase.FINISHED)
    return LifecycleDecision(
        Phase.FINISHING if ending and request_stop != "" else Phase.RUNNING,
        persisted,
        Wanted(prepare=True, coordinator=True, generators=not only_saves(status), trainer=trainer),
        request_stop=request_stop,
        again_seconds=min(wait, POLL_SECONDS),
        waiting_for=_waiting_for(status, persisted),
    )


def _note_trainer(observed: LifecycleInput, persisted: PersistedState, *, requeued: bool) -> PersistedState:
    """Notes since when a queue gates the trainer, and since when it is ready."""
    trainer, now = observed.trainer, observed.unix_seconds
    persisted = replace(
        persisted, gated_since=no_later(persisted.gated_since, now) if trainer.gated else None
    )
    if requeued:
        return replace(persisted, ready_since=None)
    if not trainer.ready or trainer.attempt != persisted.attempt:
        return persisted
    since = now if persisted.ready_since is None else persisted.ready_since
    return replace(persisted, ready_since=since, record=replace(persisted.record, has_been_ready=True))


def _waiting_for(status: Status | None, persisted: PersistedState) -> str:
    if status is None:
        return "the coordinator to answer"
    if persisted.awaited_since is None:
        return ""
    return f"the trainer, which is to end training, up to {DRAIN_SECONDS / 60:g} minutes"


def _waits_in_queue(observed: LifecycleInput, persisted: PersistedState) -> bool:
    """Whether only the trainer's Job is to exist, which a queue holds."""
    trainer = observed.trainer
    if observed.unadmitted:  # first its trainer saves
        stops = trainer.pods_terminating or trainer.state is JobState.TERMINATING
        return not stops and (trainer.gated or trainer.state is not JobState.ACTIVE)
    if trainer.gated and not trainer.pods_terminating:
        since = no_later(persisted.gated_since, observed.unix_seconds)
        return not observed.serving or observed.unix_seconds - since >= observed.gated_seconds
    # The next attempt of a trainer that failed right after its admission is queued again.
    gone = trainer.state in (JobState.ABSENT, JobState.FAILED, JobState.TERMINATING)
    return observed.queued and gone and not observed.serving


def _stop_reason(spec: RunSpec, observed: LifecycleInput, *, resumed: bool) -> str:
    """The reason to stop the run; empty without one."""
    if observed.status is None:
        return ""
    limit = budget.limit_reached(spec.budget, observed.status)
    if limit:
        return limit
    # A run that the autoscaler stopped stays stopped until a user resumes it, whatever the autoscaler decides later.
    if observed.status.stop_reason in (FORECAST, BROKEN) and not resumed:
        return observed.status.stop_reason
    return observed.stop
