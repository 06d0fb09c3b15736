"""The observation of a run's objects: the state of its Jobs, and of its pods. Pure.

Phase, container states and conditions of a pod become one :class:`Problem`, with a reason of :mod:`scalerl_api.reasons` and
the cluster's message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.process import (
    BAD_INPUT_EXIT_CODE,
    DIVERGED_EXIT_CODE,
    PUBLISH_REFUSED_EXIT_CODE,
    STEPS_LOST_EXIT_CODE,
)
from scalerl_api.reasons import Reason
from scalerl_api.status import ModelStatus
from scalerl_lifecycle.lifecycle_types import ContainerExit, Job, JobState, Problem, last_log_line
from scalerl_lifecycle.status_fields import seconds
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.cluster_messages import placing_problem
from scalerl_operator.controller.parts import Observed, PodView
from scalerl_operator.kube.objects import belongs, label, true_condition
from scalerl_operator.kube.types import Object
from scalerl_operator.names import ATTEMPT, COMPONENT, SPEC_HASH

JOB_NAME: Final = "batch.kubernetes.io/job-name"
MAX_BACK_OFF: Final = "back-off 5m0s"
"""Part of the message of a kubelet with the default back-off, when a container has reached the longest one."""
QUIET_SECONDS: Final = 600.0
"""Restarts that are further apart are not consecutive."""
PLACING_SECONDS: Final[dict[Reason | Phase, float]] = {
    Reason.UNSCHEDULABLE: 10.0,
    Reason.VOLUME_NOT_READY: 30.0,
}
"""How long a new pod may wait for a node, or for its volume, before that is a problem."""

_WAITING: Final = {
    "ErrImagePull": Reason.IMAGE_PULL_FAILED,
    "ImagePullBackOff": Reason.IMAGE_PULL_FAILED,
    "InvalidImageName": Reason.IMAGE_PULL_FAILED,
    "ImageInspectError": Reason.IMAGE_PULL_FAILED,
    "RegistryUnavailable": Reason.IMAGE_PULL_FAILED,
    "SignatureValidationFailed": Reason.IMAGE_PULL_FAILED,
    "ErrImageNeverPull": Reason.IMAGE_PULL_FAILED,
    "CreateContainerConfigError": Reason.CONTAINER_START_FAILED,
    "CreateContainerError": Reason.CONTAINER_START_FAILED,
    "RunContainerError": Reason.CONTAINER_START_FAILED,
    "CrashLoopBackOff": Reason.BACK_OFF,
}
_MISSING: Final = ("not found", "couldn't find key")
"""In the kubelet's message about a container whose Secret or ConfigMap, or a key of it, does not exist."""
_NEVER_STARTED: Final = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of containers whose program did not start: it is not in the image, or is of another architecture."""
_EVICTED: Final = frozenset({"Evicted", "Preempting", "Terminated", "NodeLost"})
"""Reasons of failed pods that were evicted. All others are those of a node that refused the pod: a lack of a resource
(OutOfcpu), an unhealthy device (UnexpectedAdmissionError), a shutdown (NodeShutdown)."""
_DISRUPTION: Final = "DisruptionTarget"
"""The condition of a pod that is evicted, preempted, drained, or on a lost node."""
LOST_SECONDS: Final = 60.0
"""A pod that still exists so long after its grace period, by the operator's clock alone, is on a node that does not answer."""


def observe_objects(
    objects: Mapping[tuple[str, str], Object],
    uid: str,
    hashes: Mapping[Role, str],
    terminating_seconds: Mapping[str, float] = MappingProxyType({}),
    lost_seconds: float = LOST_SECONDS,
) -> Observed:
    """The observation of a run.

    Args:
        objects: by (kind, name).
        uid: the run's; objects of an earlier run of the same name are left out.
        hashes: those of the accepted spec, by role.
        terminating_seconds: by a pod's uid, see :func:`pod_view`.
        lost_seconds: see :data:`LOST_SECONDS`.
    """
    own = {key: obj for key, obj in objects.items() if belongs(obj, uid)}
    views = (
        pod_view(o, terminating_seconds.get(o["metadata"].get("uid", ""), 0.0), lost_seconds)
        for (kind, _), o in own.items()
        if kind == "Pod"
    )
    pods = tuple(sorted(views, key=lambda p: p.name))

    def job(role: Role) -> Job:
        jobs = [o for (kind, _), o in own.items() if kind == "Job" and label(o, COMPONENT) == role]
        abandoned = [o for o in jobs if role is Role.TRAINER and is_abandoned(o, pods)]
        jobs = [o for o in jobs if o not in abandoned]
        last = max(map(attempt_of, abandoned), default=0)
        # The operator creates one at a time; if there are more, the last that has not ended counts.
        jobs.sort(key=lambda o: (_job_state(o) in (JobState.ACTIVE, JobState.TERMINATING), attempt_of(o)))
        found = _job(jobs[-1], pods, hashes[role]) if jobs else Job()
        return replace(found, abandoned=last)

    return Observed(
        pods=pods,
        prepare=job(Role.PREPARE),
        trainer=job(Role.TRAINER),
        serving=any(kind in ("StatefulSet", "Deployment") for kind, _ in own),
        replica_failures=_replica_failures(own.values()),
    )


