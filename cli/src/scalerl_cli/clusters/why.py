"""``scalerl why``: what a run waits for, and what to do, in three lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from typing import Final

from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_cli.clusters.get import summary
from scalerl_cli.clusters.runs import ENDED_PHASES, Run, advice, find, plain, since
from scalerl_cli.clusters.session import Session
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo
from scalerl_lifecycle.workloads import Role
from scalerl_operator.kube import errors
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.gang import WORKLOAD
from scalerl_operator.names import COMPONENT, QUEUE, selector

MAX_TEXT: Final = 600
"""Characters of a line."""
_VISIBILITY: Final = (
    "/apis/visibility.kueue.x-k8s.io/{version}/namespaces/{namespace}/localqueues/{queue}/pendingworkloads"
)


def why(session: Session, arguments: argparse.Namespace) -> int:
    """Print state, cause and advice of a run."""
    run = find(session, arguments.name)
    cause, what_to_do = explain(session, run)
    if arguments.output == "json":
        echo(json.dumps(summary(run) | {"why": cause, "advice": what_to_do}, indent=2))
        return DONE
    for line in (_state(run), f"why: {cause}", f"do:  {what_to_do}"):
        echo(line)
    return DONE


def _state(run: Run) -> str:
    reason = f" ({run.reason})" if run.reason else ""
    parts = [f"{run.namespace}/{run.name}: {run.phase}{reason}"]
    if run.record is not None:
        parts.append(f"deleted, ended {run.age} ago")
    elif (condition := run.condition) is not None:
        parts.append(f"for {since(condition.get('lastTransitionTime'))}")
    parts += [f"step {run.steps}"] if run.steps else []
    parts += [f"ETA {run.eta}"] if run.eta else []
    return plain(", ".join(parts))


def explain(session: Session, run: Run) -> tuple[str, str]:
    """Cause and advice, each on one line."""
    cause, what_to_do = _explain(session, run)
    return plain(cause)[:MAX_TEXT], plain(what_to_do)[:MAX_TEXT]


def _explain(session: Session, run: Run) -> tuple[str, str]:
    metadata, condition = run.obj["metadata"], run.condition
    if run.record is not None:
        text = "" if condition is None else str(condition.get("message"))
        return (
            f"the run was deleted; {text or 'it had no problem'}",
            f"`scalerl fetch {run.name} curve` has its curve; its files are on the claim {run.claim}, if it was kept",
        )
    if not run.status.get("conditions"):
        return (
            f"no operator has reported on the run since it was created {since(metadata.get('creationTimestamp'))} ago",
            "check that the operator runs and watches this namespace: kubectl get deployment -A -l app.kubernetes.io/name=scalerl",
        )
    if metadata.get("deletionTimestamp") is not None:
        return (
            f"it is being deleted since {since(metadata['deletionTimestamp'])}: it writes a checkpoint and releases its devices",
            "wait; docs/operations.md, A drain without a coordinator, has the limits",
        )
    seen, current = run.status.get("observedGeneration") or 0, metadata.get("generation") or 0
    behind = f"the operator has not seen the last edit (generation {current}) yet; " if seen < current else ""
    if condition is None:
        return f"{behind}it has no problem and waits for nothing", "nothing"
    message = str(condition.get("message") or "")
    parts = [message or str(condition.get("type"))]
    if condition.get("type") == ConditionType.COMPLETED and run.status.get("stopReason"):
        parts.append(f"stopped: {run.status['stopReason']}")
    if run.phase not in (*ENDED_PHASES, Phase.SUSPENDED):
        pods = _pods(session, run)
        found = (_unscheduled(pods), *_queue(session, run, pods), _preparation(session, run, pods))
        parts += [text for text in found if text]
    shown = [part for at, part in enumerate(parts) if not any(part in other for other in parts[:at])]
    return behind + "; ".join(shown), advice(
        condition
    ) or "read the conditions: kubectl describe scalerlrun " + run.name


def _pods(session: Session, run: Run) -> list[Object]:
    """The run's pods; none if the user may not list them, since the conditions have the most important."""
    try:
        return session.list("Pod", run.namespace, ",".join(f"{k}={v}" for k, v in selector(run.uid).items()))
    except errors.ApiError:
        return []


def _unscheduled(pods: list[Object]) -> str:
    """Why the scheduler does not place a pod; empty if all are placed."""
    for pod in pods:
        for one in (pod.get("status") or {}).get("conditions") or ():
            if one.get("type") == "PodScheduled" and one.get("status") == "False" and one.get("message"):
                return f"the pod {pod['metadata']['name']} is not scheduled: {one['message']}"
    return ""


def _queue(session: Session, run: Run, pods: list[Object]) -> tuple[str, ...]:
    """Position of the run in its queue, by Kueue's visibility API, and what it lacks, by its Workloads, as far as the user may read them."""
    queue = (run.obj["metadata"].get("labels") or {}).get(QUEUE)
    if not queue or run.reason != Reason.WAITING_FOR_QUOTA:
        return ()
    uids = {run.uid, *(pod["metadata"]["uid"] for pod in pods)}
    lacks: list[str] = []
    with contextlib.suppress(errors.ApiError):
        for workload in session.list(WORKLOAD, run.namespace):
            for one in (workload.get("status") or {}).get("conditions") or ():
                waits = (one.get("type"), one.get("status")) == ("QuotaReserved", "False")
                if waits and _is_of_run(workload, run, uids):
                    lacks.append(str(one.get("message") or ""))
    return _position(session, run, queue, uids), *lacks


def _position(session: Session, run: Run, queue: str, uids: set[str]) -> str:
    for version in ("v1beta2", "v1beta1"):
        path = _VISIBILITY.format(version=version, namespace=run.namespace, queue=queue)
        with contextlib.suppress(errors.ApiError):
            for item in session.raw(path, f"get pendingworkloads {run.namespace}/{queue}").get("items") or ():
                if _is_of_run(item, run, uids):
                    return f"position {int(item['positionInLocalQueue']) + 1} in the queue {queue}"
            return ""
    return ""


def _is_of_run(workload: Object, run: Run, uids: set[str]) -> bool:
    """Whether a Workload is that of the run, of one of its pods, or of one of its Jobs, which a user need not be allowed to read."""
    jobs = re.compile(f"{re.escape(run.names.prepare)}|{re.escape(run.names.trainer)}-[0-9]+")
    owners = workload["metadata"].get("ownerReferences") or ()
    return any(o["uid"] in uids or (o["kind"] == "Job" and jobs.fullmatch(o["name"])) for o in owners)


def _preparation(session: Session, run: Run, pods: list[Object]) -> str:
    """The last line of the preparation's log, while it prepares."""
    if run.phase != Phase.PREPARING:
        return ""
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        if labels.get(COMPONENT) == Role.PREPARE and (pod.get("status") or {}).get("phase") == "Running":
            with contextlib.suppress(errors.ApiError):
                query = {"container": str(Role.PREPARE), "tailLines": "1"}
                lines = [*session.log(run.namespace, pod["metadata"]["name"], query, follow=False)]
                return f"the preparation logs: {lines[-1].decode(errors='replace')}" if lines else ""
    return ""
