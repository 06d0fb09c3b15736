"""Explains pods that were not created or did not start, from Events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from scalerl_api.reasons import Reason
from scalerl_lifecycle.lifecycle_types import JobState, Problem
from scalerl_lifecycle.status_fields import seconds
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.cluster_messages import claim_problem, creation_problem, mount_problem
from scalerl_operator.controller.parts import CLAIM, Findings, Run
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.objects import is_deleted, label
from scalerl_operator.kube.types import Object
from scalerl_operator.names import COMPONENT, Names

MIN_AGE_SECONDS: Final = 10.0
"""Age of an object without pods, or of a pod that does not start, from which its Events are read."""
EVENTS_SECONDS: Final = 15.0
"""Between two requests for the Events of one run."""
START_CHECK_SECONDS: Final = (15.0, 300.0)
"""First and longest wait between two reconciles of a run whose pods are starting."""
RECENT_SECONDS: Final = 300.0
"""An older Event may be out of date: the kubelet and the volume controllers repeat the Event while the cause lasts."""
RECENT_CREATION_SECONDS: Final = 1200.0
"""The same, of a controller that cannot create a pod: it retries at intervals of up to 1,000 s."""
_CREATION: Final = ("FailedCreate",)
_START: Final = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
_BINDING: Final = ("ProvisioningFailed", "FailedBinding")
_CLASSIFY: Final = {_CREATION: creation_problem, _START: mount_problem, _BINDING: claim_problem}
"""Reasons of Events, and the function that classifies their messages."""


async def diagnose(api: KubeApi, findings: Findings) -> Problem | None:
    """Why a pod was not created or does not start, from the Events of the first such object: the cause of several is usually
    the same. Reads Events at most every :data:`EVENTS_SECONDS` for one run.
    """
    run = findings.run
    read_at, problem = run.state.events_read
    waiting = _first_waiting(findings)
    if waiting is None:
        run.state.events_read = (0.0, None)
        return None
    if 0 <= run.unix_seconds - read_at < EVENTS_SECONDS:
        return problem
    name, uid, reasons = waiting
    message = await _last_event(api, run, uid, reasons)
    problem = None
    if message:
        problem = Problem(_CLASSIFY[reasons](message), f"{name}: {message}")
        if Names(run.name).token in message:
            run.state.token_unverified = True
    run.state.events_read = (run.unix_seconds, problem)
    return problem


def next_start_check(findings: Findings) -> float | None:
    """Seconds to the next read of Events, which are not watched, while a pod is missing or starts; longer, the longer that start
    takes, which may be the hundredth of the run."""
    observed, now = findings.observed, findings.run.unix_seconds
    begun = [pod.created for pod in observed.pods if pod.creating and not pod.terminating]
    preparing = findings.decision.wanted.prepare and observed.prepare.state is not JobState.COMPLETE
    if preparing and not observed.of(Role.PREPARE):
        job = findings.run.objects.get(("Job", Names(findings.run.name).prepare))
        begun.append(now if job is None else seconds(job["metadata"].get("creationTimestamp")))
    if not begun:
        return None
    first, longest = START_CHECK_SECONDS
    return min(max(first, (now - max(begun)) / 2), longest)


def _first_waiting(findings: Findings) -> tuple[str, str, tuple[str, ...]] | None:
    """The first object without its pods, or pod that does not start: name, uid, and the reasons of Events with the cause."""
    run, observed = findings.run, findings.observed
    for (kind, name), obj in run.objects.items():
        role = label(obj, COMPONENT)
        old = run.unix_seconds - seconds(obj["metadata"].get("creationTimestamp")) > MIN_AGE_SECONDS
        if not old or is_deleted(obj) or any(p.role == role for p in observed.pods):
            continue
        job = observed.trainer if role == Role.TRAINER else observed.prepare
        wanted = kind == "StatefulSet" and findings.decision.wanted.coordinator
        if wanted or (kind == "Job" and job.state is JobState.ACTIVE and not job.gated):
            return f"{kind} {name}", obj["metadata"]["uid"], _CREATION
    for pod in observed.pods:
        if pod.creating and not pod.terminating and run.unix_seconds - pod.created > MIN_AGE_SECONDS:
            return pod.name, pod.uid, _START
    claim = run.objects.get((CLAIM, Names(run.name).claim))
    waits = any(p.problem is not None and p.problem.reason is Reason.VOLUME_NOT_READY for p in observed.pods)
    if waits and claim is not None and (claim.get("status") or {}).get("phase") == "Pending":
        return f"{CLAIM} {claim['metadata']['name']}", claim["metadata"]["uid"], _BINDING
    return None


async def _last_event(api: KubeApi, run: Run, uid: str, reasons: Sequence[str]) -> str:
    try:
        events = await api.list("Event", run.namespace, field_selector=f"involvedObject.uid={uid}")
    except errors.Forbidden:
        return ""
    oldest = run.unix_seconds - (RECENT_CREATION_SECONDS if reasons == _CREATION else RECENT_SECONDS)
    recent = [e for e in events if e.get("reason") in reasons and _time(e) > oldest]
    return str(max(recent, key=_time).get("message", "")) if recent else ""


def _time(event: Object) -> float:
    return seconds(event.get("lastTimestamp") or event.get("eventTime"))
