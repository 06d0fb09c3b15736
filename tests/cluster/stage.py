"""A test environment for the operator's reconciles: a real API server with its controllers, without a kubelet.

It has a fake coordinator with a status that the test sets. The test itself sets the statuses of pods, which start, run and
end accordingly.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from aiohttp import web
from testcluster import Cluster, KubectlError, MissingError, start_control_plane

from scalerl_api import endpoints, wire
from scalerl_coordinator.decisions import DecisionLog
from scalerl_operator.controller.coordinator_poller import Timings
from scalerl_operator.controller.pod_views import LOST_SECONDS
from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube import connection
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.errors import AlreadyExists, Conflict, decode
from scalerl_operator.kube.kinds import kind_of
from scalerl_operator.kube.transport import Call
from scalerl_operator.manifests.scope import Images

ROOT = Path(__file__).resolve().parents[2]
CRD = ROOT / "crds" / "scalerl.dev_scalerlruns.yaml"
WATCHED = (
    *("ScaleRLRun", "ConfigMap", "Service", "PersistentVolumeClaim", "StatefulSet", "Deployment", "Job"),
    *("NetworkPolicy", "PodDisruptionBudget", "Pod"),
)
LONG_TIMEOUT_SECONDS = 120.0
"""Timeout of the operator's requests: tests are not about a machine that is slow."""
_addresses = (
    # Derived from the process id, so that concurrent test runs have different addresses.
    f"127.{1 + os.getpid() % 250}.{a}.{b}"
    for a, b in itertools.product(range(os.getpid() // 250 % 250, 256), range(1, 255))
)

Object = dict[str, Any]


class Calls:
    """Counts the requests to the API server by verb."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def called(self, verb: str, kind: str, code: int, seconds: float) -> None:
        self.counts[verb] += 1

    @property
    def writes(self) -> int:
        return sum(n for verb, n in self.counts.items() if verb not in ("get", "list"))


class Coordinator:
    """A fake coordinator with a state set by the test."""

    def __init__(self) -> None:
        self.address = next(_addresses)
        self.phase, self.stop_reason, self.stop_requests = wire.Phase.RUNNING, "", list[str]()
        self.step, self.points = 3, list[wire.EvaluationPoint]()
        self.given_up = 0
        self.silent, self.asked, self.token = False, 0, ""
        """token: required of requests, unless it is empty."""
        self.decisions: DecisionLog | None = None
        """None: as a coordinator of a release without a decision log."""

    def status(self) -> wire.Status:
        counts = wire.Counts(
            given_up=self.given_up,
            **dict.fromkeys(
                [
                    "acknowledged",
                    "trained",
                    "filtered",
                    "queued",
                    "leased",
                    "late",
                    "stale",
                    "invalid",
                    "duplicate",
                    "expired_leases",
                ],
                0,
            ),
        )
        return wire.Status(
            phase=self.phase,
            waiting_for="",
            step=self.step,
            published_version=self.step,
            stop_reason=self.stop_reason,
            counts=counts,
            members=[],
            points=self.points,
            last_step_stats={},
            wall_seconds=10.0,
            device_seconds=20.0,
            tokens_generated=1,
            tokens_trained=1,
            generator_busy_fraction=0.5,
            trainer_busy_fraction=0.5,
            max_staleness_steps=0,
            mean_staleness_steps=0.0,
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async def status(request: web.Request) -> web.Response:
            self.asked += 1
            if self.silent:
                await asyncio.sleep(3600)
            if self.token and request.headers["authorization"] != f"Bearer {self.token}":
                said = wire.Problem(
                    error="unauthorized", message="the run's bearer token is missing or wrong"
                )
                return web.Response(status=401, body=msgspec.msgpack.encode(said))
            return web.Response(body=msgspec.msgpack.encode(self.status()))

        async def stop(request: web.Request) -> web.Response:
            self.stop_reason = msgspec.msgpack.decode(await request.read(), type=wire.Stop).reason
            self.stop_requests.append(self.stop_reason)
            self.phase = wire.Phase.FINISHING if self.stop_reason else wire.Phase.RUNNING
            return web.Response(body=msgspec.msgpack.encode(wire.Ack()))

        async def decision_lines(request: web.Request) -> web.Response:
            if self.decisions is None:
                return web.Response(status=404)
            content, size = self.decisions.read(int(request.query["offset"]))
            return web.Response(body=msgspec.msgpack.encode(wire.DecisionLines(content=content, size=size)))

        async def record(request: web.Request) -> web.Response:
            if self.decisions is None:
                return web.Response(status=404)
            line = msgspec.msgpack.decode(await request.read(), type=wire.DecisionLine)
            self.decisions.append(line.offset, line.line)
            return web.Response(body=msgspec.msgpack.encode(wire.Ack()))

        app = web.Application()
        app.router.add_get(endpoints.DECISIONS, decision_lines)
        app.router.add_post(endpoints.DECISIONS, record)
        app.router.add_get(endpoints.STATUS, status)
        app.router.add_post(endpoints.STOP, stop)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, self.address, 8080).start()
        try:
            yield
        finally:
            await runner.cleanup()


class Stage:
    """A namespace with an operator that reconciles its runs."""

    def __init__(
        self, api: KubeApi, own: KubeApi, calls: Calls, namespace: str, kubectl: Callable[..., str]
    ) -> None:
        self.api, self.calls, self.namespace, self.kubectl = api, calls, namespace, kubectl
        self._own = own  # the test's own requests are not counted
        self.now, self.stepped = 0.0, 0.0
        """Seconds by which time has passed, and by which the operator's wall clock alone was set."""
        self.stopped: float | None = None
        """Unix seconds at which that clock stands but for these: else a slow machine adds its own."""
        self.images = Images("trainer:1", "generator:1", "coordinator:1")
        self.leads, self.namespaced = True, False
        self.lost_seconds = LOST_SECONDS
        self.answer_seconds = LONG_TIMEOUT_SECONDS
        self.writes_left: int | None = None
        """Number of writes after which the operator is interrupted at any point of a reconcile; None: no limit."""
        self.coordinator = Coordinator()
        self._begin()

    async def fresh_operator(self) -> None:
        """Replace the operator, as in a restart: only the state in the cluster remains."""
        await self.reconciler.forget_all()
        self._begin()

    def _begin(self) -> None:
        self.cache = Cache(lambda key: None)
        self.reconciler = Reconciler(
            self.api,
            self.cache,
            images=self.images,
            operator_namespace="scalerl",
            namespaced=self.namespaced,
            background=False,
            lost_seconds=self.lost_seconds,
            poll_timings=Timings(answer=self.answer_seconds),
            clock=self.clock,
            monotonic=lambda: time.monotonic() + self.now,
        )

    def silence(self, silent: bool) -> None:
        """Whether the coordinator answers no request: only then does the operator give up after a second."""
        self.coordinator.silent, self.answer_seconds = silent, 1.0 if silent else LONG_TIMEOUT_SECONDS
        for poller in self.reconciler.coordinators._pollers.values():
            poller.client._timeout_seconds = self.answer_seconds

    def may_write(self) -> bool:
        """The operator's fence, called before each of its writes."""
        if not self.leads or self.writes_left == 0:
            return False
        if self.writes_left is not None:
            self.writes_left -= 1
        return True

    def clock(self) -> float:
        return (time.time() if self.stopped is None else self.stopped) + self.now + self.stepped

    async def reconcile(self, name: str = "tiny-addition") -> float | None:
        """Update the state that watches and pollers maintain, then reconcile once."""
        await self.watch()
        # Also after the reconcile, since the first response of a coordinator triggers another reconcile.
        await self.ask_coordinators()
        wait = await self.reconciler.reconcile((self.namespace, name))
        if not all(held.known for held in self.reconciler.coordinators._pollers.values()):
            await self.ask_coordinators()
            wait = await self.reconciler.reconcile((self.namespace, name))
        return wait

    async def ask_coordinators(self) -> None:
        """Poll all coordinators once."""
        pollers = self.reconciler.coordinators
        await asyncio.gather(*(pollers.refresh(run) for run in pollers._pollers))

    async def account(self) -> None:
        """Wait until a controller has created the namespace's service account, without which pods are refused."""
        words = ("wait", "serviceaccount/default", "-n", self.namespace, "--for=create", "--timeout=500s")
        await asyncio.to_thread(self.kubectl, *words)

    async def watch(self) -> None:
        """Update the cache with the namespace's present objects, as watches would."""
        for kind in WATCHED:
            found, version = await self._own.list_at(kind, self.namespace)
            for obj in found:
                obj["kind"] = kind
                self.cache.observe(None, obj)
            present = [(o["metadata"]["namespace"], o["metadata"]["name"]) for o in found]
            self.cache.forget_missing(kind, present, version)

    async def reconcile_until(
        self, until: Callable[[Object], bool], name: str = "tiny-addition", times: int = 1200
    ) -> Object:
        """Reconcile until ``until`` holds for the run, at most ``times`` times; returns the run."""
        for _ in range(times):
            # A controller may be first, as the garbage collector: the operator's queue tries again, too.
            with contextlib.suppress(AlreadyExists, Conflict):
                await self.reconcile(name)
            run = await self._own.get("ScaleRLRun", self.namespace, name)
            if run is None or until(run):
                return run or {}
            await asyncio.sleep(0.1)
        raise AssertionError(f"not reached: {yaml.safe_dump((run or {}).get('status'))}")

    async def create(self, *objects: Object) -> None:
        for obj in objects:
            obj["metadata"]["namespace"] = self.namespace
            await self._own.create(obj)

    async def edit(self, kind: str, name: str, patch: Object, subresource: str | None = None) -> Object:
        """Patch an object with a field manager other than the operator's."""
        query = {"fieldManager": "somebody", "fieldValidation": "Strict"}
        call = Call("patch", kind_of(kind), self.namespace, name, subresource, patch, query)
        return decode(await self._own._transport.request(call))

    async def get(self, kind: str, name: str) -> Object | None:
        return await self._own.get(kind, self.namespace, name)

    async def delete(self, kind: str, name: str) -> None:
        await self._own.delete(kind, self.namespace, name)

    async def all(self, kind: str, role: str | None = None) -> list[Object]:
        found = await self._own.list(kind, self.namespace)
        return [
            o
            for o in found
            if role is None or o["metadata"].get("labels", {}).get("app.kubernetes.io/component") == role
        ]

    async def events(self) -> list[tuple[str, str]]:
        found = [
            e
            for e in await self._own.list("Event", self.namespace)
            if e["involvedObject"]["kind"] == "ScaleRLRun"
        ]
        found.sort(key=lambda e: (e["firstTimestamp"], int(e["metadata"]["resourceVersion"])))
        return [(e["reason"], e["message"]) for e in found]

    # --- pods -------------------------------------------------------------------------------------

    async def pods(self, role: str, count: int = 1) -> list[Object]:
        """Wait for ``count`` pods of a role that are neither terminating nor finished, and return all such pods."""
        for _ in range(1200):
            found = [p for p in await self.all("Pod", role) if "deletionTimestamp" not in p["metadata"]]
            found = [p for p in found if p.get("status", {}).get("phase") in (None, "Pending", "Running")]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.1)
        said = [e["message"] for e in await self._own.list("Event", self.namespace)]
        raise AssertionError(f"no {count} pods of {role} in 120 s; events: {said}")

    async def begin(self, role: str, count: int = 1) -> None:
        """Set the pods of a role to running and ready."""
        for pod in await self.pods(role, count):
            containers = [
                {
                    "name": c["name"],
                    "ready": True,
                    "restartCount": 0,
                    "image": c["image"],
                    "imageID": "",
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                }
                for c in pod["spec"]["containers"]
            ]
            address = self.coordinator.address if role == "coordinator" else next(_addresses)
            status = {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": containers,
            }
            await self.edit("Pod", pod["metadata"]["name"], {"status": status}, "status")

    async def end(self, role: str, code: int = 0, message: str = "", count: int = 1) -> None:
        """End the first ``count`` pods of a role with exit code ``code``."""
        for pod in (await self.pods(role, count))[:count]:
            over = {"exitCode": code, "message": message, "reason": "Completed" if code == 0 else "Error"}
            containers = [
                {
                    "name": c["name"],
                    "ready": False,
                    "restartCount": 0,
                    "image": c["image"],
                    "imageID": "",
                    "state": {"terminated": over},
                }
                for c in pod["spec"]["containers"]
            ]
            status = {
                "phase": "Succeeded" if code == 0 else "Failed",
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": containers,
            }
            await self.edit("Pod", pod["metadata"]["name"], {"status": status}, "status")

    async def start(self, run: Object) -> None:
        """Create a run and bring it to a healthy state: prepared, with all pods ready."""
        await self.create(run)
        await self.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
        await self.end("prepare")
        await self.reconcile_until(lambda r: r["status"]["phase"] == "Running")
        await self.begin("coordinator")
        await self.begin("generator")
        await self.begin("trainer", 2)
        await self.reconcile_until(
            lambda r: condition(r, "TrainerReady") == "Ready" and r["status"].get("step") == 3
        )


def condition(run: Object, type_: str) -> str:
    """The reason of a condition; empty if the condition is absent."""
    found = [c["reason"] for c in run.get("status", {}).get("conditions", ()) if c["type"] == type_]
    return found[0] if found else ""


def tiny(name: str = "tiny-addition", **spec: Any) -> Object:
    """The tiny example with another name and changed sections of the spec."""
    run = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())
    run["metadata"]["name"] = name
    run["spec"] |= spec
    return run


