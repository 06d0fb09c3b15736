"""Report: from what was seen and decided to the run's status. Pure.

A condition's time is when its ``status`` last changed. What nobody looks at while a run is at rest (its pods) keeps
its last word as ``False``, with the reason why there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from scalerl_api.conditions import NOTHING_TO_DO, ConditionType, Phase, Reason
from scalerl_api.exports import ExportedModel, Exports
from scalerl_api.spec import ModelSpec, ScaleRLRun
from scalerl_api.spec_warnings import cluster_warnings_of, warnings_of
from scalerl_api.status import (
    Condition,
    ExportsStatus,
    ExportStatus,
    GeneratorsStatus,
    RunStatus,
    TrainerStatus,
    UsageStatus,
)
from scalerl_api.wire import BROKEN, FORECAST, Status
from scalerl_operator.controller import degraded
from scalerl_operator.controller.observe import Observed, Problem, rfc3339, seconds
from scalerl_operator.names import QUEUE
from scalerl_operator.policy import restarts
from scalerl_operator.policy.decision import Course, End, JobState, Memory, Outcome, Rest
from scalerl_operator.workloads import Role

STALLED_SECONDS: Final = 1800.0
"""So long without a step, and Progressing is False."""
_MESSAGE_CHARACTERS: Final = 2000
AT_REST: Final = frozenset({Phase.PENDING, Phase.SUSPENDED, Phase.COMPLETED, Phase.FAILED})
_AT_REST_BECAUSE: Final = {
    Phase.SUSPENDED: Reason.RUN_SUSPENDED,
    Phase.COMPLETED: Reason.RUN_COMPLETED,
    Phase.FAILED: Reason.RUN_FAILED,
}
"""Why a run at rest has no pods; in any other phase they are yet to come."""
PROGRESS: Final = frozenset(
    {"step", "lastStepTime", "reward", "points", "usage", "trouble", "exports", "forecast", "decisions"}
)
"""Fields of the status that move while a run works: written now and then, not at every look."""


@dataclass(frozen=True)
class Steered:
    """What autoscaling says of the run. forecast: reason and message of ForecastReady."""

    replicas: int
    base: int | None = None
    chosen: int | None = None
    pinned: bool = False
    ready: bool = False
    reason: Reason = Reason.AUTOSCALING_OFF
    message: str = ""


@dataclass(frozen=True)
class Looked:
    """All that a report rests on. accepted: what keeps the run from being started; None: nothing does.
    invalid: why the spec is not accepted, while the run goes on with the one accepted before; None: it is accepted.
    spec: the one that was accepted last, as the status keeps it. volume: what is wrong with the run's claim.
    blocked: what keeps the operator from making an object now. refused: the coordinator's words to the operator that it does
    not listen to; empty where it answers, or does not. queue_missing: why no queue holds the run; empty where there is one,
    or the run has no queue label.
    """

    unix_seconds: float
    generation: int
    accepted: Problem | None
    blocked: Problem | None
    observed: Observed | None
    course: Course
    heard: Status | None
    steered: Steered
    refused: str = ""
    invalid: Problem | None = None
    spec: str | None = None
    queue_missing: str = ""
    volume: Problem | None = None


def report(run: ScaleRLRun | None, before: RunStatus, seen: Looked) -> RunStatus:
    """The status as it is to be now; ``run`` is None for a spec that cannot be read."""
    now, course = rfc3339(seen.unix_seconds), seen.course
    if seen.heard is not None:
        known = degraded.noted(before.trouble, seen.heard, seen.unix_seconds)
        before = before.model_copy(update={"trouble": known})
    conditions = [
        _condition(before, seen.generation, now, type_, value, problem)
        for type_, value, problem in _said(run, before, seen)
    ]
    status = before.model_copy(
        update={
            "phase": course.phase,
            "observed_generation": seen.generation,
            "accepted_spec": seen.spec,
            "conditions": conditions,
            "start_time": before.start_time or (now if course.prepare else None),
            "completion_time": before.completion_time or (now if course.memory.outcome is not None else None),
            "drain_start_time": _time(course.memory.drain_since),
            "coordinator_unreachable_time": _time(course.memory.unreachable_since),
            "rest": course.memory.rest.value,
            "resumed": course.memory.resumed,
            "trainer": _trainer(course.memory),
        }
    )
    if seen.observed is not None:
        pods = [pod for pod in seen.observed.of(Role.GENERATOR) if not pod.over]
        status = status.model_copy(
            update={
                "replicas": len(pods),
                "generators": GeneratorsStatus(
                    replicas=len(pods),
                    ready=sum(p.ready for p in pods),
                    chosen=seen.steered.chosen,
                    base=seen.steered.base,
                ),
            }
        )
    return status if seen.heard is None else _progress(status, before, seen.heard, now)


def remembered(status: RunStatus) -> Memory:
    """What the last look left for this one."""
    trainer = status.trainer
    return Memory(
        attempt=trainer.attempt,
        judged=trainer.judged,
        record=restarts.Record(
            in_a_row=trainer.in_a_row,
            failed_starts=trainer.failed_starts,
            diverged=trainer.diverged,
            worked=trainer.worked,
            disruptions=trainer.disruptions,
        ),
        restarts=trainer.restarts,
        ready_since=seconds(trainer.ready_time) if trainer.ready_time else None,
        next_at=seconds(trainer.next_attempt_time),
        held_since=seconds(trainer.held_time) if trainer.held_time else None,
        drain_since=seconds(status.drain_start_time) if status.drain_start_time else None,
        unreachable_since=seconds(status.coordinator_unreachable_time)
        if status.coordinator_unreachable_time
        else None,
        rest=Rest(status.rest),
        resumed=status.resumed,
        outcome=_outcome(status),
    )


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that makes ``before`` into ``after``: what is not in ``after`` is null, however deep.

    >>> merge_patch({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1}, "e": 4})
    {'a': {'b': 1, 'c': None}, 'e': 4, 'd': None}
    """
    patch: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = merge_patch(old, value)
        patch[name] = value
    return patch | {name: None for name in before if name not in after}