def ignore_young_pods(observed: Observed, now: float) -> Observed:
    """Removes the problems of new pods for :data:`PLACING_SECONDS`, and sets when the first of them counts."""
    left: dict[str, float] = {}
    for pod in observed.pods:
        if pod.problem is not None and pod.problem.reason in PLACING_SECONDS:
            seconds_left = pod.created + PLACING_SECONDS[pod.problem.reason] - now
            if seconds_left > 0 and pod.created <= now:
                left[pod.uid] = seconds_left
    pods = tuple(replace(pod, problem=None) if pod.uid in left else pod for pod in observed.pods)
    return replace(observed, pods=pods, young_seconds=min(left.values(), default=None))


# --- pods ---------------------------------------------------------------------------------------


def pod_view(pod: Object, terminating_seconds: float = 0.0, lost_seconds: float = LOST_SECONDS) -> PodView:
    """The view of a pod. terminating_seconds: for how long it has been seen to be deleted."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    first, own = status.get("initContainerStatuses") or (), status.get("containerStatuses") or ()
    containers = [*first, *own]
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    exits = tuple(
        ContainerExit(int(end.get("exitCode", 1)), _last_log_line(end))
        for c in own
        if (end := (c.get("state") or {}).get("terminated")) is not None and end.get("exitCode") != 0
    ) or tuple(
        # Only the roles' exit codes have a meaning.
        ContainerExit(1, f"init container {c['name']}: {_last_log_line(end)}")
        for c in first
        if (end := (c.get("state") or {}).get("terminated")) is not None and end.get("exitCode") != 0
    )
    bad_inputs = (
        ContainerExit(BAD_INPUT_EXIT_CODE, _last_log_line(end))
        for c in own
        for end in _ends(c)
        if end.get("exitCode") == BAD_INPUT_EXIT_CODE
    )
    waiting = [
        w.get("reason") for c in containers if (w := (c.get("state") or {}).get("waiting")) is not None
    ]
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        role=label(pod, COMPONENT),
        job=label(pod, JOB_NAME),
        ip=status.get("podIP", ""),
        created=seconds(metadata.get("creationTimestamp")),
        terminating="deletionTimestamp" in metadata,
        finished=status.get("phase") in ("Succeeded", "Failed"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        creating=bool(waiting)
        and {*waiting} <= {"ContainerCreating", "PodInitializing"}
        and not any("running" in (c.get("state") or {}) for c in first),
        restarts=max((_quick_restarts(c, seconds(status.get("startTime"))) for c in containers), default=0),
        problem=_problem(pod, status, conditions, containers),
        exits=exits,
        bad_input=None if label(pod, COMPONENT) == Role.ENVIRONMENT else next(bad_inputs, None),
        disrupted=_is_disrupted(status, conditions),
        lost=_is_lost(pod, conditions, terminating_seconds, lost_seconds),
        started=bool(own) and all(c.get("started") is True for c in own),
        steps_lost=any(not c.get("ready") and _last_end(c) == STEPS_LOST_EXIT_CODE for c in own),
        model=_reported_model(containers) if label(pod, COMPONENT) == Role.PREPARE else None,
        attempt=attempt_of(pod),
        spec_hash=str((metadata.get("annotations") or {}).get(SPEC_HASH, "")),
    )


def _reported_model(containers: Iterable[Object]) -> ModelStatus | None:
    for container in containers:
        end = (container.get("state") or {}).get("terminated") or {}
        if container.get("name") == "prepare" and end.get("exitCode") == 0:
            return ModelStatus.read_report(str(end.get("message", "")))
    return None


def _is_disrupted(status: Object, conditions: Mapping[str, Object]) -> bool:
    """Whether a pod was evicted or refused. One that is evicted without the condition has exceeded its limit of disk usage."""
    if conditions.get(_DISRUPTION, {}).get("status") == "True":
        return True
    own_failures = ("", "Evicted", "DeadlineExceeded")
    return status.get("phase") == "Failed" and status.get("reason", "") not in own_failures


def _is_lost(
    pod: Object, conditions: Mapping[str, Object], terminating_seconds: float, lost_seconds: float
) -> bool:
    """Whether the node of a pod that is being deleted does not answer.

    The operator may not read nodes. When a node stops answering, Kubernetes sets the condition Ready of its pods to False, and no
    other; a kubelet writes Ready and ContainersReady alike. After the tolerated time it evicts them for the node's taint.
    """
    metadata = pod["metadata"]
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    if ended or "deletionTimestamp" not in metadata:
        return False
    disruption = conditions.get(_DISRUPTION, {})
    evicted = disruption.get("status") == "True" and disruption.get("reason") == "DeletionByTaintManager"
    ready, containers = (conditions.get(name, {}).get("status") for name in ("Ready", "ContainersReady"))
    longest = lost_seconds + (metadata.get("deletionGracePeriodSeconds") or 0)
    return (evicted and ready == "False" and containers == "True") or terminating_seconds > longest


def _memory_bound(pod: Object, name: str) -> str:
    """What a container that was killed for its memory has exceeded, and what to do."""
    spec = pod.get("spec") or {}
    given: Object = next(
        (c for kind in ("initContainers", "containers") for c in spec.get(kind) or () if c["name"] == name),
        {},
    )
    resources = given.get("resources") or {}
    limit, request = ((resources.get(kind) or {}).get("memory") for kind in ("limits", "requests"))
    field = "generator.actorResources" if name == "actor" else "podTemplate.resources"
    if limit:
        return f"it used more memory than its limit of {limit}: raise {field}.limits.memory"
    return (
        f"it has no limit, and its node ran out of memory (its request is {request or 0}): raise "
        f"{field}.requests.memory"
    )


def _problem(
    pod: Object, status: Object, conditions: Mapping[str, Object], containers: Iterable[Object]
) -> Problem | None:
    if status.get("phase") == "Failed" and (why := _reason_and_message(status)):
        return Problem(Reason.EVICTED if status["reason"] in _EVICTED else Reason.REFUSED_BY_NODE, why)
    if status.get("phase") == "Failed" and _is_disrupted(status, conditions):
        return Problem(Reason.EVICTED, _reason_and_message(conditions[_DISRUPTION]))
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        message = scheduled.get("message", "")
        if scheduled.get("reason") == "SchedulingGated":
            return Problem(Reason.WAITING_FOR_QUOTA, message)
        return Problem(placing_problem(message), message)
    for container in containers:
        name, state = container["name"], container.get("state") or {}
        before = (container.get("lastState") or {}).get("terminated")
        over = state.get("terminated") or before
        waiting = (state.get("waiting") or {}).get("reason", "")
        if over is not None and over.get("reason") == "OOMKilled" and not container.get("ready"):
            return Problem(Reason.OUT_OF_MEMORY, f"{name} was killed: {_memory_bound(pod, name)}")
        if over is not None and over.get("reason") in _NEVER_STARTED and not container.get("ready"):
            return Problem(Reason.CONTAINER_START_FAILED, f"{name}: {_last_log_line(over)}")
        if waiting in _WAITING:
            line = _last_log_line(before) if waiting == "CrashLoopBackOff" and before is not None else ""
            message = line or state["waiting"].get("message", waiting)
            missing = waiting == "CreateContainerConfigError" and any(t in message for t in _MISSING)
            reason = Reason.REFERENCE_NOT_FOUND if missing else _WAITING[waiting]
            return Problem(reason, f"{name}: {message}")
    return None


def _reason_and_message(of: Object) -> str:
    """Reason and message of a pod, or of a condition; empty without a reason."""
    reason, message = of.get("reason", ""), of.get("message", "")
    return f"{reason}: {message}" if reason and message else reason


def _quick_restarts(container: Object, pod_started: float) -> int:
    """Restarts of a container in CrashLoopBackOff if they are consecutive, else 0.

    They are if the kubelet waits its longest back-off, which ten minutes without a restart reset. On a node with a shorter
    longest back-off, they are if the container has on average run for less than ten minutes.
    """
    waiting = (container.get("state") or {}).get("waiting") or {}
    lost = container.get("name") != Role.ENVIRONMENT and _last_end(container) == STEPS_LOST_EXIT_CODE
    if waiting.get("reason") != "CrashLoopBackOff" or lost:
        return 0
    count = int(container.get("restartCount", 0))
    before = (container.get("lastState") or {}).get("terminated") or {}
    ended = seconds(before.get("finishedAt"))
    quick = 0 < pod_started < ended < pod_started + count * QUIET_SECONDS
    return count if quick or MAX_BACK_OFF in waiting.get("message", "") else 0


def _ends(container: Object) -> list[Object]:
    """The container's last two ``terminated`` states, the latest first."""
    states = (container.get("state") or {}, container.get("lastState") or {})
    return [end for state in states if (end := state.get("terminated")) is not None]


