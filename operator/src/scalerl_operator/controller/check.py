"""Checks whether a decision can be applied: the volume, the source of a fork, what keeps a new run from being started, and the
queue."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from scalerl_api.cluster import StorageSpec
from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.spec import RunSpec, ScaleRLRun
from scalerl_api.spec_warnings import past_deadline
from scalerl_lifecycle.problems import Problem
from scalerl_lifecycle.status_fields import seconds
from scalerl_operator.controller.accept import plugin_problem
from scalerl_operator.controller.fork_source import find_source
from scalerl_operator.controller.parts import CLAIM, WORKLOADS, Checks, Findings, Run
from scalerl_operator.controller.refusals import name_taken, refused
from scalerl_operator.controller.run_object import RunObject
from scalerl_operator.controller.volume import check_volume
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.objects import label
from scalerl_operator.kube.types import Object
from scalerl_operator.kube.unlabelled import UnlabelledNames
from scalerl_operator.names import PRIORITY, QUEUE, Names

QUEUE_SECONDS: Final = 30.0
"""Between two requests for the queue of one run."""
_BEFORE_THE_END: Final = (Phase.PENDING, Phase.PREPARING, Phase.RUNNING)


class Checker:
    """Checks decisions.

    Args:
        render_all: renders all objects that a new run will have.
        namespaced: see :func:`preflight`.
    """

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        run_object: RunObject,
        render_all: Callable[[Findings], Sequence[Object]],
        *,
        namespaced: bool,
    ) -> None:
        self._api = api
        self._cache = cache
        self._run_object = run_object
        self._render_all = render_all
        self._namespaced = namespaced
        self._unlabelled = UnlabelledNames(api)

    async def check(self, findings: Findings) -> Checks | None:
        """None: the run is to be reconciled again."""
        if findings.accepted.found is None:
            return Checks()
        checks = await check_volume(self._api, self._run_object, findings)
        if checks is None:
            return None
        if checks.not_started is None:
            checks = await find_source(self._api, replace(findings, checks=checks))
        if checks.not_started is None:
            render_all = functools.partial(self._render_all, replace(findings, checks=checks))
            found = (self._cache, self._unlabelled, findings.run, findings.accepted.run, render_all)
            problem = await preflight(self._api, *found, namespaced=self._namespaced)
            checks = replace(checks, not_started=problem)
        phase = findings.decision.phase if checks.not_started is None else Phase.PENDING
        return replace(checks, queue_missing=await queue_problem(self._api, findings, phase))


async def preflight(
    api: KubeApi,
    cache: Cache,
    unlabelled: UnlabelledNames,
    run: Run,
    accepted: ScaleRLRun,
    render_all: Callable[[], Sequence[Object]],
    *,
    namespaced: bool,
) -> Problem | None:
    """The first problem that keeps a run from being started; None for a run that has been started.

    namespaced: the operator's role does not permit reads of cluster-scoped objects.
    render_all: renders all objects that the run will have. If the run has a podTemplate, its workloads are created as a dry run,
    which also finds that their names are taken: a refusal of the generators would otherwise show only after the preparation.
    """
    started = any(kind in WORKLOADS and run.owns(obj) for (kind, _), obj in run.objects.items())
    if run.before.start_time is not None or started:
        return None
    created = seconds(run.obj["metadata"].get("creationTimestamp"))
    if (late := past_deadline(accepted.spec, created)) is not None:
        return Problem(Reason.SPEC_INVALID, str(late))
    problem = plugin_problem(accepted.spec) or await _check_storage(
        api, run, accepted.spec.storage, namespaced=namespaced
    )
    objects = render_all()
    tried = [obj for obj in objects if obj["kind"] in WORKLOADS] if _has_raw_parts(accepted.spec) else []
    names = [(obj["kind"], obj["metadata"]["name"]) for obj in objects if obj not in tried]
    for kind, name in (*names, ("Secret", Names(run.name).token)):
        if problem is None and await _may_be_taken(cache, unlabelled, kind, name, run):
            problem = await _check_name(api, kind, name, run)
    return problem or await _dry_run(api, run, tried)


async def _check_storage(api: KubeApi, run: Run, storage: StorageSpec, *, namespaced: bool) -> Problem | None:
    claim, storage_class = storage.claim_name, storage.storage_class_name
    if claim is not None:
        if await api.get(CLAIM, run.namespace, claim) is None:
            return Problem(Reason.REFERENCE_NOT_FOUND, f"spec.storage.claimName: {claim} does not exist")
    elif storage_class is not None and not namespaced:
        # With another role than the chart's, Events of the claim report a missing class.
        with contextlib.suppress(errors.Forbidden):
            if await api.get("StorageClass", None, storage_class) is None:
                message = f"spec.storage.storageClassName: {storage_class} does not exist"
                return Problem(Reason.REFERENCE_NOT_FOUND, message)
    return None


async def _may_be_taken(cache: Cache, unlabelled: UnlabelledNames, kind: str, name: str, run: Run) -> bool:
    """Whether an object may have the name. One that was created in the last seconds is found by the create."""
    there = (kind, name) in run.objects or cache.version(kind, run.namespace, name) >= 0
    return there or await unlabelled.may_have(kind, run.namespace, name)


async def _check_name(api: KubeApi, kind: str, name: str, run: Run) -> Problem | None:
    live = run.objects.get((kind, name))
    if live is None:
        live = await api.get(kind, run.namespace, name, recent=True)
        if live is not None and not run.owns(live):
            live = await api.get(kind, run.namespace, name)  # it may have been deleted since
    return None if live is None else name_taken(live, run)


async def _dry_run(api: KubeApi, run: Run, objects: Sequence[Object]) -> Problem | None:
    """Whether the API server accepts the run's workloads, and their names are free."""
    for obj in objects:
        try:
            await api.create(obj, dry_run=True)
        except errors.AlreadyExists:
            live = await api.get(obj["kind"], run.namespace, obj["metadata"]["name"])
            if live is not None and (problem := name_taken(live, run)) is not None:
                return problem
        except (errors.Invalid, errors.Forbidden) as error:
            return refused(error, obj, run)
    return None


