"""Time until the page of a long run is there, until it finds rollouts, and the memory of its process.

Makes a run of 10,000 steps with 80 metrics each, 400 evaluations, a trace and a million rollouts of 512 tokens (as benchmarks/rollouts.py), starts
``scalerl view``, and opens it in a headless Chromium where there is one.

    python benchmarks/view.py [--steps N] [--rollouts N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rollouts
from aiohttp import ClientSession, CookieJar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
import chromium

EVALUATIONS, METRICS, GROUPS_A_STEP = 400, 80, 16


def make(run: Path, steps: int, count: int) -> None:
    """Write the run, unless it is there."""
    run.mkdir(exist_ok=True)
    if not (run / "rollouts").exists():
        rollouts.write(run / "rollouts", count)
    source = random.Random(0)
    with (run / "metrics.jsonl").open("w") as metrics, (run / "trace.jsonl").open("w") as trace:
        for step in range(steps):
            row = {f"figure_{at}": source.random() for at in range(METRICS - 20)}
            row |= {
                name: 5 * source.random()
                for name in ("entropy", "grad_norm", "sampled_kl", "publish_seconds")
            }
            row |= {"reward": 0.6 - 0.4 * math.exp(-step / 3000) + 0.05 * source.random()}
            row |= {
                "forward_backward_seconds": 20.0,
                "optimizer_seconds": 2.0,
                "busy_seconds": 22.0,
                "wait_seconds": 3.0,
            }
            metrics.write(json.dumps({"step": step, "wall_seconds": 30.0 * (step + 1)} | row) + "\n")
            for group in range(GROUPS_A_STEP):
                line = {
                    "kind": "group",
                    "t": 30.0 * step + group,
                    "slot": step * GROUPS_A_STEP + group,
                    "step": step,
                }
                line |= {
                    "prompt": group,
                    "generator": f"generator-{group % 4}",
                    "leased": max(0.0, 30.0 * step + group - 25),
                }
                trace.write(
                    json.dumps(line | {"prompt_tokens": 9, "lengths": [512] * 16, "lease_version": step})
                    + "\n"
                )
    with (run / "curve.csv").open("w") as curve:
        curve.write("compute,reward,samples\n")
        for at in range(EVALUATIONS):
            reward = 0.2 + 0.4 * at / (at + 80) + source.gauss(0, 0.01)
            curve.write(f"{at * 1e7:.0f},{reward:.4f},1024\n")


def memory(process: int) -> dict[str, int]:
    """MiB now and at most; the first without the files' pages, which other processes share."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    names = {"VmRSS": "resident_mib", "RssAnon": "anonymous_mib", "VmHWM": "most_resident_mib"}
    return {shown: int(status[name].split()[0]) // 1024 for name, shown in names.items()}


async def timed(session: ClientSession, address: str) -> tuple[float, Any]:
    started = time.perf_counter()
    async with session.get(address) as response:
        content = await response.json()
    return round(time.perf_counter() - started, 3), content


async def requests(address: str, token: str) -> dict[str, Any]:
    """Times of requests, the best of three."""
    found: dict[str, Any] = {}
    async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
        await (await session.get(f"{address}/?token={token}")).read()
        found["first_state_seconds"], _ = await timed(session, f"{address}/api/state")
        for name, path in {
            "state": "state",
            "curve": "curve",
            "metrics": "metrics?names=reward,entropy,grad_norm,sampled_kl",
            "timeline_of_200_steps": "timeline?count=200",
            "newest_rollouts": "rollouts?descending=1&limit=25",
            "reward_and_text": f"rollouts?reward=1&contains={rollouts.NEEDLE}",
            "text": f"rollouts?contains={rollouts.NEEDLE}",
            "worst_of_last_step": "rollouts?step=last&sort=reward&limit=5",
            "one_prompt": "prompt?prompt=p3",
        }.items():
            times = [await timed(session, f"{address}/api/{path}") for _ in range(3)]
            assert "problem" not in times[0][1], times[0][1]
            found[f"{name}_seconds"] = min(seconds for seconds, _ in times)
    return found


async def paint(address: str, token: str) -> dict[str, float]:
    """Seconds from the navigation to the first paint, and until the curve is drawn."""
    async with chromium.tab() as tab:
        await tab.open(f"{address}/?token={token}")
        started = time.perf_counter()
        await tab.until("location.search === '' && document.querySelector('figure svg path')")
        drawn = time.perf_counter() - started
        first = await tab.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        return {"first_paint_seconds": round(first / 1000, 3), "curve_drawn_seconds": round(drawn, 3)}


def serve(run: Path) -> tuple[subprocess.Popen[str], str, str, float]:
    """A started page: process, address, token, seconds until it printed them."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "scalerl_cli.main", "view", str(run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"(http://[\d.:]+)/\?token=(\S+)", line)
    assert found is not None, line
    return process, found[1], found[2], round(time.perf_counter() - started, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument(
        "--directory", type=Path, help="where the run goes, or is (default: a temporary directory)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = arguments.directory or Path(temporary) / "run"
        make(run, arguments.steps, arguments.rollouts)
        figures: dict[str, Any] = {"steps": arguments.steps, "rollouts": arguments.rollouts}
        figures["cores"] = len(os.sched_getaffinity(0))
        for part in (paint, requests) if chromium.BINARY else (requests,):
            process, address, token, figures["start_seconds"] = serve(run)
            try:
                figures |= asyncio.run(part(address, token)) | memory(process.pid)
            finally:
                process.terminate()
                process.wait(60)
    print(json.dumps({"benchmark": "view", "figures": figures}))


if __name__ == "__main__":
    main()
