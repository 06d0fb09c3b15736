"""Edits with which a run does not start, and limits that are raised, on a real API server: the run is held, and goes on.

Every field, on objects in memory: ``test_operator_failing_edits.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from stage import Object, Stage, condition, tiny

from scalerl_api import wire
from scalerl_operator.kube import errors

pytestmark = pytest.mark.cluster

NAME = "tiny-addition"
RUN = ("ScaleRLRun", NAME)
MOUNT = {"volumeMounts": [{"name": "data", "mountPath": "/dat", "readOnly": True}]}
LINE = (
    "2026-01-01 00:00:00,000 ERROR scalerl_trainer.prepare task.jsonl.path: /data/data.jsonl does not exist"
)


def phase(wanted: str) -> Any:
    return lambda run: run["status"]["phase"] == wanted


async def drain(there: Stage) -> None:
    """The run drains for an edit; its trainer saves and ends."""
    await there.reconcile_until(lambda run: bool(there.coordinator.stop_requests))
    there.coordinator.phase = wire.Phase.FINISHED
    await there.end("trainer", 0, count=2)


async def prepare_ends(there: Stage, code: int = 0, message: str = "") -> None:
    """As soon as the preparation has been created again; before, the phase is that of the drain."""
    for _ in range(1200):
        await there.reconcile()
        pods = [
            pod for pod in await there.all("Pod", "prepare") if "deletionTimestamp" not in pod["metadata"]
        ]
        if any(pod.get("status", {}).get("phase") in (None, "Pending") for pod in pods):
            return await there.end("prepare", code, message)
        await asyncio.sleep(0.1)
    raise AssertionError("no other preparation is made")


async def start_again(there: Stage) -> Object:
    """The run prepares, and all its pods start; its coordinator resumes from the journal."""
    await prepare_ends(there)
    await there.reconcile_until(phase("Running"))
    there.coordinator.phase = wire.Phase.RUNNING
    await there.begin("coordinator")
    await there.begin("generator")
    await there.begin("trainer", 2)
    return await there.reconcile_until(lambda run: condition(run, "TrainerReady") == "Ready")


async def is_held(there: Stage, *says: str) -> Object:
    run = await there.reconcile_until(phase("Suspended"))
    message = next(c["message"] for c in run["status"]["conditions"] if c["type"] == "Suspended")
    assert condition(run, "Suspended") == "EditFailed"
    for text in (*says, "revert or fix the edit of"):
        assert text in message
    assert ("EditFailed", f"Suspended: {message}") in await there.events()
    await there.fresh_operator()
    for _ in range(2):
        await there.reconcile()
        left = [o for kind in ("Deployment", "StatefulSet") for o in await there.all(kind)]
        assert all("deletionTimestamp" in o["metadata"] for o in left)
    assert "completionTime" not in run["status"]
    return run


async def interrupted_reconciles(there: Stage) -> None:
    """An operator that dies after each number of writes."""
    for writes in range(4):
        there.writes_left = writes
        with contextlib.suppress(errors.Fenced):
            await there.reconcile()
        await there.fresh_operator()
    there.writes_left = None


async def test_wrong_mount_path_holds_the_run_until_it_is_reverted(there: Stage) -> None:
    await there.start(tiny())
    await there.edit(*RUN, {"spec": {"podTemplate": MOUNT}})
    await drain(there)
    await prepare_ends(there, 2, LINE)
    run = await is_held(
        there,
        "BadInput: task.jsonl.path: /data/data.jsonl does not exist",
        "spec.podTemplate.volumeMounts.0.mountPath",
    )
    assert run["status"]["step"] == 3
    mount = tiny()["spec"]["podTemplate"]["volumeMounts"]
    await there.edit(*RUN, {"spec": {"podTemplate": {"volumeMounts": mount}}})
    await interrupted_reconciles(there)
    run = await start_again(there)
    assert (run["status"]["step"], run["status"].get("trainedSpec")) == (3, None)
    assert there.coordinator.stop_requests[-1] == "", "the stop of its drain is cancelled"


async def test_service_account_of_an_edit_is_taken_back(there: Stage) -> None:
    """The API server keeps the name in a deprecated field, too."""
    await there.start(tiny())
    for name in ("nobody", None):
        for role in ("coordinator", "generator"):
            await there.edit(*RUN, {"spec": {role: {"podTemplate": {"serviceAccountName": name}}}})
        await there.reconcile()
        found = [o for kind in ("Deployment", "StatefulSet") for o in await there.all(kind)]
        assert [o["spec"]["template"]["spec"]["serviceAccountName"] for o in found] == [name or "default"] * 2


async def test_completed_run_is_given_more_steps(there: Stage) -> None:
    """By ``kubectl patch``, also by an operator that dies at any write."""
    await there.start(tiny(budget={"maxSteps": 3}))
    there.coordinator.phase, there.coordinator.stop_reason = wire.Phase.FINISHED, "maxSteps"
    await there.end("trainer", 0, count=2)
    run = await there.reconcile_until(phase("Completed"))
    assert "completionTime" in run["status"]
    await there.edit(*RUN, {"spec": {"budget": {"maxSteps": 203}}})
    there.coordinator.phase = wire.Phase.WAITING
    await interrupted_reconciles(there)
    run = await start_again(there)
    assert (run["status"]["step"], condition(run, "Completed")) == (3, "Running")
    assert "completionTime" not in run["status"]


async def test_failed_run_continues_with_a_fixed_spec(there: Stage) -> None:
    await there.create(tiny())
    await there.reconcile_until(lambda run: run.get("status", {}).get("phase") == "Preparing")
    await there.end("prepare", 2, LINE)
    await there.reconcile_until(phase("Failed"))
    await there.edit(*RUN, {"spec": {"ttlSecondsAfterFinished": 100_000}})
    await there.reconcile()
    run = await there.get(*RUN)
    assert run is not None
    assert run["status"]["phase"] == "Failed"
    await there.edit(*RUN, {"spec": {"trainer": {"podTemplate": {"env": [{"name": "A", "value": "b"}]}}}})
    await interrupted_reconciles(there)
    await start_again(there)
