"""The Workload of a queued run (:mod:`scalerl_operator.build.gang`): what it says of the run, and what the operator answers.

Kueue sets ``Admitted`` and ``Evicted``. The operator creates the run's pods while the Workload is admitted. After an eviction it ends
them, and then gives the quota back, with which Kueue queues the Workload again in its old place.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase, Reason
from scalerl_operator.build.gang import ROLES, WORKLOAD, Gang, minimum
from scalerl_operator.controller.observe import PodView, RunObservation, label, rfc3339, true_condition
from scalerl_operator.controller.run_context import WORKLOADS, RunContext, is_deleted
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.names import COMPONENT, PRIORITY, QUEUE, Names
from scalerl_operator.policy.lifecycle_types import Job, JobState, LifecycleDecision
from scalerl_operator.workloads import Role

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


async def find(api: KubeApi, context: RunContext, *, served: bool) -> Gang | None:
    """The gang of a run; None: it has none, since it has no queue, the cluster serves no Workloads, it was started
    without one, or the operator may not read the class of its priority, as with a role for single namespaces.

    served: the cluster serves Workloads.
    """
    live = _live(context)
    if live is None:
        if (
            not (served and label(context.obj, QUEUE))
            or context.accepted is None
            or _queued_one_by_one(context)
        ):
            return None
        try:
            return Gang(minimum(context.run.spec), priority=await _priority(api, context))
        except errors.Forbidden:
            return None
    priority = live["spec"].get("priority", 0)
    generators = next((s["count"] for s in live["spec"]["podSets"] if s["name"] == Role.GENERATOR), 1)
    admission = (live.get("status") or {}).get("admission")
    evicted = bool(true_condition(live, "Evicted"))
    if admission is None or not (evicted or true_condition(live, "Admitted")):
        return Gang(generators, priority=priority)
    known = (live["metadata"]["uid"], json.dumps(admission, sort_keys=True))
    if context.state.placement[0] != known:
        placement, unread = await _placement(api, admission)
        context.state.placement = (known, placement)
        context.state.unread_flavors = UNREAD_FLAVORS.format(", ".join(unread)) if unread else ""
        if unread:
            log.warning("%s/%s: %s", context.namespace, context.name, context.state.unread_flavors)
    return Gang(generators, context.state.placement[1], admitted=not evicted, priority=priority)


async def _priority(api: KubeApi, context: RunContext) -> int | None:
    """:attr:`.Gang.priority`. Reads the class at most every :data:`PRIORITY_SECONDS`.

    Raises:
        Forbidden: the operator may not read it.
    """
    name, now = label(context.obj, PRIORITY), context.unix_seconds
    read_at, known, value = context.state.priority_read
    if not name or (known == name and 0 <= now - read_at < PRIORITY_SECONDS):
        return value if name else None
    found = await api.get("WorkloadPriorityClass", None, name)
    value = None if found is None else int(found.get("value", 0))
    context.state.priority_read = (now, name, value)
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


def observed_in_queue(context: RunContext, observed: RunObservation) -> RunObservation:
    """The observation, with the trainer as a Job that is held, or is being stopped, while its gang is not admitted."""
    memory, trainer = context.memory, observed.trainer
    waits = context.gang is not None and not context.gang.admitted and _live(context) is not None
    ended = trainer.state in (JobState.COMPLETE, JobState.FAILED)
    if not waits or ended or memory.attempt == 0 or memory.attempt == memory.last_recorded_attempt:
        return observed
    ending = trainer.state is JobState.LEAVING or any(_is_active(p, (Role.TRAINER,)) for p in observed.pods)
    held = Job(
        JobState.ACTIVE,
        attempt=memory.attempt,
        stale=trainer.stale,
        held=True,
        ending=ending,
        abandoned=trainer.abandoned,
    )
    return replace(observed, trainer=held)


def is_wanted(decision: LifecycleDecision, prepare: Job) -> bool:
    """Whether a run keeps its place in the queue, or its quota: from its first attempt to its end, also between two attempts. Not
    beside a preparation in the queue, of which a run that is resumed would wait for the quota, and it for the run's."""
    prepared = decision.prepare and prepare.state is JobState.COMPLETE
    waits = decision.phase is Phase.PENDING and prepared and decision.memory.attempt > 0
    starts = decision.coordinator or decision.trainer is not None
    return decision.phase in _WITH_WORKLOADS and (waits or starts)


