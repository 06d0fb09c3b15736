"""Reconciles one run, in eight steps, the long ones in files of their names. Steps 1 to 5 return a part each (:mod:`.parts`).

1. read: the run and its objects, from the cache.
2. accept (pure): its spec or, while that is invalid, the one accepted before, which the status has as it was written; then adds the
   finalizer.
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

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from scalerl_api.conditions import Phase
from scalerl_api.load import SpecError, SpecProblem, accepted_run, run_from_object
from scalerl_api.reasons import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import RunStatus
from scalerl_autoscaling.autoscaler import Autoscaler
from scalerl_lifecycle import lifecycle
from scalerl_lifecycle.edits_of_run import as_accepted, edits_since
from scalerl_lifecycle.lifecycle_types import (
    GATED_SECONDS,
    LifecycleDecision,
    LifecycleInput,
    Problem,
    Service,
)
from scalerl_lifecycle.status_fields import is_over, persisted_state
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller import gang_admission
from scalerl_operator.controller.apply import Applier
from scalerl_operator.controller.check import Checker, plugin_problem
from scalerl_operator.controller.cluster_autoscaler import autoscaler_report, number_to_scale_to
from scalerl_operator.controller.coordinator_poller import (
    TIMINGS,
    CoordinatorPollers,
    Timings,
    ask_coordinator,
    request_stop,
)
from scalerl_operator.controller.diagnosis import next_start_check
from scalerl_operator.controller.parts import Accepted, Findings, Observed, Run
from scalerl_operator.controller.pod_views import LOST_SECONDS, ignore_young_pods, observe_objects
from scalerl_operator.controller.report import RunFigures, figures, report
from scalerl_operator.controller.run_object import RunObject, write_record
from scalerl_operator.controller.run_state import KnownRuns
from scalerl_operator.controller.volume import RETRY_SECONDS
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import EventType, KubeApi
from scalerl_operator.kube.objects import label
from scalerl_operator.kube.types import Key, Object
from scalerl_operator.manifests.scope import Images, spec_hash
from scalerl_operator.names import FINALIZER, QUEUE

BLOCKED_SECONDS: Final = 30.0
"""Between two reconciles of a run of which an object was refused."""
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
        self._gangs = gangs
        self._autoscaler = autoscaler
        self._lost_seconds = lost_seconds
        self._on_status = on_status
        self._gated_seconds = gated_seconds
        self._clock = clock
        self._monotonic = monotonic
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
        observed = await self._observe(run, accepted)
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
        return soonest(put_off, await self._follow_up(findings))

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

    async def _observe(self, run: Run, accepted: Accepted) -> Observed | None:
        """The run's objects, its place in the queue, its coordinator, and its forecast. None: the coordinator has not responded since
        the run's pods changed; its poller wakes the run."""
        queued = await gang_admission.find(self._api, run, accepted, served=self._gangs())
        terminating = run.state.terminating_seconds(run.objects.values(), self._monotonic())
        seen = observe_objects(run.objects, run.uid, accepted.spec_hashes(), terminating, self._lost_seconds)
        seen = gang_admission.observed_in_queue(run, replace(seen, gang=queued))
        seen = ignore_young_pods(seen, run.unix_seconds)
        observed = await ask_coordinator(self._api, self.coordinators, run, accepted, seen)
        if observed is None:
            return None
        forecast = autoscaler_report(run, accepted, observed, self._autoscaler)
        if forecast.event:
            kind: EventType = "Warning" if forecast.alarming else "Normal"
            await self._api.event(run.obj, kind, Reason.AUTOSCALER, forecast.event)
        return replace(observed, autoscaler=forecast)

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

    async def _follow_up(self, findings: Findings) -> float | None:
        """What follows for others: the quota of an evicted run, edits of ``spec``, the deletion of an expired run. Returns the seconds
        until the next reconcile."""
        run, decision, state = findings.run, findings.decision, findings.run.state
        if findings.accepted.found is None:
            return decision.again_seconds
        if findings.checks.not_started is None:
            await gang_admission.write_workload_status(self._api, findings)
            if decision.set_suspend:
                await self._run_object.suspend(run)
            elif (number := number_to_scale_to(findings)) is not None:
                await self._run_object.scale(run, number, findings.observed.autoscaler.decision)
                return 0.0  # the operator's own write wakes no run
        repair = state.next_repair_seconds(run.unix_seconds)
        if is_over(decision.persisted):
            ttl = findings.accepted.spec.ttl_seconds_after_finished
            return soonest(await self._run_object.expire(run, ttl), repair)
        # A restored claim without the run's label is not watched.
        unwatched = findings.blocked is not None or findings.checks.claim_gone or state.workload_refusal
        return soonest(
            decision.again_seconds,
            findings.observed.young_seconds,
            repair,
            RETRY_SECONDS if state.size_refused is not None else None,
            BLOCKED_SECONDS if unwatched else None,
            next_start_check(findings),
        )


