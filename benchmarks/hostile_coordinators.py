"""The operator beside coordinators that attack it: its memory, its event loop, other runs' reconciles, and what is quoted.

A real API server with its controllers; the operator's reconciler, work queue and pollers in this process; each attack
(tests/support/hostile_server.py) is served by another process at the address of a run's coordinator. Ten healthy runs are woken
ten times a second, one after the other; a reconcile counts from its wake-up to its end. First without an attack, then beside each
attack, then beside all at once, in one invocation. Memory is the peak over what is resident before the first attack, and before all at once.

    python benchmarks/hostile_coordinators.py [--quick] [--seconds S] [ATTACK ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import hostile_server
from hostile_server import ATTACKS, LEGIT_THOUGH_LARGE, MARK, REDIRECTS, SLOW, THE_NEWEST_POINTS
from stage import Stage, own_control_plane, stage
from test_unreachable import with_coordinator

from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube.types import Key
from scalerl_operator.kube.work_queue import WorkQueue
from scalerl_operator.names import PORTS

HEALTHY, WORKERS, PER_SECOND, LAG_SECONDS = 10, 8, 10.0, 0.01
NAMED = (
    *("gzip", "endless", "million-points", "20000-points", "many-values", "labels", "redirect-302"),
    *("deep", "deep-field", "slow", "endless-interim", "long-text", "error-problem"),
)
QUICK = ("gzip", "million-points", "endless-interim")
ALL = tuple(ATTACKS) + tuple(SLOW) + tuple(REDIRECTS) + tuple(LEGIT_THOUGH_LARGE) + tuple(THE_NEWEST_POINTS)


class Figures(NamedTuple):
    """peak_bytes: over what was resident before the first measurement. held_seconds: longest delay of the event loop; own_seconds: longest processor
    time of its thread in such an interval, without that of other processes. quoted: objects with the answer's mark."""

    seconds: list[float]
    peak_bytes: int
    held_seconds: float
    own_seconds: float
    quoted: int


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@asynccontextmanager
async def attacking(places: Sequence[tuple[str, str]]) -> AsyncIterator[None]:
    """Another process that serves each attack at its address."""
    command = [sys.executable, hostile_server.__file__, str(PORTS["http"])]
    process = await asyncio.create_subprocess_exec(
        *command, *(f"{address}={attack}" for address, attack in places), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"serving\n"
        yield
    finally:
        process.kill()
        await process.wait()


class Operator:
    """The operator's parts beside a fleet of healthy runs."""

    def __init__(self, there: Stage) -> None:
        self.there = there
        self._before = 0
        """Resident bytes before the first measurement."""
        self._ended: defaultdict[Key, asyncio.Event] = defaultdict(asyncio.Event)
        self._queue = WorkQueue(self._reconcile, workers=WORKERS)
        self._reconciler = Reconciler(
            there.api, there.cache, images=there.images, operator_namespace="scalerl", wake=self._queue.wake
        )

    async def _reconcile(self, key: Key) -> float | None:
        try:
            return await self._reconciler.reconcile(key)
        finally:
            self._ended[key].set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.settle()
        self._queue.release()
        try:
            for _ in range(4):
                await self.settle()
                await asyncio.sleep(1.0)
            yield
        finally:
            await self._queue.halt()
            await self._reconciler.forget_all()

    async def settle(self) -> None:
        await self.there.watch()
        for key in self.there.cache.runs():
            self._queue.wake(key)

    def reset_memory(self) -> None:
        """Memory counts from the next measurement on."""
        self._before = 0

    async def measure(self, seconds: float) -> Figures:
        healthy = [key for key in self.there.cache.runs() if key[1].startswith("healthy")]
        took: list[float] = []
        held = own = 0.0

        async def measure_delay() -> None:
            nonlocal held, own
            while True:
                began, used = time.perf_counter(), time.thread_time()
                await asyncio.sleep(LAG_SECONDS)
                held = max(held, time.perf_counter() - began - LAG_SECONDS)
                own = max(own, time.thread_time() - used)

        reset_peak()
        self._before = self._before or resident("VmRSS")
        delay = asyncio.create_task(measure_delay())
        for number in range(int(seconds * PER_SECOND)):
            key = healthy[number % HEALTHY]
            self._ended[key].clear()
            began = time.monotonic()
            self._queue.wake(key)
            await self._ended[key].wait()
            took.append(time.monotonic() - began)
            await asyncio.sleep(max(0.0, 1 / PER_SECOND - took[-1]))
        delay.cancel()
        peak = resident("VmHWM") - self._before
        runs = [self.there.cache.run(*key) for key in self.there.cache.runs()]
        events = await self.there.api.list("Event", self.there.namespace)
        quoted = sum(MARK in json.dumps(one, default=str) for one in (*runs, *events))
        return Figures(sorted(took), peak, held, own, quoted)


def show(name: str, found: Figures) -> None:
    p50, p99 = (found.seconds[min(len(found.seconds) - 1, int(len(found.seconds) * q))] for q in (0.5, 0.99))
    print(
        f"{name:18} memory +{found.peak_bytes / 1e6:5.1f} MB, loop held {1e3 * found.held_seconds:4.0f} ms "
        f"(processor {1e3 * found.own_seconds:3.0f}), "
        f"{len(found.seconds)} reconciles: median {1e3 * p50:3.0f} ms, p99 {1e3 * p99:4.0f} ms; quoted {found.quoted}",
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", default=list(NAMED))
    parser.add_argument("--seconds", type=float, default=12.0, help="of each attack; default: 12")
    parser.add_argument("--quick", action="store_true", help="three attacks of five seconds")
    options = parser.parse_args()
    if options.quick:
        options.attacks, options.seconds = list(QUICK), 5.0
    with own_control_plane() as cluster:
        async with stage(cluster, "benchmark") as there:
            for number in range(HEALTHY):
                await with_coordinator(there, f"healthy-{number}", there.coordinator.address)
            operator = Operator(there)
            async with operator.running():
                show("none", await operator.measure(options.seconds))
                for number, attack in enumerate(options.attacks):
                    address = f"127.66.0.{number + 1}"
                    async with attacking([(address, attack)]):
                        await with_coordinator(there, f"hostile-{number}", address)
                        await operator.settle()
                        show(attack, await operator.measure(options.seconds))
                places = [(f"127.66.1.{number + 1}", attack) for number, attack in enumerate(ALL)]
                if not options.quick:
                    for number, (address, _) in enumerate(places):
                        await with_coordinator(there, f"hostile-all-{number}", address)
                    await operator.settle()
                    await asyncio.sleep(30.0)  # until their objects are made; nothing answers yet
                    operator.reset_memory()
                    async with attacking(places):
                        show(f"all {len(places)} at once", await operator.measure(2 * options.seconds))


if __name__ == "__main__":
    asyncio.run(main())
