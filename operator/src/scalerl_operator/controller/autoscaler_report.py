"""What a run's autoscaler wants, and what it says of the run. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_api.conditions import Reason
from scalerl_api.status import DecisionStatus


@dataclass(frozen=True)
class AutoscalerReport:
    """The autoscaler of one run at one reconcile.

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
