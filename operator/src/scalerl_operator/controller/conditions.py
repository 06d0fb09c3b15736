"""The conditions of a run, from its observation and its decision. Pure.

:data:`CONDITIONS` has a row for each type. A condition's time is when its ``status`` last changed. Conditions of pods are
``False`` in phases without pods, with the phase as the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.spec import ModelSpec
from scalerl_api.spec_warnings import cluster_warnings_of, warnings_of
from scalerl_api.status import Condition
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_lifecycle.ending import only_saves
from scalerl_lifecycle.lifecycle_types import JobState, Problem
from scalerl_lifecycle.restarts import MAX_POD_RESTARTS
from scalerl_lifecycle.status_fields import (
    DECIDED,
    condition,
    end_of,
    phase_problem,
    rfc3339,
    seconds,
)
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller import gang_admission
from scalerl_operator.controller.coordinator_problems import (
    journal_problem,
    problem_of_running,
    unsaved_problem,
)
from scalerl_operator.controller.parts import Findings, Observed
from scalerl_operator.controller.volume import size_problem
from scalerl_operator.kube.client import EventType
from scalerl_operator.manifests.container_fields import memory_warnings
from scalerl_operator.manifests.scope import Images, Scope
from scalerl_operator.names import QUEUE

STALLED_SECONDS: Final = 1800.0
"""Time without a step after which Progressing is False."""
_SUSPENDED_OR_ENDED: Final = frozenset({Phase.PENDING, Phase.SUSPENDED, Phase.COMPLETED, Phase.FAILED})
_TRAINING: Final = (Phase.RUNNING, Phase.FINISHING)
_OF_PREPARATION: Final = (Reason.PREPARE_FAILED, Reason.BAD_INPUT, Reason.EDIT_FAILED)

Value = tuple[bool, Problem]
"""Whether a condition is true, and its reason; if the message is empty, the condition has the reason's text."""


def conditions(findings: Findings) -> list[Condition]:
    """The conditions of the run; without those that need a start if it cannot be started."""
    not_startable = findings.accepted.found is None or (
        findings.checks.not_started is not None and findings.run.before.start_time is None
    )
    phase = findings.decision.phase
    no_pods = phase in _SUSPENDED_OR_ENDED or phase is Phase.PREPARING
    return [
        _condition(
            findings,
            ConditionType(type_),
            *((False, _phase(findings)) if row.of_pods and no_pods else row.check(findings)),
        )
        for type_, row in CONDITIONS.items()
        if row.always or not not_startable
    ]


def _condition(findings: Findings, type_: ConditionType, value: bool, why: Problem) -> Condition:
    run = findings.run
    return condition(run.before, type_, value, why, rfc3339(run.unix_seconds), run.generation)


def _accepted(findings: Findings) -> Value:
    why = findings.checks.not_started or findings.accepted.invalid
    if why is not None:  # also of a run that has lost its volume
        return False, why
    spec = findings.accepted.spec
    size = None if findings.model is None else findings.model.size
    # Neither images nor the operator's namespace affect the estimates.
    scope = Scope(findings.accepted.run, findings.run.uid, Images("", "", ""), "", size)
    warnings = [*warnings_of(spec), *cluster_warnings_of(spec), *memory_warnings(scope)]
    if not warnings:
        return True, Problem(Reason.ACCEPTED, "")
    return True, Problem(Reason.ACCEPTED_WITH_WARNINGS, "; ".join(str(warning) for warning in warnings))


def _admitted(findings: Findings) -> Value:
    """Before the next attempt's Job exists, the condition is that of the last attempt."""
    observed, queue = findings.observed, findings.accepted.run.metadata.labels.get(QUEUE)
    if queue is None:
        return True, Problem(Reason.NO_QUEUE, "")
    if findings.decision.phase is Phase.SUSPENDED:
        return False, _phase(findings)
    if findings.checks.queue_missing:
        return False, Problem(Reason.REFERENCE_NOT_FOUND, findings.checks.queue_missing)
    jobs = {Role.PREPARE: observed.prepare, Role.TRAINER: observed.trainer}
    if observed.trainer.gated and findings.observed.gang is not None:
        text = f"the run as a whole ({findings.observed.gang.generators} generators) in the queue {queue}"
        return False, Problem(Reason.WAITING_FOR_QUOTA, f"{text}: {gang_admission.why_waiting(findings.run)}")
    waiting = [role for role, job in jobs.items() if job.gated]
    for role in (Role.COORDINATOR, Role.GENERATOR, Role.ENVIRONMENT):
        problems = (pod.problem for pod in observed.of(role))
        if any(p is not None and p.reason is Reason.WAITING_FOR_QUOTA for p in problems):
            waiting.append(role)
    if waiting:
        text = f"{', '.join(waiting)} in the queue {queue}; {Reason.WAITING_FOR_QUOTA.text}"
        return False, Problem(Reason.WAITING_FOR_QUOTA, text)
    admitted = any(job.state is not JobState.ABSENT for job in jobs.values())
    if not (admitted or _was_true(findings, ConditionType.ADMITTED)):
        return False, Problem(Reason.WAITING_FOR_QUOTA, "")
    state = findings.run.state
    return True, Problem(Reason.QUEUE_ADMITTED, state.workload_refusal or state.unread_flavors)


