"""The figures of a run's metrics that its status does not have. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from scalerl_api.compute import rl_token_cost
from scalerl_api.conditions import Phase
from scalerl_api.status import RunStatus
from scalerl_lifecycle.budget import used_fractions
from scalerl_lifecycle.eta import eta_seconds, recent_rates
from scalerl_operator.controller.parts import Findings

MAX_SECONDS_LEFT: Final = 100 * 365 * 86400.0
"""Longest ETA that is shown."""


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