def waits_for_progress_only(before: RunStatus, now: RunStatus) -> bool:
    """Whether only what moves all the time is different."""
    return _without_progress(before) == _without_progress(now)


def _without_progress(status: RunStatus) -> dict[str, object]:
    return {k: v for k, v in status.to_object().items() if k not in PROGRESS}


def _outcome(status: RunStatus) -> Outcome | None:
    for type_, end in ((ConditionType.COMPLETED, End.COMPLETED), (ConditionType.FAILED, End.FAILED)):
        condition = status.condition(type_)
        if condition is not None and condition.status == "True":
            return Outcome(end, *understood(condition))
    return None


def understood(condition: Condition) -> tuple[Reason, str]:
    """Reason and message, of a condition that may be from a later release: it keeps its word in the message."""
    reason = Reason.read(condition.reason)
    known = reason is not Reason.OTHER_RELEASE or condition.reason == reason
    return reason, condition.message if known else f"{condition.reason}: {condition.message}"


def _time(unix_seconds: float | None) -> str | None:
    return None if not unix_seconds else rfc3339(unix_seconds)


def _trainer(memory: Memory) -> TrainerStatus:
    # Times have whole seconds: rounded up, so that a wait is never cut short by the rounding.
    return TrainerStatus(
        attempt=memory.attempt,
        judged=memory.judged,
        restarts=memory.restarts,
        in_a_row=memory.record.in_a_row,
        failed_starts=memory.record.failed_starts,
        disruptions=memory.record.disruptions,
        diverged=memory.record.diverged,
        worked=memory.record.worked,
        ready_time=_time(memory.ready_since),
        held_time=_time(memory.held_since),
        next_attempt_time=rfc3339(memory.next_at + 0.999)
        if memory.judged == memory.attempt and memory.next_at
        else None,
    )


def _progress(status: RunStatus, before: RunStatus, heard: Status, now: str) -> RunStatus:
    newest = heard.points[-1] if heard.points else None
    return status.model_copy(
        update={
            "step": heard.step,
            "last_step_time": now if heard.step > (before.step or 0) else before.last_step_time,
            "reward": before.reward if newest is None else f"{newest.reward:.4f}",
            "points": len(heard.points),
            "stop_reason": heard.stop_reason or None,
            "usage": UsageStatus(
                seconds=f"{heard.wall_seconds:.0f}",
                device_hours=f"{heard.device_seconds / 3600:.4f}",
                tokens_generated=heard.tokens_generated,
                tokens_trained=heard.tokens_trained,
            ),
            "exports": before.exports if heard.exports is None else _exports(heard.exports),
        }
    )


def _exports(found: Exports) -> ExportsStatus:
    def model(exported: ExportedModel | None) -> ExportStatus | None:
        if exported is None:
            return None
        return ExportStatus(
            version=exported.version,
            reward=f"{exported.reward:.4f}",
            path=exported.path,
            uri=exported.uri,
            time=exported.time,
        )

    return ExportsStatus(best=model(found.best), last=model(found.last), problem=found.problem[:1024])


