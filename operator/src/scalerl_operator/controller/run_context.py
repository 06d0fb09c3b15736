"""One run at one reconcile: the object, what it owns, the status of the last reconcile, and what is remembered. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from scalerl_api.cluster import ImagesSpec
from scalerl_api.conditions import Phase
from scalerl_api.status import RunStatus
from scalerl_operator.controller.observe import belongs, label
from scalerl_operator.controller.run_state import RunState
from scalerl_operator.kube.types import Images, Object
from scalerl_operator.names import COMPONENT, IMAGE, Names
from scalerl_operator.policy.decision import LifecycleDecision, Memory, Suspension
from scalerl_operator.workloads import Role

WORKLOADS: Final = frozenset({"Job", "Deployment", "StatefulSet"})
CLAIM: Final = "PersistentVolumeClaim"


@dataclass(frozen=True)
class RunContext:
    """One run at one reconcile.

    run: the ScaleRLRun. objects: what it owns, by (kind, name), with what this reconcile has written. unix_seconds: now.
    before: the status that the last reconcile wrote. memory: what lifecycle decisions remember, from that status.
    """

    run: Object
    objects: dict[tuple[str, str], Object]
    unix_seconds: float
    before: RunStatus = field(default_factory=RunStatus)
    memory: Memory = field(default_factory=Memory)
    state: RunState = field(default_factory=RunState)

    @property
    def uid(self) -> str:
        return str(self.run["metadata"]["uid"])

    @property
    def namespace(self) -> str:
        return str(self.run["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.run["metadata"]["name"])

    @property
    def generation(self) -> int:
        return int(self.run["metadata"].get("generation", 0))

    @property
    def finalizers(self) -> list[str]:
        return list(self.run["metadata"].get("finalizers") or ())

    def owns(self, obj: Object) -> bool:
        """Whether an object is this run's, not an earlier one's of the same name."""
        return belongs(obj, self.uid)

    @property
    def to_be_drained(self) -> list[tuple[str, str]]:
        """(kind, name) of what should work in a run that is to be suspended or deleted and has not begun to drain."""
        memory, names = self.memory, Names(self.name)
        asked = is_deleted(self.run) or self.run["spec"].get("suspend") is True
        done = memory.rest is not Suspension.NO or memory.drain_since is not None or memory.outcome
        if not asked or done:
            return []
        found = [("Job", names.prepare)] if self.before.phase is Phase.PREPARING else []
        if memory.attempt > 0:
            found += [("Deployment", names.generator), ("StatefulSet", names.coordinator)]
            found += [("Job", names.trainer_job(memory.attempt))]
        return found

    def status_has(self, decision: LifecycleDecision, accepted_spec: str | None) -> bool:
        """Whether the status already holds what the next reconcile has to know."""
        return decision.memory == self.memory and accepted_spec == self.before.accepted_spec


def is_deleted(obj: Object) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in obj["metadata"]


def pinned(context: RunContext, named: ImagesSpec, images: Images) -> Images:
    """``images``, but for roles that run already: an upgrade of the operator does not mix versions in a run that is
    under way. A run that was suspended gets the new ones.

    named: the run's own images, which win. The annotation of each workload has the image that it would have without them:
    a role whose image is no longer named goes back to that one.
    """
    given: dict[str, str | None] = {
        Role.PREPARE: named.trainer,
        Role.TRAINER: named.trainer,
        Role.GENERATOR: named.generator,
        Role.COORDINATOR: named.coordinator,
    }
    live: dict[str, str] = {}
    for (kind, _), obj in context.objects.items():
        if kind in WORKLOADS and context.owns(obj) and not is_deleted(obj):
            role = label(obj, COMPONENT)
            own = (obj["metadata"].get("annotations") or {}).get(IMAGE)
            if own is None and given.get(role) is None:  # made by a release that had no such annotation
                own = obj["spec"]["template"]["spec"]["containers"][0]["image"]
            if own is not None:
                live[role] = own
    return Images(
        trainer=live.get(Role.TRAINER, live.get(Role.PREPARE, images.trainer)),
        generator=live.get(Role.GENERATOR, images.generator),
        coordinator=live.get(Role.COORDINATOR, images.coordinator),
        pull_policy=images.pull_policy,
    )