def _has_raw_parts(spec: RunSpec) -> bool:
    parts = (spec, spec.coordinator, spec.generator, spec.trainer, spec.environment)
    templates = [part.pod_template for part in parts if part is not None]
    return any(t is not None and t.model_dump(exclude_defaults=True) for t in templates)


async def queue_problem(api: KubeApi, findings: Findings, phase: Phase) -> str:
    """A message if the LocalQueue (Kueue) of the run's label, or the class of its priority, does not exist; empty otherwise, for a run that has been admitted,
    and if the operator may not read it. Reads the queue at most every :data:`QUEUE_SECONDS` for one run.
    """
    run, gang = findings.run, findings.observed.gang
    queue, admitted = label(run.obj, QUEUE), run.before.condition(ConditionType.ADMITTED)
    known = admitted is not None and admitted.status == "True" and admitted.reason != Reason.NO_QUEUE
    if not queue or known or phase not in _BEFORE_THE_END:
        return ""
    read_at, problem = run.state.queue_read
    if 0 <= run.unix_seconds - read_at < QUEUE_SECONDS:
        return problem
    try:
        exists = await api.get("LocalQueue", run.namespace, queue) is not None
    except errors.Forbidden:
        exists = True  # with another role than the chart's, this is not known
    problem = ""
    if not exists:
        problem = f"no LocalQueue {queue} in the namespace {run.namespace}: with Kueue, the run waits for it; in a cluster "
        problem += f"without Kueue it starts, and counts in no quota. To run without a queue, remove the label {QUEUE}"
    priority = label(run.obj, PRIORITY)
    if exists and priority and gang is not None and gang.priority is None:
        problem = f"no WorkloadPriorityClass {priority}: create it, or remove the label {PRIORITY}; until then the run waits"
    run.state.queue_read = (run.unix_seconds, problem)
    return problem
