"""Reconciles one run, in eight steps, each in the file of its name, but the first. Steps 1 to 5 return a part each (:mod:`.parts`).

1. read: the run and its objects, from the cache.
2. accept: its spec, or the one accepted before; adds the finalizer.
3. observe: Jobs and pods, the queue, the coordinator's last status, the forecast.
4. decide (pure): which objects are to exist. A run that has drained for its deletion is recorded and released instead of 5 to 8.
5. check: whether the decision can be applied; otherwise the run waits.
6. apply: records the lifecycle's new state in the status; then creates, changes and deletes objects, and sends a stop request.
7. report: writes the status if it has changed.
8. follow_up: returns the quota of an evicted run, edits ``spec`` if decided, deletes an expired run; when to reconcile again.

Not every reconcile has all steps: it ends after 1 where the run is gone, and after 3 while the coordinator's response is outstanding.
Before 3, workloads that are to drain get their removed labels back, without which they would not be observed.
If 5 finds that a user has abandoned the run's steps, it has removed them from the status, and the reconcile begins again. A run that
may not be applied skips 6. Step 7 is also part of 6: the status is written there before the decision is executed.

A reconcile covers the whole run, and only writes what differs. The process may end at any line: the next reconcile, in any
process, continues from the objects. State that the objects do not show (the outcome of a run, its suspension, the attempts
counted) is written to the status before it is acted on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import RunStatus
from scalerl_autoscaling.autoscaler import Autoscaler
from scalerl_lifecycle.lifecycle_types import GATED_SECONDS, LifecycleDecision
from scalerl_lifecycle.status_fields import persisted_state
from scalerl_operator.controller.accept import accept
from scalerl_operator.controller.apply import Applier
from scalerl_operator.controller.check import Checker
from scalerl_operator.controller.coordinator_poller import (
    TIMINGS,
    CoordinatorPollers,
    Timings,
    request_stop,
)
from scalerl_operator.controller.decide import decide
from scalerl_operator.controller.ended_run_record import write_record
from scalerl_operator.controller.follow_up import BLOCKED_SECONDS, follow_up, soonest
from scalerl_operator.controller.observe import Observer
from scalerl_operator.controller.parts import Findings, Run
from scalerl_operator.controller.pod_views import LOST_SECONDS
from scalerl_operator.controller.report import report
from scalerl_operator.controller.run_figures import RunFigures, figures
from scalerl_operator.controller.run_object import RunObject
from scalerl_operator.controller.run_state import KnownRuns
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Key
from scalerl_operator.manifests.scope import Images
from scalerl_operator.names import FINALIZER

COORDINATOR_SECONDS: Final = 10.0
"""Longest wait for a coordinator's response; the poller wakes the run earlier, with a response or a failure."""


