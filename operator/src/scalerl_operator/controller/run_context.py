"""A run at one reconcile (:class:`RunContext`), and the state kept between its reconciles (:class:`RunState`), which saves
calls to the API server and may be lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from scalerl_api.conditions import Phase
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import ModelStatus, RunStatus, TroubleStatus
from scalerl_api.wire import Status
from scalerl_operator.autoscaling.autoscaler import Autoscaler
from scalerl_operator.autoscaling.report import AutoscalerReport
from scalerl_operator.build.gang import Gang
from scalerl_operator.build.scope import spec_hash
from scalerl_operator.controller.observe import RunObservation, belongs, label
from scalerl_operator.kube.types import Key, Object
from scalerl_operator.names import QUEUE
from scalerl_operator.policy import lifecycle
from scalerl_operator.policy.edits_of_run import SpecEdit
from scalerl_operator.policy.lifecycle_types import (
    LifecycleDecision,
    LifecycleInput,
    Memory,
    Service,
)
from scalerl_operator.policy.problems import Problem
from scalerl_operator.workloads import Role

WORKLOADS: Final = frozenset({"Job", "Deployment", "StatefulSet"})
CLAIM: Final = "PersistentVolumeClaim"
REPAIR_SECONDS: Final = 2.0
"""Between the first and the second repair of an object; the pause doubles with each further one."""
LONGEST_REPAIR_SECONDS: Final = 300.0

ObjectName = tuple[str, str]
"""(kind, name)."""


@dataclass(frozen=True)
class Repair:
    """Consecutive repairs of an object.

    last: when the last one was made, Unix seconds.
    due: when the next one may be made, if it has been put off.
    """

    count: int
    last: float
    due: float = 0.0


@dataclass
class RunState:
    """The state of one run between reconciles; dropped when the run is gone or this process no longer leads. Times are Unix
    seconds."""

    status_written: float = 0.0
    """When the status was last written."""
    pruned: tuple[Object, Object] | None = None
    """That status as sent and as stored, where an older CRD drops fields."""
    fingerprint: int | None = None
    """Of the run's objects, when all were applied."""
    blocked: Problem | None = None
    """Why an object of the run could not be created at the last reconcile."""

    token: str = ""
    token_checked: float = 0.0
    """When the Secret was last read."""
    token_doubted: bool = False
    """A pod did not find the Secret, which cannot be watched."""
    pod_searched: float = 0.0
    """When the coordinator's pod was last searched by name."""
    leaving: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By uid of each pod that is being deleted: its deletionTimestamp, and when it was first seen with that."""

    settled: dict[ObjectName, tuple[str, int]] = field(default_factory=dict)
    """Hashes of each object as rendered, and of its content after it was applied."""
    applied: set[str] = field(default_factory=set)
    """uids of objects whose fields the operator owns by apply, not by creation."""
    repairs: dict[ObjectName, Repair] = field(default_factory=dict)
    refused: dict[ObjectName, Problem] = field(default_factory=dict)
    """Why the API server refused the last repair of an object, until one succeeds or the object needs none."""
    size_refused: tuple[Any, float, Problem] | None = None
    """Size of the claim that the API server refused, when, and why."""

    claim_read: tuple[float, Object | None] = (0.0, None)
    """When the claim was last read, and the claim."""
    events_read: tuple[float, Problem | None] = (0.0, None)
    """When the Events of a pod were last read, and the problem."""
    placement: tuple[tuple[str, str], str] = (("", ""), "")
    """uid and admission of the run's Workload, and :attr:`.Gang.placement`."""
    unread_flavors: str = ""
    """A message if the operator may not read the ResourceFlavors of that admission."""
    priority_read: tuple[float, str, int | None] = (0.0, "", None)
    """When the class of the run's priority was last read, its name, and its value."""
    unanswered: str = ""
    """Why the API server refused the operator's status of the run's Workload."""
    queue_read: tuple[float, str] = (0.0, "")
    """When the run's queue was last read, and the problem."""

    record_tried: float | None = None
    """When the record of a deleted run was first tried to be written."""

    autoscaler: Autoscaler | None = None

    def leaving_seconds(self, objects: Iterable[Object], now: float) -> dict[str, float]:
        """For how long each pod has been seen to be deleted, by uid. An object's own times are those of another clock."""
        before, self.leaving = self.leaving, {}
        for obj in objects:
            metadata = obj["metadata"]
            if obj["kind"] == "Pod" and (deleted := metadata.get("deletionTimestamp")) is not None:
                known, since = before.get(metadata["uid"], (deleted, now))
                # A deletion with a shorter grace period begins anew; so does a clock that was set back.
                self.leaving[metadata["uid"]] = (deleted, since if known == deleted and since <= now else now)
        return {uid: now - since for uid, (_, since) in self.leaving.items()}

    def may_repair(self, key: ObjectName, now: float) -> bool:
        """Whether an object that another writer has changed may be repaired now; if so, counts the repair."""
        before = self.repairs.get(key)
        if before is None or not _is_recent(before, now):
            self.repairs[key] = Repair(1, now)
            return True
        pause = min(REPAIR_SECONDS * 2.0 ** min(before.count - 1, 16), LONGEST_REPAIR_SECONDS)
        if 0 <= now - before.last < pause:
            self.repairs[key] = Repair(before.count, before.last, before.last + pause)
            return False
        self.repairs[key] = Repair(before.count + 1, now)
        return True

    def next_repair_seconds(self, now: float) -> float | None:
        """Seconds until a repair that was put off is due; None: there is none."""
        waits = (repair.due - now for repair in self.repairs.values())
        return min((wait for wait in waits if 0 < wait <= LONGEST_REPAIR_SECONDS), default=None)

    def repaired_lately(self, now: float) -> bool:
        """Whether an object of the run was repaired within twice :data:`LONGEST_REPAIR_SECONDS`."""
        return any(_is_recent(repair, now) for repair in self.repairs.values())