# --- conditions ---------------------------------------------------------------------------------

Said = tuple[ConditionType, bool, Problem]


def _condition(
    before: RunStatus, generation: int, now: str, type_: ConditionType, value: bool, why: Problem
) -> Condition:
    status = "True" if value else "False"
    old = before.condition(type_)
    return Condition(
        type=type_.value,
        status="True" if value else "False",
        observed_generation=generation,
        last_transition_time=old.last_transition_time if old is not None and old.status == status else now,
        reason=why.reason.value,
        message=(why.message or _meaning(type_, value, why.reason))[:_MESSAGE_CHARACTERS],
    )


def _meaning(type_: ConditionType, value: bool, reason: Reason) -> str:
    """Never nothing, so that ``kubectl describe`` says what is so, or what to do about it."""
    return type_.text if value and reason.text == NOTHING_TO_DO else reason.text


def _said(run: ScaleRLRun | None, before: RunStatus, seen: Looked) -> Sequence[Said]:
    if run is None or (seen.accepted is not None and before.start_time is None):
        why = seen.accepted or Problem(Reason.SPEC_INVALID, "")
        return [(ConditionType.ACCEPTED, False, why), *_ends(seen.course, before.stop_reason)]
    return [
        _accepted(run, seen),
        _admitted(run, before, seen),
        _prepared(run, before, seen),
        _role(ConditionType.COORDINATOR_READY, Role.COORDINATOR, 1, seen),
        _role(ConditionType.GENERATORS_READY, Role.GENERATOR, seen.steered.replicas, seen),
        _role(ConditionType.TRAINER_READY, Role.TRAINER, run.spec.trainer.replicas, seen),
        _progressing(before, seen),
        (
            ConditionType.FORECAST_READY,
            seen.steered.ready,
            Problem(seen.steered.reason, seen.steered.message),
        ),
        _pinned(seen.steered),
        _degraded(run, before, seen),
        *_ends(seen.course, before.stop_reason),
    ]


def _accepted(run: ScaleRLRun, seen: Looked) -> Said:
    """A run that was begun may be held later: its volume is lost."""
    why = seen.accepted or seen.invalid
    return ConditionType.ACCEPTED, why is None, why or _warnings(run)


def _warnings(run: ScaleRLRun) -> Problem:
    found = [*warnings_of(run.spec), *cluster_warnings_of(run.spec)]
    if not found:
        return Problem(Reason.ACCEPTED, "")
    return Problem(Reason.ACCEPTED_WITH_WARNINGS, "; ".join(str(warning) for warning in found))


def _admitted(run: ScaleRLRun, before: RunStatus, seen: Looked) -> Said:
    """True is only what a queue has said: of an attempt that is yet to be made it is what was true of the last."""
    type_, observed = ConditionType.ADMITTED, seen.observed
    if QUEUE not in run.metadata.labels:
        return type_, True, Problem(Reason.NO_QUEUE, "")
    if observed is None or seen.course.phase is Phase.SUSPENDED:
        return type_, False, _without_pods(seen)
    if seen.queue_missing:
        return type_, False, Problem(Reason.QUEUE_NOT_FOUND, seen.queue_missing)
    waiting = [
        role for role, job in ((Role.PREPARE, observed.prepare), (Role.TRAINER, observed.trainer)) if job.held
    ]
    for role in (Role.COORDINATOR, Role.GENERATOR):
        problems = (p.problem for p in observed.of(role))
        if any(p is not None and p.reason is Reason.WAITING_FOR_QUOTA for p in problems):
            waiting.append(role)
    if waiting:
        said = (
            f"{', '.join(waiting)} in the queue {run.metadata.labels[QUEUE]}; {Reason.WAITING_FOR_QUOTA.text}"
        )
        return type_, False, Problem(Reason.WAITING_FOR_QUOTA, said)
    made = any(j.state is not JobState.ABSENT for j in (observed.prepare, observed.trainer))
    if not (made or _was(before, type_)):
        return type_, False, Problem(Reason.WAITING_FOR_QUOTA, "")
    return type_, True, Problem(Reason.QUEUE_ADMITTED, "")


def _without_pods(seen: Looked) -> Problem:
    return Problem(_AT_REST_BECAUSE.get(seen.course.phase, Reason.NOT_STARTED), "")


