"""A node of the trainer or of the coordinator is lost: with the real controllers of nodes, evictions, Jobs and StatefulSets, the next one
starts by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from stage import Object, Stage, condition, tiny

from scalerl_operator import names
from scalerl_operator.controller import apply, pod_views
from scalerl_operator.kube.errors import ApiError
from scalerl_operator.manifests import render
from scalerl_operator.manifests.coordinator import GRACE_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

TOLERATED_SECONDS = 1
TOLERATIONS = [
    {
        "key": f"node.kubernetes.io/{key}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": TOLERATED_SECONDS,
    }
    for key in ("unreachable", "not-ready")
]


class Nodes:
    """Two nodes without kubelets. One answers all the time, since Kubernetes evicts no pods when no node does."""

    def __init__(self, there: Stage) -> None:
        self._there = there
        self.lost, self._other = f"{there.namespace}-lost", f"{there.namespace}-other"
        self._is_lost, self._lock = False, asyncio.Lock()

    async def kubectl(self, *words: str, stdin: Object | None = None) -> str:
        text = None if stdin is None else json.dumps(stdin)
        return await asyncio.to_thread(self._there.kubectl, *words, stdin=text)

    async def report(self, name: str, ready: str = "True") -> None:
        """The status as a kubelet posts it, or, with ``Unknown``, as the node controller replaces it."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        reported = {
            "type": "Ready",
            "status": ready,
            "reason": "Test",
            "message": "",
            "lastHeartbeatTime": now,
        }
        patch = json.dumps({"status": {"conditions": [reported | {"lastTransitionTime": now}]}})
        await self.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)

    async def bind(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        target["target"] = {"kind": "Node", "name": self.lost}
        path = f"/api/v1/namespaces/{self._there.namespace}/pods/{name}/binding"
        await self.kubectl("create", "--raw", path, "-f", "-", stdin=target)

    @contextlib.asynccontextmanager
    async def there(self) -> AsyncIterator[None]:
        for name in (self.lost, self._other):
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            await self.kubectl("create", "-f", "-", stdin=node)
            await self.report(name)
        posting = asyncio.create_task(self._post())
        try:
            yield
        finally:
            posting.cancel()
            await self.kubectl("delete", "node", self.lost, self._other, "--wait=false", "--ignore-not-found")

    async def _post(self) -> None:
        while True:
            await asyncio.sleep(8)
            async with self._lock:
                for name in (self._other, *(() if self._is_lost else (self.lost,))):
                    await self.report(name)

    async def lose(self, *, noticed: bool) -> None:
        """The first node posts no more, which its controller notices after 40 s; ``noticed``: it has."""
        async with self._lock:
            self._is_lost = True
            if noticed:
                await self.report(self.lost, "Unknown")


async def ready_pod(there: Stage, name: str, ready: str) -> None:
    conditions = [{"type": "Ready", "status": ready}, {"type": "ContainersReady", "status": "True"}]
    await there.edit("Pod", name, {"status": {"conditions": conditions}}, "status")


def trainer(run: Object) -> dict[str, Any]:
    return dict(run["status"]["trainer"])


@pytest.mark.parametrize(
    "silent", [False, pytest.param(True, marks=pytest.mark.full)], ids=["reported", "silent"]
)
async def test_next_attempt_starts_without_the_lost_pod(
    there: Stage, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """silent: the node stops posting, which its controller takes 40 to 50 s to notice; else the test writes what that does."""
    nodes = Nodes(there)
    async with nodes.there():
        await there.create(
            tiny(trainer={"replicas": 2, "maxRestarts": 0, "podTemplate": {"tolerations": TOLERATIONS}})
        )
        await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
        await there.end("prepare")
        await there.reconcile_until(lambda r: r["status"]["phase"] == "Running")
        await there.begin("coordinator")
        await there.begin("generator")
        lost = (await there.pods("trainer", 2))[0]
        name = lost["metadata"]["name"]
        await nodes.bind(lost)
        await there.begin("trainer", 2)
        await ready_pod(there, name, "True")
        await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "Ready")
        await nodes.lose(noticed=not silent)
        if not silent:
            await ready_pod(there, name, "False")

        run = await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "NodeLost")
        assert (trainer(run)["disruptions"], trainer(run)["consecutiveFailures"]) == (1, 0)
        assert any(reason == "NodeLost" and name in text for reason, text in await there.events())
        run = await there.reconcile_until(lambda r: trainer(r)["attempt"] == 2)
        pod = await there.get("Pod", name)
        assert pod is not None
        assert "deletionTimestamp" in pod["metadata"], "it is not deleted by force"
        (disruption,) = (c for c in pod["status"]["conditions"] if c["type"] == "DisruptionTarget")
        assert disruption["reason"] == "DeletionByTaintManager"
        jobs = {job["metadata"]["name"]: job for job in await there.all("Job", "trainer")}
        assert set(jobs) == {"tiny-addition-trainer-1", "tiny-addition-trainer-2"}
        assert "deletionTimestamp" in jobs["tiny-addition-trainer-1"]["metadata"]
        environment = jobs["tiny-addition-trainer-2"]["spec"]["template"]["spec"]["containers"][0]["env"]
        (attempt,) = (entry["value"] for entry in environment if entry["name"] == "SCALERL_ATTEMPT")
        assert attempt.endswith(".2")
        await there.begin("trainer", 2)
        await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "Ready")
        await there.reconcile()
        rendered: list[str] = []
        monkeypatch.setattr(apply, "render", lambda scope: rendered.append("run") or render(scope))
        there.calls.counts.clear()
        for _ in range(5):
            await there.reconcile()
        assert (rendered, there.calls.writes) == ([], 0), (
            "the Job of the lost pod is there for as long as its node is"
        )
        monkeypatch.undo()

        # A later attempt that fails by itself is judged as ever, while the first one's Job is still there.
        await there.end("trainer", 0, count=2)
        there.now += 10.0
        await there.reconcile_until(lambda r: trainer(r)["attempt"] == 3)
        await there.begin("trainer", 2)
        await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "Ready")

        # The node returns as another one: the pod's end is confirmed, and the Job goes.
        await nodes.kubectl("delete", "pod", name, "-n", there.namespace, "--force", "--grace-period=0")
        for _ in range(1200):
            jobs = {job["metadata"]["name"]: job for job in await there.all("Job", "trainer")}
            if "tiny-addition-trainer-1" not in jobs:
                break
            await asyncio.sleep(0.1)
        assert set(jobs) == {"tiny-addition-trainer-3"}
        run = await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "Ready")
        assert trainer(run)["attempt"] == 3


