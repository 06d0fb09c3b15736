"""Reconciles one run, in six steps.

``accept (pure) → observe (I/O) → decide (pure) → check (I/O) → apply (I/O) → report (pure, then one status patch)``

A reconcile covers the whole run, and writes nothing where everything is as it should be. The process may end at any line: the
next reconcile, here or elsewhere, continues from what exists. So what cannot be seen from that (how a run ended, that it is
suspended, which attempt is counted) is reported before it is applied: a coordinator that is gone could not say again why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from scalerl_api.conditions import Phase, Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import RunStatus
from scalerl_operator.autoscaling.autoscaler import Autoscaler
from scalerl_operator.build.scope import Images
from scalerl_operator.controller.accept import accept, adopt_spec_hashes, generators_of_earlier_release
from scalerl_operator.controller.apply import Applier
from scalerl_operator.controller.cluster_autoscaler import autoscaler_report, wanted_generators
from scalerl_operator.controller.coordinator_poller import CoordinatorPollers, ask_coordinator, request_stop
from scalerl_operator.controller.diagnosis import next_start_check, queue_problem
from scalerl_operator.controller.observe import observe, patient
from scalerl_operator.controller.run_context import KnownRuns, RunContext, decide
from scalerl_operator.controller.status import RunObject, remembered, report
from scalerl_operator.controller.volume import RETRY_SECONDS, check_volume
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import EventType, KubeApi
from scalerl_operator.kube.types import Key
from scalerl_operator.names import FINALIZER
from scalerl_operator.policy.lifecycle_types import LifecycleDecision

BLOCKED_SECONDS: Final = 30.0
"""Between two tries of what the cluster refused."""
LATEST_ANSWER_SECONDS: Final = 10.0
"""Longest wait for a coordinator's answer; the poller wakes the run earlier, with the answer or a failure."""


class Reconciler:
    """Reconciles runs: one reconcile at a time a run, many runs at once.

    images: where a run names none. namespaced: an operator of a few namespaces, which may see nothing of the cluster's.
    autoscaler: makes the autoscaler of a run with that uid; None: no forecast is wanted.
    on_status: called with each run's status at each reconcile, None when it is gone. wake: called for a run whose
    coordinator has answered. background: see :class:`.CoordinatorPollers`. clock: Unix seconds.
    """

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        *,
        images: Images,
        operator_namespace: str,
        namespaced: bool = False,
        autoscaler: Callable[[ScaleRLRun, str], Autoscaler] | None = None,
        on_status: Callable[[Key, RunStatus | None], None] = lambda key, status: None,
        wake: Callable[[Key], None] = lambda key: None,
        background: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._cache = cache
        self._run = RunObject(api, cache)
        self._applier = Applier(api, cache, images, operator_namespace, namespaced=namespaced)
        self.coordinators = CoordinatorPollers(lambda what: api.must_lead(what), wake, background=background)
        self._make_autoscaler = autoscaler
        self._on_status = on_status
        self._clock = clock
        self._known = KnownRuns(self.coordinators.forget)

    async def forget_all(self) -> None:
        """Cancels what is under way. When another replica leads: all that is remembered here will be out of date when this
        one leads again."""
        await self._known.forget_all()
        await self.coordinators.close()

    async def reconcile(self, key: Key) -> float | None:
        """One reconcile. Returns the seconds after which to reconcile again; None: when something changes.

        Raises:
            ApiError: the API server did not do as asked; the caller retries with back-off.
        """
        context = await self._context(key)
        if context is None:
            return None
        if context.deleted and FINALIZER not in context.finalizers:
            await self._known.forget(context.key)
            return None  # the rest is the garbage collector's
        await self._applier.find_unlabelled(context)
        accept(context)
        if context.accepted is not None and not context.deleted and FINALIZER not in context.finalizers:
            await self._run.hold(context)
        if (number := generators_of_earlier_release(context)) is not None:
            await self._run.scale(context, number, decision=-1)
            return 0.0
        await adopt_spec_hashes(self._api, self._cache, context)
        observed = observe(context.objects, context.uid, context.spec_hashes())
        context.observed, placed = patient(observed, context.unix_seconds)
        if not await ask_coordinator(self._api, self.coordinators, context):
            return LATEST_ANSWER_SECONDS
        context.autoscaler = autoscaler_report(context, self._make_autoscaler)
        context.decision = decide(context)
        if context.decision.release:
            await self._run.release(context)
            await self._known.forget(context.key)
            return None
        await self._check(context)
        await self._carry_out(context)
        if context.autoscaler.event:
            kind: EventType = "Warning" if context.autoscaler.alarming else "Normal"
            await self._api.event(context.obj, kind, Reason.AUTOSCALER, context.autoscaler.event)
        put_off = await self._report(context)
        if context.accepted is None:
            return context.decision.again_seconds
        if await self._edit_spec(context):
            return 0.0  # our own write wakes no run
        repair = context.state.next_repair_seconds(context.unix_seconds)
        if context.decision.memory.outcome is not None:
            return _soonest(await self._run.expire(context), repair)
        return _soonest(
            context.decision.again_seconds,
            put_off,
            placed,
            repair,
            RETRY_SECONDS if context.state.size_refused is not None else None,
            # A claim that takes the lost one's place has no label of the run yet, and so is not watched.
            BLOCKED_SECONDS if context.blocked is not None or context.claim_gone else None,
            next_start_check(context),
        )

    async def _context(self, key: Key) -> RunContext | None:
        obj = self._cache.run(*key)
        state = await self._known.state(key, None if obj is None else obj["metadata"]["uid"])
        if obj is None or state is None:
            self._on_status(key, None)
            return None
        status = RunStatus.read(obj.get("status"))
        return RunContext(obj, self._cache.owned(*key), self._clock(), status, remembered(status), state)

    async def _check(self, context: RunContext) -> None:
        """What keeps the decision from being carried out: then nothing is applied."""
        if context.accepted is None:
            return
        await check_volume(self._api, self._run, context)
        context.not_started = context.not_started or await self._applier.preflight(context)
        if context.not_started is not None:
            context.decision = LifecycleDecision(Phase.PENDING, context.memory, again_seconds=BLOCKED_SECONDS)
        context.queue_missing = await queue_problem(self._api, context)

    async def _carry_out(self, context: RunContext) -> None:
        """Writes what is decided, then carries it out. Nothing is carried out if that write fails.

        What keeps an object from being created is written as the last reconcile found it. If that stays so, this is the same
        patch as the one at the end, only earlier.
        """
        if context.not_started is not None:
            return
        if context.accepted is not None:
            known = (context.memory, context.before.accepted_spec)
            if known != (context.decision.memory, context.spec_text):
                await self._report(context)
                context.before = RunStatus.read(context.obj.get("status"))
                context.memory = context.decision.memory
            await self._applier.apply(context)
        await request_stop(self._api, self.coordinators, context)

    async def _edit_spec(self, context: RunContext) -> bool:
        """Suspends the run, or sets its number of generators, as decided; True if the run is to be reconciled again at once."""
        if context.not_started is not None:
            return False
        if context.decision.set_suspend:
            await self._run.suspend(context)
            return False
        if (number := wanted_generators(context)) is not None:
            await self._run.scale(context, number, context.autoscaler.decision)
        return number is not None

    async def _report(self, context: RunContext) -> float | None:
        """Writes the status if it has changed. Returns the seconds until a postponed write is due."""
        status = report(context)
        self._on_status(context.key, status)
        return await self._run.write(context, status)


def _soonest(*waits: float | None) -> float | None:
    return min((wait for wait in waits if wait is not None), default=None)
