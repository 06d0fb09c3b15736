"""From a run's live objects to facts: Jobs, pods, what they wait for, and how they ended. Pure.

What Kubernetes spreads over pod phases, container states and conditions becomes one :class:`Problem` a pod, with a
constant of :mod:`scalerl_api.conditions` and the cluster's own words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from scalerl_api.conditions import Reason
from scalerl_api.process import BAD_INPUT_EXIT_CODE
from scalerl_operator.cluster.names import ATTEMPT, COMPONENT, RUN_UID, SPEC_HASH
from scalerl_operator.cluster.types import Object
from scalerl_operator.policy.lifecycle import Ended, Job, JobState, Service
from scalerl_operator.workloads import Role

JOB_NAME: Final = "batch.kubernetes.io/job-name"
LONGEST_BACK_OFF: Final = "back-off 5m0s"
"""In the kubelet's words for a container that it will start again."""
PLACING_SECONDS: Final = {Reason.UNSCHEDULABLE: 10.0, Reason.VOLUME_NOT_READY: 30.0}
"""For so long it is no news that a new pod waits for a node, or for its volume, which is made only now."""

_WAITING: Final = {
    "ErrImagePull": Reason.IMAGE_PULL_FAILED,
    "ImagePullBackOff": Reason.IMAGE_PULL_FAILED,
    "InvalidImageName": Reason.IMAGE_PULL_FAILED,
    "ErrImageNeverPull": Reason.IMAGE_PULL_FAILED,
    "CreateContainerConfigError": Reason.CONTAINER_CONFIG_INVALID,
    "CreateContainerError": Reason.CONTAINER_CONFIG_INVALID,
    "RunContainerError": Reason.CONTAINER_CONFIG_INVALID,
    "CrashLoopBackOff": Reason.BACK_OFF,
}


@dataclass(frozen=True)
class Problem:
    """Why something is not as it should be, in the cluster's words."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class PodView:
    """One pod. over: all its containers have ended. restarts: of its worst container, in quick succession.
    ends: of containers that are over, not with 0. creating: scheduled, but its containers are not there yet: only events say what is missing.
    """

    name: str
    uid: str
    role: str
    job: str
    ip: str
    created: float
    leaving: bool
    over: bool
    ready: bool
    creating: bool
    restarts: int
    problem: Problem | None
    ends: tuple[Ended, ...]
    bad_input: Ended | None


@dataclass(frozen=True)
class Observed:
    """A run's objects, read. serving: coordinator or generators have been made. foreign: of the names that the run needs,
    those that are another's.
    """

    pods: tuple[PodView, ...]
    prepare: Job
    trainer: Job
    trainer_wanted: int
    serving: bool
    foreign: tuple[str, ...]
    replica_failures: Mapping[str, str]

    def of(self, role: Role) -> tuple[PodView, ...]:
        """The pods of a role that are to stay."""
        return tuple(p for p in self.pods if p.role == role and not p.leaving)

    def service(self, role: Role) -> Service:
        """What the lifecycle wants to know of a role that runs as a service."""
        pods = self.of(role)
        worst = max(pods, key=lambda p: p.restarts, default=None)
        return Service(
            ready=sum(p.ready for p in pods),
            restarts=worst.restarts if worst is not None else 0,
            restarted=worst.name if worst is not None else "",
            bad_input=next((p.bad_input for p in pods if p.bad_input is not None), None),
        )

    def problem(self, role: Role) -> Problem | None:
        """The first thing wrong with a role's pods, or with making them."""
        found = next((p.problem for p in self.of(role) if p.problem is not None), None)
        if found is None and (message := self.replica_failures.get(role)):
            return Problem(creation_problem(message), message)
        return found


