"""The Workload of a queued run (:mod:`scalerl_operator.manifests.gang`): what it says of the run, and what the operator answers.

Kueue sets ``Admitted`` and ``Evicted``. The operator creates the run's pods while the Workload is admitted. After an eviction it ends
them, and then gives the quota back, with which Kueue queues the Workload again in its old place.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.reasons import Reason
from scalerl_lifecycle.lifecycle_types import Job, JobState, LifecycleDecision
from scalerl_lifecycle.role_containers import environment_replicas
from scalerl_lifecycle.status_fields import rfc3339
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import WORKLOADS, Accepted, Findings, Observed, PodView, Run
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.objects import is_deleted, label, true_condition
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.gang import ROLES, WORKLOAD, Gang, minimum
from scalerl_operator.names import COMPONENT, PRIORITY, QUEUE, Names

log = logging.getLogger(__name__)

_WITH_WORKLOADS: Final = (Phase.PENDING, Phase.PREPARING, Phase.RUNNING, Phase.FINISHING, Phase.SUSPENDING)
PRIORITY_SECONDS: Final = 30.0
"""Between two requests for the class of one run's priority, until it has a Workload."""
UNREAD_FLAVORS: Final = (
    "the operator may not get the ResourceFlavor {}, whose node labels and tolerations the pods therefore lack: bind its service "
    "account to a ClusterRole that may get resourceflavors.kueue.x-k8s.io, or write them into spec.podTemplate"
)
_REQUEUED: Final = ("Preempted", "NodeFailures")
"""Reasons of evictions after which Kueue queues a Workload at once; after others it decides when."""


async def find(api: KubeApi, run: Run, accepted: Accepted, *, served: bool) -> Gang | None:
    """The gang of a run; None: it has none, since it has no queue, the cluster serves no Workloads, it was started
    without one, or the operator may not read the class of its priority, as with a role for single namespaces.

    Args:
        served: the cluster serves Workloads.
    """
    live = _live(run)
    if live is None:
        if not (served and label(run.obj, QUEUE)) or accepted.found is None or _queued_one_by_one(run):
            return None
        try:
            spec, generators = accepted.spec, minimum(accepted.spec)
            servers = 0 if spec.environment is None else environment_replicas(spec, generators)
            return Gang(generators, priority=await _priority(api, run), environments=servers)
        except errors.Forbidden:
            return None
    priority = live["spec"].get("priority", 0)
    counts = {one["name"]: one["count"] for one in live["spec"]["podSets"]}
    generators, servers = counts.get(Role.GENERATOR, 1), counts.get(Role.ENVIRONMENT, 0)
    admission = (live.get("status") or {}).get("admission")
    evicted = bool(true_condition(live, "Evicted"))
    if admission is None or not (evicted or true_condition(live, "Admitted")):
        return Gang(generators, priority=priority, environments=servers)
    known = (live["metadata"]["uid"], json.dumps(admission, sort_keys=True))
    if run.state.placement[0] != known:
        placement, unread = await _placement(api, admission)
        run.state.placement = (known, placement)
        run.state.unread_flavors = UNREAD_FLAVORS.format(", ".join(unread)) if unread else ""
        if unread:
            log.warning("%s/%s: %s", run.namespace, run.name, run.state.unread_flavors)
    return Gang(
        generators,
        run.state.placement[1],
        admitted=not evicted,
        priority=priority,
        environments=servers,
    )


async def _priority(api: KubeApi, run: Run) -> int | None:
    """:attr:`.Gang.priority`. Reads the class at most every :data:`PRIORITY_SECONDS`.

    Raises:
        Forbidden: the operator may not read it.
    """
    name, now = label(run.obj, PRIORITY), run.unix_seconds
    read_at, known, value = run.state.priority_read
    if not name or (known == name and 0 <= now - read_at < PRIORITY_SECONDS):
        return value if name else None
    found = await api.get("WorkloadPriorityClass", None, name)
    value = None if found is None else int(found.get("value", 0))
    run.state.priority_read = (now, name, value)
    return value


async def _placement(api: KubeApi, admission: Object) -> tuple[str, list[str]]:
    """:attr:`.Gang.placement`, and the names of ResourceFlavors that the operator may not read, as with a role for single
    namespaces."""
    flavors: dict[str, Object] = {}
    unread: list[str] = []
    found = {}
    for assigned in admission["podSetAssignments"]:
        selector: Object = {}
        tolerations: list[Object] = []
        for flavor in sorted(set((assigned.get("flavors") or {}).values())):
            if flavor not in flavors:
                try:
                    found_flavor = await api.get("ResourceFlavor", None, flavor)
                except errors.Forbidden:
                    found_flavor = None
                    unread.append(flavor)
                flavors[flavor] = (found_flavor or {}).get("spec") or {}
            selector |= flavors[flavor].get("nodeLabels") or {}
            tolerations += flavors[flavor].get("tolerations") or []
        found[assigned["name"]] = {
            "nodeSelector": selector,
            "tolerations": tolerations,
            "topology": assigned.get("topologyAssignment") is not None,
        }
    return json.dumps(found, sort_keys=True), unread


