"""Checks whether a decision can be applied: the volume, the source of a fork, what keeps a new run from being started, and the
queue."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from scalerl_api import plugins
from scalerl_api.cluster import StorageSpec
from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.registry import Kind
from scalerl_api.spec import RunSpec, ScaleRLRun
from scalerl_api.spec_warnings import past_deadline
from scalerl_lifecycle.lifecycle_types import JobState, Problem
from scalerl_lifecycle.status_fields import seconds
from scalerl_operator.controller.parts import CLAIM, WORKLOADS, Checks, Findings, Run
from scalerl_operator.controller.refusals import name_taken, refused
from scalerl_operator.controller.run_object import RunObject
from scalerl_operator.controller.volume import check_volume
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.kinds import RUN as RUN_KIND
from scalerl_operator.kube.objects import is_deleted, label
from scalerl_operator.kube.types import Object
from scalerl_operator.kube.unlabelled import UnlabelledNames
from scalerl_operator.manifests.run_record import RUN_KEY
from scalerl_operator.names import ENDED, PRIORITY, QUEUE, RUN, Names, label_value

QUEUE_SECONDS: Final = 30.0
"""Between two requests for the queue of one run."""
_BEFORE_THE_END: Final = (Phase.PENDING, Phase.PREPARING, Phase.RUNNING)
_FIELD: Final = "spec.from.run"


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
    render_all: renders all objects that the run will have. If the run has a podTemplate or actorResources, its workloads are created as a
    dry run, which also finds that their names are taken: a refusal of the generators would otherwise show only after the preparation.
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


def plugin_problem(spec: RunSpec) -> Problem | None:
    """The first name of what the coordinator opens that its image does not have: that image is the operator's, unless the run names
    another one. The preparation and the vLLM servers check what is in theirs."""
    if spec.images.coordinator is not None:
        return None
    found = plugins.problems(
        spec, (Kind.SOURCE, Kind.VERIFIER, Kind.ENVIRONMENT, Kind.SCHEDULE, Kind.TRACKER)
    )
    return Problem(Reason.REFERENCE_NOT_FOUND, ": ".join(found[0])) if found else None


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
    given = [spec.generator.actor_resources, *(part.pod_template for part in parts if part is not None)]
    return any(one is not None and one.model_dump(exclude_defaults=True) for one in given)


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


async def find_source(api: KubeApi, findings: Findings) -> Checks:
    """The checks with the claim of the run that a run forks (``spec.from``), for a preparation that is about to be created, which alone
    mounts it; or why there is none.

    Only of the run's own namespace: of a run that exists, of one that was deleted by its record, or without either, a claim with
    the labels of a run of that name. A run that has trained has its own checkpoints, and needs the source no more.
    """
    source, checks = findings.accepted.spec.fork, findings.checks
    absent = findings.observed.prepare.state is JobState.ABSENT
    if source is None or findings.run.steps or not findings.decision.wanted.prepare or not absent:
        return checks
    claim, uid = await _claim_of(api, source.run, findings.run)
    found = replace(checks, source_uid=uid)
    if isinstance(claim, Problem):
        return replace(found, not_started=claim)
    return replace(found, source_claim=claim)


async def _claim_of(api: KubeApi, name: str, fork: Run) -> tuple[str | Problem, str]:
    """The claim of the run with that name, or why there is none; and that run's uid."""
    uid, namespace = "", fork.namespace
    if name == fork.name:
        text = f"{_FIELD}: a run cannot be a fork of itself; give it another name"
        return Problem(Reason.SPEC_INVALID, text), uid
    recorded = await api.get(RUN_KIND, namespace, name) or await _recorded(api, namespace, name)
    named = None
    if recorded is not None:
        uid = str(recorded["metadata"].get("uid", ""))
        storage = (recorded.get("spec") or {}).get("storage") or {}
        named = storage.get("claimName")
        if storage.get("mountedBy") == "Coordinator":
            text = f"{_FIELD}: {name}: its checkpoints are in its bucket alone (storage.mountedBy Coordinator), and a fork reads a claim"
            return Problem(Reason.SPEC_INVALID, text), uid
    claim = str(named or Names(name).claim)
    live = await api.get(CLAIM, namespace, claim)
    if live is None:
        known = recorded is not None
        what = "its claim" if known else "there is no such run, and the claim of a deleted one,"
        text = f"{_FIELD}: {name}: {what} {claim} does not exist in the namespace {namespace}"
        return Problem(Reason.REFERENCE_NOT_FOUND, text), uid
    if is_deleted(live):
        text = f"{_FIELD}: {name}: its claim {claim} is being deleted"
        return Problem(Reason.REFERENCE_NOT_FOUND, text), uid
    if named is None and (live["metadata"].get("labels") or {}).get(RUN) != label_value(name):
        text = f"{_FIELD}: {name}: PersistentVolumeClaim {claim} is not known as that of this run (label {RUN}={label_value(name)})"
        return Problem(Reason.REFERENCE_NOT_FOUND, text), uid
    return claim, uid


async def _recorded(api: KubeApi, namespace: str, name: str) -> Object | None:
    """Metadata and spec of the last deleted run of that name, from its record; None without a readable one."""
    found, _ = await api.list_at("ConfigMap", namespace, label_selector=f"{ENDED}={label_value(name)}")
    for one in sorted(found, key=lambda o: str(o["metadata"]["creationTimestamp"]), reverse=True):
        try:
            run = json.loads(one["data"][RUN_KEY])
            if run["metadata"]["name"] == name:
                return dict(run)
        except (KeyError, TypeError, ValueError):  # users may edit records
            continue
    return None
