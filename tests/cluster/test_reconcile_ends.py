"""Ways out of the ordinary for a run to go or to come back, on a real API server with its garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from stage import CRD, ROOT, Stage, condition, stage, tiny
from testcluster import Cluster

from scalerl_api import wire
from scalerl_api.process import COORDINATOR_TIMEOUT_SECONDS
from scalerl_lifecycle.lifecycle_types import ASK_AGAIN_SECONDS
from scalerl_operator.kube.errors import Conflict, Invalid
from scalerl_operator.manifests.scope import Images

OPERATIONS = ROOT / "docs" / "operations.md"

pytestmark = pytest.mark.cluster

NAME = "tiny-addition"
KINDS = (
    *("Job", "StatefulSet", "Deployment", "ConfigMap", "Secret", "Service", "NetworkPolicy"),
    *("PodDisruptionBudget", "PersistentVolumeClaim"),
)

Object = dict[str, Any]


@pytest.fixture
async def there(control_plane: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    namespace = f"e{abs(hash(request.node.name)) % 10**8}"
    data = (ROOT / "examples/tiny/data.jsonl").read_text()[:2000]
    async with stage(control_plane, namespace) as place:
        config = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"data.jsonl": data}}
        await place.create(config | {"metadata": {"name": f"{NAME}-data"}})
        yield place


async def objects(there: Stage, *kinds: str) -> dict[str, Object]:
    """Of the run, by uid."""
    found = [o for kind in kinds or KINDS for o in await there.all(kind)]
    return {o["metadata"]["uid"]: o for o in found if "scalerl.dev/run" in o["metadata"].get("labels", {})}


async def reach(true: Any, what: str, times: int = 600) -> None:
    for _ in range(times):
        if await true():
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"not reached: {what}")


async def land(there: Stage, role: str, count: int) -> None:
    """A role's pods have a node: a deletion waits for its kubelet, which the test plays."""
    for pod in await there.pods(role, count):
        name = pod["metadata"]["name"]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": there.namespace},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "elsewhere"},
        }
        path = f"/api/v1/namespaces/{there.namespace}/pods/{name}/binding"
        await asyncio.to_thread(there.kubectl, "create", "--raw", path, "-f", "-", stdin=json.dumps(binding))


async def delete(there: Stage, cascade: str) -> None:
    words = ("delete", "scalerlrun", NAME, "-n", there.namespace, f"--cascade={cascade}", "--wait=false")
    await asyncio.to_thread(there.kubectl, *words)


async def is_gone(there: Stage) -> bool:
    # The garbage collector writes the run too; the second writer reconciles again.
    with contextlib.suppress(Conflict):
        await there.reconcile()
    return await there.get("ScaleRLRun", NAME) is None


async def test_foreground_deletion_waits_for_trainer_and_recreates_nothing(
    there: Stage,
) -> None:
    await there.start(tiny(storage={"size": "1Gi", "onDelete": "Retain"}))
    await land(there, "trainer", 2)
    before = await objects(there)
    await delete(there, "foreground")

    async def trainers_leave() -> bool:
        assert not await is_gone(there)
        pods = await there.all("Pod", "trainer")
        return len(pods) == 2 and all("deletionTimestamp" in p["metadata"] for p in pods)

    await reach(trainers_leave, "the garbage collector takes the trainer's pods")
    await there.fresh_operator()
    for _ in range(5):
        assert not await is_gone(there)
        assert set(await objects(there)) <= set(before), "nothing is made for a run that goes"
        await asyncio.sleep(0.1)
    run = await there.get("ScaleRLRun", NAME)
    assert run is not None, "what was trained is being saved"
    assert "scalerl.dev/drain" in run["metadata"]["finalizers"]
    assert run["status"]["phase"] == "Suspending"
    for pod in await there.all("Pod", "trainer"):
        words = ("delete", "pod", pod["metadata"]["name"], "-n", there.namespace)
        await asyncio.to_thread(there.kubectl, *words, "--grace-period=0", "--force", "--wait=false")
    await reach(lambda: is_gone(there), "the run is gone")

    async def nothing_but_the_claim() -> bool:
        return {o["kind"] for o in (await objects(there)).values()} == {"PersistentVolumeClaim"}

    await reach(nothing_but_the_claim, "all is collected")
    assert set(await objects(there)) <= set(before)


async def test_drain_deletes_trainer_job_before_unreachable_coordinator(there: Stage) -> None:
    """A run that is deleted, of a spec that is refused."""
    # The operator's clock moves here; the API server's, by which pods have their time to end, does not.
    there.lost_seconds = 1e6
    await there.fresh_operator()
    await there.start(tiny())
    await land(there, "trainer", 2)
    await there.edit("ScaleRLRun", NAME, {"spec": {"podTemplate": {"labels": {"no label": "a"}}}})
    await there.reconcile_until(lambda run: condition(run, "Accepted") == "SpecInvalid")
    there.silence(True)
    await there.delete("ScaleRLRun", NAME)
    assert await there.reconcile() == ASK_AGAIN_SECONDS
    there.now += COORDINATOR_TIMEOUT_SECONDS / 3
    await there.fresh_operator()  # since when the coordinator does not answer is in the status
    assert await there.reconcile() == ASK_AGAIN_SECONDS
    (job,) = await there.all("Job", "trainer")
    assert "deletionTimestamp" not in job["metadata"], "the coordinator may come back"
    there.now += COORDINATOR_TIMEOUT_SECONDS
    assert await there.reconcile() == ASK_AGAIN_SECONDS
    run = await there.get("ScaleRLRun", NAME)
    assert run is not None
    said = next(c["message"] for c in run["status"]["conditions"] if c["type"] == "Suspended")
    assert "its Job is deleted, no answer from the coordinator in 300 s" in said
    (job,) = await there.all("Job", "trainer")
    assert "deletionTimestamp" in job["metadata"]
    assert await is_gone(there) is False, "its ranks have their time to save"
    (coordinator,) = await there.all("StatefulSet")
    assert "deletionTimestamp" not in coordinator["metadata"]
    for pod in await there.all("Pod", "trainer"):
        words = ("delete", "pod", pod["metadata"]["name"], "-n", there.namespace)
        await asyncio.to_thread(there.kubectl, *words, "--grace-period=0", "--force", "--wait=false")
    await reach(lambda: is_gone(there), "the run is gone, long before its drain is over")
    assert there.coordinator.stop_requests == []


