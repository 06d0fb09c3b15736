"""A run of a mixture of experts: trained, published in flight, killed once and resumed, exact against the trainer, exported."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from runs import assert_nothing_left, small_spec, start_run
from safetensors import safe_open

STEPS = 6
EXACT = 1e-5
"""Greatest difference of log-probabilities in float32, in nats."""

pytestmark = pytest.mark.timeout(1800)


def assert_exact(rows: list[dict[str, Any]], experts: int, unlike: int = 0) -> None:
    """Trainer and vLLM compute the same with each version that was published in flight, but for some ``unlike``."""
    probes = [row["probe_max_difference"] for row in rows if "probe_max_difference" in row]
    exact = sum(probe <= EXACT for probe in probes)
    assert exact >= max(1, len(probes) - unlike), probes
    for row in rows:
        if row["applied"]:
            assert 0 < row["router_entropy"] <= math.log(experts)
            assert 0 <= row["expert_load_min"] <= 1 <= row["expert_load_max"] <= experts / 2


def test_two_steps_of_a_mixture_of_experts(tmp_path: Path) -> None:
    """In `make test`; the longer run below has two ranks and is killed. Answers are random bits, so that groups differ in reward."""
    bits = random.Random(0)
    sums = [{"prompt": f"{n}+0=", "answer": str(bits.randrange(2))} for n in range(400)]
    data = tmp_path / "bits.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums))
    spec = small_spec(
        task__jsonl__path=str(data),
        model__scratch__layers=2,
        model__scratch__intermediateSize=96,
        model__scratch__experts={"count": 4, "perToken": 2},
        task__heldOut__size=8,
        trainer__replicas=1,
        budget__maxSteps=2,
    )
    with start_run(tmp_path, spec) as run:
        assert run.finish(900) == 0, run.tail()
        rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1]
    assert any(row["applied"] for row in rows)
    assert_exact(rows, 4)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_run_of_a_mixture_of_experts(stage: int, tmp_path: Path) -> None:
    spec = small_spec(
        model__scratch__intermediateSize=96,
        model__scratch__experts={"count": 8, "perToken": 2},
        trainer__zeroStage=stage,
        recipe__optimizer__learningRate="1e-3",
        checkpoint__everySteps=3,
        budget__maxSteps=STEPS,
    )
    with start_run(tmp_path, spec) as run:
        run.until(lambda: run.step() >= 4, 900, "four steps")
        run.kill_everything()
    with start_run(tmp_path, spec, "--resume") as run:
        assert run.finish(900) == 0, run.tail()
        rows = run.metrics()
    assert_nothing_left(run.directory)
    assert [row["step"] for row in rows] == list(range(STEPS))
    # A probe that the next publish overtakes, or the kill, has no figure. Of two experts that are equal but for rounding, the two may
    # choose different ones: of a token in some hundred thousand.
    assert_exact(rows, 8, unlike=1)
    folders = sorted((run.directory / "checkpoints/hf").glob("step-*"))
    with safe_open(folders[-1] / "model.safetensors", "np") as exported:
        assert "model.layers.3.block_sparse_moe.experts.7.w2.weight" in exported.keys()  # noqa: SIM118
