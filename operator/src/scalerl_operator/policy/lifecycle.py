"""Lifecycle: which parts of a run are to exist now, what its coordinator is told, and what phase that is. Pure.

Level-triggered: everything is derived from what is seen now and from :class:`Memory`, which the run's status carries
from one look to the next. Whoever looks again after any crash, at any moment, comes to the same course.

=============  =====================================================  ==============================================
phase          exists                                                 left when
=============  =====================================================  ==============================================
Pending        nothing; of a run in a queue the Job that waits there  the spec is accepted, the queue lets the Job in
Preparing      the prepare Job                                        it is complete
Running        coordinator, generators, the present trainer attempt   the coordinator is told to stop, or ends by itself
Finishing      the same                                               the coordinator says finished, the trainer left
Suspending     the same                                               the trainer has left, or the drain is over
Suspended      nothing but what is kept                               ``suspend`` is taken back
Completed      what is kept, and Jobs that have ended                 never
Failed         the same                                               never
=============  =====================================================  ==============================================

A queue (Kueue) lets in Job by Job. All else waits for the trainer: it is made when the trainer is let in, and goes when
the trainer has been put back for a while, so that a run that waits holds no devices and its clock stands still.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase, Reason
from scalerl_api.process import BAD_INPUT_EXIT_CODE, COORDINATOR_TIMEOUT_SECONDS, DIVERGED_EXIT_CODE
from scalerl_api.spec import RunSpec
from scalerl_api.wire import BROKEN, FORECAST, INTERRUPTED
from scalerl_api.wire import Phase as Word
from scalerl_operator.policy import budget, restarts, stop_requests
from scalerl_operator.policy.decision import (
    Course,
    End,
    Ended,
    Facts,
    Heard,
    Job,
    JobState,
    Memory,
    Outcome,
    Rest,
)

DRAIN_SECONDS: Final = 1800.0
"""How long a run that is suspended or deleted may take to finish its step and to checkpoint."""
POLL_SECONDS: Final = 5.0
"""Between two looks at a run whose coordinator works: its words come by asking, not by watching."""
ASK_AGAIN_SECONDS: Final = 2.0
"""The same, while an answer is needed to go on."""
START_DELAY_SECONDS: Final = 300.0
"""The longest wait before the next attempt of a run whose trainer has been up once: what is in its way (a volume that is
away, a device plug-in) gets an hour to pass before twenty restarts are spent."""
HELD_SECONDS: Final = 30.0
"""A queue may hold the trainer for so long before what works beside it goes too: it looks at every attempt anew, and lets
most in within a second."""
NEWS_SECONDS: Final = 30.0
"""How a Job's pods ended is heard apart from that the Job has failed, and may come later. No longer than this."""
_IN_QUEUE: Final = "the queue to let it in"


def decide(spec: RunSpec, seen: Facts, memory: Memory) -> Course:
    """The course of a run whose spec is accepted."""
    memory = _known(seen, memory)
    if memory.outcome is not None:
        return _over(seen, memory, memory.outcome)
    if seen.deleting or seen.suspend or memory.rest is not Rest.NO:
        return _at_rest(seen, memory)
    if seen.prepare.stale:
        return _update(seen, memory)
    memory = _without_drain(memory)
    if seen.prepare.state is not JobState.COMPLETE:
        return _prepare(spec, seen, memory)
    if memory.attempt == 0:  # how often the preparation lost its place is nothing to the trainer
        memory = replace(memory, record=replace(memory.record, disruptions=0))
    broken = _broken(spec, seen)
    if broken is not None:
        return _end(seen, memory, broken)
    return _run(spec, seen, memory)


def leave(seen: Facts, memory: Memory) -> Course:
    """The course of a run that is being deleted. Its spec has no say in it, and may be one that cannot be read."""
    memory = _known(seen, memory)
    if memory.outcome is not None:
        return _over(seen, memory, memory.outcome)
    return _at_rest(seen, memory)


