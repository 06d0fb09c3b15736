"""A run of a mixture of experts: trained, published in flight, killed once and resumed, exact against the trainer, exported."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from runs import assert_nothing_left, small_spec, start_run
from safetensors import safe_open

STEPS = 6
EXACT = 1e-5
"""Greatest difference of log-probabilities in float32, in nats."""

# In `make test`: test_generator_families_vllm.py publishes experts to vLLM, test_trainer_families.py trains them.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


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
    # Trainer and vLLM compute the same with each version that was published in flight.
    probes = [row["probe_max_difference"] for row in rows if "probe_max_difference" in row]
    # A probe that the next publish overtakes, or the kill, has no figure.
    assert len(probes) >= 2
    # Of two experts that are equal but for rounding, the two may choose different ones: of a token in some hundred thousand.
    assert sorted(probes)[-2] <= EXACT
    for row in rows:
        if row["applied"]:
            assert 0 < row["router_entropy"] <= math.log(8)
            assert 0 <= row["expert_load_min"] <= 1 <= row["expert_load_max"] <= 4
    folders = sorted((run.directory / "checkpoints/hf").glob("step-*"))
    with safe_open(folders[-1] / "model.safetensors", "np") as exported:
        assert "model.layers.3.block_sparse_moe.experts.7.w2.weight" in exported.keys()  # noqa: SIM118
