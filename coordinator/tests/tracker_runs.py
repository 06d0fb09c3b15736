"""Runs whose metrics, evaluations and rollouts trackers show, and the processes of trackers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow.parquet as pq
from coordinator_client import run_text

from scalerl_api import wire
from scalerl_api.load import parse_run
from scalerl_api.paths import RunPaths
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.recorded_rows import table_of
from scalerl_coordinator.tracking.tail import SAMPLE_COLUMNS
from scalerl_coordinator.tracking.tracker_process import follow, open_sink

Rows = dict[int, dict[str, float]]


def row(step: int, loss: float | None = None) -> dict[str, float]:
    return {"step": step, "loss": 1 / (step + 3) if loss is None else loss, "work_tokens": 1000 * step + 7}


def rows(steps: int) -> Rows:
    return {step: row(step) for step in range(steps)}


LATE = 50
"""Its evaluation ends after those of later versions."""


def device_seconds(version: int) -> float:
    """When the evaluation of a version ended."""
    return 12.0 * version + (9000.0 if version == LATE else 0.0)


def point(version: int, reward: float | None = None) -> wire.EvaluationPoint:
    return wire.EvaluationPoint(
        version=version,
        work_tokens=1000 * version,
        reward=1 - 1 / (version + 2) if reward is None else reward,
        standard_error=0.01,
        samples=400,
        prompts=100,
        set_digest="12",  # looks like a figure, and is none
        mixed_versions=version % 20 == 10,
        truncated_fraction=0.125,
        mean_tokens=17.5,
        wall_seconds=3.0 * version,
        device_seconds=device_seconds(version),
        given_up_prompts=2,
    )


def figures(version: int, reward: float | None = None) -> dict[str, float]:
    """What trackers are to show of :func:`point`."""
    return {
        "held_out/compute": 1000 * version,
        "held_out/reward": 1 - 1 / (version + 2) if reward is None else reward,
        "held_out/samples": 400,
        "held_out/standard_error": 0.01,
        "held_out/version": version,
        "held_out/wall_seconds": 3 * version,
        "held_out/device_seconds": device_seconds(version),
        "held_out/mean_tokens": 17.5,
        "held_out/truncated_fraction": 0.125,
        "held_out/mixed_versions": int(version % 20 == 10),
        "held_out/prompts": 100,
        "held_out/given_up_prompts": 2,
    }


def write_curve(paths: RunPaths, versions: Iterable[int], **reward: float) -> None:
    RunFiles(paths).write_curves([point(version, **reward) for version in sorted(versions)], 0)


def specify(paths: RunPaths, **trackers: object) -> None:
    paths.run_file.write_text(run_text(trackers=trackers))


def start(paths: RunPaths, name: str, **variables: str) -> subprocess.Popen[bytes]:
    """The process of a tracker, as the supervisor starts it."""
    environ = {
        **os.environ,
        "SCALERL_DIR": str(paths.root),
        "SCALERL_NAME": "coordinator-0",
        "SCALERL_COORDINATOR_URL": "http://127.0.0.1:1",
        "SCALERL_TOKEN_FILE": str(paths.token),
        **variables,
    }
    command = [sys.executable, "-m", "scalerl_coordinator.tracking.tracker_process", name]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )


def finish(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Ask it to end; what it reported last."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, (out, err)
    last: dict[str, Any] = json.loads(out.splitlines()[-1])
    return last


def in_process(paths: RunPaths, name: str, wait: Callable[[float], bool]) -> list[int]:
    """Follow the file in this process; the steps that were reported."""
    reports: list[int] = []
    sink = open_sink(name, parse_run(paths.run_file.read_text(), "test"), paths)
    follow(paths, sink, reports.append, wait)
    return reports


def record_evaluation(paths: RunPaths, version: int, prompts: int = 40) -> None:
    """Two completions for each prompt, with text that is hostile or long."""
    completions = [
        {
            **dict.fromkeys(SAMPLE_COLUMNS),
            "step": version,
            "split": "held_out",
            "task": "main",
            "prompt_index": prompts - 1 - index,
            "sample": sample,
            "prompt": "x" * 5000,
            "completion": f"<b>{index}\0\u202e",
            "reward": sample / 2,
            "tokens": 3,
        }
        for index in range(prompts)
        for sample in (0, 1)
    ]
    paths.rollouts.mkdir(exist_ok=True)
    pq.write_table(
        table_of(completions), paths.rollouts / f"held_out-{version:08d}-{version:08d}-00000001.parquet"
    )


def wait_for(found: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + 300
    while not (value := found()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value
