"""The autoscaler on a cluster: its report at a reconcile, and the finished runs of a namespace as priors of forecasts."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.forecast import EarlierRun
from scalerl_api.load import accepted_run
from scalerl_api.reasons import Reason
from scalerl_api.spec import RunSpec, ScaleRLRun
from scalerl_autoscaling.autoscaler import Autoscaler
from scalerl_autoscaling.earlier_runs import select
from scalerl_autoscaling.models import Generators
from scalerl_autoscaling.report import AutoscalerReport
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import Accepted, Findings, Observed, Run
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.objects import label
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.storage import CURVE_KEY
from scalerl_operator.names import RUN_UID, SCALED_BY, Names

FINISHED: Final = (Phase.COMPLETED, Phase.FAILED)
"""Not Suspended, which may be resumed."""

log = logging.getLogger(__name__)


def autoscaler_report(
    run: Run, accepted: Accepted, observed: Observed, make: Callable[[ScaleRLRun, str], Autoscaler] | None
) -> AutoscalerReport:
    """The report of the run's autoscaler, created by ``make``; while the coordinator does not respond, the last report."""
    state, status = run.state, observed.coordinator
    if accepted.found is None:
        return AutoscalerReport()
    spec = accepted.spec
    off = spec.autoscaling.mode == "Off"
    if status is None or run.persisted.outcome is not None:
        condition = run.before.condition(ConditionType.FORECAST_READY)
        if condition is None or off:
            return AutoscalerReport()
        reason, message = Reason.understood(condition.reason, condition.message)
        return AutoscalerReport(ready=condition.status == "True", reason=reason, message=message)
    if make is None or (off and state.autoscaler is None):
        return AutoscalerReport()
    if state.autoscaler is None:
        state.autoscaler = make(accepted.run, run.uid)
    ready = observed.service(Role.GENERATOR).ready
    wanted, each = spec.generator.replicas, max(1, spec.generator.devices)
    generators = Generators(wanted=wanted, ready=ready, devices_each=each)
    return state.autoscaler.report(spec, status, generators, resumed=run.persisted.resumed)


def number_to_scale_to(findings: Findings) -> int | None:
    """The number of generators of the autoscaler's last decision, if the spec does not have it yet."""
    report, spec = findings.observed.autoscaler, findings.accepted.spec
    allowed, number = spec.autoscaling.generators, report.scale_to
    if findings.accepted.invalid is not None or number is None or allowed is None:
        return None
    done = findings.run.annotation(SCALED_BY) == str(report.decision)
    if done or not allowed.min <= number <= allowed.max or number == spec.generator.replicas:
        return None
    return number


# --- finished runs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinishedRuns:
    """Reads the finished runs of a namespace and their curves from the cache. uid: of the run to forecast."""

    cache: Cache
    namespace: str
    uid: str

    async def __call__(self, spec: RunSpec) -> list[EarlierRun]:
        """Those that may be a prior for a run of this spec: the latest first, at most ``MAX_EARLIER_RUNS``."""
        runs = self._loaders(await self._newest())
        return await select(runs, spec, lambda text: log.info("namespace %s: %s", self.namespace, text))

    def _loaders(self, names: list[str]) -> Iterator[tuple[str, Callable[[], tuple[RunSpec, str]]]]:
        for name in names:
            run = self.cache.run(self.namespace, name)
            if run is not None:  # not deleted meanwhile
                curve = self.cache.get("ConfigMap", self.namespace, Names(name).curve)
                yield name, functools.partial(_load, run, curve)

    async def _newest(self) -> list[str]:
        """The names of all finished runs, the latest first. Yields to the event loop after each."""
        finished: list[tuple[str, str]] = []
        for namespace, name in self.cache.runs():
            if namespace != self.namespace:
                continue
            run = self.cache.run(namespace, name)
            if run is None or run["metadata"]["uid"] == self.uid:
                continue
            status = run.get("status") or {}
            if status.get("phase") in FINISHED:
                finished.append((str(status.get("completionTime", "")), name))
            await asyncio.sleep(0)
        return [name for _, name in sorted(finished, reverse=True)]


def _load(run: Object, curve: Object | None) -> tuple[RunSpec, str]:
    """The spec that the run was accepted with, which may have been edited since, and its curve."""
    if curve is None or label(curve, RUN_UID) != run["metadata"]["uid"]:
        raise ValueError("it has no curve")
    text = (run.get("status") or {}).get("acceptedSpec")
    accepted = {**run, "spec": json.loads(text)} if text else run
    return accepted_run(accepted).spec, str(curve["data"][CURVE_KEY])
