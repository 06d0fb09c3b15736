"""Reconciles the runs of the namespaces that this release of the operator has claimed, each with its autoscaler."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from scalerl_api.spec import ScaleRLRun
from scalerl_autoscaling.autoscaler import Autoscaler
from scalerl_autoscaling.decision_log import DecisionRecord
from scalerl_autoscaling.forecast_client import Sidecar
from scalerl_lifecycle.lifecycle_types import GATED_SECONDS
from scalerl_operator.controller.cluster_autoscaler import FinishedRuns
from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.controller.report import RunFigures
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.namespace_claims import RENEW_SECONDS, NamespaceClaims
from scalerl_operator.kube.objects import is_deleted, label
from scalerl_operator.kube.types import Key
from scalerl_operator.names import QUEUE
from scalerl_operator.process_metrics import Metrics
from scalerl_operator.settings import Settings
from scalerl_processes.waiting import cancel

UNKNOWN_WORKLOADS_SECONDS: Final = 5.0
"""Between two reconciles of a run while the objects of its namespace, or the Workloads of its queue, cannot be listed."""

Reconcile = Callable[[Key], Awaitable[float | None]]
MakeReconcile = Callable[["ReconcileContext"], contextlib.AbstractAsyncContextManager[Reconcile]]


@dataclass
class ReconcileContext:
    """The argument of :data:`MakeReconcile`."""

    settings: Settings
    api: KubeApi
    cache: Cache
    metrics: Metrics
    wake: Callable[[Key], None]
    """Wakes a run for its coordinator or its autoscaler; a failed reconcile is not retried sooner."""
    workloads_served: Callable[[], bool] = lambda: False
    """Whether the cluster serves Kueue's Workloads."""
    workloads_known: Callable[[], bool] = lambda: True
    """Whether they have been listed, or are not served: until then, no run in a queue is reconciled but one that is deleted."""
    namespace_known: Callable[[str], bool] = lambda namespace: True
    """Whether the objects of a namespace have been listed: until then, none of its runs is reconciled."""
    on_lost: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called when this replica no longer leads and no reconcile is in work."""


class ClaimedRuns:
    """Reconciles runs, unless another release has claimed their namespace. gated_seconds: see :data:`.lifecycle_types.GATED_SECONDS`."""

    def __init__(self, context: ReconcileContext, gated_seconds: float) -> None:
        self._context = context
        settings, url = context.settings, context.settings.sidecar_url
        self._sidecar = None if url is None else Sidecar(lambda: url)
        self._runs = Reconciler(
            context.api,
            context.cache,
            images=settings.images,
            operator_namespace=settings.operator_namespace,
            namespaced=bool(settings.namespaces),
            gangs=lambda: settings.gangs and context.workloads_served(),
            autoscaler=None if self._sidecar is None else functools.partial(self._autoscaler, self._sidecar),
            on_status=context.metrics.run,
            wake=context.wake,
            gated_seconds=gated_seconds,
        )
        self._claims = NamespaceClaims(context.api, f"{settings.operator_namespace}/{settings.lease}")
        context.metrics.foreign_namespaces.set_function(self._claims.of_others)

    async def reconcile(self, key: Key) -> float | None:
        """As :meth:`.Reconciler.reconcile`."""
        context, run = self._context, self._context.cache.run(*key)
        # A run that is being deleted must be able to end, also in a namespace that another operator has claimed.
        queued = run is not None and not is_deleted(run) and label(run, QUEUE)
        if not context.namespace_known(key[0]) or (queued and not context.workloads_known()):
            return UNKNOWN_WORKLOADS_SECONDS
        if run is None or is_deleted(run) or await self._claims.mine(key[0]):
            return await self._runs.reconcile(key)
        await self._runs.forget(key)
        context.metrics.run(key, None, RunFigures())
        return RENEW_SECONDS

    async def renew_claims(self) -> None:
        """Renews them until cancelled, and wakes the runs of a namespace that another release has taken."""
        runs = self._context.cache.runs

        def lost(namespace: str) -> None:
            for key in runs():
                if key[0] == namespace:
                    self._context.wake(key)

        await self._claims.keep(lambda: {namespace for namespace, _ in runs()}, lost)

    async def forget(self) -> None:
        """Drops all state, which will be out of date when this replica leads again."""
        self._claims.forget()
        await self._runs.forget_all()

    def _autoscaler(self, sidecar: Sidecar, run: ScaleRLRun, uid: str) -> Autoscaler:
        key = (run.metadata.namespace or "", run.metadata.name)
        read, write = self._runs.coordinators.decisions, self._runs.coordinators.record_decision
        return Autoscaler(
            "/".join(key),
            run.spec,
            DecisionRecord(functools.partial(read, key), functools.partial(write, key)),
            sidecar,
            wake=lambda: self._context.wake(key),
            on_decision=self._context.metrics.decision,
            earlier=FinishedRuns(self._context.cache, key[0], uid),
        )


@contextlib.asynccontextmanager
async def reconciler(
    context: ReconcileContext, gated_seconds: float = GATED_SECONDS
) -> AsyncIterator[Reconcile]:
    """The operator's own reconcile."""
    runs = ClaimedRuns(context, gated_seconds)
    context.on_lost.append(runs.forget)
    renewal = asyncio.create_task(runs.renew_claims(), name="claims")
    try:
        yield runs.reconcile
    finally:
        await cancel(renewal)
        await runs.forget()
