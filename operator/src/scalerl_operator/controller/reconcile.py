"""Reconciles one run, in six steps.

``accept (pure) → observe (I/O) → decide (pure) → check (I/O) → apply (I/O) → report (pure, then one status patch)``

A reconcile covers the whole run, and only writes what differs. The process may end at any line: the next reconcile, in any
process, continues from the objects. State that the objects do not show (the outcome of a run, its suspension, the attempts
counted) is written to the status before it is acted on.
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
from scalerl_operator.controller import gang
from scalerl_operator.controller.accept import accept
from scalerl_operator.controller.apply import Applier
from scalerl_operator.controller.cluster_autoscaler import autoscaler_report, wanted_generators
from scalerl_operator.controller.coordinator_poller import CoordinatorPollers, ask_coordinator, request_stop
from scalerl_operator.controller.diagnosis import next_start_check, queue_problem
from scalerl_operator.controller.observe import observe, patient
from scalerl_operator.controller.record import write_record
from scalerl_operator.controller.run_context import KnownRuns, RunContext, decide
from scalerl_operator.controller.source import find_source
from scalerl_operator.controller.status import RunObject, is_over, remembered, report
from scalerl_operator.controller.summary import RunFigures, figures
from scalerl_operator.controller.volume import RETRY_SECONDS, check_volume
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import EventType, KubeApi
from scalerl_operator.kube.types import Key
from scalerl_operator.names import FINALIZER
from scalerl_operator.policy.lifecycle_types import LifecycleDecision

BLOCKED_SECONDS: Final = 30.0
"""Between two reconciles of a run of which an object was refused."""
COORDINATOR_SECONDS: Final = 10.0
"""Longest wait for a coordinator's response; the poller wakes the run earlier, with a response or a failure."""


class Reconciler:
    """Reconciles runs; at most one reconcile of a run at a time.

    images: of runs that name none.
    namespaced: the operator watches a few namespaces, and may not read cluster-scoped objects.
    autoscaler: creates the autoscaler of a run with that uid; None: no forecasts.
    on_status: called with each run's status and figures at each reconcile; None: the run is gone.
    gangs: whether queued runs are admitted as a whole, by Kueue's Workloads.
    wake: called for a run whose coordinator has responded.
    background: see :class:`.CoordinatorPollers`.
    clock: Unix seconds.
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._cache = cache
        self._run = RunObject(api, cache)
        self._applier = Applier(api, cache, images, operator_namespace, namespaced=namespaced)
        self.coordinators = CoordinatorPollers(lambda what: api.must_lead(what), wake, background=background)
        self._gangs = gangs
        self._make_autoscaler = autoscaler
        self._on_status = on_status
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
        context = await self._context(key)
        if context is None:
            return None
        if context.deleted and FINALIZER not in context.finalizers:
            await self._known.forget(context.key)
            return None  # the garbage collector deletes its objects
        await self._applier.find_unlabelled(context)
        accept(context)
        if context.accepted is not None and not context.deleted and FINALIZER not in context.finalizers:
            await self._run.hold(context)
        context.gang = await gang.find(self._api, context, served=self._gangs())
        observed = observe(context.objects, context.uid, context.spec_hashes(), context.unix_seconds)
        observed = gang.observed_in_queue(context, observed)
        context.observed, placed = patient(observed, context.unix_seconds)
        if not await ask_coordinator(self._api, self.coordinators, context):
            return COORDINATOR_SECONDS
        context.autoscaler = autoscaler_report(context, self._make_autoscaler)
        context.decision = decide(context)
        if context.decision.release:
            await write_record(self._api, context)
            await self._run.release(context)
            await self._known.forget(context.key)
            return None
        await self._check(context)
        await self._execute(context)
        if context.autoscaler.event:
            kind: EventType = "Warning" if context.autoscaler.alarming else "Normal"
            await self._api.event(context.obj, kind, Reason.AUTOSCALER, context.autoscaler.event)
        status_due = await self._report(context)
        if context.accepted is None:
            return context.decision.again_seconds
        if context.not_started is None:
            await gang.answer(self._api, context)
        if await self._edit_spec(context):
            return 0.0  # the operator's own write wakes no run
        repair = context.state.next_repair_seconds(context.unix_seconds)
        if is_over(context.decision.memory):
            return _soonest(await self._run.expire(context), repair)
        return _soonest(
            context.decision.again_seconds,
            status_due,
            placed,
            repair,
            RETRY_SECONDS if context.state.size_refused is not None else None,
            # A restored claim without the run's label is not watched.
            BLOCKED_SECONDS
            if context.blocked is not None or context.claim_gone or context.state.unanswered
            else None,
            next_start_check(context),
        )

    async def _context(self, key: Key) -> RunContext | None:
        obj = self._cache.run(*key)
        state = await self._known.state(key, None if obj is None else obj["metadata"]["uid"])
        if obj is None or state is None:
            self._on_status(key, None, RunFigures())
            return None
        status = RunStatus.read(obj.get("status"))
        return RunContext(obj, self._cache.owned(*key), self._clock(), status, remembered(status), state)

    async def _check(self, context: RunContext) -> None:
        """Checks that the decision can be executed; otherwise, nothing is applied."""
        if context.accepted is None:
            return
        await check_volume(self._api, self._run, context)
        context.not_started = (
            context.not_started
            or await find_source(self._api, context)
            or await self._applier.preflight(context)
        )
        if context.not_started is not None:
            context.decision = LifecycleDecision(Phase.PENDING, context.memory, again_seconds=BLOCKED_SECONDS)
        context.queue_missing = await queue_problem(self._api, context)

    async def _execute(self, context: RunContext) -> None:
        """Writes new state of the lifecycle to the status, and then executes the decision."""
        if context.not_started is not None:
            return
        if context.accepted is not None:
            before = context.before
            recorded = (context.memory, before.accepted_spec, before.accepted_spec_hash, before.model)
            if recorded != (context.decision.memory, context.spec_text, context.long_spec, context.model):
                await self._report(context)
                context.before = RunStatus.read(context.obj.get("status"))
                context.memory = context.decision.memory
            await self._applier.apply(context)
        await request_stop(self._api, self.coordinators, context)

    async def _edit_spec(self, context: RunContext) -> bool:
        """Suspends the run, or sets its number of generators, if decided. True: reconcile the run again at once."""
        if context.not_started is not None:
            return False
        if context.decision.set_suspend:
            await self._run.suspend(context)
            return False
        if (number := wanted_generators(context)) is not None:
            await self._run.scale(context, number, context.autoscaler.decision)
        return number is not None

    async def _report(self, context: RunContext) -> float | None:
        """Writes the status if it has changed. Returns the seconds until a write that was put off is due."""
        status = report(context)
        self._on_status(context.key, status, figures(context, status))
        return await self._run.write(context, status)


def _soonest(*waits: float | None) -> float | None:
    return min((wait for wait in waits if wait is not None), default=None)
