"""A claim that is deleted is reported at once, and a run that has steps never starts on an empty volume."""

from __future__ import annotations

import contextlib

import pytest
from stage import Object, Stage, condition, tiny

from scalerl_api.process import STEPS_LOST_EXIT_CODE
from scalerl_operator.controller.reconcile import BLOCKED_SECONDS
from scalerl_operator.kube import errors
from scalerl_operator.names import ABANDON, RUN, RUN_UID

pytestmark = pytest.mark.cluster

THE_RUN = ("ScaleRLRun", "tiny-addition")
CLAIM = ("PersistentVolumeClaim", "tiny-addition-data")
IN_USE = "test/in-use"
"""Stands for the pods that have the claim mounted: here no kubelet has."""


def degraded(run: Object) -> Object:
    return next(c for c in run["status"]["conditions"] if c["type"] == "Degraded")


async def suspend(there: Stage) -> None:
    await there.edit(*THE_RUN, {"spec": {"suspend": True}})
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspending")
    await there.end("trainer", 0, count=2)
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspended")
    for kind in ("Job", "StatefulSet", "Deployment"):
        await there.reconcile_until(lambda r: True)
        for obj in await there.all(kind):
            assert "deletionTimestamp" in obj["metadata"]


async def delete_claim(there: Stage) -> None:
    await there.delete(*CLAIM)
    for _ in range(100):
        if await there.get(*CLAIM) is None:
            return
        with contextlib.suppress(errors.NotFound):
            await there.edit(*CLAIM, {"metadata": {"finalizers": None}})
    raise AssertionError("the claim does not go")


async def is_held(there: Stage, says: str) -> Object:
    """Held, of what is there nothing is made, and each reconcile finds it so and writes nothing."""
    run = await there.reconcile_until(lambda r: condition(r, "Accepted") == "ClaimLost")
    message = next(c["message"] for c in run["status"]["conditions"] if c["type"] == "Accepted")
    assert says in message
    assert "has trained 3 steps and does not start on an empty volume" in message
    assert run["status"]["phase"] == "Pending"
    assert (condition(run, "Degraded"), condition(run, "Prepared")) == ("ClaimLost", "Prepared")
    assert any(
        reason == "ClaimLost" and text.startswith("Accepted: ") for reason, text in await there.events()
    )
    writes = there.calls.writes
    await there.fresh_operator()
    for _ in range(2):
        assert await there.reconcile() is not None
    assert there.calls.writes == writes
    assert [o for o in await there.all("Job") if "deletionTimestamp" not in o["metadata"]] == []
    return run


async def test_deleted_claim_is_reported_at_once_and_holds_run(
    there: Stage,
) -> None:
    await there.start(tiny())
    claim = await there.edit(*CLAIM, {"metadata": {"finalizers": [IN_USE]}})
    await there.delete(*CLAIM)
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "ClaimDeleted", times=1)
    assert "tiny-addition-data is being deleted" in degraded(run)["message"]
    assert any(reason == "ClaimDeleted" for reason, _ in await there.events())
    assert (run["status"]["phase"], condition(run, "TrainerReady")) == ("Running", "Ready")
    await suspend(there)
    await there.edit(*CLAIM, {"metadata": {"finalizers": None}})
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "ClaimLost", times=1)
    labels = {RUN: "tiny-addition", RUN_UID: run["metadata"]["uid"]}
    needed = f"{RUN}=tiny-addition {RUN_UID}={labels[RUN_UID]}"
    assert f"needs the labels {needed}" in degraded(run)["message"], "also while the run is suspended"
    assert run["status"]["phase"] == "Suspended"
    assert await there.reconcile() == BLOCKED_SECONDS, "a claim without labels is not watched"
    await there.edit(*THE_RUN, {"spec": {"suspend": False}})
    run = await is_held(there, "tiny-addition-data does not exist")
    assert await there.get(*CLAIM) is None

    # What somebody makes of that name is not taken for the run's data before they say so.
    spec = {key: claim["spec"][key] for key in ("accessModes", "resources")}
    made = {"apiVersion": "v1", "kind": CLAIM[0], "spec": spec}
    await there.create(made | {"metadata": {"name": CLAIM[1]}})
    said = f"kubectl label pvc tiny-addition-data --overwrite {needed}"
    await is_held(there, said)
    await there.edit(*THE_RUN, {"spec": {"suspend": True}})
    run = await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspended")
    assert said in degraded(run)["message"]
    assert await there.reconcile() == BLOCKED_SECONDS
    await there.edit(*THE_RUN, {"spec": {"suspend": False}})
    await is_held(there, said)
    await there.edit(*CLAIM, {"metadata": {"labels": labels}})
    run = await there.reconcile_until(lambda r: r["status"]["phase"] == "Preparing")
    assert (condition(run, "Accepted"), condition(run, "Degraded")) == ("Accepted", "Healthy")
    spec_map = await there.get("ConfigMap", "tiny-addition-spec")
    assert spec_map is not None
    assert spec_map["data"]["trained"], "the coordinator checks whether it is the run's volume"