def accept(run: Run) -> Accepted:
    """The run's accepted spec, and what has been edited since the last reconcile, and since the last steps that were trained. Pure."""
    found: ScaleRLRun | None = None
    invalid: Problem | None = None
    text, long_hash = run.before.accepted_spec, run.before.accepted_spec_hash
    try:
        found = run_from_object(run.obj)
        written = as_accepted(run.obj["spec"])
        edited = run.before.start_time is not None and text not in (None, written[0])
        if edited and (missing := plugin_problem(found.spec)) is not None:
            where, _, message = missing.message.partition(": ")
            raise SpecError(run.name, [SpecProblem(where, message)])
        text, long_hash = written
    except SpecError as error:
        message = "; ".join(str(problem) for problem in error.problems)
        if text is not None:
            message += "; the run continues with the spec accepted before"
            found = accepted_run(_with_spec(run.obj, text))
        invalid = Problem(Reason.SPEC_INVALID, message)
    accepted = Accepted(found, text, long_hash, invalid)
    if found is None:
        return accepted
    edit, unproven = edits_since(run.before, found.spec, run.obj["spec"], text)
    return replace(accepted, edit=edit, unproven=unproven)


def _with_spec(run: Object, text: str) -> Object:
    """The run with that spec, and its current ``suspend``: a run with an invalid spec can be suspended too."""
    spec: dict[str, Any] = json.loads(text)
    suspend = run["spec"].get("suspend", False)
    return {**run, "spec": {**spec, "suspend": suspend} if isinstance(suspend, bool) else spec}


def decide(
    run: Run, accepted: Accepted, observed: Observed, gated_seconds: float = GATED_SECONDS
) -> LifecycleDecision:
    """The lifecycle's decision on what was observed. Pure. A run without an accepted spec stays as it is until it is deleted; its
    drain needs no spec."""
    if accepted.found is not None or run.deleted:
        spec = None if accepted.found is None else accepted.found.spec
        return lifecycle.decide(spec, _lifecycle_input(run, accepted, observed, gated_seconds), run.persisted)
    phase = run.before.phase if run.persisted.attempt else Phase.PENDING
    return LifecycleDecision(phase, run.persisted)


def _lifecycle_input(
    run: Run, accepted: Accepted, observed: Observed, gated_seconds: float
) -> LifecycleInput:
    """The observations that the lifecycle depends on."""
    spec = None if accepted.found is None else accepted.found.spec
    return LifecycleInput(
        unix_seconds=run.unix_seconds,
        deleting=run.deleted,
        suspend=spec is not None and spec.suspend,
        queued=bool(label(run.obj, QUEUE)),
        unadmitted=observed.gang is not None and not observed.gang.admitted,
        serving=observed.serving,
        prepare=observed.prepare,
        trainer=observed.trainer,
        coordinator=_service(accepted, observed, Role.COORDINATOR),
        generators=_service(accepted, observed, Role.GENERATOR),
        environment=None
        if spec is None or spec.environment is None
        else _service(accepted, observed, Role.ENVIRONMENT),
        status=observed.coordinator,
        stop="" if run.state.autoscaler is None else run.state.autoscaler.stop,
        steps=run.steps,
        started=all(_is_started(accepted, observed, role) for role in (Role.COORDINATOR, Role.GENERATOR)),
        edit=accepted.edit,
        unproven=accepted.unproven,
        gated_seconds=gated_seconds,
    )


def _is_started(accepted: Accepted, observed: Observed, role: Role) -> bool:
    """Whether a pod of a role is ready that was created for the accepted spec, as far as that is known."""
    hashes = ("", "" if accepted.found is None else spec_hash(accepted.found, role))
    return any(pod.ready and pod.spec_hash in hashes for pod in observed.of(role))


def _service(accepted: Accepted, observed: Observed, role: Role) -> Service:
    """The lifecycle's input about a role; failures of pods of an earlier spec, which are being replaced, do not count."""
    found = observed.service(role)
    if accepted.found is None or (found.bad_input is None and not found.restarts):
        return found
    return observed.service(role, spec_hash(accepted.found, role))


def soonest(*waits: float | None) -> float | None:
    """The shortest of the waits that there are; None: there is none."""
    return min((wait for wait in waits if wait is not None), default=None)