def _known(seen: Facts, memory: Memory) -> Memory:
    """The memory with an attempt that was made by somebody who could not write it down any more."""
    if seen.trainer.attempt > memory.attempt:
        return replace(memory, attempt=seen.trainer.attempt, ready_since=None)
    return memory


# --- at rest ------------------------------------------------------------------------------------


def _at_rest(seen: Facts, memory: Memory) -> Course:
    """Drain what works; then nothing is to exist."""
    draining = _drain(seen, memory, Phase.SUSPENDING)
    if draining is not None:
        return draining
    if seen.deleting:
        return Course(Phase.SUSPENDING, memory, release=True)
    if seen.suspend:
        return Course(Phase.SUSPENDED, replace(_without_drain(memory), rest=Rest.YES))
    if memory.rest is Rest.ASKED:
        return Course(Phase.SUSPENDED, memory, ask_suspend=True)
    # Whoever resumes it has seen to what was wrong.
    memory = replace(_anew(_without_drain(memory)), rest=Rest.NO, resumed=True)
    return Course(Phase.PENDING, memory, prepare=True, again_seconds=0.0)


def _without_drain(memory: Memory) -> Memory:
    return replace(memory, drain_since=None, unreachable_since=None)


def _anew(memory: Memory) -> Memory:
    """It is tried at once, all that failed before counts no more, and it has yet to show that it can start."""
    return replace(memory, next_at=0.0, record=memory.record.anew())


def _drain(seen: Facts, memory: Memory, phase: Phase) -> Course | None:
    """The course while the trainer saves what it trained; None when it has, or had nothing, or takes too long."""
    now, trainer = seen.unix_seconds, seen.trainer
    since = _since(memory.drain_since, now)
    # One whose ranks have never all been up has trained nothing: it waits for a queue, a node or an image.
    begun = trainer.ready or memory.ready_since is not None
    works = trainer.state is JobState.LEAVING or (
        trainer.state is JobState.ACTIVE and begun and (trainer.ending or not trainer.held)
    )
    if not works or memory.rest is not Rest.NO or now - since >= DRAIN_SECONDS:
        return None
    unreachable = None if seen.heard is not None else _since(memory.unreachable_since, now)
    # The trainer never learns that it is to end. Deleted, its ranks get SIGTERM and save, if they reach the coordinator.
    abandoned = unreachable is not None and now - unreachable >= COORDINATOR_TIMEOUT_SECONDS
    # A trainer that a queue never let in leaves with nothing to save: nothing is made for it.
    serving = seen.serving or not seen.queued or trainer.state is JobState.ACTIVE
    note = "the trainer to finish its step and to write a checkpoint"
    if abandoned:
        note = f"the trainer to end: its Job is deleted, no answer from the coordinator in {COORDINATOR_TIMEOUT_SECONDS:g} s"
    return Course(
        phase,
        replace(memory, drain_since=since, unreachable_since=unreachable),
        prepare=True,
        coordinator=serving,
        generators=seen.generators_wanted if serving else 0,
        trainer=trainer.attempt if trainer.state is JobState.ACTIVE and not abandoned else None,
        frozen=True,
        tell=_told(INTERRUPTED, seen.heard, resumed=False),
        again_seconds=ASK_AGAIN_SECONDS,
        note=note,
    )


# --- preparing ----------------------------------------------------------------------------------


def _update(seen: Facts, memory: Memory) -> Course:
    """The spec that the roles read has changed: what works is drained on the old one, then all begins on the new."""
    draining = _drain(seen, memory, Phase.PREPARING)
    return draining or Course(Phase.PREPARING, _anew(memory), note="what was made for the earlier spec to go")


