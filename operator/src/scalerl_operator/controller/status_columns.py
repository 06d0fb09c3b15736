"""The fields of the status that one line about a run shows: reason, progress, ETA, budget. Pure.

Texts, for the columns of ``kubectl get``, which can only show fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from scalerl_api.conditions import BY_IMPORTANCE, ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.status import Condition, RunStatus
from scalerl_lifecycle.budget import used_fractions
from scalerl_lifecycle.eta import coarse
from scalerl_operator.controller.parts import Findings
from scalerl_operator.controller.run_figures import seconds_left

_ENDS: Final = {
    Phase.SUSPENDED: ConditionType.SUSPENDED,
    Phase.COMPLETED: ConditionType.COMPLETED,
    Phase.FAILED: ConditionType.FAILED,
}
"""Phases in which nothing runs, and the conditions with the reason."""
_PHASES: Final[frozenset[str]] = frozenset(Phase)


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
