"""One run at one reconcile: what the steps of the reconcile find and decide. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import RunStatus
from scalerl_api.wire import Status
from scalerl_operator.autoscaling.loop import AutoscalerReport
from scalerl_operator.build.scope import spec_hash
from scalerl_operator.controller.observe import RunObservation, belongs, label
from scalerl_operator.controller.run_state import RunState
from scalerl_operator.kube.types import Object
from scalerl_operator.names import QUEUE
from scalerl_operator.policy import lifecycle
from scalerl_operator.policy.budget import Usage
from scalerl_operator.policy.lifecycle_types import (
    CoordinatorReport,
    LifecycleDecision,
    LifecycleInput,
    Memory,
)
from scalerl_operator.policy.problems import Problem
from scalerl_operator.workloads import Role

WORKLOADS: Final = frozenset({"Job", "Deployment", "StatefulSet"})
CLAIM: Final = "PersistentVolumeClaim"


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
        roles = (Role.PREPARE, Role.TRAINER)
        if self.accepted is None:
            return dict.fromkeys(roles, "")
        known = self.state.spec_hashes
        if known is None or known[0] != self.generation:
            hashes = {role: spec_hash(self.accepted, role) for role in roles}
            known = self.state.spec_hashes = (self.generation, hashes)
        return known[1]

    def lifecycle_input(self) -> LifecycleInput:
        """The part of what was observed that the lifecycle depends on."""
        coordinator, observed = self.coordinator, self.observed
        report = None
        if coordinator is not None:
            usage = Usage(coordinator.wall_seconds, coordinator.device_seconds)
            report = CoordinatorReport(coordinator.phase, coordinator.stop_reason, usage)
        return LifecycleInput(
            unix_seconds=self.unix_seconds,
            deleting=self.deleted,
            suspend=self.accepted is not None and self.accepted.spec.suspend,
            queued=bool(label(self.obj, QUEUE)),
            serving=observed.serving,
            prepare=observed.prepare,
            trainer=observed.trainer,
            coordinator=observed.service(Role.COORDINATOR),
            coordinator_report=report,
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
    if context.accepted is not None:
        return lifecycle.decide(context.run.spec, context.lifecycle_input(), context.memory)
    if context.deleted:
        return lifecycle.decide_deletion(context.lifecycle_input(), context.memory)
    phase = context.before.phase if context.memory.attempt else Phase.PENDING
    return LifecycleDecision(phase, context.memory)
