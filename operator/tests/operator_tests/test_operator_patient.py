"""That a new pod waits for its node or its volume is no news for a while."""

from __future__ import annotations

from typing import Any

from operator_tests.manifests import UID
from scalerl_api.reasons import Reason
from scalerl_lifecycle.status_fields import rfc3339
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import Observed
from scalerl_operator.controller.pod_views import ignore_young_pods, observe_objects
from scalerl_operator.names import COMPONENT, RUN_UID

NOW = 1_000_000.0
VOLUME = "pod has unbound immediate PersistentVolumeClaims"
NODE = "0/3 nodes are available: 3 Insufficient cpu."


def waiting(**of: tuple[float, str]) -> Observed:
    """Pods by name, each with its age and what the scheduler says of it."""
    pods: dict[tuple[str, str], Any] = {}
    for name, (age, message) in of.items():
        metadata = {"name": name, "uid": name, "labels": {RUN_UID: UID, COMPONENT: Role.GENERATOR}}
        metadata["creationTimestamp"] = rfc3339(NOW - age)
        said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        pods["Pod", name] = {"metadata": metadata, "status": {"conditions": [said]}}
    return observe_objects(pods, UID, {Role.PREPARE: "", Role.TRAINER: ""})


def reasons(observed: Observed) -> dict[str, Reason]:
    return {pod.name: pod.problem.reason for pod in observed.pods if pod.problem is not None}


def test_shortest_wait_for_a_young_pod() -> None:
    observed = ignore_young_pods(waiting(node=(4, NODE), volume=(5, VOLUME)), NOW)
    assert (reasons(observed), observed.young_seconds) == ({}, 6.0)
    observed = ignore_young_pods(waiting(node=(10, NODE), volume=(11, VOLUME)), NOW)
    assert (reasons(observed), observed.young_seconds) == ({"node": Reason.UNSCHEDULABLE}, 19.0)
    observed = ignore_young_pods(waiting(node=(29, NODE), volume=(30, VOLUME)), NOW)
    assert len(reasons(observed)) == 2
    assert observed.young_seconds is None
