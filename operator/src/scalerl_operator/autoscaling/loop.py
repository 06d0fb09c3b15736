"""The loop around one run's autoscaler, for a run on a cluster and for a local run. Its caller never waits for it.

Each call of :meth:`AutoscalerLoop.report` brings an observation, returns the latest report, and starts at most one step in the
background. The report follows from the decision log, so that a process that starts later knows as much as the one before.
A back end supplies the decision log and the finished runs, makes the observations and carries the reports out:
:mod:`scalerl_operator.controller.cluster_autoscaler` at each reconcile, :mod:`scalerl_operator.local.local_autoscaler` each second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.conditions import Reason
from scalerl_api.spec import RunSpec
from scalerl_api.status import DecisionStatus
from scalerl_api.wire import BROKEN, FORECAST, Status
from scalerl_operator.autoscaling.autoscaler import UNBELIEVABLE, Autoscaler, Backoff, Step
from scalerl_operator.autoscaling.decision_log import (
    REASON_CHARACTERS,
    DecisionRecord,
    Line,
    as_recorded,
    decision_status,
)
from scalerl_operator.autoscaling.forecast_client import NO_ANSWER, Sidecar
from scalerl_operator.autoscaling.history import ReadEarlier
from scalerl_operator.autoscaling.log_storage import RecordError
from scalerl_operator.autoscaling.models import Decision, Generators, State
from scalerl_operator.autoscaling.observation import limits, recipe
from scalerl_operator.autoscaling.vote import ENOUGH_POINTS

log = logging.getLogger(__name__)

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


class AutoscalerLoop:
    """The autoscaler of one run.

    name: of the run, for the process's log. open_record: opens the decision log; the loop closes it.
    sidecar: may be shared by all runs. wake: called when the report has changed.
    on_decision: called with the state of each decision made here.
    earlier: reads the finished runs that are a prior of the forecast; None: no run is.
    unix: the machine's clock. monotonic: one that only goes forward.
    stop: as in the last report; it holds while the coordinator does not answer.
    decision: the last one made here; None before the first.
    """

    def __init__(
        self,
        name: str,
        open_record: Callable[[], Awaitable[DecisionRecord]],
        sidecar: Sidecar,
        *,
        wake: Callable[[], None] = lambda: None,
        on_decision: Callable[[str], None] = lambda state: None,
        earlier: ReadEarlier | None = None,
        unix: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stop = ""
        self.decision: Decision | None = None
        self._name = name
        self._open_record = open_record
        self._sidecar = sidecar
        self._wake = wake
        self._on_decision = on_decision
        self._earlier = earlier
        self._unix = unix
        self._monotonic = monotonic
        self._autoscaler: Autoscaler | None = None
        """None until its decision log was read."""
        self._task: asyncio.Task[None] | None = None
        self._resumed = self._stop_cancelled = False
        self._problem: tuple[Reason, str] | None = None
        self._backoff = Backoff(monotonic)
        self._events: list[str] = []
        self._alarming = False
        self._reported_sequence = -1

    def report(
        self, spec: RunSpec, status: Status, generators: Generators, *, resumed: bool = False
    ) -> AutoscalerReport:
        """The latest report; a step on what is new in ``status`` is started in the background.

        resumed: the run was resumed, and the coordinator still holds the stop request.
        """
        if resumed and not self._resumed:
            self._stop_cancelled = True
            if self._autoscaler is not None:
                self._autoscaler.resumed = True
        self._resumed = resumed
        if self._autoscaler is not None:
            self._autoscaler.spec = spec
            self._stop_cancelled = self._autoscaler.resumed
        report = self._report(spec)
        if spec.autoscaling.mode != "Off" and self._may_start(status, report):
            self._task = asyncio.create_task(
                self._advance(spec, status, generators), name=f"autoscaler of {self._name}"
            )
        self.stop = report.stop
        return report

    def close(self) -> None:
        """Cancels a step under way and closes the decision log; ``wake`` is not called afterwards."""
        self._wake = lambda: None
        if self._task is not None:
            self._task.cancel()
        if self._autoscaler is not None:
            self._autoscaler.record.close()

    def _may_start(self, status: Status, report: AutoscalerReport) -> bool:
        if self._task is not None or self._backoff.waits:
            return False
        if self._autoscaler is None:
            return True
        if status.stop_reason or (report.stop and self._problem is None):
            return False  # a run that ends, or is about to, needs no further decision
        newest = self._autoscaler.record.known.sequence
        if report.generators is not None and newest != self._reported_sequence:
            # The number is applied first, so that the next step observes it.
            self._reported_sequence = newest
            return False
        return True

    async def _advance(self, spec: RunSpec, status: Status, generators: Generators) -> None:
        """Opens the decision log, or makes one step. Raises nothing: an error becomes part of the report."""
        changed, problem = True, None
        try:
            if self._autoscaler is None:
                self._autoscaler = Autoscaler(
                    spec,
                    await self._open_record(),
                    self._sidecar,
                    resumed=self._stop_cancelled,
                    earlier=self._earlier,
                    unix=self._unix,
                    monotonic=self._monotonic,
                )
                self._problem = None
            else:
                step = await self._autoscaler.step(status, generators)
                changed = step is not None
                if step is not None:
                    self._note(step)
        except RecordError as error:
            problem = (Reason.NOT_RECORDED, str(error))
        except Exception as error:
            log.exception("%s: the autoscaler failed", self._name)
            problem = (Reason.AUTOSCALER_FAILED, f"{type(error).__name__}: {error}")
        finally:
            self._task = None
        self._backoff.note(failed=problem is not None)
        self._problem = problem or self._problem
        if changed:
            self._wake()

    def _note(self, step: Step) -> None:
        self._problem = (Reason.NOT_RECORDED, step.trouble) if step.trouble else None
        decision = self.decision = step.decision
        self._on_decision(decision.state)
        if step.changed:
            self._events.append(f"{decision.state}: {'; '.join(decision.reasons[:2])}")
        elif step.action.kind == "scale":
            self._events.append(decision.reasons[0])
        self._alarming = self._alarming or (step.changed and decision.state is State.BROKEN)

    def _report(self, spec: RunSpec) -> AutoscalerReport:
        event, self._events = "; ".join(self._events), []
        alarming, self._alarming = self._alarming, False
        if spec.autoscaling.mode == "Off":
            return AutoscalerReport()
        if self._autoscaler is None:
            reason, message = self._problem or (Reason.TOO_FEW_POINTS, "the decision log is being read")
            return AutoscalerReport(reason=reason, message=message)
        known = self._autoscaler.record.known
        evaluated, last = known.last_evaluated, known.last
        ready, reason, message = _forecast_ready(evaluated)
        if self._problem is not None:
            ready, (reason, message) = False, self._problem
        stop = ""
        if evaluated is not None and _acted_on(spec, evaluated) and not self._stop_cancelled:
            stop = _STOPS.get(evaluated.decision.action.kind, "")
        return AutoscalerReport(
            known=True,
            stop=stop,
            generators=last.decision.action.generators
            if last is not None and _acted_on(spec, last)
            else None,
            decision=known.sequence - 1,
            decisions=tuple(decision_status(line) for line in known.recent),
            state=None if last is None else last.decision.state.value,
            forecast=_forecast(evaluated),
            ready=ready,
            reason=reason,
            message=message[:REASON_CHARACTERS],
            event=event,
            alarming=alarming,
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
        return False, Reason.TOO_FEW_POINTS, "no evaluation yet"
    observation, state, why = evaluated.observation, evaluated.decision.state, evaluated.decision.reasons[0]
    answer = observation.forecast
    if state is State.BROKEN:
        return False, Reason.BROKEN, why
    if answer is None and observation.trouble.startswith((NO_ANSWER, UNBELIEVABLE)):
        return False, Reason.SIDECAR_UNREACHABLE, observation.trouble
    used = observation.points.used if answer is None else answer.fit.points_used
    if state is State.INSUFFICIENT:
        return False, Reason.TOO_FEW_POINTS if used < ENOUGH_POINTS else Reason.NO_FIT, why
    return True, Reason.FORECASTING, why