def _prepare(spec: RunSpec, seen: Facts, memory: Memory) -> Course:
    if seen.prepare.state is JobState.FAILED and seen.prepare.disrupted:
        return _prepare_again(spec, seen, memory)
    if _is_news_to_come(seen.prepare, seen.unix_seconds):
        note = "word of how the preparation ended"
        return Course(Phase.PREPARING, memory, prepare=True, again_seconds=ASK_AGAIN_SECONDS, note=note)
    if seen.prepare.state is JobState.FAILED:
        worst = _worst(seen.prepare.ends)
        reason = Reason.BAD_INPUT if worst.exit_code == BAD_INPUT_EXIT_CODE else Reason.PREPARE_FAILED
        said = worst.message or f"prepare exited with {worst.exit_code}"
        return _end(seen, memory, Outcome(End.FAILED, reason, said))
    if seen.prepare.held:
        return Course(Phase.PENDING, memory, prepare=True, note=_IN_QUEUE)
    return Course(
        Phase.PREPARING,
        memory,
        prepare=seen.prepare.state is not JobState.LEAVING,
        note="the model and tokenizer to be prepared",
    )


def _prepare_again(spec: RunSpec, seen: Facts, memory: Memory) -> Course:
    """No node let it come to an end: after a while it goes, and is made anew."""
    again = restarts.disrupted(_policy(spec), memory.record, ready_seconds=None)
    wait = seen.prepare.failed_at + again.delay_seconds - seen.unix_seconds
    note = "the preparation's next try"
    if _is_to_come(wait):
        return Course(Phase.PREPARING, memory, prepare=True, again_seconds=wait, note=note)
    return Course(
        Phase.PREPARING, replace(memory, record=again.record), again_seconds=ASK_AGAIN_SECONDS, note=note
    )


# --- running ------------------------------------------------------------------------------------


def _broken(spec: RunSpec, seen: Facts) -> Outcome | None:
    """The coordinator cannot go on. Of generators any may fail: the run goes on with the others, and says so."""
    coordinator = seen.coordinator
    if coordinator.bad_input is not None:
        said = coordinator.bad_input.message or "its input is wrong"
        return Outcome(End.FAILED, Reason.BAD_INPUT, f"coordinator: {said}")
    if coordinator.restarts > spec.coordinator.max_restarts:
        said = f"{coordinator.restarted or 'coordinator'} was restarted {coordinator.restarts} times"
        return Outcome(End.FAILED, Reason.RESTARTS_EXHAUSTED, said)
    return None


def _run(spec: RunSpec, seen: Facts, memory: Memory) -> Course:
    heard = seen.heard
    if heard is not None and not heard.stop_reason:
        memory = replace(memory, resumed=False)
    wanted = _wanted(spec, seen, resumed=memory.resumed)
    tell = _told(wanted, heard, resumed=memory.resumed)
    # A word that is yet to be told makes what the coordinator says now a thing of the past.
    finished = heard is not None and tell is None and heard.phase is Word.FINISHED
    # A rank that fails once the coordinator has noted the last checkpoint has nothing to lose any more.
    put_back = seen.trainer.held and not seen.trainer.ending
    left = put_back or seen.trainer.state in (JobState.COMPLETE, JobState.FAILED, JobState.ABSENT)
    if finished and left and memory.attempt > 0 and heard is not None:
        by_forecast = heard.stop_reason == FORECAST and spec.autoscaling.on_stop == "Suspend"
        if by_forecast or heard.stop_reason == BROKEN:
            return Course(
                Phase.SUSPENDED, replace(memory, rest=Rest.ASKED, drain_since=None), ask_suspend=True
            )
        return _end(seen, memory, Outcome(End.COMPLETED, _reason(heard.stop_reason), heard.stop_reason))
    held = seen.trainer.held
    memory = replace(memory, held_since=_since(memory.held_since, seen.unix_seconds) if held else None)
    if put_back:
        memory = replace(memory, ready_since=None)
    elif seen.trainer.ready and seen.trainer.attempt == memory.attempt:
        since = seen.unix_seconds if memory.ready_since is None else memory.ready_since
        memory = replace(memory, ready_since=since, record=replace(memory.record, worked=True))
    memory = _judge(spec, seen, memory)
    if memory.outcome is not None:
        return _end(seen, memory, memory.outcome)
    memory, trainer, wait = _attempt(seen, memory, finished=finished)
    if _waits_in_queue(seen, memory):
        again = None if seen.trainer.held else wait
        return Course(
            Phase.PENDING, memory, prepare=True, trainer=trainer, again_seconds=again, note=_IN_QUEUE
        )
    ending = heard is not None and (heard.phase in (Word.FINISHING, Word.FINISHED) or bool(heard.stop_reason))
    return Course(
        Phase.FINISHING if ending and tell != "" else Phase.RUNNING,
        memory,
        prepare=True,
        coordinator=True,
        generators=seen.generators_wanted,
        trainer=trainer,
        tell=tell,
        again_seconds=min(wait, POLL_SECONDS),  # a first answer wakes the run
        note="" if heard is not None else "the coordinator to answer",
    )


