"""The autoscaler's back end on a cluster: its report at a reconcile, its log of decisions, and the finished runs of a namespace.

The log is ``decisions.jsonl`` on the run's volume, written by its coordinator. Two operators may write at once, when one has
lost its lease and does not know yet. Every line therefore names the offset that it follows: of two lines at one offset the
coordinator refuses the second, and its sender reads the log again.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from scalerl_api.conditions import ConditionType, Phase, Reason
from scalerl_api.forecast import EarlierRun
from scalerl_api.load import accepted_run
from scalerl_api.spec import KIND, RunSpec, ScaleRLRun
from scalerl_api.status import RECENT_DECISIONS, DecisionStatus
from scalerl_operator.autoscaling.decision_log import Line, decision_status
from scalerl_operator.autoscaling.history import select
from scalerl_operator.autoscaling.log_storage import RecordError, RecordLost
from scalerl_operator.autoscaling.loop import AutoscalerLoop, AutoscalerReport
from scalerl_operator.autoscaling.models import Generators
from scalerl_operator.build.storage import CURVE_KEY
from scalerl_operator.controller.accept import with_spec
from scalerl_operator.controller.coordinator_poller import CoordinatorPollers
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.coordinator_client import (
    CoordinatorRefused,
    CoordinatorUnreachable,
    EndpointMissing,
    OffsetSuperseded,
)
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.names import RUN_UID, SCALED_BY, Names
from scalerl_operator.workloads import Role

FINISHED: Final = (Phase.COMPLETED, Phase.FAILED)
"""Not Suspended: it may be resumed. One that failed at its start has too few points and is left out."""

log = logging.getLogger(__name__)


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


# --- the log of decisions ------------------------------------------------------------------------


class CoordinatorStorage:
    """The decisions of one run; see :class:`scalerl_operator.autoscaling.log_storage.Storage`.

    The coordinator of a run that an earlier release started has no log of decisions: then ``status.decisions`` alone
    keeps the last ones, and an operator that starts later knows none of them.
    """

    def __init__(self, run: ScaleRLRun, uid: str, coordinators: CoordinatorPollers, api: KubeApi) -> None:
        self._namespace, self._run = run.metadata.namespace, run.metadata.name
        self.name = f"decisions.jsonl of {run.metadata.namespace}/{run.metadata.name}"
        self._uid = uid
        self._coordinators = coordinators
        self._api = api
        self._status_only = False
        self._recent: list[DecisionStatus] = []
        self._kept = bytearray()
        """Lines of a run whose coordinator keeps none."""

    async def pages(self) -> AsyncGenerator[bytes, None]:
        """All whole lines."""
        offset, size = 0, 1
        while offset < size:
            try:
                page = await self._coordinators.decisions(self._uid, offset)
            except EndpointMissing:
                if not self._status_only:
                    log.warning(
                        "%s/%s: its coordinator, of an earlier release, keeps no log of decisions; the last %d are in the status",
                        *(self._namespace, self._run, RECENT_DECISIONS),
                    )
                self._status_only = True
                yield bytes(self._kept)
                return
            except (CoordinatorUnreachable, CoordinatorRefused) as error:
                raise RecordError(f"{self.name} cannot be read: {error}") from error
            self._status_only = False
            if not page.content and page.size > offset:
                raise RecordError(
                    f"{self.name} ends at byte {offset} of {page.size}: it was cut while it was read"
                )
            yield page.content
            offset += len(page.content)
            size = page.size if page.size >= 0 else offset

    async def append(self, content: bytes, at: int) -> None:
        """One line, acknowledged when this returns."""
        if not content:
            return  # the coordinator has cut a torn line itself
        try:
            # Asked each time: a resumed run has another coordinator, which may keep a log.
            await self._coordinators.record_decision(self._uid, at, content)
        except EndpointMissing as error:
            if not self._status_only:
                raise RecordLost(f"{self.name}: {error}") from error
            await self._append_to_status(content)
        except (CoordinatorUnreachable, OffsetSuperseded) as error:
            # Another operator wrote, or it is unknown whether this line was written.
            raise RecordLost(f"{self.name} could not be written: {error}") from error
        except (CoordinatorRefused, errors.ApiError) as error:
            raise RecordError(f"{self.name} cannot be written: {error}") from error

    async def set_aside(self, problem: str) -> str:
        """Refused: the file was edited on the volume, and is to be repaired there."""
        raise RecordError(
            f"{self.name}: {problem}; repair it, or move it away on the run's volume to start an empty one"
        )

    def close(self) -> None:
        """Nothing is held."""

    async def _append_to_status(self, content: bytes) -> None:
        decided = decision_status(msgspec.json.decode(content, type=Line))
        recent = [*self._recent, decided][-RECENT_DECISIONS:]
        status = {"decisions": [one.model_dump(mode="json", by_alias=True) for one in recent]}
        patch = {"status": status, "metadata": {"uid": self._uid}}
        try:
            await self._api.patch(KIND, self._namespace, self._run, patch, "status")
        except errors.ApiError as error:
            raise RecordError(f"{self.name} cannot be written: {error}") from error
        self._recent = recent
        self._kept += content


# --- finished runs, as a prior of the forecast of another: from the cache, with no request --------


@dataclass(frozen=True)
class FinishedRuns:
    """Reads the finished runs of one namespace; uid: of the run that asks.

    The curve's ConfigMap is among the objects that the cache holds anyway. After each run the event loop has its turn.
    """

    cache: Cache
    namespace: str
    uid: str

    async def __call__(self, spec: RunSpec) -> list[EarlierRun]:
        """Those that may be a prior of a run of this spec: the newest first, at most ``MAX_EARLIER_RUNS``."""
        runs = self._loaders(await self._newest())
        return await select(runs, spec, lambda text: log.info("namespace %s: %s", self.namespace, text))

    def _loaders(self, names: list[str]) -> Iterator[tuple[str, Callable[[], tuple[RunSpec, str]]]]:
        for name in names:
            run = self.cache.run(self.namespace, name)
            if run is not None:  # else deleted meanwhile
                curve = self.cache.get("ConfigMap", self.namespace, Names(name).curve)
                yield name, functools.partial(_load, run, curve)

    async def _newest(self) -> list[str]:
        """The names of all that are finished, the newest first."""
        finished = list[tuple[str, str]]()
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
    """What it ran with (its spec may have been edited since), and its curve."""
    if curve is None or (curve["metadata"].get("labels") or {}).get(RUN_UID) != run["metadata"]["uid"]:
        raise ValueError("it has no curve")
    kept = (run.get("status") or {}).get("acceptedSpec") or json.dumps(run["spec"])
    return accepted_run(with_spec(run, kept)).spec, str(curve["data"][CURVE_KEY])
