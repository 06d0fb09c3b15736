"""That a new pod waits for its node or its volume is no news for a while."""

from __future__ import annotations

from typing import Any

from operator_tests.manifests import UID
from scalerl_api.conditions import Reason
from scalerl_operator.controller.observe import RunObservation, observe, patient
from scalerl_operator.names import COMPONENT, RUN_UID
from scalerl_operator.policy.memory_status import rfc3339
from scalerl_operator.workloads import Role

NOW = 1_000_000.0
VOLUME = "pod has unbound immediate PersistentVolumeClaims"
NODE = "0/3 nodes are available: 3 Insufficient cpu."


def waiting(**of: tuple[float, str]) -> RunObservation:
    """Pods by name, each with its age and what the scheduler says of it."""
    pods: dict[tuple[str, str], Any] = {}
    for name, (age, message) in of.items():
        metadata = {"name": name, "uid": name, "labels": {RUN_UID: UID, COMPONENT: Role.GENERATOR}}
        metadata["creationTimestamp"] = rfc3339(NOW - age)
        said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        pods["Pod", name] = {"metadata": metadata, "status": {"conditions": [said]}}
    return observe(pods, UID, {Role.PREPARE: "", Role.TRAINER: ""})


def reasons(observed: RunObservation) -> dict[str, Reason]:
    return {pod.name: pod.problem.reason for pod in observed.pods if pod.problem is not None}


def test_patient_returns_the_shortest_wait() -> None:
    observed, left = patient(waiting(node=(4, NODE), volume=(5, VOLUME)), NOW)
    assert (reasons(observed), left) == ({}, 6.0)
    observed, left = patient(waiting(node=(10, NODE), volume=(11, VOLUME)), NOW)
    assert (reasons(observed), left) == ({"node": Reason.UNSCHEDULABLE}, 19.0)
    observed, left = patient(waiting(node=(29, NODE), volume=(30, VOLUME)), NOW)
    assert len(reasons(observed)) == 2
    assert left is None
