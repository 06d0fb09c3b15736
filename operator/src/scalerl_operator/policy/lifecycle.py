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
created once the trainer's Job is admitted, and deleted when it has been requeued for ``HELD_SECONDS``. So a queued run holds no
devices, and its clock does not advance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase, Reason
from scalerl_api.process import (
    BAD_INPUT_EXIT_CODE,
    COORDINATOR_TIMEOUT_SECONDS,
    DIVERGED_EXIT_CODE,
    PUBLISH_REFUSED_EXIT_CODE,
)
from scalerl_api.spec import RunSpec
from scalerl_api.wire import BROKEN, FORECAST, INTERRUPTED, Status
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_operator.policy import budget, restarts
from scalerl_operator.policy.edits_of_run import restarts_a_role
from scalerl_operator.policy.lifecycle_types import (
    DRAIN_SECONDS,
    End,
    Ended,
    Job,
    JobState,
    LifecycleDecision,
    LifecycleInput,
    Memory,
    Outcome,
    Suspension,
)

POLL_SECONDS: Final = 5.0
"""Between two reconciles of a run with a coordinator, whose status is polled."""
ASK_AGAIN_SECONDS: Final = 2.0
"""The same, while the next step depends on the answer."""
START_DELAY_SECONDS: Final = 300.0
"""The longest delay of the next attempt of a trainer that has been ready before. With twenty restarts, an obstacle (a detached
volume, a device plug-in) may last an hour."""
HELD_SECONDS: Final = 30.0
"""How long a queue may hold the trainer before generators and coordinator are deleted too: it admits most attempts within a
second."""
PROVEN_STEPS: Final = 10
"""Steps after which an edit is no longer taken for the cause of a failure. At least 2: the first may have been in progress."""
MOST_FIELDS: Final = 5
"""Most edited fields in a message."""
MOST_CHARACTERS: Final = 1200
"""Of a failure, in a message with edited fields."""
NEWS_SECONDS: Final = 30.0
"""How long after the failure of a Job the exit codes of its pods may arrive."""
_IN_QUEUE: Final = "the queue to admit it"
_EARLIER_JOBS: Final = "the Jobs of its earlier start to be deleted"


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
    memory = _note_training(observed, memory)
    if memory.outcome is not None:
        return _after_outcome(observed, memory, memory.outcome)
    if observed.deleting or observed.suspend or observed.edit.mends:
        memory = replace(memory, holding=None)
    if observed.deleting or observed.suspend or memory.rest is not Suspension.NO:
        return _suspend(spec, observed, memory)
    assert spec is not None
    if observed.prepare.stale:
        # The roles' spec has changed: the run is drained with the old spec, then created again with the new one.
        note = "the objects of the earlier spec to be deleted"
        draining = _drain(spec, observed, memory, Phase.PREPARING)
        return draining or LifecycleDecision(Phase.PREPARING, _reset_failures(memory), note=note)
    if observed.prepare.state is not JobState.COMPLETE:
        return _prepare(spec, observed, _without_drain(memory))
    if memory.attempt == 0:  # disruptions of the preparation do not count for the trainer
        memory = replace(memory, record=replace(memory.record, disruptions=0))
    failure = (
        memory.holding
        or _coordinator_failure(observed, memory)
        or _generator_failure(spec, observed, memory)
        or _environment_failure(observed, memory)
    )
    if failure is not None:
        # While the coordinator answers, a run that is held saves its training first. That drain goes on without an answer, and
        # when what has failed starts again: only a user ends it.
        saves = failure.end is End.HELD and (observed.status is not None or memory.holding is not None)
        saving = replace(memory, holding=failure)
        draining = _drain(spec, observed, saving, Phase.SUSPENDING) if saves else None
        return draining or _end(observed, _without_drain(memory), failure)
    return _run(spec, observed, _without_drain(memory))


# --- suspension ----------------------------------------------------------------------------------