async def test_suspended_run_does_not_wait_for_the_lost_pod(there: Stage) -> None:
    """Nor does it use the number of that attempt again, which would not fence it out."""
    nodes = Nodes(there)
    async with nodes.there():
        await there.create(tiny(trainer={"replicas": 1, "podTemplate": {"tolerations": TOLERATIONS}}))
        await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
        await there.end("prepare")
        await there.reconcile_until(lambda r: r["status"]["phase"] == "Running")
        await there.begin("coordinator")
        await there.begin("generator")
        (lost,) = await there.pods("trainer", 1)
        await nodes.bind(lost)
        await there.begin("trainer", 1)
        await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "Ready")
        # The drain deletes the Job; the pod outlives its grace period, because its node does not answer.
        await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": True}})
        await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspending")
        there.now += 1801.0
        leaving = False
        while not leaving:
            await there.reconcile()
            pod = await there.get("Pod", lost["metadata"]["name"])
            assert pod is not None
            leaving = "deletionTimestamp" in pod["metadata"]
        await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspended")
        await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": False}})
        for there.stepped in (86_400.0, -86_400.0, 0.0):
            run = await there.reconcile_until(lambda r: r["status"]["phase"] != "Suspended")
            assert run["status"]["phase"] == "Pending", "a clock that was set makes no pod count as lost"
        there.now += pod["metadata"]["deletionGracePeriodSeconds"] + pod_views.LOST_SECONDS + 1.0
        await there.reconcile_until(lambda r: r["status"]["phase"] == "Preparing")
        await there.end("prepare")
        run = await there.reconcile_until(lambda r: trainer(r)["attempt"] == 2)
        assert trainer(run)["consecutiveFailures"] == 0
        assert await there.get("Job", "tiny-addition-trainer-1") is not None
        assert await there.get("Job", "tiny-addition-trainer-2") is not None


