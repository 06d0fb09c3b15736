"""Runs in the queues of a real Kueue, with the operator at work; the test plays the pods, and what gives them up. Part by part, as
without gangs (``queues.gangs: false``), and as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import yaml
from installed import say
from kueue import kueue, queue
from replicas import running, settings
from stage import ROOT, Stage, condition, own_control_plane, serve_runs, stage, tiny
from testcluster import Cluster

from scalerl_api import wire
from scalerl_cli.main import main as cli
from scalerl_lifecycle import lifecycle_types
from scalerl_operator import main
from scalerl_operator.kube import connection, errors
from scalerl_operator.kube.kinds import kind_of
from scalerl_operator.kube.leader_election import LEASE_NAME

pytestmark = [pytest.mark.cluster, pytest.mark.full]

Object = dict[str, Any]
RUN, OTHER = "tiny-addition", "other-addition"
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
GPU = "nvidia.com/gpu"
GATED_SECONDS = 3.0
NODE = "somewhere"


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with own_control_plane() as cluster:
        serve_runs(cluster)
        with kueue(cluster, tmp_path_factory.mktemp("kueue")):
            # Of a pod that is on a node the API server waits for the node's word when it is deleted.
            cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
            yield cluster


@pytest.fixture
async def team(control_plane: Cluster) -> AsyncIterator[Team]:
    """A namespace with a queue, and an operator that watches it."""
    async with a_team(control_plane, gangs=False, gated_seconds=GATED_SECONDS) as made:
        yield made


@asynccontextmanager
async def a_team(
    cluster: Cluster, *, gangs: bool, gated_seconds: float = lifecycle_types.GATED_SECONDS
) -> AsyncIterator[Team]:
    async with stage(cluster, f"team-{uuid.uuid4().hex[:8]}") as there:
        data = (ROOT / "examples/tiny/data.jsonl").read_text()[:2000]
        config = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"data.jsonl": data}}
        lease = {"apiVersion": kind_of("Lease").api_version, "kind": "Lease", "spec": {"holderIdentity": ""}}
        await there.create(
            config | {"metadata": {"name": f"{RUN}-data"}}, lease | {"metadata": {"name": LEASE_NAME}}
        )
        chosen = dataclasses.replace(settings(cluster, there.namespace), gangs=gangs)
        reconciler = functools.partial(main.reconciler, gated_seconds=gated_seconds)
        async with running(main.Operator(chosen, await connection.load(chosen.kubeconfig), reconciler)):
            yield Team(there, cluster)


class Team:
    """One namespace, its queue, and what happens to its run."""

    def __init__(self, there: Stage, cluster: Cluster) -> None:
        self.there, self.cluster = there, cluster

    async def quota(self, devices: int, cpu: str = "100") -> None:
        """What the queue may give."""
        objects = queue(
            self.there.namespace, self.there.namespace, **{"cpu": cpu, "memory": "1Ti", GPU: str(devices)}
        )
        await self._kubectl(
            *("apply", "--server-side", "--force-conflicts", "-f", "-"), stdin=yaml.safe_dump_all(objects)
        )

    async def _kubectl(self, *words: str, stdin: str | None = None) -> str:
        return await asyncio.to_thread(self.cluster.kubectl, *words, stdin=stdin)

    async def run(self) -> Object:
        return await self.there.get("ScaleRLRun", RUN) or {}

    async def edit(self, **spec: Any) -> None:
        await self.there.edit("ScaleRLRun", RUN, {"spec": spec})

    async def reaches(self, what: str, true: Callable[[Object], bool], seconds: float = 120.0) -> Object:
        """The run, once it is so."""
        deadline = time.monotonic() + seconds
        while not true(run := await self.run()):
            assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s; {await self.tell()}"
            await asyncio.sleep(0.1)
        return run

    async def stays(self, what: str, true: Callable[[Object], bool], seconds: float = 3.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert true(await self.run()), f"{what}: {await self.tell()}"
            await asyncio.sleep(0.1)

    async def let_in(self, role: str, count: int, *, after: str = "") -> list[Object]:
        """The pods of a role that nothing holds back, as soon as there are so many; ``after``: not that one (a uid)."""
        deadline = time.monotonic() + 400
        while True:
            found = [
                p for p in await self.there.all("Pod", role) if not p["metadata"].get("deletionTimestamp")
            ]
            found = [
                p for p in found if not p["spec"].get("schedulingGates") and p["metadata"]["uid"] != after
            ]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"no {count} pods of {role} are let in; {await self.tell()}"
            await asyncio.sleep(0.1)

    async def begins(self, role: str, count: int = 1, *, node: str | None = None, after: str = "") -> None:
        """The pods of a role are let in, and work."""
        for pod in await self.let_in(role, count, after=after):
            if node is not None and not pod["spec"].get("nodeName"):
                await self._bind(pod["metadata"]["name"], node)
        await self.there.begin(role, count)

    async def replaces(self, role: str, uid: str) -> None:
        """Another pod of a StatefulSet works in the place of one. The Workload goes with the pod that it was made for, and
        Kueue stops a pod without: so the next may end as soon as it has begun, and the one after it stays.
        """
        begun = ""
        while (now := (await self.let_in(role, 1, after=uid))[0]["metadata"]["uid"]) != begun:
            begun = now
            await self.there.begin(role)
            await asyncio.sleep(6)

    async def _bind(self, pod: str, node: str) -> None:
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod, "namespace": self.there.namespace},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        path = f"/api/v1/namespaces/{self.there.namespace}/pods/{pod}/binding"
        await self._kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))

    async def saves(self, role: str) -> None:
        """The pods that get SIGTERM end, with 0."""
        for pod in await self.there.all("Pod", role):
            if "deletionTimestamp" in pod["metadata"]:
                name, namespace = pod["metadata"]["name"], self.there.namespace
                with contextlib.suppress(errors.NotFound):  # it needed no word of ours
                    await self.there.edit("Pod", name, {"status": {"phase": "Succeeded"}}, "status")
                now = ("--grace-period=0", "--force", "--ignore-not-found")
                await self._kubectl("delete", "pod", name, "-n", namespace, *now)

    async def starts(self, devices: int, **spec: Any) -> None:
        """A run that works within so many devices."""
        await self.quota(devices)
        await self.there.create(queued(**spec))
        await self.let_in("prepare", 1)
        await self.there.end("prepare")
        await self.works()

    async def works(self) -> None:
        await self.begins("trainer", 2, node=NODE)
        await self.begins("coordinator")
        await self.begins("generator")
        await self.reaches("works", lambda r: condition(r, "TrainerReady") == "Ready" and admitted(r))

    async def workloads(self) -> dict[str, bool]:
        """By the kind and name of what Kueue counts: whether it holds quota now."""
        text = await self._kubectl("get", "workloads", "-n", self.there.namespace, "-o", "json")
        found = {}
        for workload in json.loads(text)["items"]:
            owner = workload["metadata"]["ownerReferences"][0]
            said = {c["type"]: c["status"] for c in workload.get("status", {}).get("conditions", ())}
            holds = said.get("QuotaReserved") == "True" and said.get("Finished") != "True"
            found[f"{owner['kind']} {owner['name']}"] = holds
        return found

    async def holding(self) -> set[str]:
        """What holds quota now."""
        return {name for name, holds in (await self.workloads()).items() if holds}

    async def names(self, *kinds: str) -> set[str]:
        found = [o for kind in kinds for o in await self.there.all(kind)]
        return {o["metadata"]["name"] for o in found if o["metadata"]["name"].startswith(RUN)}

    async def pods_left(self) -> set[str]:
        """Names of the run's pods that have not ended."""
        found = await self.there.all("Pod")
        found = [p for p in found if p["status"].get("phase") not in ("Succeeded", "Failed")]
        return {p["metadata"]["name"] for p in found if p["metadata"]["name"].startswith(RUN)}

    async def tell(self) -> str:
        """What a person would read."""
        run = await self.run()
        text = await self._kubectl("get", "jobs,sts,deploy,pods,workloads", "-n", self.there.namespace)
        return f"{yaml.safe_dump(run.get('status'))}\n{text}\n{await self.there.events()}"


