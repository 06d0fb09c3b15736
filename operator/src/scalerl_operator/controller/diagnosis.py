"""Explains pods that were not created or did not start, from Events, and runs whose queue does not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from scalerl_api.conditions import ConditionType, Phase, Reason
from scalerl_operator.controller.observe import label, seconds
from scalerl_operator.controller.run_context import CLAIM, RunContext, is_deleted
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.names import COMPONENT, QUEUE, Names
from scalerl_operator.policy.lifecycle_types import JobState
from scalerl_operator.policy.problems import Problem, claim_problem, creation_problem, mount_problem
from scalerl_operator.workloads import Role

SILENT_SECONDS: Final = 10.0
"""Age of an object without pods, or of a pod that does not start, from which its Events are read."""
ASK_SECONDS: Final = 15.0
"""Between two requests for the Events of one run."""
START_CHECK_SECONDS: Final = (15.0, 300.0)
"""First and longest wait between two reconciles of a run whose pods are to start."""
ASK_QUEUE_SECONDS: Final = 30.0
"""Between two requests for the queue of one run."""
RECENT_SECONDS: Final = 300.0
"""An older Event may be out of date: the kubelet and the volume controllers repeat the Event while the cause lasts."""
RECENT_CREATION_SECONDS: Final = 1200.0
"""The same, of a controller that cannot create a pod: it tries again after 1,000 s at most, and that long nothing changes."""
_MAKING: Final = ("FailedCreate",)
_BEGINNING: Final = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
_BINDING: Final = ("ProvisioningFailed", "FailedBinding")
_PROBLEM: Final = {_MAKING: creation_problem, _BEGINNING: mount_problem, _BINDING: claim_problem}
"""By the reasons of the Events: how their message is classified."""
_BEFORE_THE_END: Final = (Phase.PENDING, Phase.PREPARING, Phase.RUNNING)


async def diagnose(api: KubeApi, context: RunContext) -> Problem | None:
    """Why a pod that should exist does not, or does not start, from the Events of one object: of many pods that wait, the
    others wait for the same. Asks at most every :data:`ASK_SECONDS` for one run.
    """
    asked, problem = context.state.events_asked
    silent = _silent(context)
    if silent is None:
        context.state.events_asked = (0.0, None)
        return None
    if 0 <= context.unix_seconds - asked < ASK_SECONDS:
        return problem
    what, uid, reasons = silent
    message = await _last_event(api, context, uid, reasons)
    problem = None
    if message:
        problem = Problem(_PROBLEM[reasons](message), f"{what}: {message}")
        if Names(context.name).token in message:
            context.state.token_doubted = True
    context.state.events_asked = (context.unix_seconds, problem)
    return problem


def next_start_check(context: RunContext) -> float | None:
    """Seconds to the next read of Events: only they say why a pod is not created, or is scheduled and does not start. All else
    wakes the run. The longer a start takes, the rarer."""
    observed = context.observed
    preparing = context.decision.prepare and observed.prepare.state is not JobState.COMPLETE
    unmade = preparing and not observed.of(Role.PREPARE)
    if not unmade and not any(pod.creating and not pod.leaving for pod in observed.pods):
        return None
    first, longest = START_CHECK_SECONDS
    return min(max(first, (context.unix_seconds - seconds(context.before.start_time)) / 2), longest)


def _silent(context: RunContext) -> tuple[str, str, tuple[str, ...]] | None:
    """The first object that has come to nothing: its name, its uid, and which events of it would say why."""
    observed = context.observed
    for (kind, name), obj in context.objects.items():
        role = label(obj, COMPONENT)
        old = context.unix_seconds - seconds(obj["metadata"].get("creationTimestamp")) > SILENT_SECONDS
        if not old or is_deleted(obj) or any(p.role == role for p in observed.pods):
            continue
        job = observed.trainer if role == Role.TRAINER else observed.prepare
        wanted = kind == "StatefulSet" and context.decision.coordinator
        if wanted or (kind == "Job" and job.state is JobState.ACTIVE and not job.held):
            return f"{kind} {name}", obj["metadata"]["uid"], _MAKING
    for pod in observed.pods:
        if pod.creating and not pod.leaving and context.unix_seconds - pod.created > SILENT_SECONDS:
            return pod.name, pod.uid, _BEGINNING
    claim = context.objects.get((CLAIM, Names(context.name).claim))
    waits = any(p.problem is not None and p.problem.reason is Reason.VOLUME_NOT_READY for p in observed.pods)
    if waits and claim is not None and (claim.get("status") or {}).get("phase") == "Pending":
        return f"{CLAIM} {claim['metadata']['name']}", claim["metadata"]["uid"], _BINDING
    return None


async def _last_event(api: KubeApi, context: RunContext, uid: str, reasons: Sequence[str]) -> str:
    try:
        events = await api.list("Event", context.namespace, field_selector=f"involvedObject.uid={uid}")
    except errors.Forbidden:
        return ""
    oldest = context.unix_seconds - (RECENT_CREATION_SECONDS if reasons == _MAKING else RECENT_SECONDS)
    found = [e for e in events if e.get("reason") in reasons and _time(e) > oldest]
    return str(max(found, key=_time).get("message", "")) if found else ""


def _time(event: Object) -> float:
    return seconds(event.get("lastTimestamp") or event.get("eventTime"))


async def queue_problem(api: KubeApi, context: RunContext) -> str:
    """Why the LocalQueue (Kueue) of the run's label does not hold it; empty where one has admitted it, where it exists, and where the operator may not read it.

    Asks at most every :data:`ASK_QUEUE_SECONDS` for one run.

    Raises:
        ApiError: the API server did not answer.
    """
    queue, admitted = label(context.obj, QUEUE), context.before.condition(ConditionType.ADMITTED)
    known = admitted is not None and admitted.status == "True" and admitted.reason != Reason.NO_QUEUE
    if not queue or known or context.decision.phase not in _BEFORE_THE_END:
        return ""
    asked, problem = context.state.queue_asked
    if 0 <= context.unix_seconds - asked < ASK_QUEUE_SECONDS:
        return problem
    try:
        found = await api.get("LocalQueue", context.namespace, queue)
    except errors.Forbidden:
        found = {}  # by a role that is not the chart's
    problem = ""
    if found is None:
        problem = (
            f"no LocalQueue {queue} in the namespace {context.namespace}: with Kueue, the run waits for it; "
        )
        problem += "in a cluster without Kueue it starts, and counts in no quota"
    context.state.queue_asked = (context.unix_seconds, problem)
    return problem
