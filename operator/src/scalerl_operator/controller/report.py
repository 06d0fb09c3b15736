"""The status of a run, from what was observed, decided and checked, and the figures of its metrics that the status does not have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from scalerl_api.compute import rl_token_cost
from scalerl_api.conditions import BY_IMPORTANCE, ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.recipe.resolve import resolve
from scalerl_api.status import Condition, GeneratorsStatus, RecipeValue, RunStatus, SourceStatus
from scalerl_lifecycle.budget import coarse, eta_seconds, recent_rates, used_fractions
from scalerl_lifecycle.status_fields import (
    decision_fields,
    progress_fields,
    rfc3339,
    trained_spec,
)
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.conditions import conditions
from scalerl_operator.controller.parts import Findings
from scalerl_operator.names import selector

_ENDS: Final = {
    Phase.SUSPENDED: ConditionType.SUSPENDED,
    Phase.COMPLETED: ConditionType.COMPLETED,
    Phase.FAILED: ConditionType.FAILED,
}
"""Phases in which nothing runs, and the conditions with the reason."""
_PHASES: Final[frozenset[str]] = frozenset(Phase)
MAX_SECONDS_LEFT: Final = 100 * 365 * 86400.0
"""Longest ETA that is shown."""


def report(findings: Findings) -> RunStatus:
    """The current status."""
    run, accepted, decision = findings.run, findings.accepted, findings.decision
    before, persisted, now = run.before, decision.persisted, rfc3339(run.unix_seconds)
    coordinator, startable = findings.observed.coordinator, findings.checks.not_started is None
    labels = sorted(selector(run.uid, Role.GENERATOR).items())
    update: dict[str, Any] = {
        "observed_generation": run.generation,
        "accepted_spec": accepted.text if startable else before.accepted_spec,
        "accepted_spec_hash": accepted.long_hash if startable else before.accepted_spec_hash,
        "trained_spec": trained_spec(before, persisted, accepted.text) if startable else before.trained_spec,
        "conditions": conditions(findings),
        "source": _source(findings),
        **decision_fields(before, decision, now),
        "model": findings.model,
        "faults": findings.observed.faults,
        "selector": before.selector or ",".join(f"{key}={value}" for key, value in labels),
    }
    scaling = findings.observed.autoscaler
    if scaling.known and scaling.decisions:
        update |= {
            "forecast": scaling.forecast,
            "outlook": scaling.outlook,
            "stop_votes": scaling.votes,
            "decision": scaling.state,
            "decisions": list(scaling.decisions),
        }
    if accepted.found is not None:
        update["recipe"] = [
            RecipeValue(field=choice.field, value=choice.value[:256], origin=choice.shown_origin)
            for choice in resolve(accepted.spec.recipe).choices
        ]
        pods = [pod for pod in findings.observed.of(Role.GENERATOR) if not pod.finished]
        ready = sum(pod.ready for pod in pods)
        update |= {"replicas": len(pods), "generators": GeneratorsStatus(replicas=len(pods), ready=ready)}
    if coordinator is not None:
        update |= progress_fields(coordinator, before, now)
    status = before.model_copy(update=update)
    return status.model_copy(update=columns(findings, status))


def _source(findings: Findings) -> SourceStatus | None:
    """Of a fork, its source: as found at its preparation, with the step as the coordinator reports it."""
    accepted, before = findings.accepted.found, findings.run.before
    coordinator, uid = findings.observed.coordinator, findings.checks.source_uid
    given = None if accepted is None else accepted.spec.fork
    if given is None:
        return before.source
    found = before.source or SourceStatus(run=given.run)
    if uid:
        found = found.model_copy(update={"uid": uid[:64]})
    if coordinator is not None and coordinator.forked_step >= 0:
        found = found.model_copy(update={"step": coordinator.forked_step})
    return found


def columns(findings: Findings, status: RunStatus) -> dict[str, Any]:
    """The fields of the status that are only for people: texts, for the columns of ``kubectl get``, which can only show fields. A run
    without an accepted spec keeps all but the reason.
    """
    found: dict[str, Any] = {"reason": shown_reason(status.phase, status.conditions)}
    if findings.accepted.found is None:
        return found
    budget, step = findings.accepted.spec.budget, status.step or 0
    used = used_fractions(budget, status)
    limit = max(used, key=lambda name: used[name])
    found |= {
        "progress": f"{step}" if budget.max_steps is None else f"{step}/{budget.max_steps}",
        "budget": f"{100 * used[limit]:.0f}% of {limit}",
    }
    left = seconds_left(findings)
    if left is not None:
        found["eta"] = coarse(left)
    elif status.phase is not Phase.RUNNING or findings.observed.coordinator is not None:
        found["eta"] = None  # kept while the coordinator does not respond
    return found


def shown_reason(phase: Phase, conditions: Sequence[Condition]) -> str:
    """The reason to show beside the phase; ``Healthy`` if nothing is wrong, and empty if the phase says it all."""
    by_type = {condition.type: condition for condition in conditions}
    end = by_type.get(_ENDS[phase]) if phase in _ENDS else None
    if end is not None and end.status == "True":
        return end.reason
    for type_, status in BY_IMPORTANCE:
        condition = by_type.get(type_)
        if condition is not None and condition.status == status and condition.reason not in _PHASES:
            return condition.reason
    progressing = by_type.get(ConditionType.PROGRESSING)
    return Reason.HEALTHY.value if progressing is not None and progressing.status == "True" else ""


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run for its metrics.

    Attributes:
        max_steps: None without that limit.
        budget_used: fraction of each limit, by its field.
        estimated_end: when the first limit of the budget is reached, Unix seconds; None while unknown, or if the run does not
            train.
        deadline: of the autoscaler, Unix seconds; None without one.
        stop_after: votes that a stop needs; None without autoscaling.
    """

    max_steps: int | None = None
    budget_used: dict[str, float] = field(default_factory=dict)
    estimated_end: float | None = None
    deadline: float | None = None
    stop_after: int | None = None


def figures(findings: Findings, status: RunStatus) -> RunFigures:
    """The figures of a run with this status."""
    if findings.accepted.found is None:
        return RunFigures()
    spec, left = findings.accepted.spec, seconds_left(findings)
    rules = spec.autoscaling
    return RunFigures(
        max_steps=spec.budget.max_steps,
        budget_used=used_fractions(spec.budget, status),
        estimated_end=None if left is None else findings.run.unix_seconds + left,
        deadline=None if rules.deadline is None else datetime.fromisoformat(rules.deadline).timestamp(),
        stop_after=None if rules.mode == "Off" else rules.stop_after,
    )


def seconds_left(findings: Findings) -> float | None:
    """Seconds until the first limit of the budget is reached, while the run trains."""
    coordinator = findings.observed.coordinator
    if findings.accepted.found is None or coordinator is None or findings.decision.phase is not Phase.RUNNING:
        return None
    spec = findings.accepted.spec
    rates = recent_rates(coordinator, float(rl_token_cost(spec.recipe)))
    left = eta_seconds(spec.budget, coordinator, rates)
    return left if left is not None and left < MAX_SECONDS_LEFT else None
