"""Coordinators that cannot be reached hold up no other run: they are asked apart from reconciles."""

from __future__ import annotations

import time
from typing import Any

import pytest
from replicas import until
from stage import Coordinator, Stage, tiny

from scalerl_operator.controller.coordinator_poller import Timings
from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube.types import Key
from scalerl_operator.kube.work_queue import WorkQueue
from scalerl_operator.names import labels

pytestmark = pytest.mark.cluster

UNREACHABLE, WORKERS = 40, 16
SILENT_SECONDS = 120.0
"""Until one coordinator that is silent is given up; forty on sixteen workers take three times as long."""


async def with_coordinator(there: Stage, name: str, address: str) -> None:
    """A run, and its coordinator's pod at that address."""
    run = tiny(name)
    await there.create(run)
    made = await there.get("ScaleRLRun", name)
    assert made is not None
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-coordinator-0",
            "labels": labels(name, made["metadata"]["uid"], "coordinator"),
        },
        "spec": {"containers": [{"name": "coordinator", "image": "coordinator:1"}]},
    }
    await there.create(pod)
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": ready}
    await there.edit("Pod", f"{name}-coordinator-0", {"status": status}, "status")


async def test_forty_unreachable_coordinators_do_not_delay_a_healthy_run(
    there: Stage,
) -> None:
    silent, seen, steps = Coordinator(), dict[Key, float](), dict[Key, int | None]()
    silent.silent = True

    async def reconcile(key: Key) -> float | None:
        wait = await reconciler.reconcile(key)
        seen[key] = time.monotonic()
        return wait

    queue = WorkQueue(reconcile, workers=WORKERS)
    reconciler = Reconciler(
        there.api,
        there.cache,
        images=there.images,
        operator_namespace="scalerl",
        on_status=lambda key, status, _: steps.__setitem__(key, status.step if status else None),
        wake=queue.wake,
        poll_timings=Timings(answer=SILENT_SECONDS),
    )
    await there.account()
    for n in range(UNREACHABLE):
        await with_coordinator(there, f"silent-{n}", silent.address)
    await with_coordinator(there, "healthy", there.coordinator.address)
    await there.watch()
    keys = there.cache.runs()
    healthy = (there.namespace, "healthy")
    assert len(keys) == UNREACHABLE + 1
    try:
        queue.release()
        for key in keys:
            queue.wake(key)
        await until(lambda: len(steps) == len(keys))  # everything is made: connections are refused so far
        async with silent.serving():
            for _ in range(3):
                for key in sorted(keys, key=lambda key: key == healthy):
                    queue.wake(key)
                began = time.monotonic()
                took = await until(lambda began=began: seen[healthy] > began, SILENT_SECONDS)
                print(f"measured: a healthy run's reconcile among {UNREACHABLE} unreachable: {took:.2f} s")
            there.coordinator.step += 1
            # A step alone wakes no run: an answer with it, and then a reconcile by the clock.
            await until(lambda: steps[healthy] == there.coordinator.step)
            assert silent.asked, "it is silent, not away"
    finally:
        await queue.halt()
        await reconciler.forget_all()
