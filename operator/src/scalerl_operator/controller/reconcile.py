"""Reconcile: one look at one run, in six steps.

``observe (I/O) → validate (pure) → plan (pure) → render (pure) → apply (I/O) → report (pure, then one status patch)``

Whatever woke us, the whole run is looked at. A look that finds everything as it should be writes nothing. A look may
end at any line, with this process: the next one, here or elsewhere, sees what is there and goes on. So what is decided
and cannot be context from what is there (how a run ended, that it rests, which attempt is judged) is reported before it is
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
from scalerl_operator.autoscaling import replicas
from scalerl_operator.build import render
from scalerl_operator.build.shared import spec_hash
from scalerl_operator.controller.accepted_spec import going_on, kept, last_accepted, with_spec
from scalerl_operator.controller.access_token import ensure_token, read_token
from scalerl_operator.controller.apply import Applier
from scalerl_operator.controller.claim_size import RETRY_SECONDS, not_enlarged
from scalerl_operator.controller.coordinator_poller import Answer, Coordinators
from scalerl_operator.controller.diagnosis import diagnose
from scalerl_operator.controller.fingerprint import fingerprint
from scalerl_operator.controller.local_queues import queue_problem
from scalerl_operator.controller.observe import Observed, Problem, label, observe, patient, seconds
from scalerl_operator.controller.preflight import Preflight
from scalerl_operator.controller.run_context import CLAIM, WORKLOADS, RunContext, is_deleted, pinned
from scalerl_operator.controller.run_object import RunObject
from scalerl_operator.controller.run_state import RunState
from scalerl_operator.controller.scaling import RunScaling
from scalerl_operator.controller.status import (
    Looked,
    Steered,
    remembered,
    report,
    understood,
)
from scalerl_operator.controller.upgrade import restate
from scalerl_operator.controller.volume import Volume, abandons, observe_volume, without_steps
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Desired, Images, Object
from scalerl_operator.names import ABANDON, FINALIZER, QUEUE, selector
from scalerl_operator.policy import lifecycle
from scalerl_operator.policy.budget import Usage
from scalerl_operator.policy.decision import Course, Facts, Heard, JobState
from scalerl_operator.workloads import Role

Key = tuple[str, str]
"""A run: (namespace, name)."""

BLOCKED_SECONDS: Final = 30.0
"""When to try again what the cluster did not let us make."""
LATEST_ANSWER_SECONDS: Final = 10.0
"""A run that waits for its coordinator's answer is woken by it, or by that there is none; at the latest after so long."""
START_LOOKS: Final = (15.0, 300.0)
"""While pods are awaited, only events tell what is missing: looked at first and at the latest after so long."""


@dataclass(frozen=True)
class _Plan:
    """What is to be applied. frozen: see :class:`.Course`. stands: the run's objects are as they were found, or made, and
    only what follows its progress may be new."""

    desired: Desired
    images: Images
    frozen: bool
    stands: bool


