"""What one line about a run shows: reason, progress, ETA, budget; and the figures of its metrics that its status does not have. Pure.

The texts are fields of the status, for the columns of ``kubectl get``, which can only show fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from scalerl_api.compute import rl_token_cost
from scalerl_api.conditions import BY_IMPORTANCE, ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.status import Condition, RunStatus
from scalerl_lifecycle.budget import used_fractions
from scalerl_lifecycle.eta import coarse, eta_seconds, recent_rates
from scalerl_operator.controller.parts import Findings

MAX_SECONDS_LEFT: Final = 100 * 365 * 86400.0
"""Longest ETA that is shown."""
_ENDS: Final = {
    Phase.SUSPENDED: ConditionType.SUSPENDED,
    Phase.COMPLETED: ConditionType.COMPLETED,
    Phase.FAILED: ConditionType.FAILED,
}
"""Phases in which nothing runs, and the conditions with the reason."""
_PHASES: Final[frozenset[str]] = frozenset(Phase)


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
    spec, left = findings.accepted.spec, _seconds_left(findings)
    rules = spec.autoscaling
    return RunFigures(
        max_steps=spec.budget.max_steps,
        budget_used=used_fractions(spec.budget, status),
        estimated_end=None if left is None else findings.run.unix_seconds + left,
        deadline=None if rules.deadline is None else datetime.fromisoformat(rules.deadline).timestamp(),
        stop_after=None if rules.mode == "Off" else rules.stop_after,
    )


def columns(findings: Findings, status: RunStatus) -> dict[str, Any]:
    """The fields of the status that are only for people. A run without an accepted spec keeps all but the reason."""
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
    left = _seconds_left(findings)
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


def _seconds_left(findings: Findings) -> float | None:
    """Seconds until the first limit of the budget is reached, while the run trains."""
    coordinator = findings.observed.coordinator
    if findings.accepted.found is None or coordinator is None or findings.decision.phase is not Phase.RUNNING:
        return None
    spec = findings.accepted.spec
    rates = recent_rates(coordinator, float(rl_token_cost(spec.recipe)))
    left = eta_seconds(spec.budget, coordinator, rates)
    return left if left is not None and left < MAX_SECONDS_LEFT else None