def _prepared(run: ScaleRLRun, before: RunStatus, seen: Looked) -> Said:
    type_ = ConditionType.PREPARED
    job = seen.observed.prepare if seen.observed is not None else None
    outcome = seen.course.memory.outcome
    if (
        outcome is not None
        and outcome.reason in (Reason.PREPARE_FAILED, Reason.BAD_INPUT)
        and not _was(before, type_)
    ):
        return type_, False, Problem(Reason.PREPARE_FAILED, outcome.message)
    if job is not None and job.state is JobState.COMPLETE:
        return type_, True, Problem(Reason.PREPARED, "")
    if job is not None and job.held:
        return type_, False, Problem(Reason.WAITING_FOR_QUOTA, "")
    if seen.course.phase in AT_REST:
        was = _was(before, type_)
        return type_, was, Problem(Reason.PREPARED, "") if was else _without_pods(seen)
    problem = seen.observed.problem(Role.PREPARE) if seen.observed is not None else None
    problem = _the_exact(problem, seen.blocked)
    if problem is None and job is not None and job.ends and job.state is JobState.ACTIVE:
        last = job.ends[-1]
        problem = Problem(Reason.BACK_OFF, f"exit code {last.exit_code}: {last.message}")
    return type_, False, problem or seen.blocked or Problem(Reason.PREPARING, _source(run.spec.model))


def _the_exact(problem: Problem | None, blocked: Problem | None) -> Problem | None:
    """The scheduler only says that a volume is missing; why it is, the claim's own events say."""
    if problem is not None and blocked is not None and problem.reason is Reason.VOLUME_NOT_READY:
        return Problem(blocked.reason, f"{problem.message}; {blocked.message}")
    return problem


def _source(model: ModelSpec) -> str:
    """What the preparation does now."""
    if model.hub is not None:
        return f"the model {model.hub.name} is downloaded to the run's volume"
    if model.path is not None:
        return f"the model is taken from {model.path}"
    return "the model is made from scratch"


def _pinned(steered: Steered) -> Said:
    type_ = ConditionType.GENERATORS_PINNED
    if steered.pinned:
        return type_, True, Problem(Reason.SCALED_BY_SPEC, "")
    # Else nobody could see why there are others than the spec says; to set it to what it says is no edit.
    said = ""
    if steered.chosen is not None and steered.chosen != steered.base:
        said = f"the autoscaler chose {steered.chosen}; spec.generator.replicas says {steered.base}"
    return type_, False, Problem(Reason.NOT_PINNED, said)


def _was(before: RunStatus, type_: ConditionType) -> bool:
    old = before.condition(type_)
    return old is not None and old.status == "True"


def _role(type_: ConditionType, role: Role, wanted: int, seen: Looked) -> Said:
    if seen.observed is None or seen.course.phase in AT_REST | {Phase.PREPARING}:
        return type_, False, _without_pods(seen)
    pods = seen.observed.of(role)
    ready = sum(p.ready for p in pods)
    if role is Role.COORDINATOR and ready and seen.heard is None:
        return type_, False, _unheard(seen, "")
    if ready >= wanted:
        return type_, True, Problem(Reason.READY, "")
    problem = _the_exact(seen.observed.problem(role), seen.blocked)
    if problem is None and role is Role.COORDINATOR:
        problem = _unwritable(seen.heard)
    if problem is None and not pods:
        problem = seen.blocked
    if problem is None and role is Role.TRAINER and seen.observed.trainer.held:
        problem = Problem(Reason.WAITING_FOR_QUOTA, "")
    if (
        problem is None
        and role is Role.TRAINER
        and seen.course.memory.judged == seen.course.memory.attempt > 0
    ):
        problem = Problem(Reason.BACK_OFF, _next_attempt(seen))
    if problem is None:
        problem = Problem(Reason.SOME_READY if ready else Reason.STARTING, f"{ready} of {wanted} are ready")
    return type_, False, problem


def _unwritable(heard: Status | None) -> Problem | None:
    if heard is None or not heard.journal_error:
        return None
    said = f"the disk of the run's volume takes nothing more: {heard.journal_error}"
    return Problem(Reason.VOLUME_NOT_WRITABLE, said)


def _next_attempt(seen: Looked) -> str:
    memory, pods = seen.course.memory, seen.observed.pods if seen.observed is not None else ()
    said = f"attempt {memory.attempt + 1} follows"
    if memory.next_at > seen.unix_seconds:
        return f"{said} at {rfc3339(memory.next_at + 0.999)}"
    # On a node that does not answer a pod never ends by itself.
    ends = [pod.name for pod in pods if pod.role == Role.TRAINER and pod.leaving]
    return f"{said} when {', '.join(ends)} has ended" if ends else f"{said} shortly"


