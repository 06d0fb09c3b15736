"""Lifecycle of a run: which of its objects exist, the stop request to its coordinator, and its phase. Pure.

Level-triggered: the decision depends on the observation and on :class:`Memory`, which the run's status keeps from one reconcile
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
Suspended      the same, and Jobs that have ended: the run is held    the spec is edited, or suspended and resumed
Completed      the same                                               a limit is raised
Failed         the same                                               the spec is mended
=============  =====================================================  ==============================================

A failure after an edit, or after a resumption, holds a run that has trained (``End.HELD``): its spec has worked, and can be mended.
An ended run continues as a suspended one that is resumed: what is left of it is deleted first.

A queue (Kueue) admits trainer, coordinator and generators as one gang: none of them exists before, and all are deleted when it is
evicted, once the trainer has saved. Where there are no gangs, it admits each Job separately: the coordinator and the generators are
created once the trainer's Job is admitted, and deleted when it has been requeued for :data:`.HELD_SECONDS`. So a queued run holds no
devices, and its clock does not advance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase, Reason
from scalerl_api.process import BAD_INPUT_EXIT_CODE
from scalerl_api.spec import RunSpec
from scalerl_api.wire import BROKEN, FORECAST, Status
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_operator.policy import budget, restarts
from scalerl_operator.policy.attempts import (
    awaits_exit_code,
    next_attempt,
    record_end,
    restart_policy,
    worst_end,
)
from scalerl_operator.policy.drain import (
    draining_trainer,
    request_of_stop,
    reset_failures,
    suspended,
    wanted_generators,
    without_drain,
)
from scalerl_operator.policy.ending import (
    after_outcome,
    end_run,
    gives_up_trainer,
    note_missing_trainer,
    what_is_lost,
)
from scalerl_operator.policy.failures import (
    coordinator_failure,
    environment_failure,
    failed_outcome,
    generator_failure,
    note_proof,
    note_training,
)
from scalerl_operator.policy.lifecycle_types import (
    DRAIN_SECONDS,
    End,
    JobState,
    LifecycleDecision,
    LifecycleInput,
    Memory,
    Outcome,
    Suspension,
)
from scalerl_operator.policy.waits import ASK_AGAIN_SECONDS, POLL_SECONDS, is_pending, no_later

_IN_QUEUE: Final = "the queue to admit it"


def decide(spec: RunSpec | None, observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    """The decision for a run.

    spec: as accepted; None only for a run that is being deleted, which needs none.
    """
    if observed.trainer.attempt > memory.attempt:
        # A process created this attempt and ended before it recorded it.
        memory = replace(memory, attempt=observed.trainer.attempt, ready_since=None)
    if observed.trainer.abandoned > memory.last_recorded_attempt:
        # Deleted before its end was recorded, as by a suspension. Its number is not used again: a greater one fences it out.
        memory = replace(memory, last_recorded_attempt=observed.trainer.abandoned)
    if observed.coordinator.lost >= memory.coordinator_attempt:
        # It may still run: the next one takes the journal over by its greater number.
        memory = replace(memory, coordinator_attempt=observed.coordinator.lost + 1)
    memory = note_training(observed, memory)
    if memory.outcome is not None:
        return after_outcome(observed, memory, memory.outcome)
    if observed.deleting or observed.suspend or observed.edit.mends:
        memory = replace(memory, holding=None)
    if observed.deleting or observed.suspend or memory.rest is not Suspension.NO:
        return suspended(spec, observed, memory)
    assert spec is not None
    if observed.prepare.stale:
        # The roles' spec has changed: the run is drained with the old spec, then created again with the new one.
        note = "the objects of the earlier spec to be deleted"
        draining = draining_trainer(spec, observed, memory, Phase.PREPARING)
        return draining or LifecycleDecision(Phase.PREPARING, reset_failures(memory), note=note)
    if observed.prepare.state is not JobState.COMPLETE:
        return _prepare(spec, observed, without_drain(memory))
    if memory.attempt == 0:  # disruptions of the preparation do not count for the trainer
        memory = replace(memory, record=replace(memory.record, disruptions=0))
    failure = (
        memory.holding
        or coordinator_failure(observed, memory)
        or generator_failure(spec, observed, memory)
        or environment_failure(observed, memory)
    )
    if failure is not None:
        # While the coordinator answers, a run that is held saves its training first. That drain goes on without an answer, and
        # when what has failed starts again: only a user ends it.
        saves = failure.end is End.HELD and (observed.status is not None or memory.holding is not None)
        saving = replace(memory, holding=failure)
        draining = draining_trainer(spec, observed, saving, Phase.SUSPENDING) if saves else None
        return draining or end_run(observed, without_drain(memory), failure)
    return _run(spec, observed, without_drain(memory))


# --- preparation --------------------------------------------------------------------------------


def _prepare(spec: RunSpec, observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    job = observed.prepare
    if job.state is JobState.FAILED and job.disrupted:
        # After the delay, the Job is deleted, and then created again.
        again = restarts.disrupted(restart_policy(spec), memory.record, ready_seconds=None)
        wait = job.failed_at + again.delay_seconds - observed.unix_seconds
        pending = is_pending(wait)
        return LifecycleDecision(
            Phase.PREPARING,
            memory if pending else replace(memory, record=again.record),
            prepare=pending,
            again_seconds=wait if pending else ASK_AGAIN_SECONDS,
            note="the next attempt of the preparation",
        )
    if awaits_exit_code(job, observed.unix_seconds):
        note = "the exit code of the preparation"
        return LifecycleDecision(
            Phase.PREPARING, memory, prepare=True, again_seconds=ASK_AGAIN_SECONDS, note=note
        )
    if job.state is JobState.FAILED:
        worst = worst_end(job.ends)
        reason = Reason.BAD_INPUT if worst.exit_code == BAD_INPUT_EXIT_CODE else Reason.PREPARE_FAILED
        message = worst.message or f"prepare exited with {worst.exit_code}"
        return end_run(observed, memory, failed_outcome(observed, memory, reason, message))
    if job.held:
        return LifecycleDecision(Phase.PENDING, memory, prepare=True, note=_IN_QUEUE)
    note = "the model and tokenizer to be prepared"
    return LifecycleDecision(Phase.PREPARING, memory, prepare=job.state is not JobState.LEAVING, note=note)


def _run(spec: RunSpec, observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    status, memory = observed.status, note_proof(observed, memory)
    if status is not None and not status.stop_reason:
        memory = replace(memory, resumed=False)
    wanted = _stop_reason(spec, observed, resumed=memory.resumed)
    request_stop = request_of_stop(wanted, status, resumed=memory.resumed)
    # Before a stop request is sent, the coordinator's status does not reflect it.
    finished = status is not None and request_stop is None and status.phase is CoordinatorPhase.FINISHED
    # A rank that fails after the coordinator has recorded the last checkpoint loses nothing.
    requeued = observed.trainer.held and not observed.trainer.ending
    ended = requeued or observed.trainer.state in (JobState.COMPLETE, JobState.FAILED, JobState.ABSENT)
    # A trainer that never registered, such as one that waits for a node, is deleted: it has nothing to save.
    ended |= status is not None and not status.trainer_registered
    memory = note_missing_trainer(observed, memory, request_stop)
    given_up = gives_up_trainer(observed, memory)
    if ((finished and ended) or given_up) and memory.attempt > 0 and status is not None:
        stop_reason = status.stop_reason
        by_forecast = stop_reason == FORECAST and spec.autoscaling.on_stop == "Suspend"
        if by_forecast or stop_reason == BROKEN:
            return LifecycleDecision(
                Phase.SUSPENDED, replace(memory, rest=Suspension.ASKED, drain_since=None), set_suspend=True
            )
        reason = Reason.STOPPED_BY_FORECAST if stop_reason == FORECAST else Reason.BUDGET_REACHED
        untrained = "" if status.trainer_registered else " before the trainer registered: nothing was trained"
        text = f"{stop_reason}{untrained}" + (f"; {what_is_lost(status)}" if given_up else "")
        return end_run(observed, replace(memory, awaited_since=None), Outcome(End.COMPLETED, reason, text))
    held = observed.trainer.held
    memory = replace(memory, held_since=no_later(memory.held_since, observed.unix_seconds) if held else None)
    if requeued:
        memory = replace(memory, ready_since=None)
    elif observed.trainer.ready and observed.trainer.attempt == memory.attempt:
        since = observed.unix_seconds if memory.ready_since is None else memory.ready_since
        memory = replace(memory, ready_since=since, record=replace(memory.record, has_been_ready=True))
    memory = record_end(spec, observed, memory)
    if memory.outcome is not None:
        return end_run(observed, memory, memory.outcome)
    memory, trainer, wait = next_attempt(observed, memory, finished=finished)
    if _waits_in_queue(observed, memory):
        again = None if observed.trainer.held else wait
        return LifecycleDecision(
            Phase.PENDING, memory, prepare=True, trainer=trainer, again_seconds=again, note=_IN_QUEUE
        )
    # A run that continues after its end has the reason of that end until its trainer has started.
    ending = status is not None and status.phase in (CoordinatorPhase.FINISHING, CoordinatorPhase.FINISHED)
    return LifecycleDecision(
        Phase.FINISHING if ending and request_stop != "" else Phase.RUNNING,
        memory,
        prepare=True,
        coordinator=True,
        generators=wanted_generators(spec, observed),
        trainer=trainer,
        request_stop=request_stop,
        again_seconds=min(wait, POLL_SECONDS),
        note=_note(status, memory),
    )


def _note(status: Status | None, memory: Memory) -> str:
    if status is None:
        return "the coordinator to answer"
    if memory.awaited_since is None:
        return ""
    return f"the trainer, which is to end training, up to {DRAIN_SECONDS / 60:g} minutes"


def _waits_in_queue(observed: LifecycleInput, memory: Memory) -> bool:
    """Whether only the trainer's Job is to exist, which a queue holds."""
    trainer = observed.trainer
    if observed.unadmitted:  # first its trainer saves
        stops = trainer.ending or trainer.state is JobState.LEAVING
        return not stops and (trainer.held or trainer.state is not JobState.ACTIVE)
    if trainer.held and not trainer.ending:
        since = no_later(memory.held_since, observed.unix_seconds)
        return not observed.serving or observed.unix_seconds - since >= observed.held_seconds
    # The next attempt of a trainer that failed right after its admission is queued again.
    gone = trainer.state in (JobState.ABSENT, JobState.FAILED, JobState.LEAVING)
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
