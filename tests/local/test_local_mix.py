"""A mix of two tasks end to end: files, proportions and curves, through a kill of the coordinator."""

from __future__ import annotations

import os
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, START_SECONDS, assert_counts_add_up, assert_nothing_left, small_spec, start_run

from scalerl_api.metrics_fields import by_task
from scalerl_tasks import Mixture

EXAMPLE = ROOT / "examples/mix/run.yaml"
STEPS, PROMPTS = 8, 8

pytestmark = pytest.mark.timeout(1800)


def small_mix() -> dict[str, Any]:
    """The tasks of the example in the shortened tiny run."""
    run = small_spec(budget__maxSteps=STEPS, recipe__promptsPerStep=PROMPTS, evaluation__everySteps=4)
    example = yaml.safe_load(EXAMPLE.read_text())["spec"]
    sums, programs = example["task"]["mix"]
    sums["jsonl"]["path"] = str(ROOT / "examples/tiny/data.jsonl")
    programs["jsonl"]["path"] = str(ROOT / "examples/tiny-code/data.jsonl")
    sums["heldOut"], programs["heldOut"] = {"size": 8}, {"size": 4}
    programs["maxCompletionTokens"] = 24
    run["spec"] |= {"task": {"mix": [sums, programs]}}
    run["spec"]["model"] = example["model"]
    run["spec"]["warmStart"] = example["warmStart"] | {"steps": 10, "batchSize": 8}
    run["spec"]["recipe"]["maxCompletionTokens"] = 32
    run["spec"]["trainer"]["replicas"] = 1
    return run


def test_mix_keeps_its_proportions_through_a_kill(tmp_path: Path) -> None:
    spec = small_mix()
    with start_run(tmp_path, spec) as run:
        run.until(lambda: run.step() >= 2, START_SECONDS, "two steps")
        (coordinator,) = run.find("scalerl_coordinator.main")
        os.kill(coordinator.pid, signal.SIGKILL)
        assert run.finish(900) == 0, run.tail()
        rows, curve, summary = run.metrics(), run.curve(), run.summary()
        others = {
            name: run.directory.joinpath(f"curve-{name}.csv").read_text().splitlines()
            for name in ("sums", "programs")
        }
    assert_nothing_left(run.directory)
    assert_counts_add_up(summary, spec)
    mixture = Mixture([Fraction("0.75"), Fraction("0.25")], seed=0)
    for step, row in enumerate(rows):
        tasks = [mixture.task(slot) for slot in range(step * PROMPTS, (step + 1) * PROMPTS)]
        found = by_task(row)
        assert [found[name]["groups"] for name in others] == [tasks.count(0), tasks.count(1)]
        assert found["sums"]["mean_completion_tokens"] <= 8
    assert len(rows) == STEPS
    assert [point["version"] for point in curve] == ["0", "4", "8"]
    for at, point in enumerate(curve, 1):
        sums, programs = (float(lines[at].split(",")[1]) for lines in others.values())
        assert float(point["reward"]) == pytest.approx(0.75 * sums + 0.25 * programs)