def _waits_in_queue(seen: Facts, memory: Memory) -> bool:
    """Whether nothing is to be there but the trainer's Job, which a queue holds."""
    trainer = seen.trainer
    if trainer.held and not trainer.ending:
        since = _since(memory.held_since, seen.unix_seconds)
        return not seen.serving or seen.unix_seconds - since >= HELD_SECONDS
    # One that failed as soon as it was let in: its next attempt waits in the queue again.
    gone = trainer.state in (JobState.ABSENT, JobState.FAILED, JobState.LEAVING)
    return seen.queued and gone and not seen.serving


def _wanted(spec: RunSpec, seen: Facts, *, resumed: bool) -> str:
    """Why the run is to end now; empty while it is not."""
    if seen.heard is None:
        return ""
    limit = budget.decide(spec.budget, seen.heard.usage)
    if limit is not None:
        return limit.reason
    # What the autoscaler has stopped stays stopped until a person resumes it, whatever it thinks now.
    if seen.heard.stop_reason in (FORECAST, BROKEN) and not resumed:
        return seen.heard.stop_reason
    return seen.stop


def _told(wanted: str, heard: Heard | None, *, resumed: bool) -> str | None:
    """What the coordinator has to be told; None if it knows, or does not listen."""
    if heard is None:
        return None
    revocable = (
        (INTERRUPTED, FORECAST, BROKEN, *budget.REASONS) if resumed else (INTERRUPTED, *budget.REASONS)
    )
    return wanted if stop_requests.has_to_be_told(wanted, heard.stop_reason, revocable) else None


def _judge(spec: RunSpec, seen: Facts, memory: Memory) -> Memory:
    """Take the end of the present attempt into the record, once."""
    trainer = seen.trainer
    ended = trainer.state in (JobState.COMPLETE, JobState.FAILED)
    if not ended or memory.judged == memory.attempt or trainer.attempt != memory.attempt:
        return memory
    if trainer.state is JobState.COMPLETE and seen.heard is None:
        return memory  # whether the run is over, only the coordinator can say
    if _is_news_to_come(trainer, seen.unix_seconds):
        return memory
    worst = _worst(trainer.ends)
    worked = None if memory.ready_since is None else max(0.0, seen.unix_seconds - memory.ready_since)
    policy = _policy(spec)
    verdict: restarts.Restart | restarts.GiveUp
    # All ranks leave in agreement, and before the end, only when one of them has been told to go.
    if trainer.disrupted or trainer.state is JobState.COMPLETE:
        verdict = restarts.disrupted(policy, memory.record, worked)
    else:
        end = restarts.End(restarts.Cause.EXIT, worst.exit_code, worked)
        verdict = restarts.decide(policy, memory.record, end)
    if isinstance(verdict, restarts.GiveUp):
        reason = Reason.BAD_INPUT if verdict.bad_input else Reason.RESTARTS_EXHAUSTED
        if worst.exit_code == DIVERGED_EXIT_CODE:
            reason = Reason.DIVERGED
        elif worked is None and not (verdict.bad_input or memory.record.worked):
            reason = Reason.STARTS_FAILED
        message = f"trainer: {verdict.reason}" + (f": {worst.message}" if worst.message else "")
        return replace(memory, outcome=Outcome(End.FAILED, reason, message), judged=memory.attempt)
    return replace(
        memory,
        judged=memory.attempt,
        record=verdict.record,
        restarts=memory.restarts + 1,
        next_at=seen.unix_seconds + verdict.delay_seconds,
    )


