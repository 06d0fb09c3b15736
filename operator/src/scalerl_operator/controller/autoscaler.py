"""The autoscaler of a run on a cluster, which no reconcile waits for.

A reconcile gets the latest report and starts at most one step in the background. The report follows from the decision log, so
that an operator that starts later knows as much as the one before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.conditions import Reason
from scalerl_api.forecast import ForecastAnswer
from scalerl_api.spec import ScaleRLRun
from scalerl_api.wire import BROKEN, FORECAST, Status
from scalerl_operator.autoscaling.autoscaler import (
    FIRST_RETRY_SECONDS,
    LAST_RETRY_SECONDS,
    Autoscaler,
    Step,
)
from scalerl_operator.autoscaling.decision_log import DecisionRecord, Line, as_recorded
from scalerl_operator.autoscaling.forecast_request import NO_ANSWER, UNBELIEVABLE, Sidecar
from scalerl_operator.autoscaling.history import ReadEarlier
from scalerl_operator.autoscaling.log_storage import RecordError
from scalerl_operator.autoscaling.models import Generators, State
from scalerl_operator.autoscaling.vote import ENOUGH_POINTS
from scalerl_operator.controller.autoscaler_report import AutoscalerReport
from scalerl_operator.controller.decision_storage import (
    REASON_CHARACTERS,
    Coordinators,
    CoordinatorStorage,
    StatusWriter,
    shown,
)

log = logging.getLogger(__name__)

_STOPS: Final = {"stop": FORECAST, "hold": BROKEN}
"""Actions that end a run, and the reason that its coordinator gets."""


class ClusterAutoscaler:
    """The autoscaler of one run.

    coordinators, api: for the decision log. sidecar: may be shared by all runs. wake: called when the report has changed.
    on_decision: called with the state of each decision made here.
    earlier: reads the finished runs that are a prior of the forecast; None: no run is.
    unix: the machine's clock. monotonic: one that only goes forward.
    """

    def __init__(
        self,
        run: ScaleRLRun,
        uid: str,
        coordinators: Coordinators,
        api: StatusWriter,
        sidecar: Sidecar,
        *,
        wake: Callable[[], None],
        on_decision: Callable[[str], None] = lambda state: None,
        earlier: ReadEarlier | None = None,
        unix: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = CoordinatorStorage(run, uid, coordinators, api)
        self._sidecar = sidecar
        self._wake = wake
        self._on_decision = on_decision
        self._earlier = earlier
        self._unix = unix
        self._monotonic = monotonic
        self._name = f"{run.metadata.namespace}/{run.metadata.name}"
        self._record: DecisionRecord | None = None
        self._autoscaler: Autoscaler | None = None
        self._task: asyncio.Task[None] | None = None
        self._resumed = self._taken_back = False
        self._trouble: tuple[Reason, str] | None = None
        self._failures, self._retry_at = 0, 0.0
        self._events: list[str] = []
        self._alarming = False
        self._handed_out = -1
        self.stop = ""
        """As in the last report: it holds while the coordinator does not answer."""

    def report(
        self, run: ScaleRLRun, status: Status, generators: Generators, *, resumed: bool = False
    ) -> AutoscalerReport:
        """The report as it stands; a step on what is new in ``status`` is started in the background.

        resumed: somebody has resumed the run, and the coordinator still holds the stop request.
        """
        spec = run.spec
        if resumed and not self._resumed:
            self._taken_back = True
            if self._autoscaler is not None:
                self._autoscaler.resume()
        self._resumed = resumed
        if self._autoscaler is not None:
            self._autoscaler.spec = spec
            self._taken_back = self._autoscaler.resumed
        report = self._report(spec.autoscaling)
        if spec.autoscaling.mode != "Off" and self._may_start(status, report):
            self._task = asyncio.create_task(
                self._advance(run, status, generators), name=f"autoscaler of {self._name}"
            )
        self.stop = report.stop
        return report

    def close(self) -> None:
        """Cancels what is under way; wakes nobody afterwards."""
        self._wake = lambda: None
        if self._task is not None:
            self._task.cancel()

    def _may_start(self, status: Status, report: AutoscalerReport) -> bool:
        if self._task is not None or self._monotonic() < self._retry_at:
            return False
        if self._record is None:
            return True
        if status.stop_reason:
            return False  # a run that ends needs no further decision
        newest = self._record.known.sequence
        if report.generators is not None and newest != self._handed_out:
            # Its number is carried out first, so that the next step sees it.
            self._handed_out = newest
            return False
        return True

    async def _advance(self, run: ScaleRLRun, status: Status, generators: Generators) -> None:
        """Opens the decision log, or makes one step. Raises nothing: an error becomes part of the report."""
        news = True
        try:
            if self._autoscaler is None:
                await self._open(run)
            else:
                step = await self._autoscaler.step(status, generators)
                news = step is not None
                if step is not None:
                    self._take(step)
            self._failures = 0
        except RecordError as error:
            self._fail(Reason.NOT_RECORDED, str(error))
        except Exception as error:
            log.exception("%s: the autoscaler failed", self._name)
            self._fail(Reason.AUTOSCALER_FAILED, f"{type(error).__name__}: {error}")
        finally:
            self._task = None
        if news:
            self._wake()

    async def _open(self, run: ScaleRLRun) -> None:
        record = await DecisionRecord.load(self._storage)
        self._autoscaler = Autoscaler(
            run.spec,
            record,
            self._sidecar,
            resumed=self._taken_back,
            earlier=self._earlier,
            unix=self._unix,
            monotonic=self._monotonic,
        )
        self._record, self._trouble = record, None

    def _take(self, step: Step) -> None:
        self._trouble = (Reason.NOT_RECORDED, step.trouble) if step.trouble else None
        decision = step.decision
        self._on_decision(decision.state)
        if step.changed:
            self._events.append(f"{decision.state}: {'; '.join(decision.reasons[:2])}")
        elif step.action.kind == "scale":
            self._events.append(decision.reasons[0])
        self._alarming = self._alarming or (step.changed and decision.state is State.BROKEN)

    def _fail(self, reason: Reason, message: str) -> None:
        pause = min(FIRST_RETRY_SECONDS * 2.0 ** min(self._failures, 10), LAST_RETRY_SECONDS)
        self._failures += 1
        self._retry_at = self._monotonic() + pause
        self._trouble = (reason, message)

    def _report(self, spec: AutoscalingSpec) -> AutoscalerReport:
        event, self._events = "; ".join(self._events), []
        alarming, self._alarming = self._alarming, False
        if spec.mode == "Off":
            return AutoscalerReport()
        if self._record is None:
            reason, message = self._trouble or (
                Reason.TOO_FEW_POINTS,
                "the decisions so far are being read",
            )
            return AutoscalerReport(reason=reason, message=message)
        known = self._record.known
        ready, reason, message = _forecast_ready(known.looked)
        if self._trouble is not None:
            ready, (reason, message) = False, self._trouble
        looked = known.looked
        acts = _acted_on(spec, looked) and not self._taken_back
        return AutoscalerReport(
            known=True,
            stop=_STOPS.get(looked.decision.action.kind, "") if acts and looked is not None else "",
            generators=known.last.decision.action.generators
            if known.last is not None and _acted_on(spec, known.last)
            else None,
            decision=-1 if known.last is None else known.last.sequence,
            decisions=tuple(shown(brief) for brief in known.recent),
            state=known.recent[-1].state.value if known.recent else None,
            forecast=_forecast(looked),
            ready=ready,
            reason=reason,
            message=message[:REASON_CHARACTERS],
            event=event,
            alarming=alarming,
        )


def _acted_on(spec: AutoscalingSpec, line: Line | None) -> bool:
    """Whether a decision was made under the spec as it is, by somebody who may act."""
    if spec.mode != "Auto" or line is None:
        return False
    # A field that the release which made it did not have: it decided as the default says.
    return as_recorded(AutoscalingSpec()) | line.spec == as_recorded(spec)


def _answer(line: Line | None) -> ForecastAnswer | None:
    return None if line is None else line.observation.forecast


def _forecast(line: Line | None) -> str | None:
    answer = _answer(line)
    if answer is None or not answer.forecasts:
        return None
    point = answer.forecasts[0]
    return f"{point.median:.2f} ({point.low:.2f}-{point.high:.2f})"


def _forecast_ready(looked: Line | None) -> tuple[bool, Reason, str]:
    """Whether the newest points have a forecast that can be believed, and what a person reads of it."""
    if looked is None:
        return False, Reason.TOO_FEW_POINTS, "no evaluation yet"
    decision, answer, trouble = looked.decision, _answer(looked), looked.observation.trouble
    why = decision.reasons[0]
    if decision.state is State.BROKEN:
        return False, Reason.BROKEN, why
    if answer is None and trouble.startswith((NO_ANSWER, UNBELIEVABLE)):
        return False, Reason.SIDECAR_UNREACHABLE, trouble
    used = looked.observation.points.used if answer is None else answer.fit.points_used
    if decision.state is State.INSUFFICIENT:
        return False, Reason.TOO_FEW_POINTS if used < ENOUGH_POINTS else Reason.NO_FIT, why
    return True, Reason.FORECASTING, why
