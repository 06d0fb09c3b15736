"""Lifecycle: which parts of a run are to exist, what its coordinator is asked, and its phase. Pure.

Level-triggered: everything is derived from what is observed now and from :class:`Memory`, which the run's status carries
from one reconcile to the next. After a crash at any moment the next reconcile comes to the same decision.

=============  =====================================================  ==============================================
phase          exists                                                 ends when
=============  =====================================================  ==============================================
Pending        nothing; of a run in a queue the Job that waits there  the spec is accepted, the queue lets the Job in
Preparing      the prepare Job                                        it is complete
Running        coordinator, generators, the present trainer attempt   the coordinator is asked to stop, or ends by itself
Finishing      the same                                               the coordinator has finished and the trainer ended
Suspending     the same                                               the trainer has ended, or the drain timed out
Suspended      nothing but what is kept                               ``suspend`` is taken back
Completed      what is kept, and Jobs that have ended                 never
Failed         the same                                               never
=============  =====================================================  ==============================================

A queue (Kueue) admits Job by Job. All else waits for the trainer: it is created when the trainer is admitted, and deleted when
the trainer has been requeued for a while, so that a run that waits holds no devices and its clock does not advance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase, Reason
from scalerl_api.process import BAD_INPUT_EXIT_CODE, COORDINATOR_TIMEOUT_SECONDS, DIVERGED_EXIT_CODE
from scalerl_api.spec import RunSpec
from scalerl_api.wire import BROKEN, FORECAST, INTERRUPTED, Status
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_operator.policy import budget, restarts
from scalerl_operator.policy.lifecycle_types import (
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

DRAIN_SECONDS: Final = 1800.0
"""How long a run that is suspended or deleted may take to finish its step and to checkpoint."""
POLL_SECONDS: Final = 5.0
"""Between two reconciles of a run whose coordinator runs: its status is polled, not watched."""
ASK_AGAIN_SECONDS: Final = 2.0
"""The same, while an answer is needed to proceed."""
START_DELAY_SECONDS: Final = 300.0
"""The longest wait before the next attempt of a run whose trainer has been up once: what is in its way (a volume that is
away, a device plug-in) gets an hour to pass before twenty restarts are spent."""
HELD_SECONDS: Final = 30.0
"""How long a queue may hold the trainer before generators and coordinator are removed too: it admits each attempt by itself, and
most within a second."""
NEWS_SECONDS: Final = 30.0
"""How long the pods' exit codes may arrive after the Job's failure."""
_IN_QUEUE: Final = "the queue to let it in"


def decide(spec: RunSpec | None, observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    """The decision for a run. spec: as it was accepted; None: only of a run that is being deleted, to which it does not matter."""
    memory = _known(observed, memory)
    if memory.outcome is not None:
        return _ended(observed, memory, memory.outcome)
    if observed.deleting or observed.suspend or memory.rest is not Suspension.NO:
        return _suspend(observed, memory)
    assert spec is not None
    if observed.prepare.stale:
        return _update(observed, memory)
    memory = _without_drain(memory)
    if observed.prepare.state is not JobState.COMPLETE:
        return _prepare(spec, observed, memory)
    if memory.attempt == 0:  # how often the preparation lost its place is nothing to the trainer
        memory = replace(memory, record=replace(memory.record, disruptions=0))
    broken = _broken(spec, observed)
    if broken is not None:
        return _end(observed, memory, broken)
    return _run(spec, observed, memory)


def _known(observed: LifecycleInput, memory: Memory) -> Memory:
    """The memory with an attempt that a process created and did not live to record."""
    if observed.trainer.attempt > memory.attempt:
        return replace(memory, attempt=observed.trainer.attempt, ready_since=None)
    return memory


# --- suspended -----------------------------------------------------------------------------------


def _suspend(observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    """Drains what runs; then nothing is to exist."""
    draining = _drain(observed, memory, Phase.SUSPENDING)
    if draining is not None:
        return draining
    if observed.deleting:
        return LifecycleDecision(Phase.SUSPENDING, memory, release=True)
    if observed.suspend:
        return LifecycleDecision(Phase.SUSPENDED, replace(_without_drain(memory), rest=Suspension.YES))
    if memory.rest is Suspension.ASKED:
        return LifecycleDecision(Phase.SUSPENDED, memory, set_suspend=True)
    # A person who resumes a run has corrected what was wrong.
    memory = replace(_reset_failures(_without_drain(memory)), rest=Suspension.NO, resumed=True)
    return LifecycleDecision(Phase.PENDING, memory, prepare=True, again_seconds=0.0)


def _without_drain(memory: Memory) -> Memory:
    return replace(memory, drain_since=None, unreachable_since=None)


def _reset_failures(memory: Memory) -> Memory:
    """Resets the back-off and the failure counts."""
    return replace(memory, next_at=0.0, record=memory.record.reset())


def _drain(observed: LifecycleInput, memory: Memory, phase: Phase) -> LifecycleDecision | None:
    """The decision while the trainer writes its checkpoint; None when it has, or had nothing to save, or takes too long."""
    now, trainer = observed.unix_seconds, observed.trainer
    since = _since(memory.drain_since, now)
    # One whose ranks have never all been up has trained nothing: it waits for a queue, a node or an image.
    begun = trainer.ready or memory.ready_since is not None
    works = trainer.state is JobState.LEAVING or (
        trainer.state is JobState.ACTIVE and begun and (trainer.ending or not trainer.held)
    )
    if not works or memory.rest is not Suspension.NO or now - since >= DRAIN_SECONDS:
        return None
    unreachable = None if observed.status is not None else _since(memory.unreachable_since, now)
    # The trainer cannot be asked to end. Deleted, its ranks get SIGTERM and save, if they reach the coordinator.
    abandoned = unreachable is not None and now - unreachable >= COORDINATOR_TIMEOUT_SECONDS
    # A trainer that no queue admitted has nothing to save: nothing is created for it.
    serving = observed.serving or not observed.queued or trainer.state is JobState.ACTIVE
    note = "the trainer to finish its step and to write a checkpoint"
    if abandoned:
        note = f"the trainer to end: its Job is deleted, no answer from the coordinator in {COORDINATOR_TIMEOUT_SECONDS:g} s"
    return LifecycleDecision(
        phase,
        replace(memory, drain_since=since, unreachable_since=unreachable),
        prepare=True,
        coordinator=serving,
        generators=observed.generators_wanted if serving else 0,
        trainer=trainer.attempt if trainer.state is JobState.ACTIVE and not abandoned else None,
        frozen=True,
        request_stop=_stop_request(INTERRUPTED, observed.status, resumed=False),
        again_seconds=ASK_AGAIN_SECONDS,
        note=note,
    )


# --- preparing ----------------------------------------------------------------------------------


def _update(observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    """The spec that the roles read has changed: what works is drained on the old one, then all begins on the new."""
    draining = _drain(observed, memory, Phase.PREPARING)
    return draining or LifecycleDecision(
        Phase.PREPARING, _reset_failures(memory), note="what was made for the earlier spec to go"
    )


def _prepare(spec: RunSpec, observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    if observed.prepare.state is JobState.FAILED and observed.prepare.disrupted:
        return _prepare_again(spec, observed, memory)
    if _end_is_to_be_reported(observed.prepare, observed.unix_seconds):
        note = "the exit code of the preparation"
        return LifecycleDecision(
            Phase.PREPARING, memory, prepare=True, again_seconds=ASK_AGAIN_SECONDS, note=note
        )
    if observed.prepare.state is JobState.FAILED:
        worst = _worst(observed.prepare.ends)
        reason = Reason.BAD_INPUT if worst.exit_code == BAD_INPUT_EXIT_CODE else Reason.PREPARE_FAILED
        said = worst.message or f"prepare exited with {worst.exit_code}"
        return _end(observed, memory, Outcome(End.FAILED, reason, said))
    if observed.prepare.held:
        return LifecycleDecision(Phase.PENDING, memory, prepare=True, note=_IN_QUEUE)
    return LifecycleDecision(
        Phase.PREPARING,
        memory,
        prepare=observed.prepare.state is not JobState.LEAVING,
        note="the model and tokenizer to be prepared",
    )


def _prepare_again(spec: RunSpec, observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    """The preparation ends on no node: after a while its Job is deleted and created again."""
    again = restarts.disrupted(_policy(spec), memory.record, ready_seconds=None)
    wait = observed.prepare.failed_at + again.delay_seconds - observed.unix_seconds
    note = "the preparation's next try"
    if _is_to_come(wait):
        return LifecycleDecision(Phase.PREPARING, memory, prepare=True, again_seconds=wait, note=note)
    return LifecycleDecision(
        Phase.PREPARING, replace(memory, record=again.record), again_seconds=ASK_AGAIN_SECONDS, note=note
    )


# --- running ------------------------------------------------------------------------------------


def _broken(spec: RunSpec, observed: LifecycleInput) -> Outcome | None:
    """Why the coordinator cannot continue. Any generator may fail: the run continues with the others, degraded."""
    coordinator = observed.coordinator
    if coordinator.bad_input is not None:
        said = coordinator.bad_input.message or "its input is wrong"
        return Outcome(End.FAILED, Reason.BAD_INPUT, f"coordinator: {said}")
    if coordinator.restarts > spec.coordinator.max_restarts:
        said = f"{coordinator.restarted or 'coordinator'} was restarted {coordinator.restarts} times"
        return Outcome(End.FAILED, Reason.BACKOFF_LIMIT_EXCEEDED, said)
    return None


def _run(spec: RunSpec, observed: LifecycleInput, memory: Memory) -> LifecycleDecision:
    status = observed.status
    if status is not None and not status.stop_reason:
        memory = replace(memory, resumed=False)
    wanted = _wanted(spec, observed, resumed=memory.resumed)
    request_stop = _stop_request(wanted, status, resumed=memory.resumed)
    # While a stop request is to be sent, the coordinator's present status is out of date.
    finished = status is not None and request_stop is None and status.phase is CoordinatorPhase.FINISHED
    # A rank that fails once the coordinator has noted the last checkpoint has nothing to lose any more.
    requeued = observed.trainer.held and not observed.trainer.ending
    left = requeued or observed.trainer.state in (JobState.COMPLETE, JobState.FAILED, JobState.ABSENT)
    if finished and left and memory.attempt > 0 and status is not None:
        stop_reason = status.stop_reason
        by_forecast = stop_reason == FORECAST and spec.autoscaling.on_stop == "Suspend"
        if by_forecast or stop_reason == BROKEN:
            return LifecycleDecision(
                Phase.SUSPENDED, replace(memory, rest=Suspension.ASKED, drain_since=None), set_suspend=True
            )
        reason = Reason.STOPPED_BY_FORECAST if stop_reason == FORECAST else Reason.BUDGET_REACHED
        return _end(observed, memory, Outcome(End.COMPLETED, reason, stop_reason))
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
    ending = status is not None and (
        status.phase in (CoordinatorPhase.FINISHING, CoordinatorPhase.FINISHED) or bool(status.stop_reason)
    )
    return LifecycleDecision(
        Phase.FINISHING if ending and request_stop != "" else Phase.RUNNING,
        memory,
        prepare=True,
        coordinator=True,
        generators=observed.generators_wanted,
        trainer=trainer,
        request_stop=request_stop,
        again_seconds=min(wait, POLL_SECONDS),  # a first answer wakes the run
        note="" if status is not None else "the coordinator to answer",
    )


def _waits_in_queue(observed: LifecycleInput, memory: Memory) -> bool:
    """Whether nothing is to be there but the trainer's Job, which a queue holds."""
    trainer = observed.trainer
    if trainer.held and not trainer.ending:
        since = _since(memory.held_since, observed.unix_seconds)
        return not observed.serving or observed.unix_seconds - since >= HELD_SECONDS
    # One that failed as soon as it was admitted: its next attempt waits in the queue again.
    gone = trainer.state in (JobState.ABSENT, JobState.FAILED, JobState.LEAVING)
    return observed.queued and gone and not observed.serving