def _prepared(findings: Findings) -> Value:
    job, outcome = findings.observed.prepare, findings.decision.persisted.outcome
    was_true = _was_true(findings, ConditionType.PREPARED)
    if outcome is not None and outcome.reason in _OF_PREPARATION and not was_true:
        return False, Problem(Reason.PREPARE_FAILED, outcome.message)
    if job.state is JobState.COMPLETE:
        return True, Problem(Reason.PREPARED, "")
    if job.gated:
        return False, Problem(Reason.WAITING_FOR_QUOTA, "")
    if findings.decision.phase in _SUSPENDED_OR_ENDED:
        return was_true, Problem(Reason.PREPARED, "") if was_true else _phase(findings)
    problem = _with_claim_problem(findings.observed.problem(Role.PREPARE), findings.blocked)
    if problem is None and job.exits and job.state is JobState.ACTIVE:
        last = job.exits[-1]
        problem = Problem(Reason.BACK_OFF, f"exit code {last.exit_code}: {last.message}")
    problem = problem or findings.blocked
    return False, problem or Problem(Phase.PREPARING, _source(findings.accepted.spec.model))


def _coordinator_ready(findings: Findings) -> Value:
    if findings.observed.service(Role.COORDINATOR).ready and findings.observed.coordinator is None:
        return False, _coordinator_problem(findings.observed)
    if lost := _lost(findings.observed, Role.COORDINATOR):
        text = f"{lost}: {Reason.NODE_LOST.text}"
        return False, Problem(Reason.NODE_LOST, text)
    return _role_ready(findings, Role.COORDINATOR, 1, journal_problem(findings.observed.coordinator))


def _generators_ready(findings: Findings) -> Value:
    # By the spec, since the decision also has no generators before the start, in the queue, and after the end.
    if only_saves(findings.observed.coordinator):
        return True, Problem(Reason.READY, "none is needed: training has ended")
    return _role_ready(findings, Role.GENERATOR, findings.accepted.spec.generator.replicas)


def _trainer_ready(findings: Findings) -> Value:
    persisted, problem = findings.decision.persisted, None
    if findings.observed.trainer.gated:
        problem = Problem(Reason.WAITING_FOR_QUOTA, "")
    elif persisted.last_recorded_attempt == persisted.attempt > 0:
        problem = Problem(Reason.BACK_OFF, _next_attempt(findings))
        if lost := _lost(findings.observed, Role.TRAINER):
            problem = Problem(Reason.NODE_LOST, f"the node of {lost} does not answer; {problem.message}")
    return _role_ready(findings, Role.TRAINER, findings.accepted.spec.trainer.replicas, problem)


def _role_ready(findings: Findings, role: Role, wanted: int, default: Problem | None = None) -> Value:
    """default: the problem if the pods show none."""
    pods = findings.observed.of(role)
    ready = sum(pod.ready for pod in pods)
    if ready >= wanted:
        return True, Problem(Reason.READY, "")
    problem = _with_claim_problem(findings.observed.problem(role), findings.blocked)
    if problem is None and not pods:
        problem = findings.blocked
    count = Problem(Reason.PARTIALLY_READY if ready else Reason.STARTING, f"{ready} of {wanted} are ready")
    return False, problem or default or count


