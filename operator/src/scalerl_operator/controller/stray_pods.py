"""Pods that keep a run from going on, and that no controller deletes: of a failed gang, of a coordinator without its labels or on a
node that does not answer."""

from __future__ import annotations

from typing import Final

from scalerl_api.reasons import Reason
from scalerl_lifecycle.status_fields import seconds
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import Findings, Run
from scalerl_operator.controller.pod_views import JOB_NAME, attempt_of
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.objects import is_deleted, label
from scalerl_operator.kube.types import Object
from scalerl_operator.names import COMPONENT, RUN, Names, label_value

SEARCH_SECONDS: Final = 15.0
"""Between two searches for the coordinator's pod when it is not in the cache."""
FAILED_GANG_GRACE_SECONDS: Final = 5


async def replace_unlabelled_coordinator(api: KubeApi, run: Run) -> None:
    """Deletes the coordinator's pod if its labels were removed: its Service and the operator do not find it, and the
    StatefulSet cannot create another of its name. The next pod resumes from the journal."""
    names = Names(run.name)
    name, owner = f"{names.coordinator}-0", run.objects.get(("StatefulSet", names.coordinator))
    pod = run.objects.get(("Pod", name))
    if owner is None or is_deleted(owner) or (pod is not None and _is_labelled(pod, run)):
        return
    age = run.unix_seconds - seconds(owner["metadata"].get("creationTimestamp"))
    if age < SEARCH_SECONDS or 0 <= run.unix_seconds - run.state.pod_searched < SEARCH_SECONDS:
        return
    run.state.pod_searched = run.unix_seconds
    for pod in await api.list("Pod", run.namespace, field_selector=f"metadata.name={name}"):
        owners = {o["uid"] for o in pod["metadata"].get("ownerReferences") or ()}
        mounted = {(v.get("secret") or {}).get("secretName") for v in pod["spec"].get("volumes") or ()}
        labelled = _is_labelled(pod, run) and label(pod, RUN) == label_value(run.name)
        foreign = owners - {owner["metadata"]["uid"]} or names.token not in mounted
        if is_deleted(pod) or labelled or foreign:
            continue
        await api.delete("Pod", run.namespace, name, uid=pod["metadata"]["uid"])
        text = f"Pod {name}: its labels were removed; deleted, so that the StatefulSet creates another"
        await api.event(run.obj, "Warning", Reason.REPAIRED_DRIFT, text)


async def delete_lost_coordinators(api: KubeApi, findings: Findings) -> None:
    """Deletes the coordinator's pods on lost nodes by force, once no other with their number can follow. They may still run: the
    next one takes the journal over."""
    run = findings.run
    owner = run.objects.get(("StatefulSet", Names(run.name).coordinator))
    for pod in findings.observed.lost_coordinators:
        if (
            owner is not None
            and not is_deleted(owner)
            and attempt_of(owner["spec"]["template"]) <= pod.attempt
        ):
            continue
        text = (
            f"Pod {pod.name}: its node does not answer; deleted by force, so that the next coordinator starts"
        )
        await api.event(run.obj, "Warning", Reason.NODE_LOST, text)
        await api.delete("Pod", run.namespace, pod.name, uid=pod.uid, grace_seconds=0)


async def end_failed_gang(api: KubeApi, run: Run, job: str) -> None:
    """Deletes the remaining pods of a failed Job, or of one with a lost pod, with a short grace period: they have nothing to
    save, and may hang in a collective."""
    grace = FAILED_GANG_GRACE_SECONDS
    for (kind, name), pod in run.objects.items():
        if kind != "Pod" or not run.owns(pod) or label(pod, JOB_NAME) != job:
            continue
        phase, metadata = (pod.get("status") or {}).get("phase"), pod["metadata"]
        longer = metadata.get("deletionGracePeriodSeconds", grace + 1) > grace
        if phase in ("Pending", "Running") and longer:
            uid = metadata["uid"]
            await api.delete(kind, run.namespace, name, uid=uid, grace_seconds=grace)


def _is_labelled(pod: Object, run: Run) -> bool:
    """Whether the pod matches the selector of the coordinator's StatefulSet."""
    return run.owns(pod) and label(pod, COMPONENT) == Role.COORDINATOR