def _wanted(spec: RunSpec, observed: LifecycleInput, *, resumed: bool) -> str:
    """Why the run is to end now; empty while it is not."""
    if observed.status is None:
        return ""
    limit = budget.limit_reached(spec.budget, observed.status)
    if limit:
        return limit
    # What the autoscaler has stopped stays stopped until a person resumes it, whatever it thinks now.
    if observed.status.stop_reason in (FORECAST, BROKEN) and not resumed:
        return observed.status.stop_reason
    return observed.stop


def _stop_request(wanted: str, status: Status | None, *, resumed: bool) -> str | None:
    """The stop request to send to the coordinator; None if it has it, or does not answer."""
    if status is None:
        return None
    revocable = (*budget.REVOCABLE, FORECAST, BROKEN) if resumed else budget.REVOCABLE
    return wanted if budget.must_notify(wanted, status.stop_reason, revocable) else None


def _record_end(spec: RunSpec, observed: LifecycleInput, memory: Memory) -> Memory:
    """Take the end of the present attempt into the record, once."""
    trainer = observed.trainer
    ended = trainer.state in (JobState.COMPLETE, JobState.FAILED)
    if not ended or memory.last_recorded_attempt == memory.attempt or trainer.attempt != memory.attempt:
        return memory
    if trainer.state is JobState.COMPLETE and observed.status is None:
        return memory  # whether the run is over, only the coordinator can say
    if _end_is_to_be_reported(trainer, observed.unix_seconds):
        return memory
    worst = _worst(trainer.ends)
    ready_seconds = (
        None if memory.ready_since is None else max(0.0, observed.unix_seconds - memory.ready_since)
    )
    policy = _policy(spec)
    verdict: restarts.Restart | restarts.GiveUp
    # All ranks end together before the run's end only when one of them got SIGTERM.
    if trainer.disrupted or trainer.state is JobState.COMPLETE:
        verdict = restarts.disrupted(policy, memory.record, ready_seconds)
    else:
        end = restarts.ProcessEnd(restarts.Cause.EXIT, worst.exit_code, ready_seconds)
        verdict = restarts.decide(policy, memory.record, end)
    if isinstance(verdict, restarts.GiveUp):
        reason = Reason.BAD_INPUT if verdict.bad_input else Reason.BACKOFF_LIMIT_EXCEEDED
        if worst.exit_code == DIVERGED_EXIT_CODE:
            reason = Reason.DIVERGED
        elif ready_seconds is None and not (verdict.bad_input or memory.record.has_been_ready):
            reason = Reason.STARTS_FAILED
        message = f"trainer: {verdict.reason}" + (f": {worst.message}" if worst.message else "")
        return replace(
            memory, outcome=Outcome(End.FAILED, reason, message), last_recorded_attempt=memory.attempt
        )
    return replace(
        memory,
        last_recorded_attempt=memory.attempt,
        record=verdict.record,
        restarts=memory.restarts + 1,
        next_at=observed.unix_seconds + verdict.delay_seconds,
    )


