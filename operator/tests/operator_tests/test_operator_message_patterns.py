"""From the words of scheduler, kubelet and container runtime to the reason that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from operator_tests import builders
from scalerl_api.reasons import Reason
from scalerl_lifecycle.status_fields import rfc3339
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.cluster_messages import mount_problem, placing_problem
from scalerl_operator.controller.pod_views import pod_view

STARTED = 1_000_000.0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("0/4 nodes are available: 4 Insufficient nvidia.com/gpu.", Reason.UNSCHEDULABLE),
        (
            "0/3 nodes are available: 1 node(s) exceed max volume count, 2 Insufficient nvidia.com/gpu.",
            Reason.UNSCHEDULABLE,
        ),
        ("0/3 nodes are available: 3 node(s) exceed max volume count.", Reason.UNSCHEDULABLE),
        (
            "0/4 nodes are available: 1 node(s) had volume node affinity conflict, 3 Insufficient cpu.",
            Reason.UNSCHEDULABLE,
        ),
        ("0/2 nodes are available: 2 Too many pods, 1 unbound volume", Reason.UNSCHEDULABLE),
        (
            "0/2 nodes are available: 1 node(s) had untolerated taint {a: }, 1 node(s) had volume node affinity "
            "conflict. preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.",
            Reason.VOLUME_NOT_READY,
        ),
        (
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            Reason.VOLUME_NOT_READY,
        ),
        ('0/1 nodes are available: persistentvolumeclaim "c" not found.', Reason.REFERENCE_NOT_FOUND),
    ],
)
def test_why_a_pod_has_no_node(message: str, reason: Reason) -> None:
    assert placing_problem(message) is reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('MountVolume.SetUp failed for volume "x" : secret "s" not found', Reason.REFERENCE_NOT_FOUND),
        ('MountVolume.SetUp failed for volume "x" : configmap "c" not found', Reason.REFERENCE_NOT_FOUND),
        (
            'MountVolume.SetUp failed for volume "x" : references non-existent secret key: foo',
            Reason.REFERENCE_NOT_FOUND,
        ),
        (
            "Failed to create pod sandbox: rpc error: code = Unknown desc = failed to get sandbox runtime: no "
            'runtime for "nvidia" is configured',
            Reason.REFERENCE_NOT_FOUND,
        ),
        (
            'Failed to create pod sandbox: plugin type="calico" failed (add): error getting ClusterInformation',
            Reason.CONTAINER_START_FAILED,
        ),
        ("MountVolume.MountDevice failed: timed out waiting for the condition", Reason.VOLUME_NOT_READY),
    ],
)
def test_why_a_pod_does_not_begin(message: str, reason: Reason) -> None:
    assert mount_problem(message) is reason


@pytest.mark.parametrize(
    "waiting", ["ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed", "ErrImagePull"]
)
def test_unpullable_image_is_reported(waiting: str) -> None:
    problem = pod_view(a_pod({"waiting": {"reason": waiting, "message": "words"}})).problem
    assert problem is not None
    assert (problem.reason, problem.message) == (Reason.IMAGE_PULL_FAILED, "c: words")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('secret "hub" not found', Reason.REFERENCE_NOT_FOUND),
        ("couldn't find key token in Secret team/hub", Reason.REFERENCE_NOT_FOUND),
        ("container has runAsNonRoot and image will run as root", Reason.CONTAINER_START_FAILED),
    ],
)
def test_config_errors_say_whether_something_is_missing(message: str, reason: Reason) -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": message}
    problem = pod_view(a_pod({"waiting": waiting})).problem
    assert problem is not None
    assert (problem.reason, problem.message) == (reason, f"c: {message}")


@pytest.mark.parametrize(
    ("back_off", "restarts", "lived", "counted"),
    [
        ("5m0s", 30, 1e7, 30),
        ("1m0s", 30, 1e7, 0),  # one every few days, and a few just now
        ("1m0s", 30, 2000.0, 30),  # on a node whose longest back-off is a minute
        ("1m0s", 0, 5.0, 0),
    ],
)
def test_consecutive_restarts_count_for_any_longest_back_off(
    back_off: str, restarts: int, lived: float, counted: int
) -> None:
    looping = {"reason": "CrashLoopBackOff", "message": f"back-off {back_off} restarting failed container"}
    last = {"terminated": {"exitCode": 1, "finishedAt": rfc3339(STARTED + lived)}}
    pod = a_pod({"waiting": looping}, restartCount=restarts, lastState=last)
    assert pod_view(pod).restarts == counted


def test_empty_volume_exit_is_reported_until_ready() -> None:
    looping = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}
    last = {"terminated": {"exitCode": 4, "finishedAt": rfc3339(STARTED + 50.0)}}
    view = pod_view(a_pod({"waiting": looping}, restartCount=30, lastState=last))
    assert (view.restarts, view.steps_lost) == (0, True)
    again = pod_view(a_pod({"running": {}}, restartCount=31, lastState=last))
    assert again.steps_lost, "it has not read the volume yet"
    assert not pod_view(a_pod({"running": {}}, ready=True, restartCount=31, lastState=last)).steps_lost


def a_pod(state: dict[str, Any], **status: Any) -> dict[str, Any]:
    only = builders.container(state) | status
    return builders.pod("p", Role.TRAINER, only, startTime=rfc3339(STARTED))
