"""What the operator says to the runs of ``invalid_specs.yaml`` that no API server can refuse: a condition, an event, and calm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from invalid_specs import Case, Object, merged
from invalid_stage import MAKING, ROWS, is_gone, is_reported, names, namespace, said
from stage import Stage, own_control_plane, stage
from testcluster import Cluster

CALM_SECONDS = 5.0


async def is_calm(at: Stage) -> None:
    """Further reconciles change nothing, report nothing again, and the next is not at once."""
    run, events = await at.get("ScaleRLRun", "invalid"), await at.events()
    for _ in range(3):
        wait = await at.reconcile("invalid")
        assert wait is None or wait >= CALM_SECONDS, wait
    assert await at.get("ScaleRLRun", "invalid") == run
    assert await at.events() == events


@pytest.mark.parametrize(
    "case", [case for case in ROWS if not (case.nodes or case.scheduled)], ids=lambda case: case.name
)
async def test_refusals_of_the_operator_are_conditions(control_plane: Any, case: Case) -> None:
    async with stage(control_plane, namespace(case)) as at:
        try:
            await is_reported(control_plane, at, case)
            await is_calm(at)
        finally:
            await is_gone(at)


@pytest.fixture(scope="module")
def without_devices() -> Iterator[Cluster]:
    """A control plane with a scheduler and one node, which has room for anything but devices."""
    with own_control_plane(unreal_nodes=1) as cluster:
        none = {"status": {of: {"nvidia.com/gpu": "0"} for of in ("capacity", "allocatable")}}
        cluster.kubectl("patch", "node", "unreal-0", "--subresource=status", "-p", json.dumps(none))
        for case in ROWS:
            if case.scheduled:  # the scheduler wants to see each run's claim bound
                cluster.apply(volume(namespace(case)))
        yield cluster


def volume(name: str) -> Object:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": "1Ti"},
        "hostPath": {"path": f"/nowhere/{name}"},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}


async def is_prepared(at: Stage) -> None:
    """As soon as its pod has begun: the node says so once, and not after it has ended."""
    for _ in range(1200):
        (pod,) = await at.pods("prepare")
        if pod.get("status", {}).get("phase") == "Running":
            return await at.end("prepare")
        await asyncio.sleep(0.1)
    raise AssertionError("the preparation has found no place")


@pytest.mark.parametrize("case", [case for case in ROWS if case.scheduled], ids=lambda case: case.name)
async def test_unschedulable_pods_are_a_condition(without_devices: Cluster, case: Case) -> None:
    async with stage(without_devices, namespace(case)) as at:
        preparing = asyncio.create_task(is_prepared(at))
        try:
            run = await is_reported(without_devices, at, case)
            if case.condition == "Prepared":
                return
            await preparing
            assert run["status"]["phase"] == "Running", "what has a place continues"
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
            await is_gone(at)


async def test_name_of_63_characters_is_accepted(control_plane: Any) -> None:
    name = "n" * 63
    run = merged(
        ROWS[0].run, {"metadata": {"name": name}, "spec": {"task": {"reasoningGym": {"parameters": None}}}}
    )
    async with stage(control_plane, "invalid-name") as at:
        await at.create(run)
        await at.reconcile_until(lambda run: run.get("status", {}).get("phase") == "Preparing", name=name)
        for kind in MAKING:
            for made in await names(at, kind):
                assert len(made) <= 63, (kind, made)


async def test_namespaced_operator_names_a_missing_storage_class(
    without_devices: Cluster,
) -> None:
    """Its role sees nothing of the cluster: the claim's own events say it."""
    async with stage(without_devices, "invalid-class") as at:
        at.namespaced = True
        await at.fresh_operator()
        try:
            await at.create(merged(ROWS[0].run, {"spec": {"task": {"reasoningGym": {"parameters": None}}, "storage": {"storageClassName": "none"}}}))  # fmt: skip

            def named(run: Object) -> bool:
                at.now += 1.0
                return said(run, "Prepared").get("reason") == "ReferenceNotFound"

            run = await at.reconcile_until(named, name="invalid")
            assert 'storageclass.storage.k8s.io "none" not found' in said(run, "Prepared")["message"]
        finally:
            await is_gone(at)
