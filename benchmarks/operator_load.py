"""The operator with a thousand runs on a real API server: how soon they are reconciled, and what they cost when nothing happens.

    python benchmarks/operator_load.py [--quick] [--runs N] [--idle SECONDS] [--parts [idle] [edits] [suspend]]

All processes share two cores: etcd, API server, controller-manager, scheduler, four simulated nodes (a pod is Running as
soon as it is scheduled, and runs nothing, so a preparation never ends), this client, and the operator: its ``main``, as in
the image, with a service account's token.

The runs are ``examples/tiny/run-kubernetes.yaml``, which has a pod template. The operator validates workloads with a pod
template by a dry run before it creates any object: four of the eleven creations of each run. No cache is warm at the start.
Volumes for the claims exist, and are bound one after the other.

1. *reconciled*: 16 connections create all runs as fast as the API server accepts them. A run is reconciled when its
   status has its ``observedGeneration`` and phase Preparing, which is written last; then each run's claim, token, ConfigMap
   of the spec, NetworkPolicy and preparation Job are counted. The figure is the seconds from the first request until all
   objects exist.
2. *idle, preparing*: CPU time and writes of the operator during the idle seconds, after a while without writes. For
   comparison, the API server's count of all clients' writes, without Leases (nodes renew their own, and the operator its
   own every three seconds; the operator's renewals are reported separately).
3. *first write*: a hundred runs get another budget, first ten per second, then by 16 connections at once. The figure is the
   time from the start of the request to the operator's first write for that run, either the spec's ConfigMap or the
   status, as a watch reports it. It therefore includes the API server's time twice, and this client's.
4. *idle, suspended*: as 2, after ``suspend: true`` on all runs.
5. *event loop*: lag of a task that sleeps half a second, over all phases, from the operator's own histogram (the figure
   is the upper bound of the highest bucket that is not empty). The lag includes time in which other processes used the
   core, so the CPU time of the longest callback, measured around each callback, is also reported.
6. *scrape*: median time of eleven requests for the operator's metrics, bytes, and series. No run has a forecast, an ETA or a
   deadline here; `series_of_runs` are the series that have a run's name. *all series*: the same number of runs in this process,
   with every series that a run can have but problems: CPU time of a scrape's text, and to record one run, as each reconcile does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from scalerl_api import operator_metric_names as metric_names
from scalerl_api.conditions import Phase
from scalerl_api.status import OutlookStatus, RunStatus
from scalerl_operator import names
from scalerl_operator.controller.report import RunFigures
from scalerl_operator.kube import connection
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.run_metrics import RunMetrics

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

from support.operator_process import LONGEST, Operator, cpu_seconds, running  # noqa: E402
from support.seen_runs import Seen, written_to  # noqa: E402
from testcluster import Cluster, ClusterError, start_control_plane  # noqa: E402
from testcluster.handle import KubectlError  # noqa: E402

CORES, NODES, CONNECTIONS, CHANGED = 2, 4, 16, 100
PER_SECOND = 10.0
"""Runs changed per second, in the phase that paces changes."""
NAMESPACE = "benchmark"
OBJECTS = ("PersistentVolumeClaim", "Secret", "ConfigMap", "NetworkPolicy", "Job")
"""Kinds of objects that a run has while it is prepared."""
PARTS = ("idle", "edits", "suspend")
"""What can be measured after the creation; ``suspend`` includes the idle seconds of suspended runs."""
LIMIT_SECONDS = 600.0
"""Timeout of each phase, after which the benchmark fails."""

Object = dict[str, Any]


# --- the load ---------------------------------------------------------------------------------------


@dataclass
class Load:
    """The client that creates and changes the runs."""

    cluster: Cluster
    api: KubeApi
    operator: Operator
    seen: Seen
    runs: list[str]

    async def each(self, runs: list[str], call: Callable[[str], Awaitable[object]]) -> None:
        """Await ``call`` for each run, over a bounded number of connections."""
        free = asyncio.Semaphore(CONNECTIONS)

        async def one(name: str) -> None:
            async with free:
                await call(name)

        async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
            for name in runs:
                group.create_task(one(name))

    async def make_volumes(self) -> None:
        """Create a volume for each run's claim: there is no provisioner, and pods without volumes are not scheduled."""
        volumes = [_volume(name) for name in self.runs]
        manifest = "\n---\n".join(json.dumps(volume) for volume in volumes)
        create = ("create", "-f", "-", "-o", "name")
        await asyncio.to_thread(self.cluster.kubectl, *create, stdin=manifest, seconds=LIMIT_SECONDS)

    async def create(self) -> float:
        """Create all runs; returns the seconds until the last is reconciled."""
        manifest = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())

        async def make(name: str) -> None:
            await self.api.create({**manifest, "metadata": {"name": name, "namespace": NAMESPACE}})

        began = time.monotonic()
        await self.each(self.runs, make)
        created = time.monotonic() - began
        print(f"{len(self.runs)} runs created in {created:.1f} s", flush=True)
        await self.until(Phase.PREPARING, began)
        for kind in OBJECTS:  # the operator writes a run's phase before it creates the objects
            while missing := await self._without(kind):
                if time.monotonic() - began > LIMIT_SECONDS:
                    raise SystemExit(f"{len(missing)} runs without their {kind}, as {missing[0]}")
                await asyncio.sleep(0.5)
        return time.monotonic() - began

    async def _without(self, kind: str) -> list[str]:
        found, _ = await self.api.list_at(kind, NAMESPACE, label_selector=names.RUN, metadata_only=True)
        there = {o["metadata"]["labels"][names.RUN] for o in found}
        return [name for name in self.runs if name not in there]

    async def suspend(self) -> float:
        """Suspend all runs; returns the seconds until the last is suspended."""
        began = time.monotonic()
        await self.each(self.runs, lambda name: self._patch(name, {"suspend": True}))
        return await self.until(Phase.SUSPENDED, began)

    async def change(self, budget: int, rate: float | None) -> tuple[list[float], list[float]]:
        """Change the budget of some runs, all at once (None) or ``rate`` of them per second.

        Returns the seconds to the operator's first write for each run, and the seconds of the requests alone, both sorted.
        """
        some = self.runs[:: max(1, len(self.runs) // CHANGED)][:CHANGED]
        self.seen.watch_for(some)
        sent: dict[str, float] = {}
        answered: dict[str, float] = {}

        async def patch(name: str) -> None:
            sent[name] = time.monotonic()
            await self._patch(name, {"budget": {"maxSteps": budget}})
            answered[name] = time.monotonic()

        if rate is None:
            await self.each(some, patch)
        else:
            async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
                for name in some:
                    group.create_task(patch(name))
                    await asyncio.sleep(1 / rate)
        async with asyncio.timeout(LIMIT_SECONDS):
            await self.seen.all_written.wait()
        firsts = sorted(self.seen.written[name] - sent[name] for name in some)
        return firsts, sorted(answered[name] - sent[name] for name in some)

    async def until(self, phase: Phase, began: float) -> float:
        """Wait until all runs are in ``phase``; returns the seconds since ``began``."""
        shown = time.monotonic()
        while (count := self.seen.are(phase)) < len(self.runs):
            now = time.monotonic()
            if self.operator.process.poll() is not None or now - began > LIMIT_SECONDS:
                tail = self.operator.log.read_text()[-4000:]
                raise SystemExit(f"{count} of {len(self.runs)} runs are {phase}; the operator says:\n{tail}")
            if now - shown > 10:
                print(f"{now - began:6.1f} s: {count} are {phase}", flush=True)
                shown = now
            await asyncio.sleep(0.05)
        seconds = self.seen.last - began
        print(f"all {phase} after {seconds:.1f} s", flush=True)
        return seconds

    async def _patch(self, name: str, spec: Object) -> None:
        await self.api.patch("ScaleRLRun", NAMESPACE, name, {"spec": spec})

    async def idle(self, what: str, seconds: float, quiet: float) -> dict[str, float]:
        """Wait for ``quiet`` seconds without a write, then measure the operator over ``seconds`` of idle time."""
        end = time.monotonic() + LIMIT_SECONDS
        while True:
            all_before = await asyncio.to_thread(written_to, self.cluster)
            await asyncio.sleep(quiet)
            if all_before == await asyncio.to_thread(written_to, self.cluster):
                break
            if time.monotonic() > end:
                raise SystemExit(f"{what}: after {LIMIT_SECONDS:.0f} s something is still written")
        before, cpu = await self.operator.writes(), self.operator.cpu_seconds()
        began = time.monotonic()
        await asyncio.sleep(seconds)
        cpu, lasted = self.operator.cpu_seconds() - cpu, time.monotonic() - began
        own = await self.operator.writes() - before
        everybody = await asyncio.to_thread(written_to, self.cluster) - all_before
        leases = own.pop("Lease", 0)
        print(f"idle, {what}: the operator wrote {dict(own)}, all together {dict(everybody)}", flush=True)
        per_minute = 60 / lasted
        return {
            f"{what}_cpu_percent_of_a_core": round(100 * cpu / lasted, 2),
            f"{what}_writes_per_minute": round(own.total() * per_minute, 1),
            f"{what}_writes_per_minute_of_all": round(everybody.total() * per_minute, 1),
            f"{what}_lease_renewals_per_minute": round(leases * per_minute, 1),
        }


def _volume(run: str) -> Object:
    claim = names.Names(run).claim
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": claim},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "claimRef": {"namespace": NAMESPACE, "name": claim},
            "hostPath": {"path": "/nobody/mounts/it"},
        },
    }