def _attempt(seen: Facts, memory: Memory, *, finished: bool) -> tuple[Memory, int | None, float]:
    """The memory, the attempt that is to exist, and in how many seconds to look for the next."""
    state = seen.trainer.state
    if state is JobState.LEAVING or (state is JobState.ACTIVE and seen.trainer.stale):
        # Its pods save what they trained and leave; two attempts never run beside each other.
        return memory, None, ASK_AGAIN_SECONDS
    if state is JobState.ACTIVE and seen.trainer.attempt == memory.attempt:
        return memory, memory.attempt, POLL_SECONDS
    if state is not JobState.ABSENT and memory.judged != memory.attempt:
        return memory, memory.attempt, ASK_AGAIN_SECONDS
    if finished:
        return memory, memory.attempt or None, ASK_AGAIN_SECONDS
    wait = memory.next_at - seen.unix_seconds
    if _is_to_come(wait):
        return memory, memory.attempt if state is not JobState.ABSENT else None, wait
    if state is not JobState.ABSENT:
        return memory, None, ASK_AGAIN_SECONDS  # first it goes, with all its pods
    if memory.attempt > memory.judged:
        # Made in this memory, but not seen yet, or deleted by somebody: the same one again.
        return replace(memory, ready_since=None), memory.attempt, POLL_SECONDS
    return replace(memory, attempt=memory.attempt + 1, ready_since=None), memory.attempt + 1, POLL_SECONDS


def _policy(spec: RunSpec) -> restarts.RestartPolicy:
    return restarts.RestartPolicy(
        max_restarts=spec.trainer.max_restarts, max_start_delay_seconds=START_DELAY_SECONDS
    )


def _is_news_to_come(job: Job, now: float) -> bool:
    """Whether a Job has failed of which a pod still seems to run, and none has said why: to judge is for good."""
    silent = job.state is JobState.FAILED and not job.disrupted and not job.ends
    return silent and _is_to_come(job.failed_at + NEWS_SECONDS - now)


def _since(before: float | None, now: float) -> float:
    """When it began what is seen now. By the operator's own clock; one that was set back begins anew."""
    return now if before is None else min(before, now)


def _is_to_come(wait: float) -> bool:
    """Whether there is still to wait so many seconds. More than any wait is one of a clock that was set back; what is
    remembered is rounded up to whole seconds."""
    return 0 < wait <= START_DELAY_SECONDS + 1


# --- ends ---------------------------------------------------------------------------------------


def _over(seen: Facts, memory: Memory, outcome: Outcome) -> Course:
    """Jobs that have ended hold nothing but their logs: they stay as long as the run can be looked at."""
    ended = (JobState.COMPLETE, JobState.FAILED)
    return Course(
        Phase.COMPLETED if outcome.end is End.COMPLETED else Phase.FAILED,
        memory,
        prepare=seen.prepare.state in ended,
        trainer=seen.trainer.attempt if seen.trainer.state in ended else None,
        release=seen.deleting,
    )


def _end(seen: Facts, memory: Memory, outcome: Outcome) -> Course:
    return replace(_over(seen, replace(memory, outcome=outcome), outcome), again_seconds=0.0)


def _reason(stop_reason: str) -> Reason:
    if stop_reason == FORECAST:
        return Reason.STOPPED_BY_FORECAST
    return Reason.BUDGET_REACHED


def _worst(ends: tuple[Ended, ...]) -> Ended:
    """The end that says most: wrong input, then an update refused, then whatever came first. The other ranks of a gang
    only say that they lost one of them."""
    for code in (BAD_INPUT_EXIT_CODE, DIVERGED_EXIT_CODE):
        for end in ends:
            if end.exit_code == code:
                return end
    return ends[0] if ends else Ended(1)
