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
from scalerl_operator.controller.autoscaler_report import AutoscalerReport
from scalerl_operator.controller.observe import Problem, RunObservation, rfc3339, seconds
from scalerl_operator.names import QUEUE
from scalerl_operator.policy import restarts
from scalerl_operator.policy.decision import End, JobState, LifecycleDecision, Memory, Outcome, Suspension
from scalerl_operator.workloads import Role

STALLED_SECONDS: Final = 1800.0
"""So long without a step, and Progressing is False."""
_MESSAGE_CHARACTERS: Final = 2000
SUSPENDED_OR_ENDED: Final = frozenset({Phase.PENDING, Phase.SUSPENDED, Phase.COMPLETED, Phase.FAILED})
_AT_REST_BECAUSE: Final = {
    Phase.SUSPENDED: Reason.RUN_SUSPENDED,
    Phase.COMPLETED: Reason.RUN_COMPLETED,
    Phase.FAILED: Reason.RUN_FAILED,
}
"""Why a run at rest has no pods; in any other phase they are yet to come."""
PROGRESS: Final = frozenset(
    {"step", "lastStepTime", "reward", "points", "usage", "trouble", "exports", "forecast", "decisions"}
)
"""Fields of the status that change all the time while a run works: written periodically, not at every reconcile."""


@dataclass(frozen=True)
class ReconcileResult:
    """All that a report rests on. accepted: what keeps the run from being started; None: nothing does.
    invalid: why the spec is not accepted, while the run continues with the one accepted before; None: it is accepted.
    spec: the one that was accepted last, as the status keeps it. volume: what is wrong with the run's claim.
    blocked: what keeps the operator from making an object now. refused: the coordinator's message to the operator that it does
    not listen to; empty where it answers, or does not. queue_missing: why no queue holds the run; empty where there is one,
    or the run has no queue label.
    """

    unix_seconds: float
    generation: int
    accepted: Problem | None
    blocked: Problem | None
    observed: RunObservation | None
    decision: LifecycleDecision
    coordinator_report: Status | None
    autoscaler_report: AutoscalerReport
    refused: str = ""
    invalid: Problem | None = None
    spec: str | None = None
    queue_missing: str = ""
    volume: Problem | None = None


def report(run: ScaleRLRun | None, before: RunStatus, result: ReconcileResult) -> RunStatus:
    """The status as it is to be now; ``run`` is None for a spec that cannot be read."""
    now, decision = rfc3339(result.unix_seconds), result.decision
    if result.coordinator_report is not None:
        known = degraded.update_trouble(before.trouble, result.coordinator_report, result.unix_seconds)
        before = before.model_copy(update={"trouble": known})
    conditions = [
        _condition(before, result.generation, now, type_, value, problem)
        for type_, value, problem in _said(run, before, result)
    ]
    status = before.model_copy(
        update={
            "phase": decision.phase,
            "observed_generation": result.generation,
            "accepted_spec": result.spec,
            "conditions": conditions,
            "start_time": before.start_time or (now if decision.prepare else None),
            "completion_time": before.completion_time
            or (now if decision.memory.outcome is not None else None),
            "drain_start_time": _time(decision.memory.drain_since),
            "coordinator_unreachable_time": _time(decision.memory.unreachable_since),
            "rest": decision.memory.rest.value,
            "resumed": decision.memory.resumed,
            "trainer": _trainer(decision.memory),
        }
    )
    scaling = result.autoscaler_report
    if scaling.known and scaling.decisions:  # without any, the status keeps what it has
        said = {"forecast": scaling.forecast, "decision": scaling.state, "decisions": list(scaling.decisions)}
        status = status.model_copy(update=said)
    if result.observed is not None:
        pods = [pod for pod in result.observed.of(Role.GENERATOR) if not pod.over]
        status = status.model_copy(
            update={
                "replicas": len(pods),
                "generators": GeneratorsStatus(
                    replicas=len(pods),
                    ready=sum(p.ready for p in pods),
                ),
            }
        )
    return (
        status
        if result.coordinator_report is None
        else _progress(status, before, result.coordinator_report, now)
    )


def remembered(status: RunStatus) -> Memory:
    """What the last reconcile remembered for this one."""
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
        rest=Suspension(status.rest),
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


