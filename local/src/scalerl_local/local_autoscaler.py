"""Executes the reports of the autoscaler of a local run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from scalerl_api.reasons import Reason
from scalerl_api.spec import RunSpec
from scalerl_api.wire import BROKEN, FORECAST, Status
from scalerl_autoscaling.autoscaler import Autoscaler
from scalerl_autoscaling.decision_log import DecisionRecord, LogSummary
from scalerl_autoscaling.earlier_runs import ReadEarlier
from scalerl_autoscaling.forecast_client import Sidecar
from scalerl_autoscaling.models import Decision, Generators
from scalerl_lifecycle.workloads import Plan, Role
from scalerl_local.devices import NotEnoughDevices, check, machine_devices
from scalerl_local.run_view import Event
from scalerl_local.supervisor import Supervisor


def resumed_plan(plan: Plan, spec: RunSpec, log: LogSummary) -> tuple[Plan, str]:
    """The plan with the number of generators that the autoscaler chose last, and a message where it differs from the spec.

    A machine that no longer has the devices for them starts with the spec's number.
    """
    given, allowed, number = spec.generator.replicas, spec.autoscaling.generators, log.requested_generators
    if spec.autoscaling.mode != "Auto" or allowed is None or number is None:
        return plan, ""
    number = min(max(number, allowed.min), allowed.max)
    if number == given:
        return plan, ""
    changed = tuple(
        replace(workload, replicas=number) if workload.role is Role.GENERATOR else workload
        for workload in plan.workloads
    )
    scaled = replace(plan, workloads=changed)
    try:
        check(scaled, machine_devices() if scaled.devices() else ())
    except NotEnoughDevices as problem:
        return plan, f"{number} generators were chosen before, {given} are started: {problem}"
    return scaled, f"generators: {number}, as chosen before ({given} in the spec)"


class LocalAutoscaler:
    """The autoscaler of one local run.

    Args:
        applied: number of the last decision that :func:`resumed_plan` has applied.
        earlier: reads the finished runs that are a prior of the forecast.
    """

    def __init__(
        self,
        spec: RunSpec,
        supervisor: Supervisor,
        record: DecisionRecord,
        *,
        applied: int,
        token: str,
        earlier: ReadEarlier | None = None,
        on_event: Callable[[Event], None],
    ) -> None:
        sidecar = Sidecar(lambda: supervisor.url(Role.FORECASTER), token=token)
        self._autoscaler = Autoscaler("this run", spec, record, sidecar, earlier=earlier)
        self._spec = spec
        self._supervisor = supervisor
        self._on_event = on_event
        self._was_stopped: bool | None = None
        self._applied = applied
        self._problem = ""

    @property
    def stop(self) -> str:
        """The reason to stop the run; empty without one."""
        return self._autoscaler.stop

    @property
    def decision(self) -> Decision | None:
        """The last one of this process; None before the first."""
        return self._autoscaler.decision

    def update(self, status: Status) -> None:
        """Executes the latest report, and starts a step on ``status``, the coordinator's newest, in the background."""
        if self._was_stopped is None:
            # The first status shows whether a stopped run is resumed.
            self._was_stopped = status.stop_reason in (FORECAST, BROKEN)
        generators = Generators(
            wanted=self._supervisor.replicas(Role.GENERATOR),
            ready=sum(member.weight_version >= 0 for member in status.members),
            quota=self._supervisor.max_replicas(Role.GENERATOR),
            devices_each=max(1, self._spec.generator.devices),
        )
        report = self._autoscaler.report(self._spec, status, generators, resumed=self._was_stopped)
        problem = report.message if report.reason is Reason.AUTOSCALER_FAILED else ""
        if problem and problem != self._problem:
            self._event(problem, is_problem=True)
        self._problem = problem
        if report.event:
            self._event(report.event, is_problem=report.alarming)
        if report.scale_to is not None and report.decision != self._applied:
            self._applied = report.decision
            self._scale(report.scale_to)

    def close(self) -> None:
        """Cancels the step in the background."""
        self._autoscaler.close()

    def _scale(self, wanted: int) -> None:
        now = self._supervisor.replicas(Role.GENERATOR)
        if wanted == now or self._supervisor.draining(Role.GENERATOR):
            return
        try:
            self._supervisor.scale(Role.GENERATOR, wanted)
        except (NotEnoughDevices, OSError) as problem:
            self._event(f"{wanted} generators wanted, {now} stay: {problem}", is_problem=True)
        else:
            self._event(f"generators: {now} → {wanted}")

    def _event(self, text: str, *, is_problem: bool = False) -> None:
        self._on_event(Event("autoscaler", text, is_problem))