def _attempt(observed: LifecycleInput, memory: Memory, *, finished: bool) -> tuple[Memory, int | None, float]:
    """The memory, the attempt that is to exist, and the seconds until the next one."""
    state = observed.trainer.state
    if state is JobState.LEAVING or (state is JobState.ACTIVE and observed.trainer.stale):
        # Its pods save what they trained and leave; two attempts never run beside each other.
        return memory, None, ASK_AGAIN_SECONDS
    if state is JobState.ACTIVE and observed.trainer.attempt == memory.attempt:
        return memory, memory.attempt, POLL_SECONDS
    if state is not JobState.ABSENT and memory.last_recorded_attempt != memory.attempt:
        return memory, memory.attempt, ASK_AGAIN_SECONDS
    if finished:
        return memory, memory.attempt or None, ASK_AGAIN_SECONDS
    wait = memory.next_at - observed.unix_seconds
    if _is_to_come(wait):
        return memory, memory.attempt if state is not JobState.ABSENT else None, wait
    if state is not JobState.ABSENT:
        return memory, None, ASK_AGAIN_SECONDS  # first it goes, with all its pods
    if memory.attempt > memory.last_recorded_attempt:
        # Recorded, but not observed yet, or deleted: the same attempt again.
        return replace(memory, ready_since=None), memory.attempt, POLL_SECONDS
    return replace(memory, attempt=memory.attempt + 1, ready_since=None), memory.attempt + 1, POLL_SECONDS


