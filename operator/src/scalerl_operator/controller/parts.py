"""What the steps of a reconcile return: :class:`Run` as it was read, what was :class:`Accepted` and :class:`Observed`, the decision of
the lifecycle and its :class:`Checks`. Together they are the :class:`Findings`, which are applied and reported.

All are frozen: a later step changes none of an earlier one, with three exceptions. ``Run.obj`` and ``Run.objects`` follow the writes of
the reconcile, and ``Run.state`` is what is kept between reconciles, which any step may change. While the checks hold a run back,
a decision to wait replaces the lifecycle's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from scalerl_api.spec import RunSpec, ScaleRLRun
from scalerl_api.status import FaultStatus, ModelStatus, RunStatus
from scalerl_api.wire import Status
from scalerl_autoscaling.report import AutoscalerReport
from scalerl_lifecycle.edits_of_run import SpecEdit
from scalerl_lifecycle.lifecycle_types import (
    ContainerExit,
    Job,
    LifecycleDecision,
    PersistedState,
    Problem,
    Service,
)
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.cluster_messages import creation_problem
from scalerl_operator.controller.run_state import RunState
from scalerl_operator.kube.objects import belongs, is_deleted
from scalerl_operator.kube.types import Key, Object
from scalerl_operator.manifests.gang import Gang
from scalerl_operator.manifests.scope import spec_hash

WORKLOADS: Final = frozenset({"Job", "Deployment", "StatefulSet"})
CLAIM: Final = "PersistentVolumeClaim"


@dataclass(frozen=True)
class Run:
    """A run as it was read.

    Attributes:
        obj: the ScaleRLRun, with the writes of this reconcile.
        objects: its objects, by (kind, name), with the writes of this reconcile.
        unix_seconds: now.
        before: the last status.
        persisted: the state of the lifecycle, from that status.
        state: what is kept between the run's reconciles; mutable.
    """

    obj: Object
    objects: dict[tuple[str, str], Object]
    unix_seconds: float
    before: RunStatus = field(default_factory=RunStatus)
    persisted: PersistedState = field(default_factory=PersistedState)
    state: RunState = field(default_factory=RunState)

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
    def steps(self) -> int:
        """Number of trained steps."""
        return self.before.step or 0

    def owns(self, obj: Object) -> bool:
        """Whether an object is this run's, not that of an earlier run of the same name."""
        return belongs(obj, self.uid)

    def annotation(self, name: str) -> str | None:
        """An annotation of the run; None without it."""
        return (self.obj["metadata"].get("annotations") or {}).get(name)


@dataclass(frozen=True)
class Accepted:
    """The accepted spec.

    Attributes:
        found: the run with it: with the current one or, while that is invalid, the one accepted before; None: neither.
        text: that spec, for the status; None if it is too large.
        long_hash: of a valid spec that is too long for the status, which then has no text.
        invalid: why the current spec is invalid.
        edit: of the accepted spec, since the last reconcile.
        unproven: fields that were edited after the last steps that were trained.
    """

    found: ScaleRLRun | None = None
    text: str | None = None
    long_hash: str | None = None
    invalid: Problem | None = None
    edit: SpecEdit = field(default_factory=SpecEdit)
    unproven: tuple[str, ...] = ()

    @property
    def run(self) -> ScaleRLRun:
        """The accepted run; only for steps that need one."""
        assert self.found is not None
        return self.found

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    def spec_hashes(self) -> Mapping[Role, str]:
        """The hashes of Jobs of the accepted spec; empty without one, which no Job has."""
        run, roles = self.found, (Role.PREPARE, Role.TRAINER)
        return {role: "" if run is None else spec_hash(run, role) for role in roles}


@dataclass(frozen=True)
class PodView:
    """One pod.

    Attributes:
        terminating: it is being deleted.
        finished: all its containers have ended.
        creating: scheduled, without containers: only Events say why.
        restarts: consecutive ones of its worst container.
        exits: of containers that ended with another exit code than 0.
        disrupted: evicted, or refused by its node.
        started: its startup probes have succeeded, so that it responds though it may not be ready.
        lost: it is being deleted, and its node, which does not answer, cannot confirm that it has ended.
        attempt: number of the trainer or the coordinator; 0: it has none.
        steps_lost: a container that is not ready ended with the report that the volume holds none of the run's steps.
        model: what a preparation that has ended well reports of the model.
        spec_hash: of the spec that it was created for; empty if unknown.
    """

    name: str
    uid: str
    role: str
    job: str
    ip: str
    created: float
    terminating: bool
    finished: bool
    ready: bool
    creating: bool
    restarts: int
    problem: Problem | None
    exits: tuple[ContainerExit, ...]
    bad_input: ContainerExit | None
    disrupted: bool = False
    lost: bool = False
    attempt: int = 0
    started: bool = False
    steps_lost: bool = False
    model: ModelStatus | None = None
    spec_hash: str = ""