def why_waiting(context: RunContext) -> str:
    """Why the quota of an evicted Workload was not given back, or what Kueue says of one that it has not admitted; else the general advice."""
    live = _live(context) or {}
    conditions = {c["type"]: c for c in (live.get("status") or {}).get("conditions") or ()}
    reserved = conditions.get("QuotaReserved", {})
    said = "" if reserved.get("status") == "True" else reserved.get("message", "")
    return context.state.unanswered or said or Reason.WAITING_FOR_QUOTA.text


async def answer(api: KubeApi, context: RunContext) -> None:
    """Gives the quota of an evicted Workload back once the run has no pods, and says when the pods of an admitted one are ready.
    A refusal is logged, and said by the condition Admitted.

    Raises:
        Conflict: Kueue has changed the Workload meanwhile; the next reconcile tries again.
    """
    live, observed = _live(context), context.observed
    context.state.unanswered = ""
    if live is None or not true_condition(live, "QuotaReserved"):
        return
    eviction = true_condition(live, "Evicted")
    now = rfc3339(context.unix_seconds)

    def said(kind: str, status: bool, reason: str, message: str) -> Object:
        generation = live["metadata"].get("generation", 0)
        return {
            "type": kind,
            "status": str(status),
            "reason": reason,
            "message": message,
            "lastTransitionTime": now,
            "observedGeneration": generation,
        }

    if eviction:
        if any(_is_active(pod, ROLES) for pod in observed.pods):
            return
        reason, message = eviction["reason"], eviction.get("message", "")
        news = [
            said("QuotaReserved", False, "Pending", message),
            said("Admitted", False, "NoReservation", "The workload has no reservation"),
            said("Requeued", reason in _REQUEUED, reason, message),
        ]
    elif _is_ready(context) and not true_condition(live, "PodsReady"):
        news = [
            said(
                "PodsReady", True, "Started", "All pods were ready or succeeded since the workload admission"
            )
        ]
    else:
        return
    kinds = {one["type"] for one in news}
    kept = [one for one in live["status"].get("conditions") or () if one["type"] not in kinds]
    status: Object = {"conditions": [*kept, *news]} | ({"admission": None} if eviction else {})
    name, version = live["metadata"]["name"], live["metadata"]["resourceVersion"]
    try:
        await api.patch(
            WORKLOAD, context.namespace, name, {"status": status}, "status", resource_version=version
        )
    except (errors.Forbidden, errors.Invalid, errors.NotFound) as error:
        text = f"the status of Workload {name} cannot be written: {error.message}"
        context.state.unanswered = text
        log.warning("%s/%s: %s", context.namespace, context.name, text)


def _is_ready(context: RunContext) -> bool:
    observed, gang = context.observed, context.gang
    if gang is None or not gang.admitted or not observed.trainer.ready:
        return False
    generators = observed.service(Role.GENERATOR).ready
    wanted = min(gang.generators, context.decision.generators)
    return observed.service(Role.COORDINATOR).ready > 0 and generators >= wanted


def _is_active(pod: PodView, roles: tuple[Role, ...]) -> bool:
    """Whether a pod may still run. The node of a lost one cannot say so, and no longer counts in the quota."""
    return pod.role in roles and not (pod.over or pod.lost)


def _live(context: RunContext) -> Object | None:
    live = context.objects.get((WORKLOAD, Names(context.name).workload))
    return None if live is None or is_deleted(live) or not context.owns(live) else live


def _queued_one_by_one(context: RunContext) -> bool:
    """Whether Kueue has queued the run's workloads one by one, since it was started where there were no gangs."""
    extra = Names(context.name).extra_generators
    return any(
        kind in WORKLOADS and label(obj, QUEUE) and label(obj, COMPONENT) in ROLES and name != extra
        for (kind, name), obj in context.objects.items()
        if context.owns(obj)
    )