def observe(objects: Mapping[tuple[str, str], Object], uid: str, hashes: Mapping[Role, str]) -> Observed:
    """Read what the cache holds of a run.

    objects: by (kind, name). uid: the run's; objects of an earlier run of that name are foreign. hashes: what
    the Jobs of each role are to be made for now.
    """
    mine = {key: obj for key, obj in objects.items() if label(obj, RUN_UID) == uid}
    pods = tuple(
        sorted((pod_view(o) for (kind, _), o in mine.items() if kind == "Pod"), key=lambda p: p.name)
    )
    jobs = [o for (kind, _), o in mine.items() if kind == "Job"]
    trainers = [o for o in jobs if label(o, COMPONENT) == Role.TRAINER]
    # Never two at once by rule; should somebody have made another, the one that works counts.
    trainers.sort(key=lambda o: (_job_state(o) in (JobState.ACTIVE, JobState.LEAVING), _attempt(o)))
    trainer = trainers[-1] if trainers else None
    preparing = [o for o in jobs if label(o, COMPONENT) == Role.PREPARE]
    return Observed(
        pods=pods,
        prepare=_job(preparing[0], pods, hashes[Role.PREPARE]) if preparing else Job(),
        trainer=_job(trainer, pods, hashes[Role.TRAINER]) if trainer is not None else Job(),
        trainer_wanted=int(trainer["spec"].get("parallelism", 0)) if trainer is not None else 0,
        serving=any(kind in ("StatefulSet", "Deployment") for kind, _ in mine),
        foreign=tuple(
            f"{kind} {name}" for (kind, name) in objects if (kind, name) not in mine and kind != "Pod"
        ),
        replica_failures=_replica_failures(mine.values()),
    )


def label(obj: Object, name: str) -> str:
    """A label's value; empty without it."""
    labels = obj["metadata"].get("labels") or {}
    return str(labels.get(name, ""))


def creation_problem(message: str) -> Reason:
    """What a controller's words about a pod that it cannot make come to."""
    text = message.lower()
    if "exceeded quota" in text:
        return Reason.QUOTA_EXCEEDED
    if "priorityclass" in text or "priority class" in text:
        return Reason.PRIORITY_CLASS_NOT_FOUND
    if "runtimeclass" in text:
        return Reason.RUNTIME_CLASS_NOT_FOUND
    return Reason.OBJECT_REFUSED


def mount_problem(message: str) -> Reason:
    """What the kubelet's words about a pod that it cannot start come to."""
    text = message.lower()
    if "configmap" in text and "not found" in text:
        return Reason.CONFIG_MAP_NOT_FOUND
    if "secret" in text and "not found" in text:
        return Reason.SECRET_NOT_FOUND
    if "runtime" in text and "handler" in text:
        return Reason.RUNTIME_CLASS_NOT_FOUND
    return Reason.VOLUME_NOT_READY


def seconds(time: str | None) -> float:
    """Unix seconds of an RFC 3339 time; 0 without one."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def rfc3339(unix_seconds: float) -> str:
    """The time as Kubernetes writes it.

    >>> rfc3339(0.4)
    '1970-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(int(unix_seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def patient(observed: Observed, now: float) -> tuple[Observed, float | None]:
    """Without what pods wait for that have just been made, and seconds until the first counts."""
    new: dict[str, float] = {}
    for pod in observed.pods:
        if pod.problem is not None and pod.problem.reason in PLACING_SECONDS:
            left = pod.created + PLACING_SECONDS[pod.problem.reason] - now
            if left > 0 and pod.created <= now:
                new[pod.uid] = left
    if not new:
        return observed, None
    pods = tuple(replace(pod, problem=None) if pod.uid in new else pod for pod in observed.pods)
    return replace(observed, pods=pods), min(new.values())


# --- pods ---------------------------------------------------------------------------------------


def pod_view(pod: Object) -> PodView:
    """One pod, read."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    ends = tuple(
        Ended(int(over.get("exitCode", 1)), _last_words(over))
        for c in containers
        if (over := (c.get("state") or {}).get("terminated")) is not None and over.get("exitCode") != 0
    )
    waiting = [w for c in containers if (w := (c.get("state") or {}).get("waiting")) is not None]
    creating = bool(waiting) and all(
        w.get("reason") in ("ContainerCreating", "PodInitializing") for w in waiting
    )
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        role=label(pod, COMPONENT),
        job=label(pod, JOB_NAME),
        ip=status.get("podIP", ""),
        created=seconds(metadata.get("creationTimestamp")),
        leaving="deletionTimestamp" in metadata,
        over=status.get("phase") in ("Succeeded", "Failed"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        creating=creating,
        restarts=max((_quick_restarts(c) for c in containers), default=0),
        problem=_problem(status, conditions, containers),
        ends=ends,
        bad_input=next((e for c in containers for e in _bad_inputs(c)), None),
    )


def _problem(
    status: Object, conditions: Mapping[str, Object], containers: Iterable[Object]
) -> Problem | None:
    if status.get("phase") == "Failed" and status.get("reason") == "Evicted":
        return Problem(Reason.EVICTED, status.get("message", ""))
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        message = scheduled.get("message", "")
        if scheduled.get("reason") == "SchedulingGated":
            return Problem(Reason.WAITING_FOR_QUOTA, message)
        if "persistentvolumeclaim" in message.lower() or "volume" in message.lower():
            return Problem(Reason.VOLUME_NOT_READY, message)
        return Problem(Reason.UNSCHEDULABLE, message)
    for container in containers:
        name, state = container["name"], container.get("state") or {}
        before = (container.get("lastState") or {}).get("terminated")
        over = state.get("terminated") or before
        waiting = (state.get("waiting") or {}).get("reason", "")
        if over is not None and over.get("reason") == "OOMKilled" and not container.get("ready"):
            return Problem(Reason.OUT_OF_MEMORY, f"{name} was killed: it used more memory than its limit")
        if waiting in _WAITING:
            words = _last_words(before) if waiting == "CrashLoopBackOff" and before is not None else ""
            message = words or state["waiting"].get("message", waiting)
            return Problem(_WAITING[waiting], f"{name}: {message}")
    return None


def _quick_restarts(container: Object) -> int:
    """Restarts, of a container that the kubelet has given its longest back-off: it ended again and again, with no ten
    minutes of work in between, which would have taken the back-off back."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    looping = waiting.get("reason") == "CrashLoopBackOff" and LONGEST_BACK_OFF in waiting.get("message", "")
    return int(container.get("restartCount", 0)) if looping else 0


