"""One run at one reconcile: what its steps find and decide (:class:`RunContext`), and what is remembered of the run between two
reconciles (:class:`RunState`). All of that memory can be lost: it saves calls, and keeps them rare."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from scalerl_api.conditions import Phase
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import RunStatus
from scalerl_api.wire import Status
from scalerl_operator.autoscaling.autoscaler import Autoscaler
from scalerl_operator.autoscaling.report import AutoscalerReport
from scalerl_operator.build.scope import spec_hash
from scalerl_operator.controller.observe import RunObservation, belongs, label
from scalerl_operator.kube.types import Key, Object
from scalerl_operator.names import QUEUE
from scalerl_operator.policy import lifecycle
from scalerl_operator.policy.lifecycle_types import (
    LifecycleDecision,
    LifecycleInput,
    Memory,
)
from scalerl_operator.policy.problems import Problem
from scalerl_operator.workloads import Role

WORKLOADS: Final = frozenset({"Job", "Deployment", "StatefulSet"})
CLAIM: Final = "PersistentVolumeClaim"
REPAIR_SECONDS: Final = 2.0
"""The first repair of an object comes at once, the next after this pause, each further one after twice the pause before."""
LONGEST_REPAIR_SECONDS: Final = 300.0

ObjectName = tuple[str, str]
"""(kind, name)."""


@dataclass(frozen=True)
class Repair:
    """count: repairs in a row. last: when the latest was made, Unix seconds. due: when a withheld one may be made."""

    count: int
    last: float
    due: float = 0.0


@dataclass(frozen=True)
class Settled:
    """An object after our last write. rendered: hash of what was applied. content: hash of what the object then held."""

    rendered: str
    content: int


@dataclass
class RunState:
    """The memory of one run, by uid in the reconciler; dropped when the run is gone or another process leads."""

    status_written: float = 0.0
    """When the status was written last, Unix seconds, as all times here."""
    pruned: tuple[Object, Object] | None = None
    """That status and what was kept of it, where the installed CRD is older and drops fields."""
    fingerprint: int | None = None
    """Of the run's objects, when all were as rendered."""
    blocked: Problem | None = None
    """Why an object of the run could not be made at the last reconcile."""

    token: str = ""
    token_checked: float = 0.0
    token_doubted: bool = False
    """A pod did not find the Secret, which cannot be watched."""
    pod_searched: float = 0.0
    """When the coordinator's pod was searched by name."""

    settled: dict[ObjectName, Settled] = field(default_factory=dict)
    applied: set[str] = field(default_factory=set)
    """uids of objects whose fields we hold by apply, not by having created them."""
    repairs: dict[ObjectName, Repair] = field(default_factory=dict)
    refused: dict[ObjectName, Problem] = field(default_factory=dict)
    """Why the API server refused the last repair of an object, until one succeeds or the object needs none."""
    size_refused: tuple[Any, float, Problem] | None = None
    """Size of the claim that the API server refused, when, and why."""

    claim_asked: tuple[float, Object | None] = (0.0, None)
    events_asked: tuple[float, Problem | None] = (0.0, None)
    queue_asked: tuple[float, str] = (0.0, "")

    autoscaler: Autoscaler | None = None

    def may_repair(self, what: ObjectName, now: float) -> bool:
        """Whether an object that somebody else changed may be repaired now; if so, the repair is counted."""
        before = self.repairs.get(what)
        if before is None or not _is_recent(before, now):
            self.repairs[what] = Repair(1, now)
            return True
        pause = min(REPAIR_SECONDS * 2.0 ** min(before.count - 1, 16), LONGEST_REPAIR_SECONDS)
        if 0 <= now - before.last < pause:
            self.repairs[what] = Repair(before.count, before.last, before.last + pause)
            return False
        self.repairs[what] = Repair(before.count + 1, now)
        return True

    def next_repair_seconds(self, now: float) -> float | None:
        """In how many seconds a withheld repair is due; None: none is withheld."""
        waits = (repair.due - now for repair in self.repairs.values())
        return min((wait for wait in waits if 0 < wait <= LONGEST_REPAIR_SECONDS), default=None)

    def repaired_lately(self, now: float) -> bool:
        """Whether somebody else changed an object of the run a short while ago."""
        return any(_is_recent(repair, now) for repair in self.repairs.values())


def _is_recent(repair: Repair, now: float) -> bool:
    return now - repair.last <= 2 * LONGEST_REPAIR_SECONDS


