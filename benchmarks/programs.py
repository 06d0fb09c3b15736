"""Programs graded per second by ``verifier.code``: kinds of tests, workers, and processor time of a program; and what a fork costs.

Groups of 16 completions, each with a small program, half of them right, through the real pool and sandbox. ``fork`` is a process of the
same interpreter that ends at once: the part that no sandbox of one process a program can save.

    python benchmarks/programs.py [--quick] [--workers 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path

from scalerl_tasks import GradingPool, Prompt, VerifierConfig
from scalerl_tasks.programs.verifier import CodeConfig
from scalerl_tasks.sandbox.confinement import Limits

GROUP = 16
TASKS = {
    "script, one test": (
        json.dumps({"inputs": ["20\n"], "outputs": ["41\n"]}),
        "print(int(input()) * 2 + {})",
    ),
    "calls, four tests": (
        json.dumps({"fn_name": "f", "inputs": [[1], [2], [3], [4]], "outputs": [3, 5, 7, 9]}),
        "def f(x):\n    return 2 * x + {}",
    ),
    "asserts, three tests": (
        json.dumps([f"assert f({x}) == {2 * x + 1}" for x in (1, 2, 3)]),
        "def f(x):\n    return 2 * x + {}",
    ),
}
"""Answer of the prompt, and program, whose number is 1 if it is right."""


async def rate(name: str, seconds: float, workers: int) -> dict[str, float]:
    """Programs per second, by wall-clock and by processor time of all processes."""
    answer, program = TASKS[name]
    prompt = Prompt(name, "", answer)
    completions = [f"```python\n{program.format(at % 2)}\n```" for at in range(GROUP)]
    config = VerifierConfig("code", code=CodeConfig("All", Limits()))
    async with GradingPool(config, workers=workers) as pool:
        await asyncio.gather(*(pool.score_group(prompt, completions) for _ in range(workers)))
        begin, used, graded = time.perf_counter(), processor_seconds(), 0

        async def ask() -> None:
            nonlocal graded
            while time.perf_counter() - begin < seconds:
                verdicts = await pool.score_group(prompt, completions)
                assert [one.score for one in verdicts] == [0, 1] * (GROUP // 2), verdicts
                graded += GROUP

        await asyncio.gather(*(ask() for _ in range(2 * workers)))
        wall, used = time.perf_counter() - begin, processor_seconds() - used
    return {"programs_per_second": graded / wall, "milliseconds_of_processor": 1000 * used / graded}


def processor_seconds() -> float:
    """Processor time of this process and all below it, also of those that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return sum(ticks[pid] for pid in ticks if is_ours(pid)) / os.sysconf("SC_CLK_TCK")


def fork_milliseconds(count: int) -> float:
    """Processor time of a fork of this interpreter that ends at once, in both processes."""
    begin = sum(os.times()[:4])
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return 1000 * (sum(os.times()[:4]) - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    seconds = 3.0 if arguments.quick else 15.0
    results: dict[str, dict[str, float]] = {}
    for name in TASKS:
        results[name] = asyncio.run(rate(name, seconds, arguments.workers))
        print(f"{name:22} {results[name]['programs_per_second']:8.0f} programs/s", end="")
        print(f" {results[name]['milliseconds_of_processor']:8.2f} ms of processor time each")
    fork = fork_milliseconds(300)
    print(f"{'fork':22} {fork:29.2f} ms; load {os.getloadavg()[0]:.1f}")
    print(json.dumps({"workers": arguments.workers, "tasks": results, "fork_milliseconds": fork}))


if __name__ == "__main__":
    main()
