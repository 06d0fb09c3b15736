"""Whole runs for the tests: start one, observe it, kill its processes, and read its results."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/tiny/run.yaml"
START_SECONDS = 400.0


def small_spec(**changes: Any) -> dict[str, Any]:
    """The tiny example, shortened; ``changes`` are dotted paths with ``__`` for the dot."""
    run = yaml.safe_load(EXAMPLE.read_text())
    run["metadata"]["name"] = "small"
    run["spec"]["task"]["jsonl"]["path"] = str(EXAMPLE.with_name("data.jsonl"))
    defaults: dict[str, Any] = {
        "warmStart__steps": 120,
        "task__heldOut__size": 32,
        "evaluation__samplesPerPrompt": 2,
        "evaluation__everySteps": 10,
        "recipe__promptsPerStep": 8,
        "recipe__completionsPerPrompt": 4,
        "checkpoint__everySteps": 5,
        "budget__maxSteps": 20,
    }
    for path, value in (defaults | changes).items():
        node = run["spec"]
        *parents, last = path.split("__")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return run


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    command: str


def _writes_below(entry: Path, logs: Path) -> bool:
    """vLLM's engine renames itself, which wipes the environment that ``/proc`` shows; its output stays."""
    return any(os.readlink(entry / "fd" / stream).startswith(f"{logs}/") for stream in ("1", "2"))


def processes_of(directory: Path) -> list[Process]:
    """Every live process whose environment, or whose output, says it belongs to the run in ``directory``."""
    wanted, logs = f"SCALERL_DIR={directory}".encode(), directory / "logs"
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" and (wanted in environment or _writes_below(entry, logs)):
                name = next((v[13:].decode() for v in environment if v.startswith(b"SCALERL_NAME=")), "")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(Process(int(entry.name), name, command))
        except (OSError, IndexError):
            continue
    return found


def engine_of(server: Process) -> list[int]:
    """Pids of the engine that a vLLM server forked; it renames itself, which wipes its visible environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == server.pid and b"EngineCore" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue
    return found


@dataclass
class LocalRun:
    """One ``scalerl run`` in a child process."""

    directory: Path
    process: subprocess.Popen[str]
    output: Path
    started: float = field(default_factory=time.monotonic)

    def find(self, part: str, but_not: str = "subreaper") -> list[Process]:
        """Processes of the run whose command line has ``part``."""
        return [p for p in processes_of(self.directory) if part in p.command and but_not not in p.command]

    def server(self) -> Process:
        """The vLLM server. Its engine, a fork, has the same command line where a process cannot set its title."""
        return min(self.find("scalerl_generator.vllm_server"), key=lambda process: process.pid)

    def actor_values(self, sample: str) -> dict[str, float]:
        """A sample of the actors' metrics, by actor; 0 where it is missing, and none of an actor that is starting."""
        values = {}
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for actor in self.find("scalerl_generator.actor"):
            address = re.search(r"--listen (\S+)", actor.command)
            assert address is not None, actor.command
            try:
                with direct.open(f"http://{address[1]}/metrics", timeout=60) as answer:
                    text = answer.read().decode()
            except OSError:
                continue
            found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
            values[actor.name] = float(found[1]) if found else 0.0
        return values

    def metrics(self) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def step(self) -> int:
        rows = self.metrics()
        return int(rows[-1]["step"]) + 1 if rows else 0

    def until(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            if condition():
                return
            if ended:
                raise AssertionError(
                    f"the run ended ({self.process.returncode}) before {what}:\n{self.tail()}"
                )
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:.0f} s: {what}\n{self.tail()}")
            time.sleep(0.1)

    def finish(self, seconds: float) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s\n{self.tail()}") from None

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    def curve(self) -> list[dict[str, str]]:
        with (self.directory / "curve.csv").open() as file:
            return list(csv.DictReader(file))

    def tail(self, lines: int = 25) -> str:
        files = [self.output, *sorted((self.directory / "logs").glob("*.log"))]
        return "\n".join(
            f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
            for file in files
        )

    def kill_everything(self) -> None:
        for pid in [self.process.pid, *(p.pid for p in processes_of(self.directory))]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(timeout=120)


@contextmanager
def start_run(
    tmp: Path, run: dict[str, Any], *arguments: str, environment: dict[str, str] | None = None
) -> Iterator[LocalRun]:
    """``scalerl run`` on ``run``; whatever happens, nothing of it is left running afterwards."""
    file = tmp / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    directory = tmp / "run"
    output = tmp / f"output-{time.monotonic_ns()}.txt"
    with output.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "scalerl_cli.main", "run", str(file), "--dir", str(directory), *arguments],
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            cwd=tmp,
            text=True,
            # Whatever started the tests (a shell's `&` ignores it), Ctrl-C means something to the run.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    started = LocalRun(directory, process, output)
    try:
        yield started
    finally:
        if process.poll() is None:
            started.kill_everything()


def assert_counts_add_up(summary: dict[str, Any], run: dict[str, Any], complete: bool = True) -> None:
    """Every acknowledged rollout is trained, filtered, skipped or queued; every slot of every step was used or given up.

    A run that was cut short may have closed (and filtered) steps that it did not train any more.
    """
    counts = summary["counts"]
    used_up = counts["trained"] + counts["filtered"] + counts["skipped"]
    assert counts["acknowledged"] == used_up + counts["queued"], counts
    recipe = run["spec"]["recipe"]
    used = summary["steps"] * recipe["promptsPerStep"] * recipe["completionsPerPrompt"]
    if complete:
        assert used_up + counts["given_up"] == used, counts
        assert counts["queued"] == 0, counts
    else:
        assert counts["acknowledged"] >= used, counts


def assert_nothing_left(directory: Path, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while left := processes_of(directory):
        assert time.monotonic() < end, f"left running: {left}"
        time.sleep(0.1)
