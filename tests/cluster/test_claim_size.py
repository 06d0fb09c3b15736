"""The size of a run's claim: it may grow by hand, where its StorageClass allows that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from stage import Object, Stage, condition, tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

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
    for _ in range(200):
        claim = await there.get(*CLAIM)
        if claim is not None and claim.get("status", {}).get("phase") == "Bound":
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the claim is not bound")


async def size(there: Stage) -> Any:
    claim = await there.get(*CLAIM)
    assert claim is not None
    return claim["spec"]["resources"]["requests"]["storage"]


def grown(amount: str) -> Object:
    return {"spec": {"resources": {"requests": {"storage": amount}}}}


async def test_a_claim_that_is_enlarged_by_hand_stays_so(there: Stage) -> None:
    await start(there, grows=True)
    await there.look()
    writes = there.calls.writes
    await there.edit(*CLAIM, grown("2Gi"))
    for _ in range(2):
        await there.look()
    await there.fresh_operator()
    await there.look()
    assert (await size(there), there.calls.writes - writes) == ("2Gi", 0), "a larger request is wanted"
    run = await there.looks(lambda r: True, times=1)
    assert (run["status"]["phase"], condition(run, "Degraded")) == ("Running", "AsExpected")
    assert "RepairedDrift" not in {reason for reason, _ in await there.events()}