class Reconciler:
    """Looks at runs: one look at a time a run, many runs at once.

    images: where a run names none. namespaced: an operator of a few namespaces, which may see nothing of the cluster's.
    scaling: makes the autoscaling of a run with that uid.
    on_status: told of each run's status at each look, None when it is gone. wake: called for a run of whose coordinator
    there is an answer. background: coordinators are asked by themselves, see :class:`.Coordinators`. clock: Unix seconds.
    """

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        *,
        images: Images,
        operator_namespace: str,
        namespaced: bool = False,
        scaling: Callable[[ScaleRLRun, str], RunScaling] = lambda run, uid: RunScaling(uid, None),
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
        self.coordinators = Coordinators(
            lambda what: self._api.must_lead(what), self._answered, background=background
        )
        self._images = images
        self._operator_namespace = operator_namespace
        self._make_scaling = scaling
        self._on_status = on_status
        self._wake = wake
        self._clock = clock
        self._uids: dict[Key, str] = {}
        self._keys: dict[str, Key] = {}
        self._states: dict[str, RunState] = {}
        self._scalings: dict[str, RunScaling] = {}

    async def close(self) -> None:
        """Let go of all connections and of what is under way."""
        await self.forget_all()

    async def forget_all(self) -> None:
        """Another leads now: what is known here, above all of decisions, is not what will be true when we lead again."""
        for uid in [*self._uids.values(), *self._scalings]:
            await self._forget(uid)
        self._uids.clear()
        await self.coordinators.close()

    async def reconcile(self, key: Key) -> float | None:
        """One look. Returns the seconds after which to look again; None: when something changes.

        Raises:
            ApiError: the API server did not do as asked; whoever calls comes back, with back-off.
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
            await self._let_go(context)
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
            invalid, run = going_on(invalid), accepted_run(with_spec(obj, spec))
        if not is_deleted(obj) and FINALIZER not in context.finalizers:
            await self._run.hold(context)
        return await self._look(run, context, spec, invalid)

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

    async def _hear(self, context: RunContext, observed: Observed) -> Answer:
        if context.memory.outcome is not None:
            await self.coordinators.forget(context.uid)
            return Answer(True)
        pods = observed.of(Role.COORDINATOR)
        return await self.coordinators.hear(
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
        """A spec that cannot be read, of a run of which none was ever accepted: nothing is created, and what there is
        already stays as it is.

        If the run is being deleted, until what works has saved what it has: for that nobody needs the spec.
        """
        course = Course(context.before.phase if context.memory.attempt else Phase.PENDING, context.memory)
        heard = None
        if is_deleted(context.run):
            observed = observe(context.objects, context.uid, {Role.PREPARE: "", Role.TRAINER: ""})
            answer = await self._hear(context, observed)
            if not answer.known:
                return LATEST_ANSWER_SECONDS
            heard = answer.status
            steered = Steered(context.before.generators.replicas)
            course = lifecycle.leave(self._facts(context, observed, heard, steered), context.memory)
            if course.release:
                await self._run.release(context)
                await self._let_go(context)
                return None
            if course.tell is not None:
                await self._tell(context, course.tell)
        await self._report(
            None,
            context,
            Looked(context.unix_seconds, context.generation, why, None, None, course, heard, Steered(0)),
        )
        return course.again_seconds

    # --- plan -------------------------------------------------------------------------------------

    async def _look(
        self, run: ScaleRLRun, context: RunContext, spec: str | None, invalid: Problem | None
    ) -> float | None:
        """``spec``: the run's, as the status keeps it. ``invalid``: why the present one is not accepted; the run then has
        the one accepted before."""
        await restate(self._api, self._cache, context)
        observed, placed = patient(
            observe(context.objects, context.uid, self._spec_hashes(run, context)), context.unix_seconds
        )
        answer = await self._hear(context, observed)
        if not answer.known:
            return LATEST_ANSWER_SECONDS
        heard = answer.status
        steered = self._steer(run, context, observed, heard)
        course = lifecycle.decide(
            run.spec, self._facts(context, observed, heard, steered, suspend=run.spec.suspend), context.memory
        )
        if course.release:
            await self._run.release(context)
            await self._let_go(context)
            return None
        context, volume = await self._volume(run, context, observed, course)
        plan = self._plan(run, context, course)
        missing = None if plan.stands else await self._missing(run, context, plan.images)
        # What drains is to save what it has, wherever it can.
        empty = _is_empty(observed) and not course.frozen
        if volume.gone and _starts(course) and (empty or not _at_work(observed)):
            missing = volume.problem
        if missing is not None:
            course = Course(Phase.PENDING, context.memory, again_seconds=BLOCKED_SECONDS)
        blocked = context.state.blocked if missing is None else None
        refused = self.coordinators.refusal(context.uid)
        queue_missing = await queue_problem(self._api, context, course.phase)
        looked = Looked(
            *(
                context.unix_seconds,
                context.generation,
                missing,
                blocked,
                observed,
                course,
                heard,
                steered,
                refused,
            ),
            invalid=invalid,
            spec=spec if missing is None else context.before.accepted_spec,
            queue_missing=queue_missing,
            volume=volume.problem or not_enlarged(context),
        )
        if missing is None:
            if not context.status_has(course, steered, spec):
                context = await self._write_down(run, context, looked)
            blocked = await self._apply(run, context, observed, plan, heard, gone=volume.gone)
            volume_problem = volume.problem or not_enlarged(context)
            looked = replace(looked, blocked=blocked, volume=volume_problem)
            if course.tell is not None:
                await self._tell(context, course.tell)
        await self._tell_people(context)
        put_off = await self._report(run, context, looked)
        if course.ask_suspend and missing is None:
            await self._run.suspend(context)
        repair = context.state.next_repair_seconds(context.unix_seconds)
        if course.memory.outcome is not None:
            return _soonest(await self._run.expire(run, context), repair)
        return _soonest(
            course.again_seconds,
            put_off,
            placed,
            repair,
            RETRY_SECONDS if context.state.size_refused is not None else None,
            # A claim that takes the lost one's place has no label of the run yet, and so is not watched.
            BLOCKED_SECONDS if blocked is not None or volume.gone else None,
            self._next_start_look(context, observed, plan.desired),
        )

    def _spec_hashes(self, run: ScaleRLRun, context: RunContext) -> dict[Role, str]:
        """What the Jobs of the present spec carry."""
        known = context.state.spec_hashes
        if known is None or known[0] != context.generation:
            hashes = {role: spec_hash(run, role) for role in (Role.PREPARE, Role.TRAINER)}
            known = context.state.spec_hashes = (context.generation, hashes)
        return known[1]

    def _next_start_look(self, context: RunContext, observed: Observed, desired: Desired) -> float | None:
        """For what only events tell: why a pod is not made, or is scheduled and does not begin. All else wakes us.

        The longer a start takes, the rarer.
        """
        preparing = desired.prepare and observed.prepare.state is not JobState.COMPLETE
        unmade = preparing and not observed.of(Role.PREPARE)
        if not unmade and not any(pod.creating and not pod.leaving for pod in observed.pods):
            return None
        first, last = START_LOOKS
        return min(max(first, (context.unix_seconds - seconds(context.before.start_time)) / 2), last)

    def _facts(
        self,
        context: RunContext,
        observed: Observed,
        heard: Status | None,
        steered: Steered,
        *,
        suspend: bool = False,
    ) -> Facts:
        word = None
        if heard is not None:
            word = Heard(heard.phase, heard.stop_reason, Usage(heard.wall_seconds, heard.device_seconds))
        scaling = self._scalings.get(context.uid)
        return Facts(
            unix_seconds=context.unix_seconds,
            deleting=is_deleted(context.run),
            suspend=suspend,
            queued=bool(label(context.run, QUEUE)),
            serving=observed.serving,
            prepare=observed.prepare,
            trainer=observed.trainer,
            coordinator=observed.service(Role.COORDINATOR),
            heard=word,
            stop=scaling.stop if scaling is not None else "",
            generators_wanted=steered.replicas,
        )

    def _steer(
        self, run: ScaleRLRun, context: RunContext, observed: Observed, heard: Status | None
    ) -> Steered:
        """What autoscaling says; what it said last while the coordinator is silent."""
        if heard is None or context.memory.outcome is not None:
            return self._as_before(run, context)
        scaling = self._scalings.get(context.uid)
        if scaling is None:
            scaling = self._scalings[context.uid] = self._make_scaling(run, context.uid)
        ready = observed.service(Role.GENERATOR).ready
        return scaling.steer(run, context.before, heard, ready, resumed=context.memory.resumed)

    def _as_before(self, run: ScaleRLRun, context: RunContext) -> Steered:
        before = context.before.generators
        kept = replicas.decide(
            run.spec.generator.replicas, run.spec.autoscaling, base=before.base, chosen=before.chosen
        )
        steered = Steered(kept.wanted, kept.base, kept.chosen, pinned=kept.pinned)
        said = context.before.condition(ConditionType.FORECAST_READY)
        if said is None or run.spec.autoscaling.mode == "Off":
            return steered
        reason, message = understood(said)
        return replace(steered, ready=said.status == "True", reason=reason, message=message)

    # --- render, apply ----------------------------------------------------------------------------

    def _plan(self, run: ScaleRLRun, context: RunContext, course: Course) -> _Plan:
        trained = bool(context.before.step)
        desired = Desired(course.prepare, course.coordinator, course.generators, course.trainer, trained)
        images = pinned(context, run.spec.images, self._images)
        known = context.state.fingerprint
        # So it is in most looks: a pod or a Job says something new.
        stands = known is not None and known == fingerprint(
            run, context, desired, images, frozen=course.frozen
        )
        return _Plan(desired, images, course.frozen, stands)

    async def _volume(
        self, run: ScaleRLRun, context: RunContext, observed: Observed, course: Course
    ) -> tuple[RunContext, Volume]:
        """What there is to say of the run's claim, and the run: without its steps if somebody gave them up."""
        steps, empty = context.before.step or 0, _is_empty(observed)
        # That its trainer gives up on an empty volume is no end of a run.
        outcome = context.memory.outcome if empty else course.memory.outcome
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
        observed: Observed,
        plan: _Plan,
        heard: Status | None,
        *,
        gone: bool,
    ) -> Problem | None:
        """What keeps an object of the run from being made. ``gone``: its claim, which is not made anew."""
        scaling = self._scalings.get(context.uid)
        more = scaling.objects(run, heard) if heard is not None and scaling is not None else []
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

    async def _tell(self, context: RunContext, reason: str) -> None:
        if await self.coordinators.tell(context.uid, reason):
            what = f"the run is told to stop: {reason}" if reason else "the run is told to go on"
            await self._api.event(context.run, "Normal", Reason.STOPPING if reason else Reason.GOING_ON, what)

    async def _tell_people(self, context: RunContext) -> None:
        scaling = self._scalings.get(context.uid)
        text, alarming = scaling.event() if scaling is not None else ("", False)
        if text:
            await self._api.event(context.run, "Warning" if alarming else "Normal", Reason.AUTOSCALER, text)

    # --- report -----------------------------------------------------------------------------------

    async def _write_down(self, run: ScaleRLRun, context: RunContext, looked: Looked) -> RunContext:
        """What is decided, before it is carried out; the run as it is then. Nothing is carried out if it fails.

        What keeps an object from being made is as the last look left it. If that stays so there is nothing to report
        after it: it is the same patch, only earlier.
        """
        await self._report(run, context, looked)
        before = RunStatus.read(context.run.get("status"))
        return replace(context, before=before, memory=looked.course.memory)

    async def _report(self, run: ScaleRLRun | None, context: RunContext, looked: Looked) -> float | None:
        """Write the status if it says anything new. Returns when a write that was put off is due."""
        status = report(run, context.before, looked)
        scaling = self._scalings.get(context.uid)
        if scaling is not None:
            status = scaling.decorate(status)
        if not status.selector:
            labels = sorted(selector(context.uid, Role.GENERATOR).items())
            status = status.model_copy(update={"selector": ",".join(f"{k}={v}" for k, v in labels)})
        self._on_status((context.namespace, context.name), status)
        return await self._run.write(context, status)

    async def _let_go(self, context: RunContext) -> None:
        """Nothing is left to do for a run, though it may be there for long: another's finalizer may hold it."""
        self._uids.pop((context.namespace, context.name), None)
        await self._forget(context.uid)

    async def _forget(self, uid: str) -> None:
        scaling = self._scalings.pop(uid, None)
        if scaling is not None:
            scaling.close()
        self._keys.pop(uid, None)
        self._states.pop(uid, None)
        await self.coordinators.forget(uid)


def _at_work(observed: Observed) -> bool:
    """Whether pods of the run may have its volume mounted, and save to it."""
    trainer = observed.trainer
    in_queue = trainer.held and not trainer.ending
    return observed.serving or (trainer.state in (JobState.ACTIVE, JobState.LEAVING) and not in_queue)


def _is_empty(observed: Observed) -> bool:
    """Whether the coordinator found none of the run's steps on the volume."""
    return any(pod.steps_lost for pod in observed.of(Role.COORDINATOR))


def _starts(course: Course) -> bool:
    """Whether something of the run is to be there that reads or writes the volume."""
    return course.prepare or course.coordinator or bool(course.generators) or course.trainer is not None


def _soonest(*waits: float | None) -> float | None:
    return min((wait for wait in waits if wait is not None), default=None)