class Reconciler:
    """Reconciles runs; at most one reconcile of a run at a time.

    Args:
        images: of runs that name none.
        namespaced: the operator watches a few namespaces, and may not read cluster-scoped objects.
        autoscaler: creates the autoscaler of a run with that uid; None: no forecasts.
        on_status: called with each run's status and figures at each reconcile; None: the run is gone.
        gangs: whether queued runs are admitted as a whole, by Kueue's Workloads.
        wake: called for a run whose coordinator has responded.
        background, poll_timings: see :class:`.CoordinatorPollers`.
        gated_seconds: see :data:`.lifecycle_types.GATED_SECONDS`; lost_seconds: see :data:`.pod_views.LOST_SECONDS`.
        clock: Unix seconds.
        monotonic: seconds that no correction of the clock changes.
    """

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        *,
        images: Images,
        operator_namespace: str,
        namespaced: bool = False,
        gangs: Callable[[], bool] = lambda: False,
        autoscaler: Callable[[ScaleRLRun, str], Autoscaler] | None = None,
        on_status: Callable[[Key, RunStatus | None, RunFigures], None] = lambda key, status, figures: None,
        wake: Callable[[Key], None] = lambda key: None,
        background: bool = True,
        poll_timings: Timings = TIMINGS,
        gated_seconds: float = GATED_SECONDS,
        lost_seconds: float = LOST_SECONDS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._cache = cache
        self._run_object = RunObject(api, cache)
        self._applier = Applier(api, cache, images, operator_namespace)
        self._checker = Checker(api, cache, self._run_object, self._applier.render_all, namespaced=namespaced)
        self.coordinators = CoordinatorPollers(
            lambda what: api.must_lead(what), wake, background=background, timings=poll_timings
        )
        self._observer = Observer(api, self.coordinators, gangs, autoscaler, lost_seconds, monotonic)
        self._on_status = on_status
        self._gated_seconds = gated_seconds
        self._clock = clock
        self._known = KnownRuns(self.coordinators.forget)

    async def forget_all(self) -> None:
        """Drops the state of all runs, which will be out of date when this replica leads again, and stops polling."""
        await self._known.forget_all()
        await self.coordinators.close()

    async def forget(self, key: Key) -> None:
        """Drops the state of a run that another release reconciles, and stops polling its coordinator."""
        await self._known.forget(key)

    async def reconcile(self, key: Key) -> float | None:
        """Reconciles a run. Returns the seconds until the next reconcile; None: when the run is woken.

        Raises:
            ApiError: a call failed; the caller retries with back-off.
        """
        run = await self._read(key)
        if run is None:
            return None
        accepted = accept(run)
        if accepted.found is not None and not run.deleted and FINALIZER not in run.finalizers:
            await self._run_object.add_finalizer(run)
        await self._applier.find_unlabelled(run)
        observed = await self._observer.observe(run, accepted)
        if observed is None:
            return COORDINATOR_SECONDS
        decision = decide(run, accepted, observed, self._gated_seconds)
        if decision.release:
            await write_record(self._api, run)
            await self._run_object.remove_finalizer(run)
            await self._known.forget(key)
            return None
        findings = Findings(run, accepted, observed, decision, blocked=run.state.blocked)
        checks = await self._checker.check(findings)
        if checks is None:
            return await self.reconcile(key)
        if checks.not_started is None:
            findings = await self._apply(replace(findings, checks=checks))
        else:
            waiting = LifecycleDecision(Phase.PENDING, run.persisted, again_seconds=BLOCKED_SECONDS)
            findings = replace(findings, checks=checks, decision=waiting, blocked=None)
        put_off = await self._report(findings)
        return soonest(put_off, await follow_up(self._api, self._run_object, findings))

    async def _read(self, key: Key) -> Run | None:
        """The run; None: it is gone, or its objects are left to the garbage collector."""
        obj = self._cache.run(*key)
        state = await self._known.state(key, None if obj is None else obj["metadata"]["uid"])
        if obj is None or state is None:
            self._on_status(key, None, RunFigures())
            return None
        status = RunStatus.read(obj.get("status"))
        run = Run(obj, self._cache.owned(*key), self._clock(), status, persisted_state(status), state)
        if run.deleted and FINALIZER not in run.finalizers:
            await self._known.forget(key)
            return None
        return run

    async def _apply(self, findings: Findings) -> Findings:
        """Writes new state of the lifecycle to the status, and then executes the decision."""
        run, accepted, decision = findings.run, findings.accepted, findings.decision
        if accepted.found is not None:
            before = run.before
            recorded = (run.persisted, before.accepted_spec, before.accepted_spec_hash, before.model)
            if recorded != (decision.persisted, accepted.text, accepted.long_hash, findings.model):
                await self._report(findings)
            findings = replace(findings, blocked=await self._applier.apply(findings))
        await request_stop(self._api, self.coordinators, run, decision.request_stop)
        return findings

    async def _report(self, findings: Findings) -> float | None:
        """Writes the status if it has changed. Returns the seconds until a write that was put off is due."""
        status = report(findings)
        self._on_status(findings.run.key, status, figures(findings, status))
        return await self._run_object.write(findings.run, status)
