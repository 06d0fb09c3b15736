"""What the autoscaler of a run requests and reports, from the decision log. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.conditions import Reason
from scalerl_api.spec import RunSpec
from scalerl_api.status import DecisionStatus
from scalerl_api.wire import BROKEN, FORECAST
from scalerl_operator.autoscaling.decision_log import (
    REASON_CHARACTERS,
    Known,
    Line,
    as_recorded,
    decision_status,
)
from scalerl_operator.autoscaling.forecast_client import NO_ANSWER
from scalerl_operator.autoscaling.forecast_request import UNBELIEVABLE
from scalerl_operator.autoscaling.models import State
from scalerl_operator.autoscaling.observation import limits, recipe

_STOPS: Final = {"stop": FORECAST, "hold": BROKEN}
"""Actions that end a run, and the reason that its coordinator gets."""


@dataclass(frozen=True)
class AutoscalerReport:
    """What the autoscaler of one run requests and reports.

    known: the decision log was read; until then the status keeps what it has.
    stop: the reason for which the run is to end, ``FORECAST`` or ``BROKEN``; empty while it is not to.
    generators: the number that the last decision set; None: it set none. decision: that decision's number.
    decisions: the last few, newest last. state: of the newest. forecast: reward at the horizon with its 90 % interval.
    ready, reason, message: of the condition ForecastReady.
    event: for an Event, once; empty mostly. alarming: the Event is a warning.
    """

    known: bool = False
    stop: str = ""
    generators: int | None = None
    decision: int = -1
    decisions: tuple[DecisionStatus, ...] = ()
    state: str | None = None
    forecast: str | None = None
    ready: bool = False
    reason: Reason = Reason.AUTOSCALING_OFF
    message: str = ""
    event: str = ""
    alarming: bool = False


def report_of(
    known: Known, spec: RunSpec, problem: tuple[Reason, str] | None, *, resumed: bool
) -> AutoscalerReport:
    """The report of a run whose log was read.

    problem: why nothing can be decided now. resumed: the user has taken a stop back since the last decision.
    """
    evaluated, last = known.last_evaluated, known.last
    ready, reason, message = _forecast_ready(evaluated)
    if problem is not None:
        ready, (reason, message) = False, problem
    stop = ""
    if evaluated is not None and _acted_on(spec, evaluated) and not resumed:
        stop = _STOPS.get(evaluated.decision.action.kind, "")
    return AutoscalerReport(
        known=True,
        stop=stop,
        generators=None if last is None or not _acted_on(spec, last) else last.decision.action.generators,
        decision=known.sequence - 1,
        decisions=tuple(decision_status(line) for line in known.recent),
        state=None if last is None else last.decision.state.value,
        forecast=_forecast(evaluated),
        ready=ready,
        reason=reason,
        message=message[:REASON_CHARACTERS],
    )


def _acted_on(spec: RunSpec, line: Line) -> bool:
    """Whether a decision was made under the spec as it is, in mode Auto: the autoscaling, the budget and the recipe."""
    found = line.observation
    if (found.limits, found.recipe) != (limits(spec), recipe(spec)):
        return False
    # A field that the release which made it did not have: it decided as the default says.
    rules = as_recorded(AutoscalingSpec()) | line.spec
    return spec.autoscaling.mode == "Auto" and rules == as_recorded(spec.autoscaling)


def _forecast(evaluated: Line | None) -> str | None:
    answer = None if evaluated is None else evaluated.observation.forecast
    if answer is None or not answer.forecasts:
        return None
    point = answer.forecasts[0]
    return f"{point.median:.2f} ({point.low:.2f}-{point.high:.2f})"


def _forecast_ready(evaluated: Line | None) -> tuple[bool, Reason, str]:
    """Status, reason and message of the condition ForecastReady."""
    if evaluated is None:
        return False, Reason.NO_FORECAST, "no evaluation yet"
    observation, state, why = evaluated.observation, evaluated.decision.state, evaluated.decision.reasons[0]
    answer = observation.forecast
    if state is State.BROKEN:
        return False, Reason.BROKEN, why
    if answer is None and observation.trouble.startswith((NO_ANSWER, UNBELIEVABLE)):
        return False, Reason.SIDECAR_UNREACHABLE, observation.trouble
    if state is State.INSUFFICIENT:
        return False, Reason.NO_FORECAST, why
    return True, Reason.READY, why
