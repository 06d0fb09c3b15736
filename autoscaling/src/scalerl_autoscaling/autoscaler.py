"""The autoscaler of one run. Its callers are the reconcile of a cluster (:mod:`scalerl_operator.controller.cluster_autoscaler`) and
the loop of a local run (:mod:`scalerl_local.local_autoscaler`).

:meth:`Autoscaler.report` takes a status and returns the latest report without waiting. It starts at most one step in the
background: observe, request a forecast, decide, record. The caller executes the report. The report depends on the decision log
only, so that it is the same after a restart of the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Final

from msgspec.structs import replace

from scalerl_api.forecast import EarlierRun, ForecastAnswer, ForecastRequest
from scalerl_api.http_client import Backoff
from scalerl_api.reasons import Reason
from scalerl_api.spec import RunSpec
from scalerl_api.wire import Status
from scalerl_autoscaling.balance import MIN_STEPS, LoadMeter, balance
from scalerl_autoscaling.decide import decide
from scalerl_autoscaling.decision_log import DecisionRecord, Policy, RecordError
from scalerl_autoscaling.earlier_runs import ReadEarlier
from scalerl_autoscaling.forecast_client import Sidecar, SidecarError
from scalerl_autoscaling.forecast_request import IMPLAUSIBLE, build_request, implausibility
from scalerl_autoscaling.models import Action, Decision, Generators, Load, Observation, State
from scalerl_autoscaling.observation import Point, limits, observe, point, recipe
from scalerl_autoscaling.report import AutoscalerReport, report_of

FIRST_RETRY_SECONDS: Final = 15.0
LAST_RETRY_SECONDS: Final = 600.0
"""Pauses after consecutive failures: the first pause doubles each time, up to the last."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One decision and its execution.

    Attributes:
        action: of the decision in Auto; none in Advisory, and none if the decision could not be recorded.
        changed: the state differs from the one before.
        problem: why the decision is not executed; empty otherwise.
    """

    policy: Policy
    decision: Decision
    action: Action
    changed: bool
    problem: str = ""


class Autoscaler:
    """Decides for one run.

    name: of the run, for log messages.
    spec: the run's present spec.
    record: has the history that decisions continue from.
    sidecar: may be shared by all runs.
    wake: called when the report has changed.
    on_decision: called with the state of each decision.
    earlier: reads the finished runs that are a prior of the forecast; None: there is no prior.
    unix: the machine's clock.
    monotonic: a clock for retries.
    resumed: the user has resumed a stopped run, and no decision that observed it has been recorded yet.
    stop: as in the last report; it stays while the coordinator does not answer.
    decision: the last one of this process; None before the first.
    """

    def __init__(
        self,
        name: str,
        spec: RunSpec,
        record: DecisionRecord,
        sidecar: Sidecar,
        *,
        wake: Callable[[], None] = lambda: None,
        on_decision: Callable[[str], None] = lambda state: None,
        earlier: ReadEarlier | None = None,
        unix: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.record = record
        self.resumed = False
        self.stop = ""
        self.decision: Decision | None = None
        self._name = name
        self._sidecar = sidecar
        self._wake = wake
        self._on_decision = on_decision
        self._read_earlier = earlier
        self._earlier: Sequence[EarlierRun] | None = None
        self._unix = unix
        self._meter = LoadMeter()
        self._decided_on: object = None
        # Separate, so that a sidecar that is down does not delay the balance, and a successful balance not the forecast.
        self._forecast_retry, self._balance_retry, self._step_retry = (Retry(monotonic) for _ in range(3))
        self._task: asyncio.Task[None] | None = None
        self._was_resumed = False
        self._problem: tuple[Reason, str] | None = None
        self._events: list[str] = []
        self._alarming = False
        self._reported_sequence = -1

    def report(
        self, spec: RunSpec, status: Status, generators: Generators, *, resumed: bool = False
    ) -> AutoscalerReport:
        """Returns the latest report, and starts a step on ``status`` in the background.

        Args:
            resumed: the run was resumed, and the coordinator still has the stop request.
        """
        self.resumed = self.resumed or (resumed and not self._was_resumed)
        self._was_resumed, self.spec = resumed, spec
        report = self._report()
        if self._may_start(status, report):
            step = self._advance(status, generators)
            self._task = asyncio.create_task(step, name=f"autoscaler of {self._name}")
        self.stop = report.stop
        return report

    def close(self) -> None:
        """Cancels the present step; ``wake`` is not called afterwards."""
        self._wake = lambda: None
        if self._task is not None:
            self._task.cancel()

    def _report(self) -> AutoscalerReport:
        event, self._events = "; ".join(self._events), []
        alarming, self._alarming = self._alarming, False
        if self.spec.autoscaling.mode == "Off":
            return AutoscalerReport()
        if not self.record.loaded:
            reason, message = self._problem or (Reason.NO_FORECAST, "the decision log is being read")
            return AutoscalerReport(reason=reason, message=message)
        report = report_of(self.record.summary, self.spec, self._problem, resumed=self.resumed)
        return replaced(report, event=event, alarming=alarming)

    def _may_start(self, status: Status, report: AutoscalerReport) -> bool:
        if self.spec.autoscaling.mode == "Off" or self._task is not None or self._step_retry.waits:
            return False
        if not self.record.loaded:
            return True
        if status.stop_reason or (report.stop and self._problem is None):
            return False  # the run ends, so it needs no further decision
        newest = self.record.summary.sequence
        if report.scale_to is not None and newest != self._reported_sequence:
            # The caller applies the number first, so that the next step observes it.
            self._reported_sequence = newest
            return False
        return True

    async def _advance(self, status: Status, generators: Generators) -> None:
        """Loads the decision log, or makes one step. An error becomes part of the report."""
        changed, problem = True, None
        try:
            if not self.record.loaded:
                await self.record.load()
                self._problem = None
            elif (step := await self.step(status, generators)) is not None:
                self._note(step)
            else:
                changed = False
        except RecordError as error:
            problem = (Reason.AUTOSCALER_FAILED, str(error))
        except Exception as error:
            log.exception("%s: the autoscaler failed", self._name)
            problem = (Reason.AUTOSCALER_FAILED, f"{type(error).__name__}: {error}")
        finally:
            self._task = None
        self._step_retry.note(failed=problem is not None)
        self._problem = problem or self._problem
        if changed:
            self._wake()

    def _note(self, step: Step) -> None:
        self._problem = (Reason.AUTOSCALER_FAILED, step.problem) if step.problem else None
        decision = self.decision = step.decision
        self._on_decision(decision.state)
        if step.changed:
            self._events.append(f"{decision.state}: {'; '.join(decision.reasons[:2])}")
        elif step.action.kind == "scale":
            self._events.append(decision.reasons[0])
        self._alarming = self._alarming or (step.changed and decision.state is State.BROKEN)

    async def step(self, status: Status, generators: Generators) -> Step | None:
        """Decides after a new evaluation, at a retry, or after a complete window of load; None without one of them.

        One call at a time. A slow sidecar delays it by up to :data:`.forecast_client.BOUND_SECONDS`. Errors of the sidecar and of
        the record become part of the step.
        """
        if self.spec.autoscaling.mode == "Off":
            return None
        points = [point(evaluation) for evaluation in status.points]
        load = self._meter.measure(self.spec, status, generators)
        resumed = self.resumed
        inputs = (status.points, self._rules(), resumed)
        if points and (inputs != self._decided_on or self._forecast_retry.is_due):
            step = await self._autoscale(status, generators, points)
            if step is None:
                return None
            # A resumption that this step has observed is no longer new; a later one is.
            self._decided_on = (*inputs[:2], resumed and self.resumed)
            return step
        if load is not None and self._may_balance(load, generators):
            observation = self._observe(status, generators, points)
            self._meter.restart()
            step = await self._finish("balance", points, replace(observation, load=load))
            self._balance_retry.note(failed=bool(step.problem))
            return step
        return None

    def _rules(self) -> tuple[object, ...]:
        """The parts of the spec that a decision depends on."""
        return self.spec.autoscaling, limits(self.spec), recipe(self.spec)

    def _may_balance(self, load: Load, generators: Generators) -> bool:
        rules = self.spec.autoscaling
        allowed = rules.generators
        if allowed is None or self._balance_retry.waits or load.seconds < rules.cooldown_seconds:
            return False
        # The window continues until it has enough steps, however long one takes; a limit needs none.
        return load.steps >= MIN_STEPS or not allowed.min <= generators.wanted <= allowed.max

    async def _autoscale(self, status: Status, generators: Generators, points: list[Point]) -> Step | None:
        """One decision; None if the rules changed during the forecast request: the next step uses the new ones."""
        resumed, rules = self.resumed, self._rules()
        observation = replace(self._observe(status, generators, points), resumed=resumed)
        request = build_request(self.spec.autoscaling, points, observation, self.record.summary.history)
        if isinstance(request, str):
            answer, trouble = None, request
        else:
            answer, trouble = await self._forecast(replace(request, earlier=list(await self._prior())))
            if rules != self._rules():
                return None
        step = await self._finish("autoscale", points, replace(observation, forecast=answer, trouble=trouble))
        # Points that cannot be used are no failure: a retry needs other points.
        self._forecast_retry.note(
            failed=bool(step.problem) or (answer is None and not isinstance(request, str))
        )
        if resumed and not step.problem:
            self.resumed = False
        return step

    async def _forecast(self, request: ForecastRequest) -> tuple[ForecastAnswer | None, str]:
        """The answer, or why there is none."""
        try:
            answer = await self._sidecar.forecast(request)
        except SidecarError as error:
            return None, str(error)
        implausible = implausibility(request, answer)
        return (None, f"{IMPLAUSIBLE}: {implausible}") if implausible else (answer, "")

    async def _prior(self) -> Sequence[EarlierRun]:
        """The earlier runs of the forecast request.

        They are read once: consecutive evaluations count as agreeing only if their forecasts have the same prior.
        """
        if self._read_earlier is None or self.spec.autoscaling.prior == "None":
            return []
        if self._earlier is None:
            try:
                self._earlier = await self._read_earlier(self.spec)
            except Exception:
                # Files of other runs must not prevent the forecast of this one.
                log.exception("finished runs cannot be read; the forecast is made without them as a prior")
                self._earlier = []
        return self._earlier

    async def _finish(self, policy: Policy, points: list[Point], observation: Observation) -> Step:
        spec, before = self.spec.autoscaling, self.record.summary.history
        decision = (decide if policy == "autoscale" else balance)(spec, observation, before)
        changed = decision.state is not before.state
        try:
            await self.record.append(policy, spec, points, observation, decision)
        except RecordError as error:
            problem = f"the decision could not be recorded, so it is not acted upon: {error}"
            return Step(policy, decision, Action(), False, problem)
        if decision.action.kind == "scale":
            self._meter.restart()
        return Step(policy, decision, decision.action if spec.mode == "Auto" else Action(), changed)

    def _observe(self, status: Status, generators: Generators, points: list[Point]) -> Observation:
        return observe(self.spec, status, points, generators, unix_seconds=self._unix())


class Retry:
    """When to try again after consecutive failures."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._pauses = Backoff(FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS)
        self._retry_at: float | None = None

    @property
    def waits(self) -> bool:
        """Whether the pause has not ended."""
        return self._retry_at is not None and self._monotonic() < self._retry_at

    @property
    def is_due(self) -> bool:
        """Whether the pause after a failure has ended."""
        return self._retry_at is not None and not self.waits

    def note(self, *, failed: bool) -> None:
        """Counts a failure; a success resets the count."""
        if failed:
            self._retry_at = self._monotonic() + self._pauses.next_seconds()
        else:
            self._pauses.reset()
            self._retry_at = None