async def running_on_a_node_to_be_lost(there: Stage, nodes: Nodes) -> Object:
    """A run whose coordinator is on that node; returns the coordinator's pod."""
    await there.create(
        tiny(trainer={"replicas": 1}, coordinator={"podTemplate": {"tolerations": TOLERATIONS}})
    )
    await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
    await there.end("prepare")
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Running")
    (pod,) = await there.pods("coordinator")
    await nodes.bind(pod)
    await there.begin("coordinator")
    await there.begin("generator")
    await there.begin("trainer", 1)
    await ready_pod(there, pod["metadata"]["name"], "True")
    await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "Ready")
    return pod


def number(pod: Object) -> str:
    (given,) = (e["value"] for e in pod["spec"]["containers"][0]["env"] if e["name"] == "SCALERL_ATTEMPT")
    assert given.endswith(f".{pod['metadata']['labels'][names.ATTEMPT]}")
    return str(pod["metadata"]["labels"][names.ATTEMPT])


async def test_next_coordinator_starts_without_the_lost_pod(there: Stage) -> None:
    """[coordinator] Its number is in the status before the lost pod is deleted by force, whichever write the operator ends after."""
    nodes = Nodes(there)
    async with nodes.there():
        lost = await running_on_a_node_to_be_lost(there, nodes)
        name, uid = lost["metadata"]["name"], lost["metadata"]["uid"]
        assert number(lost) == "1"
        await nodes.lose(noticed=True)
        await ready_pod(there, name, "False")
        for _ in range(1200):
            pod = await there.get("Pod", name)
            if pod is not None and "deletionTimestamp" in pod["metadata"]:
                break
            await asyncio.sleep(0.1)
        for writes in (0, 1, 2, 3):
            there.writes_left = writes
            with contextlib.suppress(ApiError):
                await there.reconcile()
            run, pod = await there.get("ScaleRLRun", "tiny-addition"), await there.get("Pod", name)
            assert run is not None
            if pod is None or pod["metadata"]["uid"] != uid:
                assert run["status"]["coordinatorAttempt"] == 2
                break
            await there.fresh_operator()
        there.writes_left = None
        for _ in range(1200):
            await there.reconcile()
            pods = [p for p in await there.all("Pod", "coordinator") if p["metadata"]["uid"] != uid]
            if pods and number(pods[0]) == "2":
                break
            await asyncio.sleep(0.1)
        assert number(pods[0]) == "2"
        run = await there.get("ScaleRLRun", "tiny-addition")
        assert run is not None
        assert run["status"]["coordinatorAttempt"] == 2
        assert trainer(run)["attempt"] == 1, "the trainer waits for the next coordinator"
        assert any(reason == "NodeLost" and name in text for reason, text in await there.events())
        await there.begin("coordinator")
        await there.reconcile_until(lambda r: condition(r, "CoordinatorReady") == "Ready")
        await there.reconcile()
        there.calls.counts.clear()
        for _ in range(3):
            await there.reconcile()
        assert there.calls.writes == 0


async def test_run_that_is_suspended_meanwhile_resumes_with_a_greater_number(there: Stage) -> None:
    """[coordinator] Its StatefulSet is gone only when the lost pod is, and so would be the name of the next one."""
    nodes = Nodes(there)
    async with nodes.there():
        lost = await running_on_a_node_to_be_lost(there, nodes)
        await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": True}})
        await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspending")
        await there.end("trainer", 0)
        await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspended")
        name = lost["metadata"]["name"]
        for _ in range(1200):
            await there.reconcile()
            pod = await there.get("Pod", name)
            if pod is not None and "deletionTimestamp" in pod["metadata"]:
                break
            await asyncio.sleep(0.1)
        await there.reconcile()
        there.now += GRACE_SECONDS + pod_views.LOST_SECONDS + 1.0
        for _ in range(1200):
            await there.reconcile()
            if await there.get("Pod", name) is None:
                break
            await asyncio.sleep(0.1)
        assert await there.get("Pod", name) is None
        await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": False}})
        await there.reconcile_until(lambda r: r["status"]["phase"] == "Preparing")
        await there.end("prepare")
        await there.reconcile_until(lambda r: r["status"]["phase"] == "Running")
        (pod,) = await there.pods("coordinator")
        assert number(pod) == "2"