async def test_lost_claim_of_run_with_copies_is_replaced(there: Stage) -> None:
    """Once no pod has the old one mounted: the trainer continues from the newest copy in the bucket."""
    manifest = tiny()
    manifest["spec"]["checkpoint"] = {"to": "s3://bucket/run"}
    await there.start(manifest)
    await delete_claim(there)
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "ClaimLost", times=1)
    assert "suspend and resume the run" in degraded(run)["message"]
    await there.reconcile()
    assert await there.get(*CLAIM) is None
    await suspend(there)
    await there.edit(*THE_RUN, {"spec": {"suspend": False}})
    run = await there.reconcile_until(lambda r: r["status"]["phase"] == "Preparing")
    assert (condition(run, "Accepted"), condition(run, "Degraded")) == ("Accepted", "Healthy")
    assert await there.get(*CLAIM) is not None
    assert run["status"]["step"] == 3


async def test_steps_of_a_lost_claim_can_be_abandoned(
    there: Stage,
) -> None:
    await there.start(tiny())
    await suspend(there)
    await delete_claim(there)
    await there.edit(*THE_RUN, {"spec": {"suspend": False}})
    await is_held(there, "does not exist")
    await there.edit(*THE_RUN, {"metadata": {"annotations": {ABANDON: "2"}}})
    await is_held(there, "does not exist")
    await there.edit(*THE_RUN, {"metadata": {"annotations": {ABANDON: "3"}}})
    there.writes_left = 1
    with pytest.raises(errors.Fenced):
        await there.reconcile()
    there.writes_left = None
    await there.fresh_operator()
    run = await there.reconcile_until(lambda r: r["status"]["phase"] == "Preparing")
    assert "step" not in run["status"]
    assert await there.get(*CLAIM) is not None
    spec_map = await there.get("ConfigMap", "tiny-addition-spec")
    assert spec_map is not None
    assert "trained" not in spec_map["data"]


async def finds_nothing(there: Stage) -> None:
    """The coordinator's container ends again and again: the volume is empty."""
    pod = (await there.all("Pod", "coordinator"))[0]
    over = {"exitCode": STEPS_LOST_EXIT_CODE, "reason": "Error"}
    of_all = {"ready": False, "restartCount": 50, "imageID": "", "lastState": {"terminated": over}}
    looping = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}
    containers = [
        of_all | {"name": c["name"], "image": c["image"], "state": {"waiting": looping}}
        for c in pod["spec"]["containers"]
    ]
    status = {"conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": containers}
    await there.edit("Pod", pod["metadata"]["name"], {"status": status}, "status")


async def test_empty_volume_holds_the_run_until_restored_or_abandoned(
    there: Stage,
) -> None:
    await there.start(tiny())
    await finds_nothing(there)
    run = await there.reconcile_until(lambda r: condition(r, "Accepted") == "ClaimLost", times=1)
    assert "holds neither journal nor checkpoint" in degraded(run)["message"]
    assert (run["status"]["phase"], condition(run, "Degraded")) == ("Pending", "ClaimLost")
    await there.end("trainer", 1, count=2)
    for _ in range(3):
        await there.reconcile()
        there.now += 600.0
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "ClaimLost", times=1)
    assert (run["status"]["phase"], run["status"]["trainer"].get("restarts", 0)) == ("Pending", 0)
    # Somebody restores what was on it.
    await there.begin("coordinator")
    run = await there.reconcile_until(lambda r: r["status"]["phase"] == "Running")
    assert (condition(run, "Accepted"), run["status"]["step"]) == ("Accepted", 3)
    await finds_nothing(there)
    await there.reconcile_until(lambda r: condition(r, "Accepted") == "ClaimLost", times=1)
    await there.edit(*THE_RUN, {"metadata": {"annotations": {ABANDON: "3"}}})
    run = await there.reconcile_until(lambda r: condition(r, "Accepted") == "Accepted")
    assert "step" not in run["status"]
    spec_map = await there.get("ConfigMap", "tiny-addition-spec")
    assert spec_map is not None
    assert "trained" not in spec_map["data"]


async def test_lost_claim_of_running_run_is_not_recreated(there: Stage) -> None:
    await there.start(tiny())
    await delete_claim(there)
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "ClaimLost", times=1)
    assert run["status"]["phase"] == "Running", "what works may still have it mounted"
    await there.edit(*THE_RUN, {"spec": {"budget": {"maxSteps": 77}}})
    await there.reconcile()
    assert await there.get(*CLAIM) is None


async def test_run_without_steps_gets_its_claim_again(there: Stage) -> None:
    await there.create(tiny())
    await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
    await delete_claim(there)
    await there.reconcile()
    assert await there.get(*CLAIM) is not None


async def test_missing_named_claim_is_found(there: Stage) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": CLAIM[0], "metadata": {"name": CLAIM[1]}, "spec": spec}
    await there.create(claim)
    await there.start(tiny(storage={"claimName": CLAIM[1]}))
    await there.reconcile()
    await there.edit(*CLAIM, {"metadata": {"finalizers": [IN_USE]}})
    await there.delete(*CLAIM)
    there.now += 31.0
    await there.reconcile_until(lambda r: condition(r, "Degraded") == "ClaimDeleted", times=1)
    await suspend(there)
    await there.edit(*CLAIM, {"metadata": {"finalizers": None}})
    await there.edit(*THE_RUN, {"spec": {"suspend": False}})
    await is_held(there, "does not exist")