def evaluations(count: int) -> list[wire.EvaluationPoint]:
    """Evaluation points of a saturating curve."""
    return [
        wire.EvaluationPoint(
            version=10 * i,
            work_tokens=1000 * i,
            reward=0.2 + 0.3 * i / (i + 10),
            standard_error=0.01,
            samples=4000,
            prompts=1000,
            set_digest="set",
            mixed_versions=False,
            truncated_fraction=0.02,
            mean_tokens=5.0,
            wall_seconds=100.0 * i,
            device_seconds=300.0 * i,
        )
        for i in range(1, count + 1)
    ]


@contextmanager
def own_control_plane(**how: Any) -> Iterator[Cluster]:
    """:func:`testcluster.start_control_plane`; skips the test where no control plane can be run."""
    try:
        cluster = start_control_plane(**how)
    except MissingError as error:
        pytest.skip(f"no control plane can be run here: {error}")
    with cluster:
        yield cluster


def serve_runs(cluster: Any) -> None:
    """Apply the CRD and wait until its objects are served."""
    cluster.kubectl("apply", "--server-side", "-f", CRD)
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(KubectlError):
            cluster.kubectl("get", "scalerlruns", "-A")
            return
        assert time.monotonic() < deadline, "the CRD is not served"
        time.sleep(0.2)


@asynccontextmanager
async def stage(cluster: Any, namespace: str) -> AsyncIterator[Stage]:
    """Create a namespace, serve runs, and yield a stage in it."""
    try:
        cluster.kubectl("get", "scalerlruns", "-n", namespace)
    except KubectlError:  # only if needed: another apply costs the server half a second of CPU time
        serve_runs(cluster)
    cluster.kubectl("create", "namespace", namespace)
    async with stage_in(cluster, namespace) as there:
        yield there


@asynccontextmanager
async def stage_in(cluster: Any, namespace: str) -> AsyncIterator[Stage]:
    """Yield a stage in an existing namespace of a cluster that serves runs."""
    configuration = await connection.load(str(cluster.kubeconfig))
    calls = Calls()
    async with AsyncExitStack() as stack:
        make_client = functools.partial(KubeApi, configuration, timeout=LONG_TIMEOUT_SECONDS)
        fenced = make_client(on_call=calls.called, fence=lambda: there.may_write())
        api = await stack.enter_async_context(fenced)
        own = await stack.enter_async_context(make_client())
        there = Stage(api, own, calls, namespace, cluster.kubectl)
        await stack.enter_async_context(there.coordinator.serving())
        try:
            yield there
        finally:
            await there.reconciler.forget_all()
