"""The gang of a queued run: one Workload of Kueue for its coordinator, its trainer, its environment servers and the least number of its
generators.

Kueue admits a Workload as a whole, so two runs in a queue cannot each hold the half that the other lacks. It knows the run as an
external controller does: the operator creates the Workload, creates the pods once it is admitted, with the node labels and
tolerations of the assigned flavors, and ends them when it is evicted (:mod:`..controller.gang_admission`). Generators beyond the least number,
and servers that were added later, are in a Deployment of their own, whose pods Kueue queues one by one. ADR 0016.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from scalerl_api.pods import COUNT, SLICE_SIZE
from scalerl_api.spec import RunSpec
from scalerl_lifecycle.workloads import Role
from scalerl_operator import names
from scalerl_operator.kube.kinds import kind_of
from scalerl_operator.kube.types import Object

WORKLOAD: Final = "Workload"
ROLES: Final = (Role.COORDINATOR, Role.GENERATOR, Role.TRAINER, Role.ENVIRONMENT)
"""The pod sets, by their names."""
POD_SET: Final = "kueue.x-k8s.io/podset"
OF_WORKLOAD: Final = "kueue.x-k8s.io/workload"
TOPOLOGY_GATE: Final = "kueue.x-k8s.io/topology"
"""Of pods for which Kueue chooses the node; it removes the gate. They have the label and the annotation above."""
_UNCONSTRAINED: Final = "kueue.x-k8s.io/podset-unconstrained-topology"
_TOPOLOGY: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "kueue.x-k8s.io/podset-required-topology": ("required", str),
    "kueue.x-k8s.io/podset-preferred-topology": ("preferred", str),
    _UNCONSTRAINED: ("unconstrained", lambda text: text == "true"),
    "kueue.x-k8s.io/podset-slice-required-topology": ("podSetSliceRequiredTopology", str),
    SLICE_SIZE: ("podSetSliceSize", lambda text: int(text) if COUNT.fullmatch(text) else text),
}
"""Annotations of pods, and their fields of a pod set."""
_COUNTED: Final = (
    *("nodeSelector", "affinity", "tolerations", "resourceClaims", "restartPolicy"),
    *("priorityClassName", "runtimeClassName", "schedulerName"),
)
"""Fields of a pod that Kueue reads, beside the resources of its containers."""


@dataclass(frozen=True)
class Gang:
    """A run's Workload.

    Attributes:
        generators: its number of generators.
        environments: its number of environment servers.
        placement: JSON of what :meth:`of` returns, by role; empty while it has no quota.
        admitted: the trainer may run. An evicted gang keeps its placement, by which its pods are as they were while the trainer
            saves.
        priority: the value of its WorkloadPriorityClass; None: the run names none, or it does not exist.
    """

    generators: int
    placement: str = ""
    admitted: bool = False
    priority: int | None = None
    environments: int = 0

    def replicas(self, role: Role) -> int:
        """Of a role with a Deployment."""
        return self.environments if role is Role.ENVIRONMENT else self.generators

    def of(self, role: Role) -> Object:
        """``nodeSelector``, ``tolerations`` and ``topology`` (whether Kueue chooses the node of each pod) of a role."""
        found: Object = json.loads(self.placement).get(role, {}) if self.placement else {}
        return found


def minimum(spec: RunSpec) -> int:
    """The generators without which a run is not started."""
    allowed = spec.autoscaling.generators
    return spec.generator.replicas if allowed is None else min(allowed.min, spec.generator.replicas)


def workload(
    metadata: Object,
    queue_labels: dict[str, str],
    templates: dict[Role, tuple[int, Object]],
    priority: int | None,
) -> Object:
    """The Workload. Immutable once it has quota.

    Args:
        templates: by role: the number of pods, and their template.
        priority: see :class:`Gang`. The API server refuses a class without its value.
    """
    spec: Object = {
        "queueName": queue_labels.get(names.QUEUE, ""),
        "podSets": [_pod_set(role, count, template) for role, (count, template) in templates.items()],
    }
    if (name := queue_labels.get(names.PRIORITY)) is not None:
        spec["priorityClassRef"] = {
            "group": "kueue.x-k8s.io",
            "kind": "WorkloadPriorityClass",
            "name": name,
        }
        if priority is not None:
            spec["priority"] = priority
    return {
        "apiVersion": kind_of(WORKLOAD).api_version,
        "kind": WORKLOAD,
        "metadata": metadata,
        "spec": spec,
    }


def _pod_set(role: Role, count: int, template: Object) -> Object:
    spec = template["spec"]
    counted = {name: spec[name] for name in _COUNTED if name in spec}
    for kind in ("initContainers", "containers"):
        if kind in spec:
            counted[kind] = [
                {name: each[name] for name in ("name", "image", "resources") if name in each}
                for each in spec[kind]
            ]
    made: Object = {"name": str(role), "count": count, "template": {"spec": counted}}
    annotations = template["metadata"]["annotations"]
    topology: dict[str, Any] = {
        name: read(annotations[key]) for key, (name, read) in _TOPOLOGY.items() if key in annotations
    }
    if topology:
        if role is Role.TRAINER:
            topology["podIndexLabel"] = "batch.kubernetes.io/job-completion-index"
        made["topologyRequest"] = topology
    return made


def place(template: Object, placed: Object, role: Role, name: str) -> None:
    """Sets in a pod template where the gang was admitted.

    Args:
        name: of the Workload.
    """
    spec, metadata = template["spec"], template["metadata"]
    if placed.get("nodeSelector"):
        spec["nodeSelector"] = spec.get("nodeSelector", {}) | placed["nodeSelector"]
    own = spec.get("tolerations", [])
    if more := [toleration for toleration in placed.get("tolerations", ()) if toleration not in own]:
        spec["tolerations"] = own + more
    if placed.get("topology"):
        spec["schedulingGates"] = [{"name": TOPOLOGY_GATE}]
        metadata["labels"][POD_SET] = str(role)
        metadata["annotations"][OF_WORKLOAD] = name
        if not metadata["annotations"].keys() & _TOPOLOGY.keys():
            metadata["annotations"][_UNCONSTRAINED] = "true"
