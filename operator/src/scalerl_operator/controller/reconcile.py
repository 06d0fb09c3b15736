"""Reconciles one run, in six steps.

``observe (I/O) → validate (pure) → plan (pure) → render (pure) → apply (I/O) → report (pure, then one status patch)``

Whatever woke it, a reconcile covers the whole run. It writes nothing where everything is as it should be. The process may end
at any line: the next reconcile, here or elsewhere, continues from what exists. So what is decided
and cannot be seen from what exists (how a run ended, that it rests, which attempt is judged) is reported before it is
applied: a coordinator that is gone could not say again why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from scalerl_api.conditions import ConditionType, Phase, Reason
from scalerl_api.load import SpecError, accepted_run, run_from_object
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import RunStatus
from scalerl_api.wire import Status
from scalerl_operator.autoscaling.models import Generators
from scalerl_operator.build import render
from scalerl_operator.build.curve import curve_config_map
from scalerl_operator.build.shared import spec_hash
from scalerl_operator.controller.accepted_spec import continues_with_accepted, kept, last_accepted, with_spec
from scalerl_operator.controller.access_token import ensure_token, read_token
from scalerl_operator.controller.apply import Applier
from scalerl_operator.controller.autoscaler import ClusterAutoscaler
from scalerl_operator.controller.autoscaler_report import AutoscalerReport
from scalerl_operator.controller.claim_size import RETRY_SECONDS, not_enlarged
from scalerl_operator.controller.coordinator_poller import Answer, CoordinatorPollers
from scalerl_operator.controller.diagnosis import diagnose
from scalerl_operator.controller.fingerprint import fingerprint
from scalerl_operator.controller.local_queues import queue_problem
from scalerl_operator.controller.observe import Problem, RunObservation, label, observe, patient, seconds
from scalerl_operator.controller.preflight import Preflight
from scalerl_operator.controller.run_context import CLAIM, WORKLOADS, RunContext, is_deleted, pinned
from scalerl_operator.controller.run_object import RunObject
from scalerl_operator.controller.run_state import RunState
from scalerl_operator.controller.status import (
    ReconcileResult,
    remembered,
    report,
    understood,
)
from scalerl_operator.controller.upgrade import adopt_spec_hashes, number_of_earlier_release
from scalerl_operator.controller.volume import Volume, abandons, observe_volume, without_steps
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import EventType, KubeApi
from scalerl_operator.kube.types import Desired, Images, Object
from scalerl_operator.names import ABANDON, FINALIZER, QUEUE, SCALED_BY, selector
from scalerl_operator.policy import lifecycle
from scalerl_operator.policy.budget import Usage
from scalerl_operator.policy.decision import CoordinatorReport, JobState, LifecycleDecision, LifecycleInput
from scalerl_operator.workloads import Role

Key = tuple[str, str]
"""A run: (namespace, name)."""

BLOCKED_SECONDS: Final = 30.0
"""Between two tries of what the cluster refused."""
LATEST_ANSWER_SECONDS: Final = 10.0
"""Longest wait for a coordinator's answer; the poller wakes the run earlier, with the answer or a failure."""
START_CHECK_SECONDS: Final = (15.0, 300.0)
"""First and longest wait between two reads of Events while pods are to start: only Events say what keeps them."""


@dataclass(frozen=True)
class _Plan:
    """What is to be applied. frozen: see :class:`.LifecycleDecision`. stands: the objects are as they were when they were last
    applied; only those that follow the run's progress may differ."""

    desired: Desired
    images: Images
    frozen: bool
    stands: bool


