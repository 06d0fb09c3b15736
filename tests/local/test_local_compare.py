"""``scalerl compare`` on the tiny example: two short runs, a SIGTERM amid the second one, and the same command again."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from runs import START_SECONDS, LocalRun, assert_nothing_left, small_spec

STEPS = 10
RUN = small_spec(evaluation__everySteps=2, budget__maxSteps=STEPS)

# Its sibling on small processes: test_compare_of_real_processes_resumes_after_sigterm.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def start(tmp: Path) -> LocalRun:
    """The comparison in a child process; ``directory`` is that of its second run, once it is there."""
    output = tmp / f"output-{time.monotonic_ns()}.txt"
    vary = "grpo loss: recipe.loss={ppoClip: {}}; recipe.aggregation=SampleAverage"
    command = [sys.executable, "-m", "scalerl_cli.main", "compare", str(tmp / "run.yaml"), "--vary", vary]
    with output.open("w") as sink:
        process = subprocess.Popen(
            command, cwd=tmp, env=os.environ, stdout=sink, stderr=subprocess.STDOUT, text=True
        )
    (directory, *more) = [*(tmp / "compare").glob("small-grpo-loss-seed-0-*"), tmp / "not-yet"]
    assert len(more) <= 1
    return LocalRun(directory, process, output)


def test_compare_resumes_after_sigterm_and_leaves_a_table(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    first = start(tmp_path)
    try:
        found: list[Path] = []

        def second_run_trains() -> bool:
            found[:] = (tmp_path / "compare").glob("small-grpo-loss-seed-0-*")
            return any(LocalRun(p, first.process, first.output).step() >= 3 for p in found)

        first.until(second_run_trains, 2 * START_SECONDS, "three steps of the second run")
        first.process.send_signal(signal.SIGTERM)
        assert first.finish(120) == 130, first.tail()
    finally:
        first.kill_everything()
    (interrupted,) = found
    assert_nothing_left(interrupted)
    assert not (tmp_path / "compare/comparison.md").exists()
    done = start(tmp_path)
    try:
        assert done.finish(700) == 0, done.tail()
    finally:
        done.kill_everything()
    assert_nothing_left(interrupted)
    said = done.output.read_text()
    assert "1 of 2: small, seed 0: already finished" in said
    assert "2 of 2: grpo loss, seed 0: resumed" in said
    # No step was trained twice, and none is missing.
    assert [row["step"] for row in LocalRun(interrupted, done.process, done.output).metrics()] == [
        *range(STEPS)
    ]
    with (tmp_path / "compare/comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["recipe"], row["runs"], row["failed"]) for row in rows] == [
        ("small", "1", "0"),
        ("grpo loss", "1", "0"),
    ]
    for row in rows:
        reward = float(row["reward"])
        # Samples that all fail, as the untrained model's may, give no interval.
        assert reward == 0 or float(row["reward_low"]) <= reward <= float(row["reward_high"])
    assert (tmp_path / "compare/comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "| grpo loss | 1 |" in (tmp_path / "compare/comparison.md").read_text()
