"""The size of a run's claim: it may grow, by the spec or by hand, where its StorageClass allows that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from stage import Object, Stage, condition, tiny

from scalerl_operator.controller.volume import RETRY_SECONDS
from scalerl_operator.kube import errors

pytestmark = pytest.mark.cluster

THE_RUN = ("ScaleRLRun", "tiny-addition")
CLAIM = ("PersistentVolumeClaim", "tiny-addition-data")


async def start(there: Stage, *, grows: bool) -> None:
    """A run that works on a bound claim of 1Gi."""
    name = f"{there.namespace}-class"
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": "test/nobody",
        "allowVolumeExpansion": grows,
    }
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "1Gi"},
            "storageClassName": name,
            "hostPath": {"path": "/nowhere"},
        },
    }
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": [storage_class, volume]})
    await asyncio.to_thread(there.kubectl, "apply", "-f", "-", stdin=text)
    storage = {"size": "1Gi", "storageClassName": name, "accessMode": "ReadWriteOnce"}
    await there.start(tiny(storage=storage))
    for _ in range(1200):
        claim = await there.get(*CLAIM)
        if claim is not None and claim.get("status", {}).get("phase") == "Bound":
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the claim is not bound")


async def size(there: Stage) -> Any:
    claim = await there.get(*CLAIM)
    assert claim is not None
    return claim["spec"]["resources"]["requests"]["storage"]


def sized(amount: str) -> Object:
    return {"spec": {"storage": {"size": amount}}}


def grown(amount: str) -> Object:
    return {"spec": {"resources": {"requests": {"storage": amount}}}}


async def test_claim_grows_and_never_shrinks(there: Stage) -> None:
    await start(there, grows=True)
    await there.reconcile()
    writes = there.calls.writes
    await there.edit(*CLAIM, grown("2Gi"))
    for _ in range(2):
        await there.reconcile()
    assert (await size(there), there.calls.writes - writes) == ("2Gi", 0), "a larger request is wanted"
    await there.fresh_operator()
    await there.reconcile()
    assert await size(there) == "2Gi"
    await there.edit(*THE_RUN, sized("1536Mi"))
    await there.reconcile()
    assert await size(there) == "2Gi"
    await there.edit(*THE_RUN, sized("3Gi"))
    await there.reconcile()
    assert await size(there) == "3Gi"
    with pytest.raises(
        errors.Invalid,
        match=r"storage\.size can only be raised, from 3Gi not to 2Gi: Kubernetes does not shrink claims",
    ):
        await there.edit(*THE_RUN, sized("2Gi"))
    await there.edit(*THE_RUN, sized("3072Mi"))
    run = await there.reconcile_until(lambda r: True, times=1)
    assert (run["status"]["phase"], condition(run, "Degraded")) == ("Running", "Healthy")
    assert "RepairedDrift" not in {reason for reason, _ in await there.events()}


async def test_storage_class_without_expansion_is_named(there: Stage) -> None:
    await start(there, grows=False)
    await there.edit(*THE_RUN, {"spec": {"storage": {"size": "2Gi"}, "generator": {"replicas": 2}}})
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "ClaimNotEnlarged", times=1)
    said = next(c["message"] for c in run["status"]["conditions"] if c["type"] == "Degraded")
    assert "PersistentVolumeClaim tiny-addition-data stays at 1Gi, spec.storage.size is 2Gi: " in said
    assert "must support resize" in said
    assert [reason for reason, _ in await there.events()].count("ClaimNotEnlarged") == 1
    deployment = await there.get("Deployment", "tiny-addition-generator")
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 2
    await there.reconcile()
    writes = there.calls.writes
    for _ in range(3):
        await there.reconcile()
    assert there.calls.writes == writes, "it is not asked again at each reconcile"
    patch = json.dumps({"allowVolumeExpansion": True})
    await asyncio.to_thread(there.kubectl, "patch", "storageclass", f"{there.namespace}-class", "-p", patch)
    for _ in range(240):  # the API server's admission learns of the class a moment later
        there.now += RETRY_SECONDS + 1.0
        await there.reconcile()
        if await size(there) == "2Gi":
            break
        await asyncio.sleep(0.5)
    assert await size(there) == "2Gi"
    await there.reconcile_until(lambda r: condition(r, "Degraded") == "Healthy", times=2)


async def test_refused_claim_size_can_be_reverted(there: Stage) -> None:
    await start(there, grows=False)
    await there.edit(*THE_RUN, sized("2Gi"))
    await there.reconcile_until(lambda r: condition(r, "Degraded") == "ClaimNotEnlarged", times=1)
    await there.edit(*THE_RUN, sized("1Gi"))
    await there.reconcile_until(lambda r: condition(r, "Degraded") == "Healthy", times=2)


async def test_failed_enlargement_is_reported(there: Stage) -> None:
    await start(there, grows=True)
    await there.edit(*THE_RUN, sized("2Gi"))
    await there.reconcile()
    failed = {
        "type": "NodeResizeError",
        "status": "True",
        "message": "no room on the disk",
        "lastTransitionTime": None,
    }
    await there.edit(*CLAIM, {"status": {"conditions": [failed]}}, "status")
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "ClaimNotEnlarged", times=1)
    said = next(c["message"] for c in run["status"]["conditions"] if c["type"] == "Degraded")
    assert said.startswith("PersistentVolumeClaim tiny-addition-data: no room on the disk")