def _last_end(container: Object) -> int | None:
    """The container's last exit code; None if it has never ended."""
    return next((int(end.get("exitCode", 1)) for end in _ends(container)), None)


def _last_log_line(end: Object) -> str:
    """The last line of the log in a ``terminated`` state, without the time and the name of the logger; else its reason."""
    return last_log_line(str(end.get("message", ""))) or str(end.get("reason", ""))


# --- Jobs ---------------------------------------------------------------------------------------


def is_settled(job: Object) -> bool:
    """Whether a Job has failed; from FailureTarget on, though its pods may not have ended."""
    return bool(_failed(job))


def _failed(job: Object) -> Object:
    return true_condition(job, "Failed") or true_condition(job, "FailureTarget")


def _job_state(job: Object) -> JobState:
    if "deletionTimestamp" in job["metadata"]:
        return JobState.TERMINATING
    if is_settled(job):
        return JobState.FAILED
    return JobState.COMPLETE if true_condition(job, "Complete") else JobState.ACTIVE


def attempt_of(obj: Object) -> int:
    """Number of a Job, a pod or a template; 0 without one."""
    text = label(obj, ATTEMPT)
    return int(text) if text.isdigit() else 0


def is_abandoned(job: Object, pods: Iterable[PodView]) -> bool:
    """Whether only pods on lost nodes keep a deleted Job. Its attempt is fenced out by the next one (:mod:`scalerl_trainer.fence`)."""
    left = [pod for pod in pods if pod.job == job["metadata"]["name"] and not pod.finished]
    return _job_state(job) is JobState.TERMINATING and bool(left) and all(pod.lost for pod in left)