def observed_in_queue(run: Run, observed: Observed) -> Observed:
    """The observation, with the trainer as a Job that is gated, or is being stopped, while its gang is not admitted."""
    persisted, trainer = run.persisted, observed.trainer
    waits = observed.gang is not None and not observed.gang.admitted and _live(run) is not None
    ended = trainer.state in (JobState.COMPLETE, JobState.FAILED)
    if not waits or ended or persisted.attempt == 0 or persisted.attempt == persisted.last_recorded_attempt:
        return observed
    ending = trainer.state is JobState.TERMINATING or any(
        _is_active(p, (Role.TRAINER,)) for p in observed.pods
    )
    gated = Job(JobState.ACTIVE, persisted.attempt, stale=trainer.stale, gated=True, pods_terminating=ending)
    return replace(observed, trainer=replace(gated, abandoned=trainer.abandoned))


def is_wanted(decision: LifecycleDecision, prepare: Job) -> bool:
    """Whether a run keeps its place in the queue, or its quota: from its first attempt to its end, also between two attempts. Not
    beside a preparation in the queue, of which a run that is resumed would wait for the quota, and it for the run's."""
    prepared = decision.wanted.prepare and prepare.state is JobState.COMPLETE
    waits = decision.phase is Phase.PENDING and prepared and decision.persisted.attempt > 0
    starts = decision.wanted.coordinator or decision.wanted.trainer is not None
    return decision.phase in _WITH_WORKLOADS and (waits or starts)


def why_waiting(run: Run) -> str:
    """Why the quota of an evicted Workload was not given back, or what Kueue says of one that it has not admitted; else the general advice."""
    live = _live(run) or {}
    conditions = {c["type"]: c for c in (live.get("status") or {}).get("conditions") or ()}
    reserved = conditions.get("QuotaReserved", {})
    said = "" if reserved.get("status") == "True" else reserved.get("message", "")
    return run.state.workload_refusal or said or Reason.WAITING_FOR_QUOTA.text


async def write_workload_status(api: KubeApi, findings: Findings) -> None:
    """Gives the quota of an evicted Workload back once the run has no pods, and says when the pods of an admitted one are ready.
    A refusal is logged, and said by the condition Admitted.

    Raises:
        Conflict: Kueue has changed the Workload meanwhile; the next reconcile tries again.
    """
    run = findings.run
    live = _live(run)
    run.state.workload_refusal = ""
    if live is None or not true_condition(live, "QuotaReserved"):
        return
    eviction = true_condition(live, "Evicted")
    at = {
        "lastTransitionTime": rfc3339(run.unix_seconds),
        "observedGeneration": live["metadata"].get("generation", 0),
    }

    def said(kind: str, status: bool, reason: str, message: str) -> Object:
        return {"type": kind, "status": str(status), "reason": reason, "message": message, **at}

    if eviction:
        if any(_is_active(pod, ROLES) for pod in findings.observed.pods):
            return
        reason, message = eviction["reason"], eviction.get("message", "")
        news = [
            said("QuotaReserved", False, "Pending", message),
            said("Admitted", False, "NoReservation", "The workload has no reservation"),
            said("Requeued", reason in _REQUEUED, reason, message),
        ]
    elif _is_ready(findings) and not true_condition(live, "PodsReady"):
        message = "All pods were ready or succeeded since the workload admission"
        news = [said("PodsReady", True, "Started", message)]
    else:
        return
    kinds = {one["type"] for one in news}
    kept = [one for one in live["status"].get("conditions") or () if one["type"] not in kinds]
    status: Object = {"conditions": [*kept, *news]} | ({"admission": None} if eviction else {})
    name, version = live["metadata"]["name"], live["metadata"]["resourceVersion"]
    try:
        await api.patch(WORKLOAD, run.namespace, name, {"status": status}, "status", resource_version=version)
    except (errors.Forbidden, errors.Invalid, errors.NotFound) as error:
        text = f"the status of Workload {name} cannot be written: {error.message}"
        run.state.workload_refusal = text
        log.warning("%s/%s: %s", run.namespace, run.name, text)


def _is_ready(findings: Findings) -> bool:
    observed, gang = findings.observed, findings.observed.gang
    if gang is None or not gang.admitted or not observed.trainer.ready:
        return False
    generators = observed.service(Role.GENERATOR).ready
    replicas = findings.accepted.spec.generator.replicas if findings.decision.wanted.generators else 0
    return observed.service(Role.COORDINATOR).ready > 0 and generators >= min(gang.generators, replicas)


def _is_active(pod: PodView, roles: tuple[Role, ...]) -> bool:
    """Whether a pod may still run. The node of a lost one cannot say so, and no longer counts in the quota."""
    return pod.role in roles and not (pod.finished or pod.lost)


def _live(run: Run) -> Object | None:
    live = run.objects.get((WORKLOAD, Names(run.name).workload))
    return None if live is None or is_deleted(live) or not run.owns(live) else live


def _queued_one_by_one(run: Run) -> bool:
    """Whether Kueue has queued the run's workloads one by one, since it was started where there were no gangs."""
    names = Names(run.name)
    extra = (names.extra_generators, names.extra_environments)
    return any(
        kind in WORKLOADS and label(obj, QUEUE) and label(obj, COMPONENT) in ROLES and name not in extra
        for (kind, name), obj in run.objects.items()
        if run.owns(obj)
    )
