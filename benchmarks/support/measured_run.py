"""Measures a whole ``scalerl run``: pins roles to cores, and reads rates from the run's files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PYTHON = [sys.executable, "-m", "scalerl_cli.main"]
_DRAIN_SECONDS = 30.0


def manifest(name: str, model: Path, prompts: Path, context: int, **sections: Any) -> dict[str, Any]:
    """A run of the length model with a negligible learning rate, and no evaluation or checkpoint between start and end."""
    recipe = {"zeroVarianceFilter": False, "optimizer": {"learningRate": "1e-7"}} | sections.pop("recipe")
    return {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": name},
        "spec": {
            "model": {"path": str(model), "dtype": "float32", "contextTokens": context},
            "task": {"jsonl": {"path": str(prompts)}, "verifier": {"name": "number"}, "heldOut": {"size": 8}},
            "recipe": recipe,
            "evaluation": {"everySteps": 1000, "samplesPerPrompt": 1},
            "checkpoint": {"everySteps": 1000},
            **sections,
        },
    }


@dataclass(frozen=True)
class Edit:
    """A change of the recipe after ``steps`` steps; the coordinator is killed, and restarts with the new recipe."""

    steps: int
    recipe: Mapping[str, Any]


def measured_run(
    manifest: dict[str, Any],
    work: Path,
    pins: Mapping[str, int] | None = None,
    seconds: float = 900,
    edit: Edit | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run to the end; returns ``summary.json`` and the rows of ``metrics.jsonl``.

    pins: core of each role.
    seconds: timeout.
    edit: change of the recipe during the run.

    Raises:
        RuntimeError: the run failed or took longer than ``seconds``; the message has its last lines.
    """
    work.mkdir(parents=True)
    file, directory, output = work / "run.yaml", work / "run", work / "output.txt"
    file.write_text(yaml.safe_dump(manifest))
    pinned = [word for role, core in (pins or {}).items() for word in ("--pin", f"{role}={core}")]
    deadline = time.monotonic() + seconds
    with output.open("w") as sink:
        process = subprocess.Popen(
            [*PYTHON, "run", str(file), "--dir", str(directory), *pinned],
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
        try:
            while (code := process.poll()) is None and time.monotonic() < deadline:
                if edit is not None and len(_rows(directory)) >= edit.steps:
                    _change(directory, edit.recipe)
                    edit = None
                time.sleep(0.05)
        finally:
            _end(process)
    if code != 0:
        what = "took too long" if code is None else f"failed ({code})"
        raise RuntimeError(f"the run in {work} {what}:\n" + output.read_text()[-3000:])
    return json.loads((directory / "summary.json").read_text()), _rows(directory)


def _rows(directory: Path) -> list[dict[str, Any]]:
    file = directory / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _change(directory: Path, recipe: Mapping[str, Any]) -> None:
    file = directory / "run.yaml"
    run = yaml.safe_load(file.read_text())
    run["spec"]["recipe"] |= recipe
    aside = file.with_suffix(".new")
    aside.write_text(yaml.safe_dump(run))
    aside.replace(file)
    (coordinator,) = _processes(directory, "scalerl_coordinator.main")
    os.kill(coordinator, signal.SIGKILL)


def _processes(directory: Path, module: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            of_run = f"SCALERL_DIR={directory}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if of_run and (entry / "cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", module.encode()]:
                found.append(int(entry.name))
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes: request a drain, then send a second signal, which ends everything immediately."""
    for _ in range(2):
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=_DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.kill()


def rate(rows: list[dict[str, Any]], key: str, lead: int, tail: int | None = None) -> float:
    """Sum of ``key`` per second of wall-clock time, in the steady state.

    Excludes the first ``lead`` steps, during which the generator may get ahead, and the last ``tail`` steps (by default
    ``lead``), whose completions are generated before, so that the trainer does not share the machine.
    """
    timed = rows[lead : len(rows) - (lead if tail is None else tail)]
    elapsed = timed[-1]["wall_seconds"] - rows[lead - 1]["wall_seconds"]
    return float(sum(row[key] for row in timed) / elapsed)
