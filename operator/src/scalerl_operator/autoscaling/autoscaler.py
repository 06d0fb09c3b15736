"""One step of the autoscaler: observes, requests a forecast, decides, records, and only then returns the action."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from scalerl_api.forecast import EarlierRun, ForecastAnswer, ForecastRequest
from scalerl_api.spec import RunSpec
from scalerl_api.wire import Status
from scalerl_operator.autoscaling.balance import LEAST_STEPS, LoadMeter, balance
from scalerl_operator.autoscaling.decide import decide
from scalerl_operator.autoscaling.decision_log import DecisionRecord, Policy
from scalerl_operator.autoscaling.forecast_client import Sidecar, SidecarError
from scalerl_operator.autoscaling.forecast_request import implausibility, question
from scalerl_operator.autoscaling.history import ReadEarlier
from scalerl_operator.autoscaling.log_storage import RecordError
from scalerl_operator.autoscaling.models import Action, Decision, Generators, Load, Observation
from scalerl_operator.autoscaling.observation import Point, limits, observe, point, recipe

FIRST_RETRY_SECONDS: Final = 15.0
LAST_RETRY_SECONDS: Final = 600.0
"""Pauses after consecutive failures: the first, doubled each time, up to the last."""

UNBELIEVABLE: Final = "the forecast cannot be believed"

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
    """Decides for one run. Owns its record; carries nothing out.

    spec: the run as it is now; assign a new one when it has changed.
    record: open; decisions continue from its history.
    resumed: the user has taken a stop back, and no decision has been recorded since that knows of it; it takes ``stopAfter``
    new evaluations to stop again.
    earlier: reads the finished runs that are a prior of the forecast; None: no run is.
    unix: the machine's clock. monotonic: one that only goes forward, for retries.
    """

    def __init__(
        self,
        spec: RunSpec,
        record: DecisionRecord,
        sidecar: Sidecar,
        *,
        resumed: bool = False,
        earlier: ReadEarlier | None = None,
        unix: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.record = record
        self._sidecar = sidecar
        self.resumed = resumed
        self._read_earlier = earlier
        self._earlier: Sequence[EarlierRun] | None = None
        self._unix = unix
        self._meter = LoadMeter()
        self._seen: object = None
        # Apart: a sidecar that is down holds up no balance, and a balance that went well no question.
        self._asking = Backoff(monotonic)
        self._balancing = Backoff(monotonic)

    async def step(self, status: Status, generators: Generators) -> Step | None:
        """Decide if there is something to decide on: a new evaluation, a retry, or a full window of load.

        Call it once a second or so, one call at a time, apart from what must not wait: a slow sidecar
        makes it take up to :data:`.forecast_client.BOUND_SECONDS`. Raises nothing that the run's own state,
        the sidecar or the disk can cause.
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
            # A resumption that this step has taken in is no news any more; one that came meanwhile is.
            self._seen = (*what[:2], resumed and self.resumed)
            return step
        if (
            load is not None
            and load.seconds >= self.spec.autoscaling.cooldown_seconds
            and self._may_balance(load, generators)
        ):
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
        allowed = self.spec.autoscaling.generators
        if allowed is None or self._balancing.waits:
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
            asked = replace(asked, earlier=list(await self._prior()))
            answer, trouble = await self._forecast(asked)
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
