"""A whole ``scalerl run`` under measurement: roles pinned to cores, rates read from what the run leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

PYTHON = [sys.executable, "-m", "scalerl_cli.main"]


def _pin(directory: Path, cores: Mapping[str, set[int]], done: set[int]) -> None:
    """Give every thread of the run's processes the cores of its role (the part of its name before the dash)."""
    wanted = f"SCALERL_DIR={directory}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in done:
            continue
        with suppress(OSError):
            environment = (entry / "environ").read_bytes().split(b"\0")
            if wanted not in environment:
                continue
            name = next((v[13:].decode() for v in environment if v.startswith(b"SCALERL_NAME=")), "")
            for task in (entry / "task").iterdir():
                os.sched_setaffinity(int(task.name), cores.get(name.split("-")[0], os.sched_getaffinity(0)))
            done.add(int(entry.name))


def measured_run(
    manifest: dict[str, Any], work: Path, cores: Mapping[str, set[int]] | None = None, seconds: float = 900
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run to the end; returns ``summary.json`` and the rows of ``metrics.jsonl``.

    Raises:
        RuntimeError: the run failed or took longer than ``seconds``; the message has its last lines.
    """
    work.mkdir(parents=True)
    file, directory, output = work / "run.yaml", work / "run", work / "output.txt"
    file.write_text(yaml.safe_dump(manifest))
    end = time.monotonic() + seconds
    with output.open("w") as sink:
        process = subprocess.Popen(
            [*PYTHON, "run", str(file), "--dir", str(directory)], stdout=sink, stderr=subprocess.STDOUT
        )
        pinned: set[int] = set()
        try:
            while process.poll() is None and time.monotonic() < end:
                if cores:
                    _pin(directory, cores, pinned)
                time.sleep(0.25)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=60)
    if process.returncode != 0:
        raise RuntimeError(f"the run in {work} failed ({process.returncode}):\n" + output.read_text()[-3000:])
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return json.loads((directory / "summary.json").read_text()), rows


def rate(rows: list[dict[str, Any]], key: str, skip: int) -> float:
    """Units of ``key`` per second over the steps after the first ``skip``, by the steps' wall clock."""
    timed = rows[skip:]
    elapsed = timed[-1]["wall_seconds"] - rows[skip - 1]["wall_seconds"]
    return float(sum(row[key] for row in timed) / elapsed)
