"""Steering: what the autoscaler wants of a run on this machine, carried out.

It runs beside the control loop, never in it: a sidecar that is slow holds up nothing. What it cannot
carry out becomes an event, and the run goes on as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from scalerl_api.spec import RunSpec
from scalerl_api.wire import BROKEN, FORECAST, Status
from scalerl_operator.autoscaling.autoscaler import Autoscaler, Step
from scalerl_operator.autoscaling.decision_log import DecisionRecord
from scalerl_operator.autoscaling.forecast_request import Sidecar
from scalerl_operator.autoscaling.history import ReadEarlier
from scalerl_operator.autoscaling.models import Decision, Generators, State
from scalerl_operator.local.devices import NotEnoughDevices, check, machine_devices
from scalerl_operator.local.supervisor import LocalRuntime
from scalerl_operator.local.unit import Event
from scalerl_operator.workloads import Plan, Role

_TICK_SECONDS = 1.0


def gone_on_with(plan: Plan, spec: RunSpec, record: DecisionRecord) -> tuple[Plan, str]:
    """The plan with as many generators as the autoscaler had last, and a word on it where there is one.

    A machine that no longer has the devices for them begins with what the spec says.
    """
    said, allowed, number = spec.generator.replicas, spec.autoscaling.generators, record.known.generators
    if spec.autoscaling.mode != "Auto" or allowed is None or number is None:
        return plan, ""
    number = min(max(number, allowed.min), allowed.max)
    if number == said:
        return plan, ""
    changed = tuple(
        replace(workload, replicas=number) if workload.role is Role.GENERATOR else workload
        for workload in plan.workloads
    )
    grown = replace(plan, workloads=changed)
    try:
        check(grown, machine_devices() if grown.devices() else ())
    except NotEnoughDevices as problem:
        return plan, f"{number} generators were chosen before, {said} are started: {problem}"
    return grown, f"generators: {number}, as chosen before ({said} in the spec)"


class Steering:
    """The autoscaler of one local run. It closes the record.

    earlier: reads the finished runs that are a prior of the forecast.
    stop: why the run is to end; empty while it is not.
    decision: the last one; None before the first.
    """

    def __init__(
        self,
        spec: RunSpec,
        runtime: LocalRuntime,
        record: DecisionRecord,
        *,
        token: str,
        earlier: ReadEarlier | None = None,
        on_event: Callable[[Event], None],
    ) -> None:
        self.stop = ""
        self.decision: Decision | None = None
        self._spec = spec
        self._runtime = runtime
        self._on_event = on_event
        self._record = record
        sidecar = Sidecar(lambda: runtime.url(Role.FORECASTER), token=token)
        self._autoscaler = Autoscaler(spec, record, sidecar, earlier=earlier)
        self._status: Status | None = None
        self._trouble = ""
        for note in self._record.notes:
            self._tell(note, is_problem=True)

    def see(self, status: Status) -> None:
        """The coordinator's newest word. The first tells whether a run that had been stopped is to go on."""
        if self._status is None and status.stop_reason in (FORECAST, BROKEN):
            self._autoscaler.resume()
        self._status = status

    async def run(self) -> None:
        """Decide and act until cancelled."""
        with contextlib.closing(self._record):
            while True:
                await asyncio.sleep(_TICK_SECONDS)
                if self._status is None or self._status.stop_reason:
                    continue  # a run that ends is not steered any more
                step = await self._autoscaler.step(self._status, self._generators(self._status))
                if step is not None:
                    self._take(step)

    def _generators(self, status: Status) -> Generators:
        ready = sum(member.weight_version >= 0 for member in status.members)
        return Generators(
            wanted=self._runtime.replicas(Role.GENERATOR),
            ready=ready,
            quota=self._runtime.most(Role.GENERATOR),
            devices_each=max(1, self._spec.generator.devices),
        )

    def _take(self, step: Step) -> None:
        self.decision = step.decision
        if step.trouble and step.trouble != self._trouble:
            self._tell(step.trouble, is_problem=True)
        self._trouble = step.trouble
        if step.changed:
            why = "; ".join(step.decision.reasons[:2])
            self._tell(f"{step.decision.state}: {why}", is_problem=step.decision.state is State.BROKEN)
        match step.action.kind:
            case "stop":
                self.stop = FORECAST
            case "hold":
                self.stop = BROKEN
            case "scale":
                self._scale(step.action.generators)

    def _scale(self, wanted: int | None) -> None:
        now = self._runtime.replicas(Role.GENERATOR)
        if wanted is None or wanted == now or self._runtime.draining(Role.GENERATOR):
            return
        try:
            self._runtime.scale(Role.GENERATOR, wanted)
        except (NotEnoughDevices, OSError) as problem:
            self._tell(f"{wanted} generators wanted, {now} stay: {problem}", is_problem=True)
        else:
            self._tell(f"generators: {now} → {wanted}")

    def _tell(self, text: str, *, is_problem: bool = False) -> None:
        self._on_event(Event("autoscaler", text, is_problem))