def queued(**spec: Any) -> Object:
    """The tiny example with a device a generator and a rank: three in all."""
    run = tiny(RUN, **spec)
    run["metadata"]["labels"] = {QUEUE: "queue"}
    run["spec"]["generator"] |= {"devices": 1}
    run["spec"]["trainer"] |= {"devices": 1}
    return run


def urgent(devices: int) -> Object:
    """Somebody else's Job, before all runs."""
    resources = {"requests": {"cpu": "1", "memory": "1Gi", GPU: devices}, "limits": {GPU: devices}}
    container = {"name": "c", "image": "c", "resources": resources}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "urgent", "labels": {QUEUE: "queue", PRIORITY: "urgent"}},
        "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }


async def why(team: Team, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The cause by ``scalerl why``."""
    capsys.readouterr()
    words = ["why", name, "-n", team.there.namespace, "--kubeconfig", str(team.cluster.kubeconfig)]
    assert await asyncio.to_thread(cli, words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    return str(lines[1])


def phase(run: Object) -> str:
    return str(run.get("status", {}).get("phase", ""))


def admitted(run: Object) -> bool:
    return condition(run, "Admitted") == "QueueAdmitted"


def waits(run: Object) -> bool:
    return (phase(run), condition(run, "Admitted")) == ("Pending", "WaitingForQuota")


async def test_queued_run_holds_nothing_and_starts_with_its_trainer(
    team: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, generator = f"{RUN}-trainer-1", f"{RUN}-generator"
    await team.quota(1, cpu="0")
    await team.there.create(queued())
    await team.reaches("waits to be prepared", waits)
    assert await team.names("Job", "StatefulSet", "Deployment", "Pod") == {f"{RUN}-prepare"}
    said = await why(team, RUN, capsys)
    assert "prepare in the queue queue" in said
    assert "cpu in flavor default" in said
    await team.quota(1)
    await team.let_in("prepare", 1)
    await team.reaches("prepares", lambda r: phase(r) == "Preparing" and admitted(r))
    await team.there.end("prepare")
    await team.reaches("waits to train", lambda r: waits(r) and r["status"]["trainer"]["attempt"] == 1)
    await team.stays("waits", waits)
    assert await team.names("StatefulSet", "Deployment") == set(), (
        "no device is held for a trainer that waits"
    )
    await team.quota(2)
    began = time.monotonic()
    await team.begins("trainer", 2)
    say("there is quota: the trainer is let in", time.monotonic() - began, 40)
    await team.begins("coordinator")
    said = "GeneratorsReady"
    run = await team.reaches("the generator waits", lambda r: condition(r, said) == "WaitingForQuota")
    assert (phase(run), condition(run, "Admitted")) == ("Running", "WaitingForQuota")
    assert condition(run, "Degraded") == "Healthy"
    assert f"Job {trainer}" in await team.workloads()
    await team.quota(3)
    await team.begins("generator")
    await team.reaches("works", lambda r: condition(r, said) == "Ready" and admitted(r))
    holding = await team.holding()
    assert len(holding) == 3, "coordinator, generator and trainer; what has ended gives its quota back"
    assert {f"Job {trainer}", f"Pod {RUN}-coordinator-0"} < holding
    assert any(name.startswith(f"Pod {generator}") for name in holding)


async def test_fields_of_kueue_are_not_contested(team: Team) -> None:
    """It labels pod templates, gates pods and starts Jobs; the operator applies the same objects."""
    await team.starts(4)

    async def generations() -> dict[str, int]:
        found = [o for kind in ("Job", "StatefulSet", "Deployment") for o in await team.there.all(kind)]
        return {o["metadata"]["name"]: o["metadata"]["generation"] for o in found}

    before = await generations()
    await asyncio.sleep(5)
    assert await generations() == before
    (coordinator,) = await team.there.pods("coordinator")
    # An apply of each: the coordinator's spec is another one, and the generators are more.
    await team.edit(budget={"maxSteps": 200, "maxSeconds": 3600}, generator={"replicas": 2})
    await team.replaces("coordinator", coordinator["metadata"]["uid"])
    await team.begins("generator", 2)
    await team.reaches("is larger", lambda r: r["status"]["generators"]["ready"] == 2 and admitted(r))
    after = await generations()
    assert {name for name in after if after[name] != before[name]} == {
        f"{RUN}-coordinator",
        f"{RUN}-generator",
    }
    for kind in ("StatefulSet", "Deployment"):
        (made,) = await team.there.all(kind)
        assert made["spec"]["template"]["metadata"]["labels"]["kueue.x-k8s.io/managed"] == "true"
    await asyncio.sleep(3)
    assert await generations() == after
    assert not [said for said in await team.there.events() if said[0] == "RepairedDrift"]


async def test_preempted_trainer_checkpoints_and_resumes_when_admitted(team: Team) -> None:
    await team.starts(3)
    await team.there.create(urgent(2))
    began = time.monotonic()
    run = await team.reaches("is put back", lambda r: condition(r, "TrainerReady") == "WaitingForQuota")
    say("a trainer is displaced: its run says so", time.monotonic() - began, 40)
    assert (phase(run), condition(run, "Admitted")) == ("Running", "WaitingForQuota")
    await asyncio.sleep(GATED_SECONDS + 2)
    assert f"{RUN}-coordinator" in await team.names("StatefulSet"), "the trainer still saves what it trained"
    await team.saves("trainer")
    await team.reaches("waits", waits)
    deadline = time.monotonic() + 120
    while await team.names("StatefulSet", "Deployment") or await team.pods_left():
        assert time.monotonic() < deadline, await team.tell()
        await asyncio.sleep(0.2)
    assert await team.holding() == {"Job urgent"}
    await team.there.delete("Job", "urgent")
    began = time.monotonic()
    await team.works()
    say("there is quota again: all of the run is let in", time.monotonic() - began, 160)
    trainer = (await team.run())["status"]["trainer"]
    assert (trainer["attempt"], trainer["restarts"], trainer["failedStarts"]) == (1, 0, 0)


async def test_preempted_generator_is_reported_and_recreated(team: Team) -> None:
    await team.starts(3)
    await team.there.create(urgent(1))
    run = await team.reaches("lacks it", lambda r: condition(r, "GeneratorsReady") == "WaitingForQuota")
    assert (phase(run), condition(run, "Admitted")) == ("Running", "WaitingForQuota")
    assert condition(run, "TrainerReady") == "Ready"
    # Quota that comes back while Kueue still counts the pod that is gone wakes no run.
    deadline = time.monotonic() + 120
    while True:
        counted = await team.workloads()
        generators = [name for name in counted if name.startswith(f"Pod {RUN}-generator")]
        if counted.get("Job urgent") and len(generators) == 1 and not counted[generators[0]]:
            break
        assert time.monotonic() < deadline, f"{counted}: {await team.tell()}"
        await asyncio.sleep(0.3)
    await team.there.delete("Job", "urgent")
    await team.begins("generator")
    await team.reaches("is whole", lambda r: condition(r, "GeneratorsReady") == "Ready" and admitted(r))


async def test_run_is_preempted_as_a_whole(team: Team) -> None:
    """Else each would hold the half that the other lacks: Kueue knows neither that they are halves, nor of what."""
    await team.starts(3)
    other = queued()
    other["metadata"]["name"] = OTHER
    other["metadata"]["labels"][PRIORITY] = "urgent"
    await team.there.create(other)
    await team.let_in("prepare", 1)
    await team.there.end("prepare")
    await team.reaches("is put back", lambda r: condition(r, "TrainerReady") == "WaitingForQuota")
    await team.saves("trainer")
    await team.reaches("waits", waits)
    deadline = time.monotonic() + 120
    while len(holding := await team.holding()) < 3 or not all(OTHER in name for name in holding):
        assert time.monotonic() < deadline, f"{holding}: {await team.tell()}"
        await asyncio.sleep(0.3)


async def test_suspended_run_holds_no_quota(team: Team) -> None:
    await team.starts(3)
    await team.edit(suspend=True)
    await team.reaches("is asked to stop", lambda r: team.there.coordinator.stop_requests == ["interrupted"])
    team.there.coordinator.phase = wire.Phase.FINISHED
    await team.there.end("trainer", 0, count=2)
    await team.reaches("is suspended", lambda r: phase(r) == "Suspended")
    assert condition(await team.run(), "Admitted") == "Suspended"
    await team.saves("trainer")
    deadline = time.monotonic() + 120
    while await team.workloads():
        assert time.monotonic() < deadline, await team.tell()
        await asyncio.sleep(0.3)
    team.there.coordinator.phase = wire.Phase.RUNNING
    await team.edit(suspend=False)
    await team.let_in("prepare", 1)
    await team.there.end("prepare")
    await team.works()
    await team.there.delete("ScaleRLRun", RUN)
    await team.reaches(
        "is asked to stop", lambda r: team.there.coordinator.stop_requests[-1] == "interrupted"
    )
    await team.there.end("trainer", 0, count=2)
    deadline = time.monotonic() + 120
    while await team.workloads() or await team.names("Job", "StatefulSet", "Deployment", "Pod"):
        await team.saves("trainer")
        assert time.monotonic() < deadline, await team.tell()
        await asyncio.sleep(0.3)


async def test_kueue_ignores_a_run_without_a_queue(team: Team) -> None:
    await team.quota(0)
    run = queued()
    del run["metadata"]["labels"]
    await team.there.create(run)
    await team.let_in("prepare", 1)
    await team.there.end("prepare")
    await team.begins("coordinator")
    await team.begins("generator")
    await team.begins("trainer", 2)
    run = await team.reaches("works", lambda r: condition(r, "TrainerReady") == "Ready")
    assert condition(run, "Admitted") == "NoQueue"
    assert await team.workloads() == {}


# --- as a whole -----------------------------------------------------------------------------------


@pytest.fixture
async def whole(control_plane: Cluster) -> AsyncIterator[Team]:
    """A namespace with a queue, and an operator whose runs are gangs."""
    async with a_team(control_plane, gangs=True) as made:
        yield made


async def two_runs(team: Team, devices: int) -> None:
    """Two runs of three devices each in the queue, prepared at the same time."""
    await team.quota(devices)
    other = queued()
    other["metadata"]["name"] = OTHER
    await team.there.create(queued(), other)
    await team.let_in("prepare", 2)
    await team.there.end("prepare", count=2)


async def of_run(team: Team, name: str, role: str) -> list[Object]:
    """The pods of a role that nothing holds back."""
    return [
        pod
        for pod in await team.there.all("Pod", role)
        if pod["metadata"]["name"].startswith(f"{name}-") and not pod["spec"].get("schedulingGates")
    ]


async def the_run(team: Team, name: str) -> Object:
    return await team.there.get("ScaleRLRun", name) or {}


async def test_parts_of_two_runs_deadlock(team: Team) -> None:
    """Each holds the devices of its trainer, and neither has a generator: what a gang is for."""
    await two_runs(team, 4)
    await team.let_in("trainer", 4)
    deadline = time.monotonic() + 120
    for name in (RUN, OTHER):
        while condition(await the_run(team, name), "GeneratorsReady") != "WaitingForQuota":
            assert time.monotonic() < deadline, await team.tell()
            await asyncio.sleep(0.2)
    assert not await of_run(team, RUN, "generator") + await of_run(team, OTHER, "generator")


async def test_of_two_runs_one_starts_whole_and_the_other_waits_whole(
    whole: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    await two_runs(whole, 4)
    await whole.let_in("trainer", 2)
    await whole.let_in("generator", 1)
    await whole.let_in("coordinator", 1)
    (trainers,) = {pod["metadata"]["labels"]["scalerl.dev/run"] for pod in await whole.there.pods("trainer")}
    first, second = (RUN, OTHER) if trainers == RUN else (OTHER, RUN)
    deadline = time.monotonic() + 120
    while not waits(run := await the_run(whole, second)):
        assert time.monotonic() < deadline, f"{run.get('status')}: {await whole.tell()}"
        await asyncio.sleep(0.2)
    said = await why(whole, second, capsys)
    assert "the run as a whole (1 generators) in the queue queue" in said
    assert f"insufficient unused quota for {GPU} in flavor default" in said
    until = time.monotonic() + 5
    while time.monotonic() < until:
        for kind in ("Pod", "Job", "StatefulSet", "Deployment"):
            parts = {o["metadata"]["name"] for o in await whole.there.all(kind)}
            assert {name for name in parts if name.startswith(second)} <= {
                f"{second}-prepare"
            } or kind == "Pod"
        assert not [
            p for r in ("trainer", "coordinator", "generator") for p in await of_run(whole, second, r)
        ]
        assert len(await of_run(whole, first, "trainer")) == 2
        await asyncio.sleep(0.2)
    assert await whole.holding() == {f"ScaleRLRun {first}"}
    # It ends: the other starts whole.
    await whole.there.begin("trainer", 2)
    await whole.there.begin("coordinator")
    await whole.there.begin("generator")
    await whole.there.delete("ScaleRLRun", first)
    for pod in await of_run(whole, first, "trainer"):
        await whole.there.edit("Pod", pod["metadata"]["name"], {"status": {"phase": "Succeeded"}}, "status")
    deadline = time.monotonic() + 120
    while not all(
        [
            len(await of_run(whole, second, r)) == n
            for r, n in (("trainer", 2), ("coordinator", 1), ("generator", 1))
        ]
    ):
        await whole.saves("trainer")
        assert time.monotonic() < deadline, await whole.tell()
        await asyncio.sleep(0.3)
    run = await the_run(whole, second)
    assert not waits(run)


async def test_preempted_run_saves_gives_all_back_and_resumes_in_its_attempt(whole: Team) -> None:
    await whole.starts(3)
    assert await whole.holding() == {f"ScaleRLRun {RUN}"}
    await whole.there.create(urgent(1))
    run = await whole.reaches("is evicted", lambda r: condition(r, "TrainerReady") == "WaitingForQuota")
    assert (phase(run), condition(run, "Admitted")) == ("Running", "WaitingForQuota")
    await asyncio.sleep(2)
    assert f"{RUN}-coordinator" in await whole.names("StatefulSet"), "the trainer still saves what it trained"
    assert not (await whole.workloads())["Job urgent"], "no quota is given back before"
    deadline = time.monotonic() + 120
    while await whole.names("StatefulSet", "Deployment") or await whole.pods_left():
        await whole.saves("trainer")
        assert time.monotonic() < deadline, await whole.tell()
        await asyncio.sleep(0.2)
    run = await whole.reaches("waits", waits)
    deadline = time.monotonic() + 120
    while await whole.holding() != {"Job urgent"}:
        assert time.monotonic() < deadline, await whole.tell()
        await asyncio.sleep(0.2)
    run = await whole.reaches("knows why", lambda r: "insufficient" in message_of(r, "Admitted"))
    await whole.there.delete("Job", "urgent")
    began = time.monotonic()
    await whole.works()
    say("there is quota again: all of the run is let in", time.monotonic() - began, 160)
    trainer = (await whole.run())["status"]["trainer"]
    assert (trainer["attempt"], trainer["restarts"], trainer["failedStarts"]) == (1, 0, 0)


def message_of(run: Object, kind: str) -> str:
    conditions = run.get("status", {}).get("conditions", ())
    return next((str(c["message"]) for c in conditions if c["type"] == kind), "")


async def test_generators_beyond_the_least_number_are_queued_and_preempted_alone(whole: Team) -> None:
    await whole.quota(4)
    run = queued(autoscaling={"generators": {"min": 1, "max": 3}})
    run["spec"]["generator"] |= {"replicas": 3}
    await whole.there.create(run)
    await whole.let_in("prepare", 1)
    await whole.there.end("prepare")
    await whole.begins("trainer", 2, node=NODE)
    await whole.begins("coordinator")
    await whole.let_in("generator", 2)
    extra = f"{RUN}-generator-extra"
    counts = {o["metadata"]["name"]: o["spec"]["replicas"] for o in await whole.there.all("Deployment")}
    assert counts == {f"{RUN}-generator": 1, extra: 2}

    async def extras() -> list[Object]:
        found = await whole.there.all("Pod", "generator")
        live = [
            p
            for p in found
            if "scalerl.dev/extra" in p["metadata"]["labels"] and "deletionTimestamp" not in p["metadata"]
        ]
        return [p for p in live if not p["spec"].get("schedulingGates")]

    deadline = time.monotonic() + 120
    while len(await extras()) != 1:
        assert time.monotonic() < deadline, await whole.tell()
        await asyncio.sleep(0.2)
    # The run and its extra generators have one priority: the youngest of them gives way.
    await whole.there.create(urgent(1))
    deadline = time.monotonic() + 120
    while "Job urgent" not in await whole.holding():
        assert time.monotonic() < deadline, await whole.tell()
        await asyncio.sleep(0.2)
    assert not await extras()
    assert len(await of_run(whole, RUN, "trainer")) == 2
    assert f"ScaleRLRun {RUN}" in await whole.holding()


async def test_trainers_of_a_gang_are_in_one_rack(whole: Team, control_plane: Cluster) -> None:
    rack, host = "example.com/rack", "kubernetes.io/hostname"
    amounts = {"cpu": "16", "memory": "64Gi", GPU: "1", "pods": "20"}
    topology = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Topology",
        "metadata": {"name": "racks"},
        "spec": {"levels": [{"nodeLabel": rack}, {"nodeLabel": host}]},
    }
    flavor, cluster_queue, local_queue, urgent_class = queue(
        whole.there.namespace, whole.there.namespace, **{"cpu": "100", "memory": "1Ti", GPU: "9"}
    )
    flavor["metadata"]["name"] = "racked"
    flavor["spec"] = {"nodeLabels": {"pool": "racked"}, "topologyName": "racks"}
    cluster_queue["spec"]["resourceGroups"][0]["flavors"][0]["name"] = "racked"
    nodes = [
        (f"{name}{number}", name) for name in ("a", "b", "c") for number in range(2 if name == "b" else 1)
    ]
    for name, its_rack in nodes:
        labels = {rack: its_rack, host: name, "pool": "racked"}
        control_plane.apply(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        )
        ready = {"type": "Ready", "status": "True", "reason": "test", "message": ""}
        patch = json.dumps({"status": {"allocatable": amounts, "capacity": amounts, "conditions": [ready]}})
        await whole._kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)
    objects = yaml.safe_dump_all([topology, flavor, cluster_queue, local_queue, urgent_class])
    await whole._kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=objects)
    run = queued()
    run["spec"]["trainer"]["podTemplate"] = {"annotations": {"kueue.x-k8s.io/podset-required-topology": rack}}
    await whole.there.create(run)
    await whole.let_in("prepare", 1)
    await whole.there.end("prepare")
    pods = await whole.let_in("trainer", 2)
    assert {pod["spec"]["nodeSelector"][host] for pod in pods} == {"b0", "b1"}
    assert {pod["spec"]["nodeSelector"]["pool"] for pod in pods} == {"racked"}
    (generator,) = await whole.let_in("generator", 1)
    assert generator["spec"]["nodeSelector"][host] in ("a0", "c0"), "a device a node"
    for name, _ in nodes:
        await whole._kubectl("delete", "node", name)