@dataclass(frozen=True)
class Observed:
    """A run's objects, its queue, its coordinator, and its forecast.

    Attributes:
        serving: workloads of the coordinator or of the generators exist.
        replica_failures: by role, why a Deployment cannot create its pods.
        young_seconds: until the first problem of a new pod counts; None: no pod has one.
        gang: the run in the queue of a cluster with Kueue.
        coordinator: its last status; None while it does not respond.
        refusal: message of a coordinator that refuses the operator's requests.
        faults: faults of the run, by that status or, without one, as before.
    """

    pods: tuple[PodView, ...] = ()
    prepare: Job = field(default_factory=Job)
    trainer: Job = field(default_factory=Job)
    serving: bool = False
    replica_failures: Mapping[str, str] = field(default_factory=dict)
    young_seconds: float | None = None
    gang: Gang | None = None
    coordinator: Status | None = None
    refusal: str = ""
    faults: FaultStatus = field(default_factory=FaultStatus)
    autoscaler: AutoscalerReport = field(default_factory=AutoscalerReport)

    @property
    def model(self) -> ModelStatus | None:
        """The model's size, by the newest preparation that reports it."""
        reports = [(pod.created, pod.model) for pod in self.pods if pod.model is not None]
        return max(reports, key=lambda report: report[0])[1] if reports else None

    def of(self, role: Role) -> tuple[PodView, ...]:
        """The pods of a role that are not being deleted."""
        return tuple(p for p in self.pods if p.role == role and not p.terminating)

    @property
    def lost_coordinators(self) -> tuple[PodView, ...]:
        """On lost nodes, and with a number, by which the next one takes the journal over."""
        return tuple(pod for pod in self.pods if pod.role == Role.COORDINATOR and pod.lost and pod.attempt)

    def service(self, role: Role, spec_hash: str = "") -> Service:
        """The lifecycle's input about a role that runs as a service.

        Args:
            spec_hash: pods of another spec count as starting; empty: the failures of all pods count.
        """
        pods = self.of(role)
        own = [pod for pod in pods if not spec_hash or pod.spec_hash in ("", spec_hash)]
        worst = max(own, key=lambda p: p.restarts, default=None)
        rejecting = [pod for pod in own if pod.bad_input is not None]
        lost = self.lost_coordinators if role is Role.COORDINATOR else ()
        return Service(
            ready=sum(p.ready for p in pods),
            # An evicted pod stays, beside the one that replaces it.
            starting=sum(not (p.ready or p.finished or p in rejecting) for p in pods),
            restarts=worst.restarts if worst is not None else 0,
            restarted=worst.name if worst is not None else "",
            bad_input=rejecting[0].bad_input if rejecting else None,
            lost=max((pod.attempt for pod in lost), default=0),
        )

    def problem(self, role: Role) -> Problem | None:
        """The first problem of a role's pods, or of their creation."""
        pods = self.of(role)
        newest = max((p.created for p in pods if not p.finished), default=-1.0)
        # A pod that was refused or evicted exists beside the pod that replaces it.
        problems = (p.problem for p in pods if not p.finished or p.created > newest)
        problem = next((p for p in problems if p is not None), None)
        if problem is None and (message := self.replica_failures.get(role)):
            return Problem(creation_problem(message), message)
        return problem


@dataclass(frozen=True)
class Checks:
    """What was checked before a decision is applied.

    Attributes:
        not_started: why the run cannot be started or resumed; nothing is applied meanwhile.
        volume: the problem of the run's claim.
        claim_gone: no pod may start on the claim: it does not hold the run's steps, or is being deleted.
        queue_missing: the problem of the run's queue; empty without one.
        source_claim: of the run ``spec.from.run``, for a preparation that is about to be created.
        source_uid: of that run; empty if it is not known, or was not read at this reconcile.
    """

    not_started: Problem | None = None
    volume: Problem | None = None
    claim_gone: bool = False
    queue_missing: str = ""
    source_claim: str | None = None
    source_uid: str = ""


@dataclass(frozen=True)
class Findings:
    """All parts of a reconcile.

    Attributes:
        blocked: why an object of the run could not be created, now or, before the decision is applied, at the last reconcile.
    """

    run: Run
    accepted: Accepted
    observed: Observed
    decision: LifecycleDecision
    checks: Checks = Checks()
    blocked: Problem | None = None

    @property
    def model(self) -> ModelStatus | None:
        """Size of the model: as a preparation reports it now, or has reported it."""
        return self.observed.model or self.run.before.model