async def test_released_run_with_a_foreign_finalizer_is_ignored(
    there: Stage,
) -> None:
    await there.create(tiny())
    await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
    await there.end("prepare")
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Running")
    await there.begin("coordinator")
    await there.reconcile_until(lambda r: condition(r, "CoordinatorReady") == "Ready")
    run = await there.get("ScaleRLRun", NAME)
    assert run is not None
    theirs = [*run["metadata"]["finalizers"], "test/theirs"]
    await there.edit("ScaleRLRun", NAME, {"metadata": {"finalizers": theirs}})
    await there.delete("ScaleRLRun", NAME)
    await there.reconcile_until(lambda r: r["metadata"]["finalizers"] == ["test/theirs"])
    asked = there.coordinator.asked
    await there.ask_coordinators()
    assert there.coordinator.asked == asked
    await there.edit("ScaleRLRun", NAME, {"metadata": {"finalizers": None}})


async def test_orphan_deletion_drains_and_keeps_objects(there: Stage) -> None:
    await there.start(tiny())
    before = await objects(there)
    await delete(there, "orphan")

    async def is_asked_to_stop() -> bool:
        assert not await is_gone(there)
        return bool(there.coordinator.stop_requests)

    await reach(is_asked_to_stop, "what was trained is saved first")
    assert there.coordinator.stop_requests == ["interrupted"]
    assert await there.get("ScaleRLRun", NAME) is not None
    there.coordinator.phase = wire.Phase.FINISHED
    await there.end("trainer", 0, count=2)
    await reach(lambda: is_gone(there), "the run is gone")
    after = await objects(there)
    assert set(after) == set(before), "nothing taken, nothing made"
    assert [o for o in after.values() if o["metadata"].get("ownerReferences")] == []
    # Before the name is used again, the user removes what was kept.
    await there.create(tiny())
    run = await there.reconcile_until(lambda r: bool(condition(r, "Accepted")))
    assert condition(run, "Accepted") == "NameTaken"
    command = re.search(r"^kubectl (delete job,.*)$", OPERATIONS.read_text(), re.MULTILINE)
    assert command is not None, "the page says how"
    words = command[1].replace("NAMESPACE", there.namespace).replace("NAME", NAME).split()
    await asyncio.to_thread(there.kubectl, *words, "--wait=false")
    # The claim waits for its last pod, which no kubelet ends.
    await there.reconcile_until(lambda r: condition(r, "Accepted") == "Accepted")


async def test_status_of_a_later_release_is_tolerated(there: Stage, control_plane: Cluster) -> None:
    """After a downgrade: phases, reasons and conditions that this release does not know."""
    ours = yaml.safe_load(CRD.read_text())
    later = copy.deepcopy(ours)
    status = later["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    status["phase"]["enum"].append("Hibernating")
    status["suspension"]["enum"].append("Dozing")

    def define(definition: Object) -> None:
        words = ("apply", "--server-side", "--force-conflicts", "-f", "-")
        control_plane.kubectl(*words, stdin=json.dumps(definition))

    await there.start(tiny())
    await there.create(tiny("ended"))
    await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing", "ended")
    then = "2026-01-01T00:00:00Z"
    foretold = {
        "type": "Completed",
        "status": "True",
        "reason": "ProphecyFulfilled",
        "lastTransitionTime": then,
    }
    unheard = {"type": "Levitating", "status": "True", "reason": "Lifted", "lastTransitionTime": then}
    await asyncio.to_thread(define, later)
    try:
        for name, conditions in ((NAME, [unheard]), ("ended", [unheard, foretold])):
            said = {"phase": "Hibernating", "suspension": "Dozing", "conditions": conditions}

            async def is_said(name: str = name, said: Object = said) -> bool:
                try:
                    await there.edit("ScaleRLRun", name, {"status": said}, "status")
                except Invalid:
                    return False
                return True

            await reach(is_said, "the later definition is served")
    finally:
        await asyncio.to_thread(define, ours)
    await there.fresh_operator()
    run = await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "Ready")
    assert (run["status"]["phase"], condition(run, "Levitating")) == ("Running", "")
    run = await there.reconcile_until(lambda r: r["status"]["phase"] == "Completed", "ended")
    said = next(c for c in run["status"]["conditions"] if c["type"] == "Completed")
    assert (said["reason"], said["message"]) == ("OtherRelease", "ProphecyFulfilled: ")


async def test_unnamed_image_is_replaced_by_the_default(there: Stage) -> None:
    run = tiny()
    run["spec"]["images"] = {"generator": "mine:1"}
    await there.start(run)

    async def image() -> str:
        (deployment,) = await there.all("Deployment")
        return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])

    assert await image() == "mine:1"
    there.images = Images("trainer:2", "generator:2", "coordinator:2")
    await there.fresh_operator()
    await there.reconcile()
    assert await image() == "mine:1"
    await there.edit("ScaleRLRun", NAME, {"spec": {"images": {"generator": None}}})
    await there.reconcile()
    assert await image() == "generator:1", "the release that the run's other roles have"