def _job(job: Object, pods: Iterable[PodView], spec_hash: str) -> Job:
    metadata, state, role = job["metadata"], _job_state(job), label(job, COMPONENT)
    own = sorted((p for p in pods if p.job == metadata["name"]), key=lambda p: p.created)
    wanted = int(job["spec"].get("parallelism", 1))
    exits = tuple(end for pod in own for end in pod.exits)
    evicted = tuple(
        ContainerExit(137, p.problem.message) for p in own if p.problem is not None and _was_evicted(p)
    )
    gated = state is JobState.ACTIVE and bool(job["spec"].get("suspend"))
    failed = _failed(job)
    running = any(not (p.finished or p.terminating) for p in own)
    if state is JobState.COMPLETE and role == Role.PREPARE and running:
        # The watch of pods is behind that of Jobs, and the pod has the model's size. Its change wakes the run.
        state = JobState.ACTIVE
    if state is JobState.ACTIVE and role == Role.TRAINER and any(pod.lost for pod in own):
        state = JobState.FAILED  # its controller waits for the end of the lost pod
    return Job(
        state=state,
        attempt=attempt_of(job),
        exits=exits or evicted,
        ready=sum(p.ready for p in own) >= wanted,
        stale=(metadata.get("annotations") or {}).get(SPEC_HASH, spec_hash) != spec_hash,
        gated=gated,
        # The pods of a requeued Job are deleted shortly after it is suspended.
        pods_terminating=any(p.terminating or gated for p in own if not p.finished),
        disrupted=state is JobState.FAILED
        and _was_disrupted(failed, own, exits or evicted, gang=role == Role.TRAINER),
        failed_at=seconds(failed.get("lastTransitionTime")),
    )


def _was_evicted(pod: PodView) -> bool:
    return pod.problem is not None and pod.problem.reason is Reason.EVICTED


def _was_disrupted(
    failed: Object, pods: Sequence[PodView], exits: Sequence[ContainerExit], *, gang: bool
) -> bool:
    """Whether a failed Job was disrupted: one of its pods was, or all are gone without an exit code.

    A rank's exit code for bad input, divergence or refused weights comes first. If one rank of a gang is disrupted, the others fail too. Of a
    Job with retries, a pod that failed by itself comes first.
    """
    significant = (BAD_INPUT_EXIT_CODE, DIVERGED_EXIT_CODE, PUBLISH_REFUSED_EXIT_CODE)
    if any(end.exit_code in significant for end in exits):
        return False
    if not gang and any((pod.exits or _was_evicted(pod)) and not pod.disrupted for pod in pods):
        return False
    by_rule = failed.get("reason") == "PodFailurePolicy" and _DISRUPTION in failed.get("message", "")
    gone = not exits and all(pod.finished or pod.terminating for pod in pods)
    return by_rule or gone or any(pod.disrupted or pod.lost for pod in pods)


def _replica_failures(objects: Iterable[Object]) -> dict[str, str]:
    """By role: why a Deployment cannot create its pods."""
    failures = ((label(obj, COMPONENT), true_condition(obj, "ReplicaFailure")) for obj in objects)
    return {role: condition.get("message", "") for role, condition in failures if condition}
