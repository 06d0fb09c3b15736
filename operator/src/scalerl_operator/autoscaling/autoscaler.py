"""The autoscaler of one run, on a cluster (:mod:`scalerl_operator.controller.cluster_autoscaler`, at each reconcile) and for a local run
(:mod:`scalerl_operator.local.local_autoscaler`, each second). Its caller never waits for it.

Each :meth:`Autoscaler.report` brings a status, returns the latest report, and starts at most one step in the background: observe, request
a forecast, decide, record. The report follows from the decision log, so that a process that starts later knows as much as the one
before. The caller carries it out.
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

from scalerl_api.conditions import Reason
from scalerl_api.forecast import EarlierRun, ForecastAnswer, ForecastRequest
from scalerl_api.spec import RunSpec
from scalerl_api.wire import Status
from scalerl_operator.autoscaling.balance import LEAST_STEPS, LoadMeter, balance
from scalerl_operator.autoscaling.decide import decide
from scalerl_operator.autoscaling.decision_log import DecisionRecord, Policy, RecordError
from scalerl_operator.autoscaling.forecast_client import Sidecar, SidecarError
from scalerl_operator.autoscaling.forecast_request import UNBELIEVABLE, implausibility, question
from scalerl_operator.autoscaling.history import ReadEarlier
from scalerl_operator.autoscaling.models import Action, Decision, Generators, Load, Observation, State
from scalerl_operator.autoscaling.observation import Point, limits, observe, point, recipe
from scalerl_operator.autoscaling.report import AutoscalerReport, report_of

FIRST_RETRY_SECONDS: Final = 15.0
LAST_RETRY_SECONDS: Final = 600.0
"""Pauses after consecutive failures: the first, doubled each time, up to the last."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One decision and what to do about it.

    action: the decision's in Auto; nothing in Advisory, and nothing if it could not be recorded.
    changed: the state is another one than before: worth an event.
    trouble: why nothing is acted upon, for a condition; empty while all is well.
    """

    policy: Policy
    decision: Decision
    action: Action
    changed: bool
    trouble: str = ""


class Autoscaler:
    """Decides for one run, carries nothing out.

    name: of the run, for the process's log. spec: the run as it is now. record: decisions continue from its history.
    sidecar: may be shared by all runs. wake: called when the report has changed.
    on_decision: called with the state of each decision made here.
    earlier: reads the finished runs that are a prior of the forecast; None: no run is.
    unix: the machine's clock. monotonic: one that only goes forward, for retries.
    resumed: the user has taken a stop back, and no decision has been recorded since that knows of it; it takes ``stopAfter``
    new evaluations to stop again.
    stop: as in the last report; it holds while the coordinator does not answer.
    decision: the last one made here; None before the first.
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
        self._seen: object = None
        # Apart: a sidecar that is down holds up no balance, and a balance that went well no question.
        self._asking, self._balancing, self._failing = (Backoff(monotonic) for _ in range(3))
        self._task: asyncio.Task[None] | None = None
        self._was_resumed = False
        self._problem: tuple[Reason, str] | None = None
        self._events: list[str] = []
        self._alarming = False
        self._reported_sequence = -1

    # --- called by whoever carries it out ---------------------------------------------------------

    def report(
        self, spec: RunSpec, status: Status, generators: Generators, *, resumed: bool = False
    ) -> AutoscalerReport:
        """The latest report; a step on what is new in ``status`` is started in the background.

        resumed: the run was resumed, and the coordinator still holds the stop request.
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
        """Cancels a step under way; ``wake`` is not called afterwards."""
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
        report = report_of(self.record.known, self.spec, self._problem, resumed=self.resumed)
        return replaced(report, event=event, alarming=alarming)

    def _may_start(self, status: Status, report: AutoscalerReport) -> bool:
        if self.spec.autoscaling.mode == "Off" or self._task is not None or self._failing.waits:
            return False
        if not self.record.loaded:
            return True
        if status.stop_reason or (report.stop and self._problem is None):
            return False  # a run that ends, or is about to, needs no further decision
        newest = self.record.known.sequence
        if report.generators is not None and newest != self._reported_sequence:
            # The number is applied first, so that the next step observes it.
            self._reported_sequence = newest
            return False
        return True

    async def _advance(self, status: Status, generators: Generators) -> None:
        """Reads the decision log, or makes one step. Raises nothing: an error becomes part of the report."""
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
        self._failing.note(failed=problem is not None)
        self._problem = problem or self._problem
        if changed:
            self._wake()

    def _note(self, step: Step) -> None:
        self._problem = (Reason.AUTOSCALER_FAILED, step.trouble) if step.trouble else None
        decision = self.decision = step.decision
        self._on_decision(decision.state)
        if step.changed:
            self._events.append(f"{decision.state}: {'; '.join(decision.reasons[:2])}")
        elif step.action.kind == "scale":
            self._events.append(decision.reasons[0])
        self._alarming = self._alarming or (step.changed and decision.state is State.BROKEN)

    # --- one step ---------------------------------------------------------------------------------

    async def step(self, status: Status, generators: Generators) -> Step | None:
        """Decide if there is something to decide on: a new evaluation, a retry, or a full window of load.

        One call at a time; a slow sidecar makes it take up to :data:`.forecast_client.BOUND_SECONDS`. Raises nothing that the
        run's own state, the sidecar or the disk can cause.
        """
        if self.spec.autoscaling.mode == "Off":
            return None
        points = [point(evaluation) for evaluation in status.points]
        load = self._meter.measure(self.spec, status, generators)
        resumed = self.resumed
        what = (status.points, self._rules(), resumed)
        if points and (what != self._seen or self._asking.is_due):
            step = await self._autoscale(status, generators, points)
            if step is None:
                return None
            # A resumption that this step has observed is not new any more; one that came meanwhile is.
            self._seen = (*what[:2], resumed and self.resumed)
            return step
        if load is not None and self._may_balance(load, generators):
            observation = self._observe(status, generators, points)
            self._meter.restart()
            step = await self._finish("balance", points, replace(observation, load=load))
            self._balancing.note(failed=bool(step.trouble))
            return step
        return None

    def _rules(self) -> tuple[object, ...]:
        """What of the spec a decision rests on."""
        return self.spec.autoscaling, limits(self.spec), recipe(self.spec)

    def _may_balance(self, load: Load, generators: Generators) -> bool:
        rules = self.spec.autoscaling
        allowed = rules.generators
        if allowed is None or self._balancing.waits or load.seconds < rules.cooldown_seconds:
            return False
        # The window stays open until it holds enough steps, however long one takes; a limit needs none.
        return load.steps >= LEAST_STEPS or not allowed.min <= generators.wanted <= allowed.max

    async def _autoscale(self, status: Status, generators: Generators, points: list[Point]) -> Step | None:
        """One decision; None where the rules changed while its forecast was awaited: the next step asks by the new ones."""
        resumed, rules = self.resumed, self._rules()
        observation = replace(self._observe(status, generators, points), resumed=resumed)
        asked = question(self.spec.autoscaling, points, observation, self.record.known.history)
        answer, trouble = None, asked if isinstance(asked, str) else ""
        if not isinstance(asked, str):
            answer, trouble = await self._forecast(replace(asked, earlier=list(await self._prior())))
            if rules != self._rules():
                return None
        step = await self._finish("autoscale", points, replace(observation, forecast=answer, trouble=trouble))
        # Points that cannot be used are no failure: asking again would change nothing before there are others.
        self._asking.note(failed=bool(step.trouble) or (answer is None and not isinstance(asked, str)))
        if resumed and not step.trouble:
            self.resumed = False
        return step

    async def _forecast(self, request: ForecastRequest) -> tuple[ForecastAnswer | None, str]:
        """The answer, or why there is none."""
        try:
            answer = await self._sidecar.forecast(request)
        except SidecarError as error:
            return None, str(error)
        implausible = implausibility(request, answer)
        return (None, f"{UNBELIEVABLE}: {implausible}") if implausible else (answer, "")

    async def _prior(self) -> Sequence[EarlierRun]:
        """The earlier runs to ask with.

        They are read once: a forecast must not jump because another run has ended, for then agreeing evaluations would
        agree on different questions.
        """
        if self._read_earlier is None or self.spec.autoscaling.prior == "None":
            return []
        if self._earlier is None:
            try:
                self._earlier = await self._read_earlier(self.spec)
            except Exception:
                # What other runs left behind must not cost this one its forecast.
                log.exception("finished runs cannot be read; the forecast is made without them as a prior")
                self._earlier = []
        return self._earlier

    async def _finish(self, policy: Policy, points: list[Point], observation: Observation) -> Step:
        spec, before = self.spec.autoscaling, self.record.known.history
        decision = (decide if policy == "autoscale" else balance)(spec, observation, before)
        changed = decision.state is not before.state
        try:
            await self.record.append(policy, spec, points, observation, decision)
        except RecordError as error:
            trouble = f"the decision could not be recorded, so it is not acted upon: {error}"
            return Step(policy, decision, Action(), False, trouble)
        if decision.action.kind == "scale":
            self._meter.restart()
        return Step(policy, decision, decision.action if spec.mode == "Auto" else Action(), changed)

    def _observe(self, status: Status, generators: Generators, points: list[Point]) -> Observation:
        return observe(self.spec, status, points, generators, unix_seconds=self._unix())


class Backoff:
    """When to try again after consecutive failures."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._failures = 0
        self._retry_at = 0.0

    @property
    def waits(self) -> bool:
        """Whether the next attempt is still to come."""
        return self._failures > 0 and self._monotonic() < self._retry_at

    @property
    def is_due(self) -> bool:
        """Whether a failure is to be tried again now."""
        return self._failures > 0 and not self.waits

    def note(self, *, failed: bool) -> None:
        """Counts a failure; a success resets the count."""
        pause = FIRST_RETRY_SECONDS * 2.0 ** min(self._failures, 10)
        self._retry_at = self._monotonic() + min(pause, LAST_RETRY_SECONDS)
        self._failures = self._failures + 1 if failed else 0