def _suspend(spec: RunSpec | None, observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    """Drains the run; then it has no workloads."""
    draining = _drain(spec, observed, memory, Phase.SUSPENDING)
    if draining is not None:
        return draining
    if observed.deleting:
        return LifecycleDecision(Phase.SUSPENDING, memory, release=True)
    if observed.suspend:
        return LifecycleDecision(Phase.SUSPENDED, replace(_without_drain(memory), rest=Suspension.YES))
    if memory.rest is Suspension.ASKED:
        return LifecycleDecision(Phase.SUSPENDED, memory, set_suspend=True)
    if {observed.prepare.state, observed.trainer.state} != {JobState.ABSENT}:
        return LifecycleDecision(Phase.PENDING, memory, again_seconds=ASK_AGAIN_SECONDS, note=_EARLIER_JOBS)
    # A user who resumes a run has removed the cause of its failures.
    unproven_since = observed.steps if memory.has_trained else None
    memory = _reset_failures(_without_drain(memory))
    memory = replace(memory, rest=Suspension.NO, resumed=True, unproven_since=unproven_since)
    return LifecycleDecision(Phase.PENDING, memory, prepare=True, again_seconds=0.0)


def _without_drain(memory: Memory) -> Memory:
    return replace(memory, drain_since=None, unreachable_since=None, holding=None)


def _reset_failures(memory: Memory) -> Memory:
    """Resets the back-off and the failure counts."""
    return replace(memory, next_at=0.0, awaited_since=None, record=memory.record.reset())


def _drain(
    spec: RunSpec | None, observed: LifecycleInput, memory: Memory, phase: Phase
) -> LifecycleDecision | None:
    """The decision while the trainer drains; None when it has ended, has nothing to save, or has timed out."""
    now, trainer = observed.unix_seconds, observed.trainer
    since = _since(memory.drain_since, now)
    # A trainer whose ranks were never all ready has trained nothing: it waits for a queue, a node or an image.
    was_ready = trainer.ready or memory.ready_since is not None
    draining = trainer.state is JobState.LEAVING or (
        trainer.state is JobState.ACTIVE and was_ready and (trainer.ending or not trainer.held)
    )
    if not draining or memory.rest is not Suspension.NO or now - since >= observed.drain_seconds:
        return None
    unreachable = None if observed.status is not None else _since(memory.unreachable_since, now)
    # Without the coordinator no stop request reaches the trainer, and none of its checkpoints, which have the coordinator's state,
    # is written: the steps since the last one are trained again.
    abandoned = unreachable is not None and now - unreachable >= COORDINATOR_TIMEOUT_SECONDS
    # A trainer that no queue has admitted has nothing to save, so nothing is created for its drain.
    serving = observed.serving or not observed.queued or trainer.state is JobState.ACTIVE
    note = "the trainer to finish its step and to write a checkpoint"
    if observed.status is not None and observed.status.unsaved_version >= 0:
        note = f"space on the volume for the last checkpoint, up to {DRAIN_SECONDS / 60:g} minutes: {observed.status.checkpoint_problem}"
    if abandoned:
        note = f"the trainer to end: its Job is deleted, no answer from the coordinator in {COORDINATOR_TIMEOUT_SECONDS:g} s"
    return LifecycleDecision(
        phase,
        replace(memory, drain_since=since, unreachable_since=unreachable),
        prepare=True,
        coordinator=serving,
        generators=_generators(spec, observed) if serving else 0,
        trainer=trainer.attempt if trainer.state is JobState.ACTIVE and not abandoned else None,
        frozen=True,
        request_stop=_stop_request(INTERRUPTED, observed.status, resumed=False),
        again_seconds=ASK_AGAIN_SECONDS,
        note=note,
    )


# --- preparation --------------------------------------------------------------------------------


def _prepare(spec: RunSpec, observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    job = observed.prepare
    if job.state is JobState.FAILED and job.disrupted:
        # After the delay, the Job is deleted, and then created again.
        again = restarts.disrupted(_policy(spec), memory.record, ready_seconds=None)
        wait = job.failed_at + again.delay_seconds - observed.unix_seconds
        pending = _is_pending(wait)
        return LifecycleDecision(
            Phase.PREPARING,
            memory if pending else replace(memory, record=again.record),
            prepare=pending,
            again_seconds=wait if pending else ASK_AGAIN_SECONDS,
            note="the next attempt of the preparation",
        )
    if _awaits_exit_code(job, observed.unix_seconds):
        note = "the exit code of the preparation"
        return LifecycleDecision(
            Phase.PREPARING, memory, prepare=True, again_seconds=ASK_AGAIN_SECONDS, note=note
        )
    if job.state is JobState.FAILED:
        worst = _worst(job.ends)
        reason = Reason.BAD_INPUT if worst.exit_code == BAD_INPUT_EXIT_CODE else Reason.PREPARE_FAILED
        message = worst.message or f"prepare exited with {worst.exit_code}"
        return _end(observed, memory, _failure(observed, memory, reason, message))
    if job.held:
        return LifecycleDecision(Phase.PENDING, memory, prepare=True, note=_IN_QUEUE)
    note = "the model and tokenizer to be prepared"
    return LifecycleDecision(Phase.PREPARING, memory, prepare=job.state is not JobState.LEAVING, note=note)


# --- training -----------------------------------------------------------------------------------


def _failure(observed: LifecycleInput, memory: Memory, reason: Reason, message: str) -> Outcome:
    """The outcome after a failure: a run that has trained is held if an edit or a resumption may be its cause."""
    if reason is not Reason.PUBLISH_REFUSED and memory.unproven_since is None:
        return Outcome(End.FAILED, reason, message)
    edited = tuple(field for field in observed.unproven if restarts_a_role(field))
    if edited:
        fields = ", ".join(f"spec.{field}" for field in edited[:MOST_FIELDS])
        fields += f" and {len(edited) - MOST_FIELDS} more" if len(edited) > MOST_FIELDS else ""
        message = f"{message[:MOST_CHARACTERS]}; revert or mend the edit of {fields}"
        if reason is not Reason.PUBLISH_REFUSED:
            return Outcome(End.HELD, Reason.EDIT_FAILED, f"{reason}: {message}")
    return Outcome(End.HELD, reason, message)


def _coordinator_failure(observed: LifecycleInput, memory: Memory) -> Outcome | None:
    """The outcome of a coordinator that cannot continue."""
    coordinator = observed.coordinator
    if coordinator.bad_input is not None:
        message = coordinator.bad_input.message or "its input is wrong"
        return _failure(observed, memory, Reason.BAD_INPUT, f"coordinator: {message}")
    if coordinator.restarts > restarts.MAX_POD_RESTARTS:
        message = f"{coordinator.restarted or 'coordinator'} was restarted {coordinator.restarts} times"
        return _failure(observed, memory, Reason.BACKOFF_LIMIT_EXCEEDED, message)
    if coordinator.given_up is not None:
        message = f"coordinator: {coordinator.given_up.message}"
        return _failure(observed, memory, Reason.BACKOFF_LIMIT_EXCEEDED, message)
    return None


def _generator_failure(spec: RunSpec, observed: LifecycleInput, memory: Memory) -> Outcome | None:
    """The outcome of a run whose generators all reject their input, or are given up, after an edit or before any of them has held
    weights, which only the coordinator knows. Otherwise, the others go on, and mid-training, which ends with the first checkpoint,
    needs none."""
    generators, status = observed.generators, observed.status
    end = generators.bad_input or generators.given_up
    if end is None or generators.ready or generators.starting:
        return None
    if status is None or (status.published_version >= 0 and memory.unproven_since is None):
        return None
    if spec.warm_start is not None and status.checkpoint_version < 0:
        return None
    reason = Reason.BAD_INPUT if generators.bad_input else Reason.BACKOFF_LIMIT_EXCEEDED
    return _failure(observed, memory, reason, f"generator: {end.message or 'its input is wrong'}")


def _environment_failure(observed: LifecycleInput, memory: Memory) -> Outcome | None:
    """The outcome of a run whose environment servers all fail for good, so that no episode goes on. One that has trained is held, to save
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
    end = End.HELD if memory.has_trained else End.FAILED
    return Outcome(end, Reason.BACKOFF_LIMIT_EXCEEDED, f"environment: {message}")


def _generators(spec: RunSpec | None, observed: LifecycleInput) -> int:
    """How many are to exist: none beside a trainer that only waits for space on the volume, to save its last weights. Without a
    spec, those that exist drain."""
    if observed.status is not None and observed.status.unsaved_version >= 0:
        return 0
    return 1 if spec is None else spec.generator.replicas


def _note_training(observed: LifecycleInput, memory: Memory) -> Memory:
    """Notes that the run has trained, and until when: with the spec before its last edit, or still while it drains for that edit.
    The recorded steps may be older than the coordinator's."""
    status, steps = observed.status, observed.steps
    if status is not None:
        steps = max(steps, status.step)
    trained = memory.has_trained or steps > 0 or (status is not None and status.supervised_steps > 0)
    edited = trained and (observed.edit.restarts or observed.prepare.stale)
    return replace(memory, has_trained=trained, unproven_since=steps if edited else memory.unproven_since)


def _note_proof(observed: LifecycleInput, memory: Memory) -> Memory:
    """Notes that the run has trained enough steps with its last edit: one of generators restarts them while training continues."""
    status, since = observed.status, memory.unproven_since
    if status is None or since is None:
        return memory
    if not observed.started:
        return replace(memory, unproven_since=max(since, status.step))
    proven = observed.trainer.ready and status.step >= since + PROVEN_STEPS
    return replace(memory, unproven_since=None if proven else since)


def _run(spec: RunSpec, observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    status, memory = observed.status, _note_proof(observed, memory)
    if status is not None and not status.stop_reason:
        memory = replace(memory, resumed=False)
    wanted = _stop_reason(spec, observed, resumed=memory.resumed)
    request_stop = _stop_request(wanted, status, resumed=memory.resumed)
    # Before a stop request is sent, the coordinator's status does not reflect it.
    finished = status is not None and request_stop is None and status.phase is CoordinatorPhase.FINISHED
    # A rank that fails after the coordinator has recorded the last checkpoint loses nothing.
    requeued = observed.trainer.held and not observed.trainer.ending
    ended = requeued or observed.trainer.state in (JobState.COMPLETE, JobState.FAILED, JobState.ABSENT)
    # A trainer that never registered, such as one that waits for a node, is deleted: it has nothing to save.
    ended |= status is not None and not status.trainer_registered
    memory = _note_missing_trainer(observed, memory, request_stop)
    given_up = _gives_up_trainer(observed, memory)
    if ((finished and ended) or given_up) and memory.attempt > 0 and status is not None:
        stop_reason = status.stop_reason
        by_forecast = stop_reason == FORECAST and spec.autoscaling.on_stop == "Suspend"
        if by_forecast or stop_reason == BROKEN:
            return LifecycleDecision(
                Phase.SUSPENDED, replace(memory, rest=Suspension.ASKED, drain_since=None), set_suspend=True
            )
        reason = Reason.STOPPED_BY_FORECAST if stop_reason == FORECAST else Reason.BUDGET_REACHED
        untrained = "" if status.trainer_registered else " before the trainer registered: nothing was trained"
        text = f"{stop_reason}{untrained}" + (f"; {_what_is_lost(status)}" if given_up else "")
        return _end(observed, replace(memory, awaited_since=None), Outcome(End.COMPLETED, reason, text))
    held = observed.trainer.held
    memory = replace(memory, held_since=_since(memory.held_since, observed.unix_seconds) if held else None)
    if requeued:
        memory = replace(memory, ready_since=None)
    elif observed.trainer.ready and observed.trainer.attempt == memory.attempt:
        since = observed.unix_seconds if memory.ready_since is None else memory.ready_since
        memory = replace(memory, ready_since=since, record=replace(memory.record, has_been_ready=True))
    memory = _record_end(spec, observed, memory)
    if memory.outcome is not None:
        return _end(observed, memory, memory.outcome)
    memory, trainer, wait = _attempt(observed, memory, finished=finished)
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
        generators=_generators(spec, observed),
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


def _note_missing_trainer(observed: LifecycleInput, memory: Memory, request_stop: str | None) -> Memory:
    """Notes since when a run that ends has had no trainer: its pods wait for a node, or never become ready."""
    status, trainer = observed.status, observed.trainer
    if status is None:
        return memory
    ending = status.phase is CoordinatorPhase.FINISHING and request_stop is None
    gone = not trainer.ready and memory.ready_since is None and trainer.state is not JobState.LEAVING
    since = _since(memory.awaited_since, observed.unix_seconds) if ending and gone else None
    return replace(memory, awaited_since=since)


def _gives_up_trainer(observed: LifecycleInput, memory: Memory) -> bool:
    """Whether a run that ends has been without its trainer for too long: the coordinator alone waits for it without end."""
    if observed.status is None or memory.awaited_since is None:
        return False
    return observed.unix_seconds - memory.awaited_since >= DRAIN_SECONDS


def _is_saved(status: Status) -> bool:
    """Whether the last checkpoint has all training."""
    return (
        status.checkpoint_version >= status.step
        if status.step
        else not status.supervised_steps or status.checkpoint_version >= 0
    )


def _what_is_lost(status: Status) -> str:
    """What a run loses that ends without its trainer, for users."""
    text = f"the trainer was not ready within {DRAIN_SECONDS / 60:g} minutes to end training, and "
    if _is_saved(status):
        return f"{text}the last checkpoint has all steps; a last evaluation or export may be missing"
    if not status.step:
        return f"{text}mid-training since its last checkpoint is lost"
    return f"{text}the steps after {max(status.checkpoint_version, 0)}, the last checkpoint, of {status.step} are lost"


def _waits_in_queue(observed: LifecycleInput, memory: Memory) -> bool:
    """Whether only the trainer's Job is to exist, which a queue holds."""
    trainer = observed.trainer
    if observed.unadmitted:  # first its trainer saves
        stops = trainer.ending or trainer.state is JobState.LEAVING
        return not stops and (trainer.held or trainer.state is not JobState.ACTIVE)
    if trainer.held and not trainer.ending:
        since = _since(memory.held_since, observed.unix_seconds)
        return not observed.serving or observed.unix_seconds - since >= HELD_SECONDS
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


def _stop_request(wanted: str, status: Status | None, *, resumed: bool) -> str | None:
    """The stop request to send to the coordinator; None if it has it already, or does not answer."""
    # A trainer that keeps weights in memory has ended training; only the end of its Job ends it.
    if status is None or status.unsaved_version >= 0:
        return None
    revocable = (*budget.REVOCABLE, FORECAST, BROKEN) if resumed else budget.REVOCABLE
    return wanted if budget.must_send_stop(wanted, status.stop_reason, revocable) else None


def _record_end(spec: RunSpec, observed: LifecycleInput, memory: Memory) -> Memory:
    """Records the end of the present attempt, once."""
    trainer = observed.trainer
    ended = trainer.state in (JobState.COMPLETE, JobState.FAILED)
    if not ended or memory.last_recorded_attempt == memory.attempt or trainer.attempt != memory.attempt:
        return memory
    if trainer.state is JobState.COMPLETE and observed.status is None:
        return memory  # only the coordinator knows whether the run is complete
    if _awaits_exit_code(trainer, observed.unix_seconds):
        return memory
    worst = _worst(trainer.ends)
    ready_seconds = (
        None if memory.ready_since is None else max(0.0, observed.unix_seconds - memory.ready_since)
    )
    policy = _policy(spec)
    decision: restarts.Restart | restarts.GiveUp
    # Before the end of the run, all ranks exit with 0 only when one of them got SIGTERM.
    if trainer.disrupted or trainer.state is JobState.COMPLETE:
        decision = restarts.disrupted(policy, memory.record, ready_seconds)
    else:
        end = restarts.ProcessEnd(restarts.Cause.EXIT, worst.exit_code, ready_seconds)
        decision = restarts.decide(policy, memory.record, end)
    if isinstance(decision, restarts.GiveUp):
        reason = Reason.BAD_INPUT if decision.bad_input else Reason.BACKOFF_LIMIT_EXCEEDED
        if worst.exit_code == DIVERGED_EXIT_CODE:
            reason = Reason.DIVERGED
        elif worst.exit_code == PUBLISH_REFUSED_EXIT_CODE:
            reason = Reason.PUBLISH_REFUSED
        elif ready_seconds is None and not (decision.bad_input or memory.record.has_been_ready):
            reason = Reason.STARTS_FAILED
        message = f"trainer: {decision.reason}" + (f": {worst.message}" if worst.message else "")
        outcome = _failure(observed, memory, reason, message)
        return replace(memory, outcome=outcome, last_recorded_attempt=memory.attempt)
    return replace(
        memory,
        last_recorded_attempt=memory.attempt,
        record=decision.record,
        restarts=memory.restarts + 1,
        next_at=observed.unix_seconds + decision.delay_seconds,
    )


def _attempt(observed: LifecycleInput, memory: Memory, *, finished: bool) -> tuple[Memory, int | None, float]:
    """The memory, the attempt that is to exist, and the seconds until the next one."""
    state = observed.trainer.state
    if state is JobState.LEAVING or (state is JobState.ACTIVE and observed.trainer.stale):
        # Its pods save and terminate; two attempts never run at the same time.
        return memory, None, ASK_AGAIN_SECONDS
    if state is JobState.ACTIVE and observed.trainer.attempt == memory.attempt:
        return memory, memory.attempt, POLL_SECONDS
    if state is not JobState.ABSENT and memory.last_recorded_attempt != memory.attempt:
        return memory, memory.attempt, ASK_AGAIN_SECONDS
    if finished:
        return memory, memory.attempt or None, ASK_AGAIN_SECONDS
    wait = memory.next_at - observed.unix_seconds
    if _is_pending(wait):
        return memory, memory.attempt if state is not JobState.ABSENT else None, wait
    if state is not JobState.ABSENT:
        return memory, None, ASK_AGAIN_SECONDS  # first the Job and its pods are deleted
    if memory.attempt > memory.last_recorded_attempt:
        # Recorded but not observed yet, or deleted: the same attempt is created again.
        return replace(memory, ready_since=None), memory.attempt, POLL_SECONDS
    attempt = memory.attempt + 1
    return replace(memory, attempt=attempt, ready_since=None, next_at=0.0), attempt, POLL_SECONDS


def _policy(spec: RunSpec) -> restarts.RestartPolicy:
    return restarts.RestartPolicy(
        max_restarts=spec.trainer.max_restarts, max_start_delay_seconds=START_DELAY_SECONDS
    )


def _awaits_exit_code(job: Job, now: float) -> bool:
    """Whether a Job has failed and the exit code of its pods may still arrive; the decision on it is final."""
    without_code = job.state is JobState.FAILED and not job.disrupted and not job.ends
    return without_code and _is_pending(job.failed_at + NEWS_SECONDS - now)


def _since(before: float | None, now: float) -> float:
    """The earlier of ``before`` and ``now``: a clock that was set back must not give a time in the future."""
    return now if before is None else min(before, now)


def _is_pending(wait: float) -> bool:
    """Whether a wait of so many seconds is left. One longer than any delay is due to a clock that was set back; stored times are
    rounded up to whole seconds."""
    return 0 < wait <= START_DELAY_SECONDS + 1


# --- end ----------------------------------------------------------------------------------------


def _after_outcome(observed: LifecycleInput, memory: Memory, outcome: Outcome) -> LifecycleDecision:
    """The decision for a run that has ended, or is held: it may continue."""
    if outcome.end is End.COMPLETED:
        continues = observed.edit.raises_limit
    else:
        # A run may fail when it is suspended already: only the edit continues it.
        suspends = outcome.end is End.HELD or "suspend" in observed.edit.fields
        continues = (observed.suspend and suspends) or observed.edit.mends
    if observed.deleting or not continues:
        return _ended(observed, memory, outcome)
    memory = replace(memory, outcome=None, rest=Suspension.YES)
    phase = Phase.SUSPENDED if observed.suspend else Phase.PENDING
    return LifecycleDecision(phase, memory, again_seconds=0.0, note=_EARLIER_JOBS)


def _ended(observed: LifecycleInput, memory: Memory, outcome: Outcome) -> LifecycleDecision:
    """Jobs that have ended have only their logs, and stay until the run continues or is deleted."""
    ended = (JobState.COMPLETE, JobState.FAILED)
    return LifecycleDecision(
        Phase(outcome.end.value),
        memory,
        prepare=observed.prepare.state in ended,
        trainer=observed.trainer.attempt if observed.trainer.state in ended else None,
        release=observed.deleting,
    )


def _end(observed: LifecycleInput, memory: Memory, outcome: Outcome) -> LifecycleDecision:
    return replace(_ended(observed, replace(memory, outcome=outcome), outcome), again_seconds=0.0)


def _worst(ends: tuple[Ended, ...]) -> Ended:
    """The most informative end: wrong input, then divergence or refused weights, then the first. The other ranks of a gang only report a lost
    rank."""
    order = {BAD_INPUT_EXIT_CODE: 0, DIVERGED_EXIT_CODE: 1, PUBLISH_REFUSED_EXIT_CODE: 1}
    return min(ends, key=lambda end: order.get(end.exit_code, 2), default=Ended(1))