def _bad_inputs(container: Object) -> Iterable[Ended]:
    for state in (container.get("state") or {}, container.get("lastState") or {}):
        over = state.get("terminated")
        if over is not None and over.get("exitCode") == BAD_INPUT_EXIT_CODE:
            yield Ended(BAD_INPUT_EXIT_CODE, _last_words(over))


def _last_words(over: Object) -> str:
    """The last line of the log that the kubelet kept, without the time and the logger before it."""
    lines = [line.strip() for line in str(over.get("message", "")).splitlines() if line.strip()]
    if not lines:
        return str(over.get("reason", ""))
    words = lines[-1].split(" ", 4)
    # "2026-01-01 00:00:00,000 ERROR scalerl_trainer.prepare model.path: …", the format of every role
    logged = len(words) == 5 and words[2] in ("ERROR", "CRITICAL", "WARNING", "INFO")
    return (words[4] if logged else lines[-1])[:1000]


# --- Jobs ---------------------------------------------------------------------------------------


def is_settled(job: Object) -> bool:
    """Whether a Job has failed. At FailureTarget it has, though pods may take long to end."""
    conditions = {c["type"]: c["status"] for c in (job.get("status") or {}).get("conditions") or ()}
    return "True" in (conditions.get("Failed"), conditions.get("FailureTarget"))


def _job_state(job: Object) -> JobState:
    if "deletionTimestamp" in job["metadata"]:
        return JobState.LEAVING
    if is_settled(job):
        return JobState.FAILED
    conditions = {c["type"]: c["status"] for c in (job.get("status") or {}).get("conditions") or ()}
    return JobState.COMPLETE if conditions.get("Complete") == "True" else JobState.ACTIVE


def _attempt(job: Object) -> int:
    text = label(job, ATTEMPT)
    return int(text) if text.isdigit() else 0


def _job(job: Object, pods: Iterable[PodView], spec_hash: str) -> Job:
    metadata, state = job["metadata"], _job_state(job)
    own = [p for p in pods if p.job == metadata["name"]]
    wanted = int(job["spec"].get("parallelism", 1))
    ends = tuple(end for pod in own for end in pod.ends)
    evicted = tuple(
        Ended(137, p.problem.message) for p in own if p.problem and p.problem.reason is Reason.EVICTED
    )
    return Job(
        state=state,
        attempt=_attempt(job),
        ends=ends or evicted,
        ready=sum(p.ready for p in own) >= wanted,
        stale=(metadata.get("annotations") or {}).get(SPEC_HASH, spec_hash) != spec_hash,
        held=state is JobState.ACTIVE and bool(job["spec"].get("suspend")),
        held_since=_held_since(job),
        ending=any(p.leaving and not p.over for p in own),
    )


def _held_since(job: Object) -> float | None:
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Suspended" and condition["status"] == "True":
            return seconds(condition.get("lastTransitionTime"))
    return None


def _replica_failures(objects: Iterable[Object]) -> dict[str, str]:
    """By role: why a Deployment cannot make its pods."""
    found: dict[str, str] = {}
    for obj in objects:
        for condition in (obj.get("status") or {}).get("conditions") or ():
            if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
                found[label(obj, COMPONENT)] = condition.get("message", "")
    return found
