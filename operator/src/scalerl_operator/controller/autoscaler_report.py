"""The autoscaler's back end at a reconcile: makes its observation, and reads which number of generators it requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from scalerl_api.conditions import ConditionType, Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_operator.autoscaling.loop import AutoscalerLoop, AutoscalerReport
from scalerl_operator.autoscaling.models import Generators
from scalerl_operator.names import SCALED_BY
from scalerl_operator.workloads import Role

if TYPE_CHECKING:
    from scalerl_operator.controller.run_context import RunContext


def autoscaler_report(
    context: RunContext, make: Callable[[ScaleRLRun, str], AutoscalerLoop] | None
) -> AutoscalerReport:
    """The report of the run's autoscaler, which ``make`` makes; the last one while the coordinator does not answer."""
    state, run, status = context.state, context.accepted, context.coordinator
    if run is None:
        return AutoscalerReport()
    off = run.spec.autoscaling.mode == "Off"
    if status is None or context.memory.outcome is not None:
        condition = context.before.condition(ConditionType.FORECAST_READY)
        if condition is None or off:
            return AutoscalerReport()
        reason, message = Reason.understood(condition.reason, condition.message)
        return AutoscalerReport(ready=condition.status == "True", reason=reason, message=message)
    if make is None or (off and state.autoscaler is None):
        return AutoscalerReport()
    if state.autoscaler is None:
        state.autoscaler = make(run, context.uid)
    ready = context.observed.service(Role.GENERATOR).ready
    wanted, each = run.spec.generator.replicas, max(1, run.spec.generator.devices)
    generators = Generators(wanted=wanted, ready=ready, devices_each=each)
    return state.autoscaler.report(run.spec, status, generators, resumed=context.memory.resumed)


def wanted_generators(context: RunContext) -> int | None:
    """The number of generators that the autoscaler's last decision set and that is yet to be written into the spec."""
    report = context.autoscaler
    allowed, number = context.run.spec.autoscaling.generators, report.generators
    if context.invalid is not None or number is None or allowed is None:
        return None
    done = context.annotation(SCALED_BY) == str(report.decision)
    if done or not allowed.min <= number <= allowed.max or number == context.run.spec.generator.replicas:
        return None
    return number