def _progressing(findings: Findings) -> Value:
    coordinator, now = findings.observed.coordinator, findings.run.unix_seconds
    if findings.decision.phase not in _TRAINING:
        return False, _phase(findings)
    if coordinator is None:
        return False, _coordinator_problem(findings.observed)
    if (problem := journal_problem(coordinator) or unsaved_problem(coordinator)) is not None:
        return False, problem
    waiting = f"waiting for {coordinator.waiting_for or 'the first lease'}"
    for role in (Role.GENERATOR, Role.ENVIRONMENT):
        failing = findings.observed.problem(role)
        if failing is not None and coordinator.phase is CoordinatorPhase.WAITING:
            waiting += f"; {role}: {failing.message}"
    if coordinator.step == 0:
        return False, Problem(Reason.STALLED, waiting)
    # Time without a trainer, as in a suspension, does not count.
    since = max(seconds(findings.run.before.last_step_time), findings.decision.persisted.ready_since or now)
    if coordinator.step == findings.run.before.step and now - since > STALLED_SECONDS:
        return False, Problem(Reason.STALLED, f"none since {rfc3339(since)}; {waiting}")
    # In the phase Finishing, the trainer has ended.
    if findings.decision.phase is Phase.RUNNING and not findings.observed.trainer.ready:
        return False, Problem(Reason.STALLED, f"the trainer is not ready, after step {coordinator.step}")
    return True, Problem(Reason.HEALTHY, "")


def _forecast_ready(findings: Findings) -> Value:
    report = findings.observed.autoscaler
    return report.ready, Problem(report.reason, report.message)


def _degraded(findings: Findings) -> Value:
    phase, coordinator = findings.decision.phase, findings.observed.coordinator
    problem = findings.checks.volume or size_problem(findings.run) or findings.blocked
    if problem is None and phase not in _SUSPENDED_OR_ENDED:
        problem = unsaved_problem(coordinator)
    if problem is None and phase in _TRAINING:
        problem = journal_problem(coordinator) or _role_problem(findings.observed)
    if problem is None and phase not in _SUSPENDED_OR_ENDED:
        problem = problem_of_running(coordinator, findings.observed.faults, findings.run.unix_seconds)
    return problem is not None, problem or Problem(Reason.HEALTHY, "")


def _training_healthy(findings: Findings) -> Value:
    """While the coordinator does not answer, as it was."""
    if findings.observed.coordinator is not None:
        problem = findings.observed.coordinator.health_problem
    else:
        before = findings.run.before.condition(ConditionType.TRAINING_HEALTHY)
        problem = before.message or "" if before is not None and before.reason == Reason.HEALTH_RULE else ""
    return not problem, Problem(Reason.HEALTH_RULE, problem) if problem else Problem(Reason.HEALTHY, "")


def _ended(type_: ConditionType, findings: Findings) -> Value:
    return end_of(type_, findings.decision, findings.run.before.stop_reason or "")


@dataclass(frozen=True)
class Row:
    """One type of condition.

    Attributes:
        check: its value and reason.
        problem: the status that is a problem, for alerts; None: neither.
        events: statuses that get an Event when the condition changes to them, with its type.
        always: also for a run that cannot be started.
        of_pods: False in phases without pods, with the phase as the reason.
    """

    check: Callable[[Findings], Value]
    problem: Literal["True", "False"] | None = "False"
    events: Mapping[str, EventType] = field(default_factory=dict)
    always: bool = False
    of_pods: bool = False


CONDITIONS: Final[Mapping[str, Row]] = {
    ConditionType.ACCEPTED: Row(_accepted, events={"True": "Normal", "False": "Warning"}, always=True),
    ConditionType.ADMITTED: Row(_admitted, events={"False": "Normal"}),
    ConditionType.PREPARED: Row(_prepared, events={"True": "Normal"}),
    ConditionType.COORDINATOR_READY: Row(_coordinator_ready, of_pods=True),
    ConditionType.GENERATORS_READY: Row(_generators_ready, of_pods=True),
    ConditionType.TRAINER_READY: Row(_trainer_ready, of_pods=True),
    ConditionType.PROGRESSING: Row(_progressing),
    ConditionType.FORECAST_READY: Row(_forecast_ready),
    ConditionType.DEGRADED: Row(_degraded, problem="True", events={"True": "Warning"}),
    ConditionType.TRAINING_HEALTHY: Row(_training_healthy, events={"False": "Warning"}, of_pods=True),
    ConditionType.SUSPENDED: Row(
        partial(_ended, ConditionType.SUSPENDED), problem=None, events={"True": "Normal"}, always=True
    ),
    ConditionType.COMPLETED: Row(
        partial(_ended, ConditionType.COMPLETED), problem=None, events={"True": "Normal"}, always=True
    ),
    ConditionType.FAILED: Row(
        partial(_ended, ConditionType.FAILED), problem="True", events={"True": "Warning"}, always=True
    ),
}

