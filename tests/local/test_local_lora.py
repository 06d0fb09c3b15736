"""A run whose generator gets adapters: killed once and resumed, exact against the trainer, exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import assert_nothing_left, small_spec, start_run

STEPS = 12

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_run_that_publishes_adapters(stage: int, tmp_path: Path) -> None:
    spec = small_spec(
        model__scratch__initializerRange="0.1",
        warmStart__learningRate="3e-3",
        trainer__zeroStage=stage,
        trainer__lora={"rank": 8, "alpha": 16, "publish": "Adapter", "export": "Adapter"},
        weightSync__backend="Files" if stage == 1 else "Auto",
        checkpoint__everySteps=3,
        budget__maxSteps=STEPS,
    )
    with start_run(tmp_path, spec) as run:
        run.until(lambda: run.step() >= 5, 900, "five steps")
        run.kill_everything()
    with start_run(tmp_path, spec, "--resume") as run:
        assert run.finish(900) == 0, run.tail()
        rows, summary = run.metrics(), run.summary()
    assert_nothing_left(run.directory)
    assert [row["step"] for row in rows] == list(range(STEPS))
    # Trainer and generator compute the same with each version: the probe, and what was sampled by the version that is trained.
    assert summary["probe_kl"] < 1e-9
    assert max(row["publish_bytes"] for row in rows if "publish_bytes" in row) < 700_000, "adapters only"
    folders = sorted((run.directory / "checkpoints/hf").glob("step-*"))
    assert json.loads((folders[-1] / "adapter_config.json").read_text())["r"] == 8
    assert (folders[-1] / "adapter_model.safetensors").stat().st_size < 700_000