# --- all of it --------------------------------------------------------------------------------------


async def measure(
    cluster: Cluster, work: Path, count: int, idle: float, quiet: float, parts: Sequence[str]
) -> dict[str, float]:
    await asyncio.to_thread(_serve_runs, cluster)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        api = await stack.enter_async_context(
            KubeApi(await connection.load(str(cluster.kubeconfig)), timeout=60)
        )
        operator = stack.enter_context(running(cluster, work, session))
        seen = Seen(NAMESPACE)
        await stack.enter_async_context(_followed(seen, api))
        load = Load(cluster, api, operator, seen, [f"run-{i:04d}" for i in range(count)])
        await load.make_volumes()
        await operator.ready()
        fresh = operator.memory_mb("VmRSS")
        programs = cluster.programs()
        cpu, others = operator.cpu_seconds(), {name: cpu_seconds(pid) for name, pid in programs.items()}
        figures: dict[str, float] = {"runs": count, "reconciled_seconds": round(await load.create(), 1)}
        figures["cpu_seconds_per_run"] = round((operator.cpu_seconds() - cpu) / count, 4)
        others = {name: cpu_seconds(pid) - others[name] for name, pid in programs.items()}
        print("CPU seconds beside it:", ", ".join(f"{name} {used:.1f}" for name, used in others.items()))
        figures["cpu_seconds_per_run_of_the_cluster"] = round(sum(others.values()) / count, 4)
        calls = await operator.calls()
        figures["calls_per_run"] = round(calls.total() / count, 1)
        _print_calls("to begin", calls)
        if "idle" in parts:
            figures |= await load.idle("preparing", idle, quiet)
        figures |= {"changed": CHANGED} if "edits" in parts else {}
        edits = (("paced", 161, PER_SECOND), ("at_once", 162, None)) if "edits" in parts else ()
        for how, budget, rate in edits:
            firsts, requests = await load.change(budget, rate)
            figures[f"first_write_p50_seconds_{how}"] = round(firsts[len(firsts) // 2], 3)
            figures[f"first_write_p99_seconds_{how}"] = round(firsts[len(firsts) * 99 // 100], 3)
            figures[f"of_that_the_request_p50_seconds_{how}"] = round(requests[len(requests) // 2], 3)
        if "suspend" in parts:
            calls = await operator.calls()
            figures["suspended_seconds"] = round(await load.suspend(), 1)
            _print_calls("to suspend", await operator.calls() - calls)
            figures |= await load.idle("suspended", idle, quiet)
        figures["rss_fresh_mb"] = round(fresh, 1)
        figures["rss_mb"] = round(operator.memory_mb("VmRSS"), 1)
        figures["rss_highest_mb"] = round(operator.memory_mb("VmHWM"), 1)
        figures |= _lag(await operator.metrics())
        figures |= await operator.scrape()
        figures |= _all_series(count)
    return figures


def _print_calls(what: str, calls: Counter[str]) -> None:
    print(f"calls {what}:", ", ".join(f"{verb} {count}" for verb, count in calls.most_common()), flush=True)


def _lag(found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> dict[str, float]:
    """Figures of the operator's histogram of its event loop's lag."""
    name = f"{metric_names.LOOP_LAG_SECONDS}_bucket"
    buckets = sorted((float(dict(of)["le"]), value) for (n, of), value in found.items() if n == name)
    total = buckets[-1][1]
    within = dict(buckets)
    return {
        "loop_lag_longest_under_seconds": next(bound for bound, value in buckets if value == total),
        "loop_lag_over_100ms": total - within[0.1],
        "loop_lag_samples": total,
    }


def _all_series(count: int) -> dict[str, float]:
    """Costs of the metrics of runs that have all series."""
    numbers = {name: 0 if name == "tokens" else "0.6123" for name in OutlookStatus.model_fields}
    status = RunStatus(
        phase=Phase.RUNNING, reason="Healthy", decision="STOP", outlook=OutlookStatus.model_validate(numbers)
    )
    used = dict.fromkeys(("maxSteps", "maxSeconds", "maxDeviceHours", "maxComputeTokens"), 0.3125)
    figures = RunFigures(max_steps=160, budget_used=used, estimated_end=1.9e9, deadline=1.8e9, stop_after=3)
    metrics, seconds, text = RunMetrics(), [], ""
    began = time.thread_time()
    for number in range(count):
        metrics.set((f"team-{number % 50}", f"run-{number:04d}"), status, figures)
    recorded = time.thread_time() - began
    for _ in range(11):
        began = time.thread_time()
        text = metrics.text()
        seconds.append(time.thread_time() - began)
    return {
        "all_series": sum(not line.startswith("#") for line in text.splitlines()),
        "all_series_kilobytes": round(len(text) / 1000, 1),
        "all_series_scrape_cpu_milliseconds": round(1000 * statistics.median(seconds), 1),
        "all_series_record_cpu_microseconds": round(1e6 * recorded / count, 1),
    }


@contextlib.asynccontextmanager
async def _followed(seen: Seen, api: KubeApi) -> AsyncIterator[None]:
    tasks = []
    for kind, take in (("ScaleRLRun", seen.run), ("ConfigMap", seen.config_map)):
        _, version = await api.list_at(kind, NAMESPACE, metadata_only=True)
        tasks.append(asyncio.create_task(seen.follow(api, kind, take, version), name=f"watch of {kind}"))
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _control_plane() -> Cluster:
    try:
        return start_control_plane(unreal_nodes=NODES)
    except ClusterError as error:
        raise SystemExit(f"no API server can be run here: {error}") from error


def _serve_runs(cluster: Cluster) -> None:
    """Apply the CRDs, wait until runs are served, and create the namespace."""
    cluster.kubectl("apply", "--server-side", "-f", ROOT / "crds")
    end = time.monotonic() + 30
    while True:
        try:
            cluster.kubectl("get", "scalerlruns", "-A")
            break
        except KubectlError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
    cluster.kubectl("create", "namespace", NAMESPACE)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="the operator with a thousand runs on a real API server")
    parser.add_argument("--quick", action="store_true", help="100 runs, 5 idle seconds")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of each idle state")
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=PARTS, help="what follows the creation (default: all)"
    )
    parser.add_argument("--keep-log", type=Path, help="where the operator's log goes (default: nowhere)")
    arguments = parser.parse_args()
    count = min(arguments.runs, 100) if arguments.quick else arguments.runs
    idle = min(arguments.idle, 5.0) if arguments.quick else arguments.idle
    quiet = 2.0 if arguments.quick else 5.0
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)  # inherited by all processes that are started here
    print(f"load average at the start: {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as work, _control_plane() as cluster:
        figures = asyncio.run(measure(cluster, Path(work), count, idle, quiet, arguments.parts))
        longest = float((Path(work) / LONGEST).read_text())
        figures["longest_callback_cpu_milliseconds"] = round(1000 * longest, 1)
        if arguments.keep_log is not None:
            arguments.keep_log.write_bytes((Path(work) / "operator.log").read_bytes())
    figures["cores"] = len(cores)
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):<44} {value:g}")
    print(json.dumps({"benchmark": "operator_load", "figures": figures}))


if __name__ == "__main__":
    main()