_NEEDS_A_PERSON: Final = frozenset(
    {
        *(Reason.UNSCHEDULABLE, Reason.IMAGE_PULL_FAILED, Reason.REFERENCE_NOT_FOUND),
        *(Reason.VOLUME_NOT_READY, Reason.OUT_OF_MEMORY, Reason.EVICTED, Reason.REFUSED_BY_NODE),
        *(Reason.CONTAINER_START_FAILED, Reason.COORDINATOR_REFUSED, Reason.VOLUME_NOT_WRITABLE),
        *(Reason.UNSAVED_WEIGHTS, Reason.NODE_LOST),
    }
)
"""Reasons that get a Warning with a condition of any type that is False."""
_NO_PROBLEM: Final = frozenset({Reason.AUTOSCALING_OFF, Reason.NO_FORECAST, Reason.WAITING_FOR_QUOTA})
"""Reasons of a False condition that are no problem. A run may wait in its queue for days."""
_PHASES: Final[frozenset[str]] = frozenset(Phase)


def event_type(condition: Condition) -> EventType | None:
    """The type of the Event about a condition that has changed to this one; None: no Event."""
    unresolved = condition.status == "False" and condition.reason in _NEEDS_A_PERSON
    if condition.reason in _PHASES:
        return None
    if (
        unresolved
        or _is_suspended_after_failure(condition)
        or condition.reason == Reason.ACCEPTED_WITH_WARNINGS
    ):
        return "Warning"
    return CONDITIONS[condition.type].events.get(condition.status)


def is_problem(condition: Condition) -> bool:
    """Whether a condition indicates a problem. A condition that is not true yet does; the alert has a delay."""
    if _is_suspended_after_failure(condition) or condition.reason == Reason.BROKEN:
        return True
    if condition.reason in _PHASES:
        return (condition.type, condition.reason) == (ConditionType.PREPARED, Phase.PREPARING)
    return condition.status == CONDITIONS[condition.type].problem and condition.reason not in _NO_PROBLEM


def _is_suspended_after_failure(condition: Condition) -> bool:
    """Whether the condition is that of a run that was suspended after a failure."""
    suspended = condition.type == ConditionType.SUSPENDED and condition.status == "True"
    return suspended and condition.reason not in DECIDED


def _was_true(findings: Findings, type_: ConditionType) -> bool:
    old = findings.run.before.condition(type_)
    return old is not None and old.status == "True"


def _phase(findings: Findings) -> Problem:
    return phase_problem(findings.decision)


def _with_claim_problem(problem: Problem | None, blocked: Problem | None) -> Problem | None:
    """A pod's problem; of a missing volume with the problem from the claim's Events, which has its cause."""
    if problem is not None and blocked is not None and problem.reason is Reason.VOLUME_NOT_READY:
        return Problem(blocked.reason, f"{problem.message}; {blocked.message}")
    return problem


def _source(model: ModelSpec) -> str:
    """Message of a preparation in progress."""
    if model.hub is not None:
        return f"the model {model.hub.name} is downloaded to the run's volume"
    if model.path is not None:
        return f"the model is taken from {model.path}"
    return "the model is initialized randomly"


def _next_attempt(findings: Findings) -> str:
    persisted = findings.decision.persisted
    text = f"attempt {persisted.attempt + 1} follows"
    if persisted.next_at > findings.run.unix_seconds:
        return f"{text} at {rfc3339(persisted.next_at + 0.999)}"
    # They are named because a pod on a node that is down does not end by itself, and counts as lost only later.
    pods = [pod for pod in findings.observed.pods if pod.role == Role.TRAINER and pod.terminating]
    ending = [pod.name for pod in pods if not pod.lost]
    return f"{text} when {', '.join(ending)} has ended" if ending else f"{text} shortly"


def _lost(observed: Observed, role: Role) -> str:
    """Names of a role's pods on lost nodes."""
    return ", ".join(pod.name for pod in observed.pods if pod.role == role and pod.lost)


def _coordinator_problem(observed: Observed) -> Problem:
    """Why there is no status of the coordinator."""
    if observed.refusal:
        return Problem(Reason.COORDINATOR_REFUSED, observed.refusal)
    return Problem(Reason.COORDINATOR_UNREACHABLE, "")


def _role_problem(observed: Observed) -> Problem | None:
    """The first problem of the pods of a run that trains."""
    generators = observed.service(Role.GENERATOR)
    if generators.restarts > MAX_POD_RESTARTS:
        text = f"{generators.restarted} was restarted {generators.restarts} times"
        return Problem(Reason.GENERATORS_FAILING, text)
    for role in (Role.COORDINATOR, Role.TRAINER, Role.GENERATOR, Role.ENVIRONMENT):
        problem = observed.problem(role)
        # The condition Admitted reports the wait in a queue.
        if problem is not None and problem.reason is not Reason.WAITING_FOR_QUOTA:
            return replace(problem, message=f"{role}: {problem.message}")
    return None