class Reconciler:
    """Reconciles runs: one reconcile at a time a run, many runs at once.

    images: where a run names none. namespaced: an operator of a few namespaces, which may see nothing of the cluster's.
    autoscaler: makes the autoscaler of a run with that uid; None: no forecast is wanted.
    on_status: called with each run's status at each reconcile, None when it is gone. wake: called for a run whose
    coordinator has answered. background: coordinators are asked by themselves, see :class:`.CoordinatorPollers`. clock: Unix seconds.
    """

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        *,
        images: Images,
        operator_namespace: str,
        namespaced: bool = False,
        autoscaler: Callable[[ScaleRLRun, str], ClusterAutoscaler] | None = None,
        on_status: Callable[[Key, RunStatus | None], None] = lambda key, status: None,
        wake: Callable[[Key], None] = lambda key: None,
        background: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._cache = cache
        self._run = RunObject(api, cache)
        self._applier = Applier(api, cache)
        self._preflight = Preflight(api, namespaced=namespaced)
        self.coordinators = CoordinatorPollers(
            lambda what: self._api.must_lead(what), self._answered, background=background
        )
        self._images = images
        self._operator_namespace = operator_namespace
        self._make_autoscaler = autoscaler
        self._on_status = on_status
        self._wake = wake
        self._clock = clock
        self._uids: dict[Key, str] = {}
        self._keys: dict[str, Key] = {}
        self._states: dict[str, RunState] = {}

    async def close(self) -> None:
        """Closes all connections and cancels what is under way."""
        await self.forget_all()

    async def forget_all(self) -> None:
        """Another replica leads now: what is remembered here, above all decisions, will be out of date when this one leads again."""
        for uid in list(self._states):
            await self._forget(uid)
        self._uids.clear()
        await self.coordinators.close()

    async def reconcile(self, key: Key) -> float | None:
        """One reconcile. Returns the seconds after which to reconcile again; None: when something changes.

        Raises:
            ApiError: the API server did not do as asked; the caller retries with back-off.
        """
        obj = self._cache.run(*key)
        before = self._uids.get(key)
        if before is not None and (obj is None or obj["metadata"]["uid"] != before):
            del self._uids[key]
            await self._forget(before)
        if obj is None:
            self._on_status(key, None)
            return None
        context = self._observe(key, obj)
        if is_deleted(obj) and FINALIZER not in context.finalizers:
            await self._drop_state(context)
            return None  # the rest is the garbage collector's
        await self._applier.find_unlabelled(context, context.to_be_drained)
        invalid, spec = None, kept(obj)
        try:
            run = run_from_object(obj)
        except SpecError as problem:
            invalid = Problem(Reason.SPEC_INVALID, "; ".join(str(p) for p in problem.problems))
            spec = last_accepted(obj, context.before)
            if spec is None:
                return await self._refuse(context, invalid)
            invalid, run = continues_with_accepted(invalid), accepted_run(with_spec(obj, spec))
        if not is_deleted(obj) and FINALIZER not in context.finalizers:
            await self._run.hold(context)
        if invalid is None and (number := number_of_earlier_release(run, context)) is not None:
            await self._run.scale(context, number, decision=-1)
            return 0.0
        return await self._reconcile_run(run, context, spec, invalid)

    # --- observe ----------------------------------------------------------------------------------

    def _observe(self, key: Key, obj: Object) -> RunContext:
        uid = obj["metadata"]["uid"]
        self._uids[key], self._keys[uid] = uid, key
        before = RunStatus.read(obj.get("status"))
        return RunContext(
            obj,
            self._cache.owned(*key),
            self._clock(),
            before,
            remembered(before),
            self._states.setdefault(uid, RunState()),
        )

    async def _coordinator_answer(self, context: RunContext, observed: RunObservation) -> Answer:
        if context.memory.outcome is not None:
            await self.coordinators.forget(context.uid)
            return Answer(True)
        pods = observed.of(Role.COORDINATOR)
        return await self.coordinators.poll(
            context.uid,
            pods,
            lambda again: read_token(self._api, context, again=again),
            (pods, observed.trainer),
        )

    def _answered(self, uid: str) -> None:
        key = self._keys.get(uid)
        if key is not None:
            self._wake(key)

    # --- validate ---------------------------------------------------------------------------------

    async def _refuse(self, context: RunContext, why: Problem) -> float | None:
        """Handles a run whose spec cannot be read and of which none was ever accepted: creates nothing, changes nothing.

        A run that is being deleted is drained all the same, which needs no spec.
        """
        decision = LifecycleDecision(
            context.before.phase if context.memory.attempt else Phase.PENDING, context.memory
        )
        coordinator_report = None
        if is_deleted(context.run):
            observed = observe(context.objects, context.uid, {Role.PREPARE: "", Role.TRAINER: ""})
            answer = await self._coordinator_answer(context, observed)
            if not answer.known:
                return LATEST_ANSWER_SECONDS
            coordinator_report = answer.status
            decision = lifecycle.decide_deletion(
                self._lifecycle_input(
                    context, observed, coordinator_report, context.before.generators.replicas
                ),
                context.memory,
            )
            if decision.release:
                await self._run.release(context)
                await self._drop_state(context)
                return None
            if decision.request_stop is not None:
                await self._request_stop(context, decision.request_stop)
        await self._report(
            None,
            context,
            ReconcileResult(
                context.unix_seconds,
                context.generation,
                why,
                None,
                None,
                decision,
                coordinator_report,
                AutoscalerReport(),
            ),
        )
        return decision.again_seconds

    # --- plan -------------------------------------------------------------------------------------

    async def _reconcile_run(
        self, run: ScaleRLRun, context: RunContext, spec: str | None, invalid: Problem | None
    ) -> float | None:
        """``spec``: the accepted one, as the status keeps it. ``invalid``: why the present spec is refused; ``run`` then has
        the one accepted before."""
        await adopt_spec_hashes(self._api, self._cache, context)
        observed, placed = patient(
            observe(context.objects, context.uid, self._spec_hashes(run, context)), context.unix_seconds
        )
        answer = await self._coordinator_answer(context, observed)
        if not answer.known:
            return LATEST_ANSWER_SECONDS
        coordinator_report = answer.status
        autoscaler_report = self._autoscaler_report(run, context, observed, coordinator_report)
        decision = lifecycle.decide(
            run.spec,
            self._lifecycle_input(
                context, observed, coordinator_report, run.spec.generator.replicas, suspend=run.spec.suspend
            ),
            context.memory,
        )
        if decision.release:
            await self._run.release(context)
            await self._drop_state(context)
            return None
        context, volume = await self._volume(run, context, observed, decision)
        plan = self._plan(run, context, decision)
        missing = None if plan.stands else await self._missing(run, context, plan.images)
        # What drains is to save what it has, wherever it can.
        empty = _is_empty(observed) and not decision.frozen
        if volume.gone and _starts(decision) and (empty or not _at_work(observed)):
            missing = volume.problem
        if missing is not None:
            decision = LifecycleDecision(Phase.PENDING, context.memory, again_seconds=BLOCKED_SECONDS)
        blocked = context.state.blocked if missing is None else None
        refused = self.coordinators.refusal(context.uid)
        queue_missing = await queue_problem(self._api, context, decision.phase)
        result = ReconcileResult(
            *(
                context.unix_seconds,
                context.generation,
                missing,
                blocked,
                observed,
                decision,
                coordinator_report,
                autoscaler_report,
                refused,
            ),
            invalid=invalid,
            spec=spec if missing is None else context.before.accepted_spec,
            queue_missing=queue_missing,
            volume=volume.problem or not_enlarged(context),
        )
        if missing is None:
            if not context.status_has(decision, spec):
                context = await self._record_decision(run, context, result)
            blocked = await self._apply(run, context, observed, plan, coordinator_report, gone=volume.gone)
            volume_problem = volume.problem or not_enlarged(context)
            result = replace(result, blocked=blocked, volume=volume_problem)
            if decision.request_stop is not None:
                await self._request_stop(context, decision.request_stop)
        if autoscaler_report.event:
            kind: EventType = "Warning" if autoscaler_report.alarming else "Normal"
            await self._api.event(context.run, kind, Reason.AUTOSCALER, autoscaler_report.event)
        put_off = await self._report(run, context, result)
        if decision.set_suspend and missing is None:
            await self._run.suspend(context)
        elif missing is None and invalid is None and _scales(run, context, autoscaler_report):
            assert autoscaler_report.generators is not None
            await self._run.scale(context, autoscaler_report.generators, autoscaler_report.decision)
            return 0.0  # our own write wakes no run
        repair = context.state.next_repair_seconds(context.unix_seconds)
        if decision.memory.outcome is not None:
            return _soonest(await self._run.expire(run, context), repair)
        return _soonest(
            decision.again_seconds,
            put_off,
            placed,
            repair,
            RETRY_SECONDS if context.state.size_refused is not None else None,
            # A claim that takes the lost one's place has no label of the run yet, and so is not watched.
            BLOCKED_SECONDS if blocked is not None or volume.gone else None,
            self._next_start_check(context, observed, plan.desired),
        )

    def _spec_hashes(self, run: ScaleRLRun, context: RunContext) -> dict[Role, str]:
        """The hashes that Jobs of the present spec have."""
        known = context.state.spec_hashes
        if known is None or known[0] != context.generation:
            hashes = {role: spec_hash(run, role) for role in (Role.PREPARE, Role.TRAINER)}
            known = context.state.spec_hashes = (context.generation, hashes)
        return known[1]

    def _next_start_check(
        self, context: RunContext, observed: RunObservation, desired: Desired
    ) -> float | None:
        """Seconds to the next read of Events: only they say why a pod is not created, or is scheduled and does not start. All
        else wakes the run. The longer a start takes, the rarer.
        """
        preparing = desired.prepare and observed.prepare.state is not JobState.COMPLETE
        unmade = preparing and not observed.of(Role.PREPARE)
        if not unmade and not any(pod.creating and not pod.leaving for pod in observed.pods):
            return None
        first, last = START_CHECK_SECONDS
        return min(max(first, (context.unix_seconds - seconds(context.before.start_time)) / 2), last)

    def _lifecycle_input(
        self,
        context: RunContext,
        observed: RunObservation,
        coordinator_report: Status | None,
        generators: int,
        *,
        suspend: bool = False,
    ) -> LifecycleInput:
        word = None
        if coordinator_report is not None:
            word = CoordinatorReport(
                coordinator_report.phase,
                coordinator_report.stop_reason,
                Usage(coordinator_report.wall_seconds, coordinator_report.device_seconds),
            )
        return LifecycleInput(
            unix_seconds=context.unix_seconds,
            deleting=is_deleted(context.run),
            suspend=suspend,
            queued=bool(label(context.run, QUEUE)),
            serving=observed.serving,
            prepare=observed.prepare,
            trainer=observed.trainer,
            coordinator=observed.service(Role.COORDINATOR),
            coordinator_report=word,
            stop=autoscaler.stop if (autoscaler := context.state.autoscaler) is not None else "",
            generators_wanted=generators,
        )

    def _autoscaler_report(
        self,
        run: ScaleRLRun,
        context: RunContext,
        observed: RunObservation,
        coordinator_report: Status | None,
    ) -> AutoscalerReport:
        """The autoscaler's report; the last one while the coordinator does not answer."""
        if coordinator_report is None or context.memory.outcome is not None:
            return self._last_autoscaler_report(run, context)
        state, off = context.state, run.spec.autoscaling.mode == "Off"
        if self._make_autoscaler is None or (off and state.autoscaler is None):
            return AutoscalerReport()
        if state.autoscaler is None:
            state.autoscaler = self._make_autoscaler(run, context.uid)
        ready = observed.service(Role.GENERATOR).ready
        wanted, each = run.spec.generator.replicas, max(1, run.spec.generator.devices)
        generators = Generators(wanted=wanted, ready=ready, devices_each=each)
        resumed = context.memory.resumed
        return state.autoscaler.report(run, coordinator_report, generators, resumed=resumed)

    def _last_autoscaler_report(self, run: ScaleRLRun, context: RunContext) -> AutoscalerReport:
        said = context.before.condition(ConditionType.FORECAST_READY)
        if said is None or run.spec.autoscaling.mode == "Off":
            return AutoscalerReport()
        reason, message = understood(said)
        return AutoscalerReport(ready=said.status == "True", reason=reason, message=message)

    # --- render, apply ----------------------------------------------------------------------------

    def _plan(self, run: ScaleRLRun, context: RunContext, decision: LifecycleDecision) -> _Plan:
        trained = bool(context.before.step)
        desired = Desired(
            decision.prepare, decision.coordinator, decision.generators, decision.trainer, trained
        )
        images = pinned(context, run.spec.images, self._images)
        known = context.state.fingerprint
        # True in most reconciles: only the status of a pod or a Job has changed.
        stands = known is not None and known == fingerprint(
            run, context, desired, images, frozen=decision.frozen
        )
        return _Plan(desired, images, decision.frozen, stands)

    async def _volume(
        self, run: ScaleRLRun, context: RunContext, observed: RunObservation, decision: LifecycleDecision
    ) -> tuple[RunContext, Volume]:
        """The state of the run's claim, and the run: without its steps if somebody gave them up."""
        steps, empty = context.before.step or 0, _is_empty(observed)
        # That its trainer gives up on an empty volume is no end of a run.
        outcome = context.memory.outcome if empty else decision.memory.outcome
        if is_deleted(context.run) or outcome is not None:
            return context, Volume()
        volume = await observe_volume(self._api, run, context, steps, mounted=_at_work(observed), empty=empty)
        if not (volume.gone and abandons(context, steps)) or (_at_work(observed) and not empty):
            return context, volume
        await self._run.write(context, without_steps(context.before), at_once=True)
        await self._api.event(
            context.run, "Warning", Reason.STEPS_ABANDONED, f"{steps} steps are given up: {ABANDON}"
        )
        context = replace(context, before=RunStatus.read(context.run.get("status")))
        return context, await observe_volume(self._api, run, context, 0, mounted=False)

    async def _missing(self, run: ScaleRLRun, context: RunContext, images: Images) -> Problem | None:
        """What keeps a run of which there is nothing yet from being started at all."""
        begun = any(kind in WORKLOADS and context.owns(obj) for (kind, _), obj in context.objects.items())
        if context.before.start_time is not None or begun:
            return None
        every = Desired(True, True, max(1, run.spec.generator.replicas), 1)
        return await self._preflight.check(run, context, lambda: self._render(run, context, every, images))

    async def _apply(
        self,
        run: ScaleRLRun,
        context: RunContext,
        observed: RunObservation,
        plan: _Plan,
        coordinator_report: Status | None,
        *,
        gone: bool,
    ) -> Problem | None:
        """Why an object of the run could not be created. ``gone``: its claim is gone, and is not created again."""
        points = coordinator_report.points if coordinator_report is not None else ()
        more = [curve_config_map(run, context.uid, points)] if points else []
        if plan.stands:
            blocked = await ensure_token(self._api, run, context)
            for obj in more:
                blocked = blocked or await self._applier.apply_one(obj, context)
        else:
            wanted = self._render(run, context, plan.desired, plan.images)
            wanted = [obj for obj in wanted if not (gone and obj["kind"] == CLAIM)]
            blocked = await self._applier.apply(run, context, [*wanted, *more], frozen=plan.frozen)
            found = fingerprint(run, context, plan.desired, plan.images, frozen=plan.frozen)
            state = context.state
            settled = not state.repaired_lately(context.unix_seconds) and state.size_refused is None
            if blocked is None and found is not None and settled:
                state.fingerprint = found
        if plan.desired.coordinator and not any(pod.role == Role.COORDINATOR for pod in observed.pods):
            await self._applier.replace_unlabelled_coordinator(context)
        blocked = blocked or await diagnose(self._api, context, observed, plan.desired)
        if blocked is not None:
            self._preflight.forget_namespace(context.namespace)
        context.state.blocked = blocked
        return blocked

    def _render(self, run: ScaleRLRun, context: RunContext, desired: Desired, images: Images) -> list[Object]:
        return render(run, context.uid, desired, images, operator_namespace=self._operator_namespace)

    async def _request_stop(self, context: RunContext, reason: str) -> None:
        if await self.coordinators.request_stop(context.uid, reason):
            what = f"Asked the coordinator to stop: {reason}" if reason else "Cancelled the stop request"
            await self._api.event(
                context.run, "Normal", Reason.STOPPING if reason else Reason.STOP_CANCELLED, what
            )

    # --- report -----------------------------------------------------------------------------------

    async def _record_decision(
        self, run: ScaleRLRun, context: RunContext, result: ReconcileResult
    ) -> RunContext:
        """Writes what is decided before it is carried out, and returns the run as it is then. Nothing is carried out if it fails.

        What keeps an object from being created is as the last reconcile reported it. If that stays so, this is the same
        patch as the one at the end, only earlier.
        """
        await self._report(run, context, result)
        before = RunStatus.read(context.run.get("status"))
        return replace(context, before=before, memory=result.decision.memory)

    async def _report(
        self, run: ScaleRLRun | None, context: RunContext, result: ReconcileResult
    ) -> float | None:
        """Writes the status if it has changed. Returns the seconds until a postponed write is due."""
        status = report(run, context.before, result)
        if not status.selector:
            labels = sorted(selector(context.uid, Role.GENERATOR).items())
            status = status.model_copy(update={"selector": ",".join(f"{k}={v}" for k, v in labels)})
        self._on_status((context.namespace, context.name), status)
        return await self._run.write(context, status)

    async def _drop_state(self, context: RunContext) -> None:
        """Forgets a run for which nothing is left to do; it may exist for long, held by another's finalizer."""
        self._uids.pop((context.namespace, context.name), None)
        await self._forget(context.uid)

    async def _forget(self, uid: str) -> None:
        self._keys.pop(uid, None)
        state = self._states.pop(uid, None)
        if state is not None and state.autoscaler is not None:
            state.autoscaler.close()
        await self.coordinators.forget(uid)


