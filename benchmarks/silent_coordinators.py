"""Reconciles of healthy runs beside runs whose coordinators accept connections and never answer.

A real API server with its controllers; the operator's reconciler, work queue and pollers in this process. Healthy runs are
woken ten times a second, one after the other; a reconcile counts from its wake-up to its end. First without any silent
run, then beside ``--silent`` of them, in one invocation.

    python benchmarks/silent_coordinators.py [--quick] [--silent N] [--seconds S]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from stage import Coordinator, Stage, own_control_plane, stage
from test_unreachable import with_coordinator

from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube.types import Key
from scalerl_operator.kube.work_queue import WorkQueue

HEALTHY, WORKERS, PER_SECOND, LIMIT_SECONDS = 10, 8, 10.0, 600.0


async def measure(there: Stage, silent: int, seconds: float) -> list[float]:
    """Seconds from wake-up to end of each healthy run's reconciles, sorted; ``silent`` runs are made beside them."""
    ended: defaultdict[Key, asyncio.Event] = defaultdict(asyncio.Event)

    async def reconcile(key: Key) -> float | None:
        try:
            return await reconciler.reconcile(key)
        finally:
            ended[key].set()

    queue = WorkQueue(reconcile, workers=WORKERS)
    reconciler = Reconciler(
        there.api, there.cache, images=there.images, operator_namespace="scalerl", wake=queue.wake
    )
    mute = Coordinator()
    mute.silent = True
    took: list[float] = []
    async with mute.serving(), asyncio.timeout(LIMIT_SECONDS):
        for number in range(silent):
            await with_coordinator(there, f"silent-{number}", mute.address)
        await there.watch()
        keys = there.cache.runs()
        healthy = [key for key in keys if key[1].startswith("healthy")]
        try:
            queue.release()
            for key in keys:
                queue.wake(key)
            for key in keys:
                await ended[key].wait()
            for _ in range(3):  # what was made comes back as news, and is settled
                await there.watch()
                for key in healthy:
                    queue.wake(key)
                await asyncio.sleep(2.0)
            for number in range(int(seconds * PER_SECOND)):
                key = healthy[number % HEALTHY]
                ended[key].clear()
                began = time.monotonic()
                queue.wake(key)
                await ended[key].wait()
                took.append(time.monotonic() - began)
                await asyncio.sleep(max(0.0, 1 / PER_SECOND - took[-1]))
        finally:
            await queue.halt()
            await reconciler.forget_all()
    return sorted(took)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silent", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true", help="30 silent runs, ten seconds")
    options = parser.parse_args()
    if options.quick:
        options.silent, options.seconds = 30, 10.0
    with own_control_plane() as cluster:
        async with stage(cluster, "benchmark") as there:
            for number in range(HEALTHY):
                await with_coordinator(there, f"healthy-{number}", there.coordinator.address)
            for silent in (0, options.silent):
                took = await measure(there, silent, options.seconds)
                p50, p99 = (took[min(len(took) - 1, int(len(took) * q))] for q in (0.5, 0.99))
                print(
                    f"{silent:3} silent coordinators: {len(took)} reconciles of {HEALTHY} healthy runs, "
                    f"median {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms, longest {1e3 * took[-1]:.0f} ms"
                )


if __name__ == "__main__":
    asyncio.run(main())