def _is_recent(repair: Repair, now: float) -> bool:
    return now - repair.last <= 2 * LONGEST_REPAIR_SECONDS


class KnownRuns:
    """The uid and the state of each run. forget: called with the key of a run that is gone."""

    def __init__(self, forget: Callable[[Key], Awaitable[None]]) -> None:
        self._forget = forget
        self._runs: dict[Key, tuple[str, RunState]] = {}

    async def state(self, key: Key, uid: str | None) -> RunState | None:
        """The state of the run with that uid; None: there is no run. Forgets an earlier run of the same name."""
        known = self._runs.get(key)
        if known is not None and known[0] != uid:
            await self.forget(key)
        return None if uid is None else self._runs.setdefault(key, (uid, RunState()))[1]

    async def forget(self, key: Key) -> None:
        """Forgets a run that is deleted, or that only another finalizer keeps."""
        _, state = self._runs.pop(key, ("", RunState()))
        if state.autoscaler is not None:
            state.autoscaler.close()
        await self._forget(key)

    async def forget_all(self) -> None:
        for key in list(self._runs):
            await self.forget(key)


@dataclass
class RunContext:
    """One run at one reconcile. Each step reads the results of those before it, and adds its own.

    obj: the ScaleRLRun.
    objects: its objects, by (kind, name), with the writes of this reconcile.
    unix_seconds: now.
    before: the last status.
    memory: the state of the lifecycle, from that status.
    """

    obj: Object
    objects: dict[tuple[str, str], Object]
    unix_seconds: float
    before: RunStatus = field(default_factory=RunStatus)
    memory: Memory = field(default_factory=Memory)
    state: RunState = field(default_factory=RunState)

    # accept
    accepted: ScaleRLRun | None = None
    """The run with its accepted spec: the current one or, while that is invalid, the one accepted before; None: neither."""
    spec_text: str | None = None
    """The accepted spec for the status; None if it is too large."""
    long_spec: str | None = None
    """Hash of a valid spec that is too long for the status, which then has no text."""
    invalid: Problem | None = None
    """Why the current spec is invalid."""
    edit: SpecEdit = field(default_factory=SpecEdit)
    """Of the accepted spec, since the last reconcile."""
    unproven: tuple[str, ...] = ()
    """Fields that were edited after the last steps that were trained."""

    # observe
    gang: Gang | None = None
    """In the queue of a cluster with Kueue."""
    observed: RunObservation = field(default_factory=RunObservation)
    coordinator: Status | None = None
    """The coordinator's last status; None while it does not respond."""
    coordinator_refusal: str = ""
    """Message of a coordinator that refuses the operator's requests."""
    trouble: TroubleStatus | None = None
    """Faults of the run, by that status; None: as before."""
    autoscaler: AutoscalerReport = field(default_factory=AutoscalerReport)

    # decide, check
    decision: LifecycleDecision = field(default_factory=lambda: LifecycleDecision(Phase.PENDING, Memory()))
    not_started: Problem | None = None
    """Why the run cannot be started or resumed; nothing is applied meanwhile."""
    volume: Problem | None = None
    """The problem of the run's claim."""
    trained: bool = False
    """The run has trained steps, which its volume must hold."""
    claim_gone: bool = False
    """No pod may start on the claim: it does not hold the run's steps, or is being deleted."""
    queue_missing: str = ""
    """The problem of the run's queue; empty without one."""
    source_claim: str | None = None
    """Claim of the run ``spec.from.run``, for a preparation that is about to be created."""
    source_uid: str = ""
    """That run's uid; empty if it is not known, or was not read at this reconcile."""

    @property
    def run(self) -> ScaleRLRun:
        """The accepted run; only for steps that need one."""
        assert self.accepted is not None
        return self.accepted

    @property
    def uid(self) -> str:
        return str(self.obj["metadata"]["uid"])

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def namespace(self) -> str:
        return str(self.obj["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    @property
    def generation(self) -> int:
        return int(self.obj["metadata"].get("generation", 0))

    @property
    def finalizers(self) -> list[str]:
        return list(self.obj["metadata"].get("finalizers") or ())

    @property
    def deleted(self) -> bool:
        """Whether the run is being deleted."""
        return is_deleted(self.obj)

    @property
    def blocked(self) -> Problem | None:
        """Why an object of the run could not be created."""
        return self.state.blocked if self.not_started is None else None

    @property
    def model(self) -> ModelStatus | None:
        """Size of the model: as a preparation reports it now, or has reported it."""
        return self.observed.model or self.before.model

    @property
    def steps(self) -> int:
        """Number of trained steps."""
        return self.before.step or 0

    def owns(self, obj: Object) -> bool:
        """Whether an object is this run's, not that of an earlier run of the same name."""
        return belongs(obj, self.uid)

    def annotation(self, name: str) -> str | None:
        """An annotation of the run; None without it."""
        return (self.obj["metadata"].get("annotations") or {}).get(name)

    def spec_hashes(self) -> Mapping[Role, str]:
        """The hashes of Jobs of the accepted spec; empty without one, which no Job has."""
        run, roles = self.accepted, (Role.PREPARE, Role.TRAINER)
        return {role: "" if run is None else spec_hash(run, role) for role in roles}

    def lifecycle_input(self) -> LifecycleInput:
        """The observations that the lifecycle depends on."""
        observed = self.observed
        return LifecycleInput(
            unix_seconds=self.unix_seconds,
            deleting=self.deleted,
            suspend=self.accepted is not None and self.accepted.spec.suspend,
            queued=bool(label(self.obj, QUEUE)),
            unadmitted=self.gang is not None and not self.gang.admitted,
            serving=observed.serving,
            prepare=observed.prepare,
            trainer=observed.trainer,
            coordinator=self._service(Role.COORDINATOR),
            generators=self._service(Role.GENERATOR),
            status=self.coordinator,
            stop="" if self.state.autoscaler is None else self.state.autoscaler.stop,
            generators_wanted=self.before.generators.replicas
            if self.accepted is None
            else self.accepted.spec.generator.replicas,
            steps=self.steps,
            started=all(self._is_started(role) for role in (Role.COORDINATOR, Role.GENERATOR)),
            edit=self.edit,
            unproven=self.unproven,
        )

    def _is_started(self, role: Role) -> bool:
        """Whether a pod of a role is ready that was created for the accepted spec, as far as that is known."""
        hashes = ("", "" if self.accepted is None else spec_hash(self.accepted, role))
        return any(pod.ready and pod.spec_hash in hashes for pod in self.observed.of(role))

    def _service(self, role: Role) -> Service:
        """The lifecycle's input about a role; failures of pods of an earlier spec, which are being replaced, do not count."""
        found = self.observed.service(role)
        if self.accepted is None or (found.bad_input is None and not found.restarts):
            return found
        return self.observed.service(role, spec_hash(self.accepted, role))


def is_deleted(obj: Object) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in obj["metadata"]


def decide(context: RunContext) -> LifecycleDecision:
    """The lifecycle's decision. A run without an accepted spec stays as it is until it is deleted; its drain needs no spec."""
    if context.accepted is not None or context.deleted:
        spec = None if context.accepted is None else context.accepted.spec
        return lifecycle.decide(spec, context.lifecycle_input(), context.memory)
    phase = context.before.phase if context.memory.attempt else Phase.PENDING
    return LifecycleDecision(phase, context.memory)