def _progress(status: RunStatus, before: RunStatus, coordinator_report: Status, now: str) -> RunStatus:
    newest = coordinator_report.points[-1] if coordinator_report.points else None
    return status.model_copy(
        update={
            "step": coordinator_report.step,
            "last_step_time": now if coordinator_report.step > (before.step or 0) else before.last_step_time,
            "reward": before.reward if newest is None else f"{newest.reward:.4f}",
            "points": len(coordinator_report.points),
            "stop_reason": coordinator_report.stop_reason or None,
            "usage": UsageStatus(
                seconds=f"{coordinator_report.wall_seconds:.0f}",
                device_hours=f"{coordinator_report.device_seconds / 3600:.4f}",
                tokens_generated=coordinator_report.tokens_generated,
                tokens_trained=coordinator_report.tokens_trained,
            ),
            "exports": before.exports
            if coordinator_report.exports is None
            else _exports(coordinator_report.exports),
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


def _said(run: ScaleRLRun | None, before: RunStatus, result: ReconcileResult) -> Sequence[Said]:
    if run is None or (result.accepted is not None and before.start_time is None):
        why = result.accepted or Problem(Reason.SPEC_INVALID, "")
        return [(ConditionType.ACCEPTED, False, why), *_ends(result.decision, before.stop_reason)]
    return [
        _accepted(run, result),
        _admitted(run, before, result),
        _prepared(run, before, result),
        _role(ConditionType.COORDINATOR_READY, Role.COORDINATOR, 1, result),
        _role(ConditionType.GENERATORS_READY, Role.GENERATOR, run.spec.generator.replicas, result),
        _role(ConditionType.TRAINER_READY, Role.TRAINER, run.spec.trainer.replicas, result),
        _progressing(before, result),
        (
            ConditionType.FORECAST_READY,
            result.autoscaler_report.ready,
            Problem(result.autoscaler_report.reason, result.autoscaler_report.message),
        ),
        _degraded(run, before, result),
        *_ends(result.decision, before.stop_reason),
    ]


def _accepted(run: ScaleRLRun, result: ReconcileResult) -> Said:
    """A run that was begun may be held later: its volume is lost."""
    why = result.accepted or result.invalid
    return ConditionType.ACCEPTED, why is None, why or _warnings(run)


def _warnings(run: ScaleRLRun) -> Problem:
    found = [*warnings_of(run.spec), *cluster_warnings_of(run.spec)]
    if not found:
        return Problem(Reason.ACCEPTED, "")
    return Problem(Reason.ACCEPTED_WITH_WARNINGS, "; ".join(str(warning) for warning in found))


def _admitted(run: ScaleRLRun, before: RunStatus, result: ReconcileResult) -> Said:
    """True is only what a queue has said: of an attempt that is yet to be made it is what was true of the last."""
    type_, observed = ConditionType.ADMITTED, result.observed
    if QUEUE not in run.metadata.labels:
        return type_, True, Problem(Reason.NO_QUEUE, "")
    if observed is None or result.decision.phase is Phase.SUSPENDED:
        return type_, False, _without_pods(result)
    if result.queue_missing:
        return type_, False, Problem(Reason.QUEUE_NOT_FOUND, result.queue_missing)
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


def _without_pods(result: ReconcileResult) -> Problem:
    return Problem(_AT_REST_BECAUSE.get(result.decision.phase, Reason.NOT_STARTED), "")


def _prepared(run: ScaleRLRun, before: RunStatus, result: ReconcileResult) -> Said:
    type_ = ConditionType.PREPARED
    job = result.observed.prepare if result.observed is not None else None
    outcome = result.decision.memory.outcome
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
    if result.decision.phase in SUSPENDED_OR_ENDED:
        was = _was(before, type_)
        return type_, was, Problem(Reason.PREPARED, "") if was else _without_pods(result)
    problem = result.observed.problem(Role.PREPARE) if result.observed is not None else None
    problem = _the_exact(problem, result.blocked)
    if problem is None and job is not None and job.ends and job.state is JobState.ACTIVE:
        last = job.ends[-1]
        problem = Problem(Reason.BACK_OFF, f"exit code {last.exit_code}: {last.message}")
    return type_, False, problem or result.blocked or Problem(Reason.PREPARING, _source(run.spec.model))


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


def _was(before: RunStatus, type_: ConditionType) -> bool:
    old = before.condition(type_)
    return old is not None and old.status == "True"


def _role(type_: ConditionType, role: Role, wanted: int, result: ReconcileResult) -> Said:
    if result.observed is None or result.decision.phase in SUSPENDED_OR_ENDED | {Phase.PREPARING}:
        return type_, False, _without_pods(result)
    pods = result.observed.of(role)
    ready = sum(p.ready for p in pods)
    if role is Role.COORDINATOR and ready and result.coordinator_report is None:
        return type_, False, _unheard(result, "")
    if ready >= wanted:
        return type_, True, Problem(Reason.READY, "")
    problem = _the_exact(result.observed.problem(role), result.blocked)
    if problem is None and role is Role.COORDINATOR:
        problem = _unwritable(result.coordinator_report)
    if problem is None and not pods:
        problem = result.blocked
    if problem is None and role is Role.TRAINER and result.observed.trainer.held:
        problem = Problem(Reason.WAITING_FOR_QUOTA, "")
    if (
        problem is None
        and role is Role.TRAINER
        and result.decision.memory.judged == result.decision.memory.attempt > 0
    ):
        problem = Problem(Reason.BACK_OFF, _next_attempt(result))
    if problem is None:
        problem = Problem(
            Reason.PARTIALLY_READY if ready else Reason.STARTING, f"{ready} of {wanted} are ready"
        )
    return type_, False, problem


def _unwritable(coordinator_report: Status | None) -> Problem | None:
    if coordinator_report is None or not coordinator_report.journal_error:
        return None
    said = f"the disk of the run's volume takes nothing more: {coordinator_report.journal_error}"
    return Problem(Reason.VOLUME_NOT_WRITABLE, said)


def _next_attempt(result: ReconcileResult) -> str:
    memory, pods = result.decision.memory, result.observed.pods if result.observed is not None else ()
    said = f"attempt {memory.attempt + 1} follows"
    if memory.next_at > result.unix_seconds:
        return f"{said} at {rfc3339(memory.next_at + 0.999)}"
    # On a node that does not answer a pod never ends by itself.
    ends = [pod.name for pod in pods if pod.role == Role.TRAINER and pod.leaving]
    return f"{said} when {', '.join(ends)} has ended" if ends else f"{said} shortly"


def _progressing(before: RunStatus, result: ReconcileResult) -> Said:
    type_ = ConditionType.PROGRESSING
    if result.decision.phase not in (Phase.RUNNING, Phase.FINISHING):
        return type_, False, Problem(Reason.NOT_RUNNING, "")
    if result.coordinator_report is None:
        return type_, False, _unheard(result, result.decision.note)
    if (unwritable := _unwritable(result.coordinator_report)) is not None:
        return type_, False, unwritable
    if result.coordinator_report.step == 0:
        return type_, False, Problem(Reason.STALLED, _waiting(result.coordinator_report))
    # Time without a trainer, as in a suspension, is not held against it.
    since = max(seconds(before.last_step_time), result.decision.memory.ready_since or result.unix_seconds)
    stalled = result.coordinator_report.step == before.step and result.unix_seconds - since > STALLED_SECONDS
    if stalled:
        return (
            type_,
            False,
            Problem(Reason.STALLED, f"none since {rfc3339(since)}; {_waiting(result.coordinator_report)}"),
        )
    # At the end the trainer leaves before the run is over.
    if (
        result.decision.phase is Phase.RUNNING
        and result.observed is not None
        and not result.observed.trainer.ready
    ):
        return type_, False, Problem(Reason.TRAINER_NOT_READY, f"after step {result.coordinator_report.step}")
    return type_, True, Problem(Reason.STEPS_TRAINED, "")


def _unheard(result: ReconcileResult, note: str) -> Problem:
    if result.refused:
        return Problem(Reason.COORDINATOR_REFUSED, result.refused)
    return Problem(Reason.COORDINATOR_UNREACHABLE, note)


def _waiting(coordinator_report: Status) -> str:
    return f"waiting for {coordinator_report.waiting_for or 'the first lease'}"


def _degraded(run: ScaleRLRun, before: RunStatus, result: ReconcileResult) -> Said:
    type_ = ConditionType.DEGRADED
    if (problem := result.volume or result.blocked) is not None:
        return type_, True, problem
    if result.decision.phase in (Phase.RUNNING, Phase.FINISHING) and result.observed is not None:
        if (unwritable := _unwritable(result.coordinator_report)) is not None:
            return type_, True, unwritable
        generators = result.observed.service(Role.GENERATOR)
        if generators.restarts > run.spec.generator.max_restarts:
            said = f"{generators.restarted} was restarted {generators.restarts} times"
            return type_, True, Problem(Reason.GENERATORS_FAILING, said)
        for role in (Role.COORDINATOR, Role.TRAINER, Role.GENERATOR):
            problem = result.observed.problem(role)
            # To wait in a queue is no fault; Admitted tells of it.
            if problem is not None and problem.reason is not Reason.WAITING_FOR_QUOTA:
                return type_, True, replace(problem, message=f"{role}: {problem.message}")
    if result.decision.phase not in SUSPENDED_OR_ENDED:
        went_on_from = degraded.problem(before.trouble, result.unix_seconds)
        if went_on_from is not None:
            return type_, True, went_on_from
        if (
            result.coordinator_report is not None
            and result.coordinator_report.exports is not None
            and result.coordinator_report.exports.problem
        ):
            return type_, True, Problem(Reason.EXPORT_FAILED, "")
        failing = (
            [t for t in result.coordinator_report.trackers if t.problem]
            if result.coordinator_report is not None
            else []
        )
        if failing:
            said = "; ".join(f"{t.name}: {t.problem}" for t in failing)
            return type_, True, Problem(Reason.TRACKER_FAILED, said)
    return type_, False, Problem(Reason.HEALTHY, "")


_SUSPENDED_BY: Final = {FORECAST: Reason.SUSPENDED_BY_FORECAST, BROKEN: Reason.SUSPENDED_AS_BROKEN}


def _ends(decision: LifecycleDecision, stop_reason: str | None) -> Sequence[Said]:
    outcome = decision.memory.outcome
    suspended = decision.phase is Phase.SUSPENDED
    if decision.phase is Phase.SUSPENDING:
        why = Problem(Reason.SUSPENDING, decision.note)
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
