"""That no reconcile holds the operator's event loop for 100 ms: asyncio's own debug mode says so of the real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from free_port import free_port
from replicas import leader, replica
from stage import ROOT, Object, condition, evaluations, stage, tiny
from testcluster import Cluster

from scalerl_api import wire
from scalerl_coordinator.decisions import DecisionLog

pytestmark = pytest.mark.cluster

SLOW = re.compile(r"Executing <(.*?)> took ([\d.]+) seconds")
"""asyncio's words, in debug mode, of a callback that took more than 100 ms by the wall."""
IN_DEBUG_MODE = " is serving"
"""asyncio's words of a server that listens, which it has in debug mode only."""
TIMES = 3
"""What holds the loop does so each time; a callback that waited for one of two busy cores does not."""


def words(log: Path) -> str:
    return log.read_text()


@contextlib.asynccontextmanager
async def curve_fit() -> AsyncIterator[str]:
    """The sidecar's process; its address."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scalerl_curvefit.sidecar", "--host", "127.0.0.1", "--port", str(port))
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(1200):
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.get(f"{url}/healthz") as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.1)
            else:
                raise AssertionError("the sidecar does not answer")
        yield url
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 120)


async def held(served: Cluster, namespace: str, log: Path) -> dict[str, float]:
    """One run from nothing to its forecast, and to its end: the callbacks that held the loop, with their seconds."""
    async with stage(served, namespace) as there, curve_fit() as url:
        data = {"data.jsonl": (ROOT / "examples/tiny/data.jsonl").read_text()[:2000]}
        data_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tiny-addition-data"}}
        await there.create(data_map | {"data": data})
        debug = {"PYTHONASYNCIODEBUG": "1", "SCALERL_SIDECAR_URL": url}

        async def until(true: Callable[[Object], bool]) -> None:
            run: Object | None = None
            for _ in range(1200):
                run = await there.get("ScaleRLRun", "tiny-addition")
                if run is not None and true(run):
                    return
                await asyncio.sleep(0.1)
            raise AssertionError(f"not reached: {json.dumps((run or {}).get('status'), indent=1)}")

        async with replica(served, namespace, "only", log=log, **debug) as only:
            await leader([only])
            assert IN_DEBUG_MODE in words(log), "asyncio was not in debug mode, or its words do not get here"
            began = len(words(log))  # what was said while it started is no reconcile's
            there.coordinator.points = evaluations(40)
            there.coordinator.decisions = DecisionLog(log.with_suffix(".jsonl"))
            await there.create(tiny(autoscaling={"mode": "Advisory"}))
            await until(lambda r: r.get("status", {}).get("phase") == "Preparing")
            await there.end("prepare")
            await until(lambda r: r["status"]["phase"] == "Running")
            for role, count in (("coordinator", 1), ("generator", 1), ("trainer", 2)):
                await there.begin(role, count)
            await until(lambda r: condition(r, "ForecastReady") == "Ready")
            there.coordinator.phase = wire.Phase.FINISHED
            there.coordinator.stop_reason = "maxSteps"
            await there.end("trainer", count=2)
            await until(lambda r: r["status"]["phase"] == "Completed")
            await there.delete("ScaleRLRun", "tiny-addition")
            for _ in range(1200):
                if await there.get("ScaleRLRun", "tiny-addition") is None:
                    break
                await asyncio.sleep(0.1)
            else:
                raise AssertionError("the run is not gone 120 s after it was deleted")
            only.process.terminate()
            assert await asyncio.wait_for(only.process.wait(), 120) == 0
    return {what: float(seconds) for what, seconds in SLOW.findall(words(log)[began:])}


def test_blocking_callback_is_found_in_asyncio_log() -> None:
    """The control: a callback of 150 ms, as asyncio says it to the log of a process like the operator's."""
    code = (
        "import asyncio, logging, time\n"
        "logging.basicConfig(level=logging.INFO, format='%(levelname)s %(name)s %(message)s')\n"
        "async def hold(): time.sleep(0.15)\n"
        "asyncio.run(hold())"
    )

    def found(mode: str) -> list[str]:
        environ = os.environ | {"PYTHONASYNCIODEBUG": mode}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
        )
        return [what for what, seconds in SLOW.findall(ended.stderr) if float(seconds) >= 0.15]

    assert "hold()" in "".join(found("1"))
    assert found("") == []


async def test_no_reconcile_blocks_event_loop(control_plane: Cluster, tmp_path: Path) -> None:
    found = dict[str, float]()
    for turn in range(TIMES):
        found = await held(control_plane, f"loop-{turn}", tmp_path / f"{turn}.log")
        if not found:
            return
        print(found)
    pytest.fail(f"more than 100 ms, {TIMES} times; the last time: {found}")
