"""What somebody does to a run's objects by hand: labels taken off, a Secret deleted or changed."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest
from stage import Object, Stage, condition, tiny

from scalerl_operator.controller.apply import SEARCH_SECONDS
from scalerl_operator.controller.object_writer import CHECK_SECONDS
from scalerl_operator.kube import errors

pytestmark = pytest.mark.cluster

NAME = "tiny-addition"
OURS = ("scalerl.dev/", "app.kubernetes.io/")


async def strip(there: Stage, kind: str, name: str, *only: str) -> Object:
    """Without those labels of ours, or without any."""
    live = await there.get(kind, name)
    assert live is not None
    labels = only or tuple(label for label in live["metadata"]["labels"] if label.startswith(OURS))
    await there.edit(kind, name, {"metadata": {"labels": dict.fromkeys(labels)}})
    return live


@pytest.mark.parametrize("only", [(), ("scalerl.dev/run-uid",)], ids=["all", "the run's uid"])
async def test_removed_labels_are_restored(there: Stage, only: tuple[str, ...]) -> None:
    """By its owner an object is the run's still."""
    await there.start(tiny())
    await there.reconcile()
    stripped = [
        ("Deployment", f"{NAME}-generator"),
        ("StatefulSet", f"{NAME}-coordinator"),
        ("Service", f"{NAME}-trainer"),
        ("ConfigMap", f"{NAME}-spec"),
        ("Job", f"{NAME}-trainer-1"),
    ]
    before = [await strip(there, kind, name, *only) for kind, name in stripped]
    for _ in range(2):
        await there.reconcile()
        there.now += 10.0
    for was in before:
        live = await there.get(was["kind"], was["metadata"]["name"])
        assert live is not None
        assert live["metadata"]["uid"] == was["metadata"]["uid"]
        assert was["metadata"]["labels"].items() <= live["metadata"]["labels"].items()
    run = await there.reconcile_until(lambda r: True, times=1)
    assert (run["status"]["phase"], condition(run, "Degraded")) == ("Running", "Healthy")
    assert run["status"]["trainer"]["attempt"] == 1


@pytest.mark.parametrize(
    "only",
    [(), ("scalerl.dev/run",), ("scalerl.dev/run-uid",), ("app.kubernetes.io/component",)],
    ids=["all", "the run's name", "the run's uid", "the role"],
)
async def test_coordinator_pod_without_labels_is_recreated(there: Stage, only: tuple[str, ...]) -> None:
    await there.start(tiny())
    pod = await strip(there, "Pod", f"{NAME}-coordinator-0", *only)
    await there.reconcile()
    there.now += SEARCH_SECONDS + 1.0
    run = await there.reconcile_until(lambda r: condition(r, "CoordinatorReady") == "Starting", times=1)
    assert run["status"]["phase"] == "Running"
    await there.begin("coordinator")
    run = await there.reconcile_until(lambda r: condition(r, "CoordinatorReady") == "Ready")
    live = await there.get("Pod", f"{NAME}-coordinator-0")
    assert live is not None
    assert live["metadata"]["uid"] != pod["metadata"]["uid"]
    assert any("labels were removed" in text for _, text in await there.events())


async def test_foreign_pod_of_same_name_is_unchanged(there: Stage) -> None:
    container = {"name": "theirs", "image": "theirs:1"}
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container]}}
    await there.account()
    await there.create(pod | {"metadata": {"name": f"{NAME}-coordinator-0"}})
    await there.create(tiny())
    await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
    await there.end("prepare")
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Running")
    there.now += SEARCH_SECONDS + 1.0
    await there.reconcile()
    live = await there.get("Pod", f"{NAME}-coordinator-0")
    assert live is not None
    assert "deletionTimestamp" not in live["metadata"]


async def test_deleted_secret_is_restored_unchanged(
    there: Stage,
) -> None:
    await there.start(tiny())
    before = await there.get("Secret", f"{NAME}-token")
    assert before is not None
    await there.delete("Secret", f"{NAME}-token")
    await there.reconcile()
    there.now += CHECK_SECONDS + 1.0
    await there.reconcile()
    live = await there.get("Secret", f"{NAME}-token")
    assert live is not None
    assert (live["data"], live["metadata"]["labels"]) == (before["data"], before["metadata"]["labels"])


async def test_token_that_is_refused_is_read_again(there: Stage) -> None:
    """Somebody changed the Secret, and the coordinator has started since."""
    await there.start(tiny())
    there.coordinator.token = "another"
    await there.reconcile_until(lambda r: condition(r, "CoordinatorReady") == "CoordinatorRefused", times=2)
    token = base64.b64encode(b"another").decode()
    await there.edit("Secret", f"{NAME}-token", {"data": {"token": token}})
    await there.reconcile_until(lambda r: condition(r, "CoordinatorReady") == "Ready", times=3)


async def test_job_labels_refused_by_admission_fail_no_reconcile(there: Stage) -> None:
    """As Kueue's webhook does with the queue of a Job that it has let in."""
    await there.start(tiny())
    await strip(there, "Job", f"{NAME}-trainer-1", "app.kubernetes.io/name")
    policy = f"no-labels-{there.namespace}"
    where = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": there.namespace}}}
    jobs = {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["jobs"]}
    same = "object.metadata.labels == oldObject.metadata.labels"
    rule = {
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": policy},
        "spec": {
            "matchConstraints": where | {"resourceRules": [jobs]},
            "validations": [{"expression": same, "message": "labels of a Job that is let in cannot change"}],
        },
    }
    binding = {
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": policy},
        "spec": {"policyName": policy, "validationActions": ["Deny"]},
    }
    for obj in (rule, binding):
        manifest = json.dumps({"apiVersion": "admissionregistration.k8s.io/v1"} | obj)
        there.kubectl("apply", "-f", "-", stdin=manifest)
    for tries in range(240):  # until the policy is in force
        try:
            await there.edit("Job", f"{NAME}-prepare", {"metadata": {"labels": {"try": str(tries)}}})
        except errors.Invalid:
            break
        await asyncio.sleep(0.5)
    run = await there.reconcile_until(lambda r: "cannot change" in str(r["status"]["conditions"]), times=1)
    assert run["status"]["phase"] == "Running"
    labels = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}}}
    there.kubectl("delete", "validatingadmissionpolicybinding", policy)
    await there.edit("ScaleRLRun", NAME, labels)
    there.now += 600.0
    for _ in range(240):
        await there.reconcile()
        job = await there.get("Job", f"{NAME}-trainer-1")
        assert job is not None
        if "app.kubernetes.io/name" in job["metadata"]["labels"]:
            break
        await asyncio.sleep(0.5)
        there.now += 600.0
    assert "app.kubernetes.io/name" in job["metadata"]["labels"]
    assert "kueue.x-k8s.io/queue-name" not in job["metadata"]["labels"], "its own labels are Kueue's to keep"
