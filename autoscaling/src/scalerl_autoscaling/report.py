"""The report of a run's autoscaler, from its decision log. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.reasons import Reason
from scalerl_api.spec import RunSpec
from scalerl_api.status import DecisionStatus, OutlookStatus
from scalerl_api.wire import BROKEN, FORECAST
from scalerl_autoscaling.decision_log import (
    REASON_CHARACTERS,
    Line,
    LogSummary,
    as_recorded,
    decision_status,
)
from scalerl_autoscaling.forecast_client import NO_ANSWER
from scalerl_autoscaling.forecast_request import IMPLAUSIBLE
from scalerl_autoscaling.models import State
from scalerl_autoscaling.observation import limits, recipe

_STOPS: Final = {"stop": FORECAST, "hold": BROKEN}
"""Actions that end a run, and the reasons for the stop request to its coordinator."""
MAX_TOKENS: Final = 1e18
"""The API server accepts no count above 2^63."""


@dataclass(frozen=True)
class AutoscalerReport:
    """What the autoscaler of one run requests and reports.

    Attributes:
        known: the decision log was read; until then, ``status.autoscaling`` stays as it is.
        stop: the reason to stop the run, ``FORECAST`` or ``BROKEN``; empty without one.
        scale_to: the number of generators that the last decision set; None if it set none.
        decision: sequence number of the last decision.
        decisions: the newest decisions, oldest first.
        state: of the newest decision.
        forecast: reward at the horizon with its 90 % interval.
        outlook: the numbers of that forecast; None without one.
        votes: consecutive evaluations that voted for a stop, or had the alarm.
        ready, reason, message: of the condition ForecastReady.
        event: message of an Event, reported once; empty without one.
        alarming: the Event is a warning.
    """

    known: bool = False
    stop: str = ""
    scale_to: int | None = None
    decision: int = -1
    decisions: tuple[DecisionStatus, ...] = ()
    state: str | None = None
    forecast: str | None = None
    outlook: OutlookStatus | None = None
    votes: int = 0
    ready: bool = False
    reason: Reason = Reason.AUTOSCALING_OFF
    message: str = ""
    event: str = ""
    alarming: bool = False


def report_of(
    log: LogSummary, spec: RunSpec, problem: tuple[Reason, str] | None, *, resumed: bool
) -> AutoscalerReport:
    """The report of a run.

    Args:
        problem: why the autoscaler cannot decide now.
        resumed: the user has resumed the run since the last decision.
    """
    evaluated, last = log.last_evaluated, log.last
    ready, reason, message = _forecast_ready(evaluated)
    if problem is not None:
        ready, (reason, message) = False, problem
    stop = ""
    if evaluated is not None and _acted_on(spec, evaluated) and not resumed:
        stop = _STOPS.get(evaluated.decision.action.kind, "")
    return AutoscalerReport(
        known=True,
        stop=stop,
        scale_to=None if last is None or not _acted_on(spec, last) else last.decision.action.scale_to,
        decision=log.sequence - 1,
        decisions=tuple(decision_status(line) for line in log.recent),
        state=None if last is None else last.decision.state.value,
        forecast=_forecast(evaluated),
        outlook=_outlook(evaluated),
        votes=log.history.consecutive_votes,
        ready=ready,
        reason=reason,
        message=message[:REASON_CHARACTERS],
    )


def _acted_on(spec: RunSpec, line: Line) -> bool:
    """Whether the mode is Auto and the decision was made under the present autoscaling, budget and recipe."""
    found = line.observation
    if (found.limits, found.recipe) != (limits(spec), recipe(spec)):
        return False
    # The release that recorded the line may not have had a field; it decided as with the default.
    rules = as_recorded(AutoscalingSpec()) | line.spec
    return spec.autoscaling.mode == "Auto" and rules == as_recorded(spec.autoscaling)


def _forecast(evaluated: Line | None) -> str | None:
    answer = None if evaluated is None else evaluated.observation.forecast
    if answer is None or not answer.forecasts:
        return None
    point = answer.forecasts[0]
    return f"{point.median:.2f} ({point.low:.2f}-{point.high:.2f})"


def _outlook(evaluated: Line | None) -> OutlookStatus | None:
    answer = None if evaluated is None else evaluated.observation.forecast
    if answer is None or not answer.forecasts or answer.outlook is None:
        return None
    point, asymptote, gain = answer.forecasts[0], answer.fit.A, answer.outlook.gain
    return OutlookStatus(
        tokens=int(min(max(point.compute, 0.0), MAX_TOKENS)),
        median=_number(point.median),
        low=_number(point.low),
        high=_number(point.high),
        asymptote=_number(asymptote.median),
        asymptote_low=_number(asymptote.low),
        asymptote_high=_number(asymptote.high),
        gain=_number(gain.median),
        gain_low=_number(gain.low),
        gain_high=_number(gain.high),
        gain_probability=_number(answer.outlook.p_gain_above_min),
    )


def _number(value: float) -> str:
    """Cut: a record that somebody has changed may hold any number."""
    return f"{value:.4f}"[:32]


def _forecast_ready(evaluated: Line | None) -> tuple[bool, Reason, str]:
    """Status, reason and message of the condition ForecastReady."""
    if evaluated is None:
        return False, Reason.NO_FORECAST, "no evaluation yet"
    observation, state, why = evaluated.observation, evaluated.decision.state, evaluated.decision.reasons[0]
    answer = observation.forecast
    if state is State.BROKEN:
        return False, Reason.BROKEN, why
    if answer is None and observation.trouble.startswith((NO_ANSWER, IMPLAUSIBLE)):
        return False, Reason.SIDECAR_UNREACHABLE, observation.trouble
    if state is State.INSUFFICIENT:
        return False, Reason.NO_FORECAST, why
    return True, Reason.READY, why