def _progressing(before: RunStatus, seen: Looked) -> Said:
    type_ = ConditionType.PROGRESSING
    if seen.course.phase not in (Phase.RUNNING, Phase.FINISHING):
        return type_, False, Problem(Reason.NOT_RUNNING, "")
    if seen.heard is None:
        return type_, False, _unheard(seen, seen.course.note)
    if (unwritable := _unwritable(seen.heard)) is not None:
        return type_, False, unwritable
    if seen.heard.step == 0:
        return type_, False, Problem(Reason.NO_STEPS, _waiting(seen.heard))
    # Time without a trainer, as in a suspension, is not held against it.
    since = max(seconds(before.last_step_time), seen.course.memory.ready_since or seen.unix_seconds)
    stalled = seen.heard.step == before.step and seen.unix_seconds - since > STALLED_SECONDS
    if stalled:
        return (
            type_,
            False,
            Problem(Reason.NO_STEPS, f"none since {rfc3339(since)}; {_waiting(seen.heard)}"),
        )
    # At the end the trainer leaves before the run is over.
    if seen.course.phase is Phase.RUNNING and seen.observed is not None and not seen.observed.trainer.ready:
        return type_, False, Problem(Reason.TRAINER_NOT_READY, f"after step {seen.heard.step}")
    return type_, True, Problem(Reason.STEPS_TRAINED, "")


def _unheard(seen: Looked, note: str) -> Problem:
    if seen.refused:
        return Problem(Reason.COORDINATOR_REFUSED, seen.refused)
    return Problem(Reason.COORDINATOR_UNREACHABLE, note)


def _waiting(heard: Status) -> str:
    return f"waiting for {heard.waiting_for or 'the first lease'}"


def _degraded(run: ScaleRLRun, before: RunStatus, seen: Looked) -> Said:
    type_ = ConditionType.DEGRADED
    if (problem := seen.volume or seen.blocked) is not None:
        return type_, True, problem
    if seen.course.phase in (Phase.RUNNING, Phase.FINISHING) and seen.observed is not None:
        if (unwritable := _unwritable(seen.heard)) is not None:
            return type_, True, unwritable
        generators = seen.observed.service(Role.GENERATOR)
        if generators.restarts > run.spec.generator.max_restarts:
            said = f"{generators.restarted} was restarted {generators.restarts} times"
            return type_, True, Problem(Reason.GENERATORS_FAILING, said)
        for role in (Role.COORDINATOR, Role.TRAINER, Role.GENERATOR):
            problem = seen.observed.problem(role)
            # To wait in a queue is no fault; Admitted tells of it.
            if problem is not None and problem.reason is not Reason.WAITING_FOR_QUOTA:
                return type_, True, replace(problem, message=f"{role}: {problem.message}")
    if seen.course.phase not in AT_REST:
        went_on_from = degraded.problem(before.trouble, seen.unix_seconds)
        if went_on_from is not None:
            return type_, True, went_on_from
        if seen.heard is not None and seen.heard.exports is not None and seen.heard.exports.problem:
            return type_, True, Problem(Reason.EXPORT_FAILED, "")
        failing = [t for t in seen.heard.trackers if t.problem] if seen.heard is not None else []
        if failing:
            said = "; ".join(f"{t.name}: {t.problem}" for t in failing)
            return type_, True, Problem(Reason.TRACKER_FAILED, said)
    return type_, False, Problem(Reason.AS_EXPECTED, "")


_SUSPENDED_BY: Final = {FORECAST: Reason.SUSPENDED_BY_FORECAST, BROKEN: Reason.SUSPENDED_AS_BROKEN}


def _ends(course: Course, stop_reason: str | None) -> Sequence[Said]:
    outcome = course.memory.outcome
    suspended = course.phase is Phase.SUSPENDED
    if course.phase is Phase.SUSPENDING:
        why = Problem(Reason.SUSPENDING, course.note)
    elif suspended:
        why = Problem(_SUSPENDED_BY.get(stop_reason or "", Reason.SUSPENDED_BY_SPEC), "")
    else:
        why = Problem(Reason.NOT_SUSPENDED, "")
    completed = outcome is not None and outcome.end is End.COMPLETED
    failed = outcome is not None and outcome.end is End.FAILED
    said = none = Problem(Reason.NOT_FINISHED, "")
    if outcome is not None:
        said = Problem(outcome.reason, outcome.message)
        none = Problem(Reason.RUN_COMPLETED if completed else Reason.RUN_FAILED, "")
    return [
        (ConditionType.SUSPENDED, suspended, why),
        (ConditionType.COMPLETED, completed, said if completed else none),
        (ConditionType.FAILED, failed, said if failed else none),
    ]
