"""Observes a run: its objects, its place in the queue, its coordinator, and its forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from scalerl_api.reasons import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_autoscaling.autoscaler import Autoscaler
from scalerl_operator.controller import gang_admission
from scalerl_operator.controller.cluster_autoscaler import autoscaler_report
from scalerl_operator.controller.coordinator_poller import CoordinatorPollers, ask_coordinator
from scalerl_operator.controller.parts import Accepted, Observed, Run
from scalerl_operator.controller.pod_views import ignore_young_pods, observe_objects
from scalerl_operator.kube.client import EventType, KubeApi


@dataclass(frozen=True)
class Observer:
    """Observes runs; arguments as of :class:`.Reconciler`."""

    api: KubeApi
    coordinators: CoordinatorPollers
    gangs: Callable[[], bool]
    autoscaler: Callable[[ScaleRLRun, str], Autoscaler] | None
    lost_seconds: float
    monotonic: Callable[[], float]

    async def observe(self, run: Run, accepted: Accepted) -> Observed | None:
        """None: the coordinator has not responded since the run's pods changed; its poller wakes the run."""
        queued = await gang_admission.find(self.api, run, accepted, served=self.gangs())
        terminating = run.state.terminating_seconds(run.objects.values(), self.monotonic())
        seen = observe_objects(run.objects, run.uid, accepted.spec_hashes(), terminating, self.lost_seconds)
        seen = gang_admission.observed_in_queue(run, replace(seen, gang=queued))
        seen = ignore_young_pods(seen, run.unix_seconds)
        observed = await ask_coordinator(self.api, self.coordinators, run, accepted, seen)
        if observed is None:
            return None
        forecast = autoscaler_report(run, accepted, observed, self.autoscaler)
        if forecast.event:
            kind: EventType = "Warning" if forecast.alarming else "Normal"
            await self.api.event(run.obj, kind, Reason.AUTOSCALER, forecast.event)
        return replace(observed, autoscaler=forecast)