def _policy(spec: RunSpec) -> restarts.RestartPolicy:
    return restarts.RestartPolicy(
        max_restarts=spec.trainer.max_restarts, max_start_delay_seconds=START_DELAY_SECONDS
    )


def _end_is_to_be_reported(job: Job, now: float) -> bool:
    """Whether a Job has failed of which a pod still seems to run, and none has said why: to judge is for good."""
    silent = job.state is JobState.FAILED and not job.disrupted and not job.ends
    return silent and _is_to_come(job.failed_at + NEWS_SECONDS - now)


def _since(before: float | None, now: float) -> float:
    """Since when something holds, by the operator's clock; after the clock was set back, since now."""
    return now if before is None else min(before, now)


def _is_to_come(wait: float) -> bool:
    """Whether there is still to wait so many seconds. More than any wait is one of a clock that was set back; what is
    remembered is rounded up to whole seconds."""
    return 0 < wait <= START_DELAY_SECONDS + 1


# --- ends ---------------------------------------------------------------------------------------


def _ended(observed: LifecycleInput, memory: Memory, outcome: Outcome) -> LifecycleDecision:
    """Jobs that have ended hold nothing but their logs: they stay as long as the run does."""
    ended = (JobState.COMPLETE, JobState.FAILED)
    return LifecycleDecision(
        Phase.COMPLETED if outcome.end is End.COMPLETED else Phase.FAILED,
        memory,
        prepare=observed.prepare.state in ended,
        trainer=observed.trainer.attempt if observed.trainer.state in ended else None,
        release=observed.deleting,
    )


def _end(observed: LifecycleInput, memory: Memory, outcome: Outcome) -> LifecycleDecision:
    return replace(_ended(observed, replace(memory, outcome=outcome), outcome), again_seconds=0.0)


def _worst(ends: tuple[Ended, ...]) -> Ended:
    """The end that says most: wrong input, then an update refused, then whatever came first. The other ranks of a gang
    only say that they lost one of them."""
    order = {BAD_INPUT_EXIT_CODE: 0, DIVERGED_EXIT_CODE: 1}
    return min(ends, key=lambda end: order.get(end.exit_code, 2), default=Ended(1))