def _at_work(observed: RunObservation) -> bool:
    """Whether pods of the run may have its volume mounted, and save to it."""
    trainer = observed.trainer
    in_queue = trainer.held and not trainer.ending
    return observed.serving or (trainer.state in (JobState.ACTIVE, JobState.LEAVING) and not in_queue)


def _is_empty(observed: RunObservation) -> bool:
    """Whether the coordinator found none of the run's steps on the volume."""
    return any(pod.steps_lost for pod in observed.of(Role.COORDINATOR))


def _starts(decision: LifecycleDecision) -> bool:
    """Whether something of the run is to be there that reads or writes the volume."""
    return (
        decision.prepare or decision.coordinator or bool(decision.generators) or decision.trainer is not None
    )


def _scales(run: ScaleRLRun, context: RunContext, report: AutoscalerReport) -> bool:
    """Whether the autoscaler's last decision set a number of generators and is yet to be carried out."""
    allowed, number = run.spec.autoscaling.generators, report.generators
    if number is None or allowed is None or not allowed.min <= number <= allowed.max:
        return False
    done = (context.run["metadata"].get("annotations") or {}).get(SCALED_BY) == str(report.decision)
    return not done and number != run.spec.generator.replicas


def _soonest(*waits: float | None) -> float | None:
    return min((wait for wait in waits if wait is not None), default=None)