class KnownRuns:
    """The uid and the state of each run by its name. forget: called with the name of a run that is gone."""

    def __init__(self, forget: Callable[[Key], Awaitable[None]]) -> None:
        self._forget = forget
        self._runs: dict[Key, tuple[str, RunState]] = {}

    async def state(self, key: Key, uid: str | None) -> RunState | None:
        """The state of the run that has the name now; None where there is none. One that had it before is forgotten."""
        known = self._runs.get(key)
        if known is not None and known[0] != uid:
            await self.forget(key)
        return None if uid is None else self._runs.setdefault(key, (uid, RunState()))[1]

    async def forget(self, key: Key) -> None:
        """Forgets a run for which nothing is left to do; it may exist for long, held by another's finalizer."""
        _, state = self._runs.pop(key, ("", RunState()))
        if state.autoscaler is not None:
            state.autoscaler.close()
        await self._forget(key)

    async def forget_all(self) -> None:
        for key in list(self._runs):
            await self.forget(key)


@dataclass
class RunContext:
    """One run at one reconcile. Each step reads what those before it have found, and adds its own.

    obj: the ScaleRLRun. objects: what it owns, by (kind, name), with what this reconcile has written. unix_seconds: now.
    before: the status that was written last. memory: what lifecycle decisions remember, from that status.
    """

    obj: Object
    objects: dict[tuple[str, str], Object]
    unix_seconds: float
    before: RunStatus = field(default_factory=RunStatus)
    memory: Memory = field(default_factory=Memory)
    state: RunState = field(default_factory=RunState)

    # validate
    accepted: ScaleRLRun | None = None
    """With the spec that is carried out: the present one, or the one accepted before while that is invalid; None: there is
    neither."""
    spec_text: str | None = None
    """That spec as the status keeps it."""
    invalid: Problem | None = None
    """Why the present spec is refused."""

    # observe
    observed: RunObservation = field(default_factory=RunObservation)
    coordinator: Status | None = None
    """None while it does not answer."""
    coordinator_refusal: str = ""
    """The coordinator's message to an operator that it does not listen to."""
    autoscaler: AutoscalerReport = field(default_factory=AutoscalerReport)

    # decide
    decision: LifecycleDecision = field(default_factory=lambda: LifecycleDecision(Phase.PENDING, Memory()))
    not_started: Problem | None = None
    """What keeps the run from being started, or from being started again; nothing is applied meanwhile."""
    volume: Problem | None = None
    """What is wrong with the run's claim."""
    trained: bool = False
    """The run has trained steps, without which its volume is not the run's."""
    claim_gone: bool = False
    """No pod may start on the claim: it holds none of the run's steps, or will not for long."""
    queue_missing: str = ""
    """Why no queue holds the run; empty where there is one, or the run has no queue label."""

    @property
    def run(self) -> ScaleRLRun:
        """The accepted run, of which there is one wherever objects are made."""
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
        """Why an object of the run could not be made."""
        return self.state.blocked if self.not_started is None else None

    @property
    def steps(self) -> int:
        """Trained so far."""
        return self.before.step or 0

    def owns(self, obj: Object) -> bool:
        """Whether an object is this run's, not an earlier one's of the same name."""
        return belongs(obj, self.uid)

    def annotation(self, name: str) -> str | None:
        """Of the run; None without it."""
        return (self.obj["metadata"].get("annotations") or {}).get(name)

    def spec_hashes(self) -> Mapping[Role, str]:
        """The hashes that Jobs of the accepted spec have; empty ones, which are nobody's, without a spec."""
        run, roles = self.accepted, (Role.PREPARE, Role.TRAINER)
        return {role: "" if run is None else spec_hash(run, role) for role in roles}

    def lifecycle_input(self) -> LifecycleInput:
        """The part of what was observed that the lifecycle depends on."""
        observed = self.observed
        return LifecycleInput(
            unix_seconds=self.unix_seconds,
            deleting=self.deleted,
            suspend=self.accepted is not None and self.accepted.spec.suspend,
            queued=bool(label(self.obj, QUEUE)),
            serving=observed.serving,
            prepare=observed.prepare,
            trainer=observed.trainer,
            coordinator=observed.service(Role.COORDINATOR),
            status=self.coordinator,
            stop="" if self.state.autoscaler is None else self.state.autoscaler.stop,
            generators_wanted=self.before.generators.replicas
            if self.accepted is None
            else self.accepted.spec.generator.replicas,
        )


def is_deleted(obj: Object) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in obj["metadata"]


def decide(context: RunContext) -> LifecycleDecision:
    """For a run without a readable spec, nothing is decided but its drain once it is deleted, which needs no spec."""
    if context.accepted is not None or context.deleted:
        spec = None if context.accepted is None else context.accepted.spec
        return lifecycle.decide(spec, context.lifecycle_input(), context.memory)
    phase = context.before.phase if context.memory.attempt else Phase.PENDING
    return LifecycleDecision(phase, context.memory)
