"""Estimates of the containers' host memory against what ``benchmarks/pod_memory.py`` measured."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_api.memory.containers import (
    ACCELERATOR_LIBRARY_BYTES,
    LIBRARY_BYTES,
    container_bytes,
    has_estimate,
)
from scalerl_api.memory.model_size import ModelSize
from scalerl_api.memory.roles import checkpoint_copy
from scalerl_api.spec import RunSpec

MIB = 2**20
SMALL = {"layers": 4, "hiddenSize": 128, "attentionHeads": 4, "intermediateSize": 384, "vocabularySize": 128}
MEDIUM = {
    "layers": 14,
    "hiddenSize": 768,
    "attentionHeads": 12,
    "intermediateSize": 2048,
    "vocabularySize": 512,
}
LARGE = {
    "layers": 18,
    "hiddenSize": 1280,
    "attentionHeads": 20,
    "intermediateSize": 3456,
    "vocabularySize": 512,
}
QWEN3_30B = ModelSize(30_532_122_624, 2048, 48, 6144, 151_936, largest_tensor=151_936 * 2048)


def spec(model: dict[str, Any] | None = None, dtype: str = "bfloat16", **sections: Any) -> RunSpec:
    source = {"path": "/m"} if model is None else {"scratch": model}
    return RunSpec.model_validate(
        {
            "model": source | {"dtype": dtype, "contextTokens": 64},
            "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "exact"}},
            "recipe": {"maxCompletionTokens": 8},
            "budget": {"maxSteps": 1},
        }
        | sections
    )


@pytest.mark.parametrize(
    ("model", "dtype", "ranks", "stage", "prepare", "server", "trainer"),
    [
        (SMALL, "float32", 1, 1, 50, 1395, 740),
        (MEDIUM, "float32", 1, 1, 65, 2102, 3274),
        (MEDIUM, "float32", 2, 1, 63, 1943, 2422),
        (MEDIUM, "bfloat16", 1, 1, 60, 1547, 2485),
        (MEDIUM, "bfloat16", 2, 1, 70, 1543, 2043),
        (MEDIUM, "bfloat16", 2, 3, 75, 1542, 2393),
        (LARGE, "bfloat16", 1, 1, 105, 2104, 7039),
    ],
)
def test_estimates_are_above_measured_ones_by_half_at_most(
    model: dict[str, int], dtype: str, ranks: int, stage: int, prepare: int, server: int, trainer: int
) -> None:
    """Measured: MiB, by a trainer that had no copy of its state. Of the preparation only the upper bound matters: its default is
    for models that are not known yet."""
    run = spec(
        model,
        dtype,
        generator={"kvCache": "256Mi"},
        trainer={"replicas": ranks, "zeroStage": stage, "microBatchTokens": 64},
    )
    assert run.model.scratch is not None
    size = ModelSize.of_scratch(run.model.scratch)
    assert prepare * MIB < container_bytes("prepare", size, run) < 1100 * MIB
    assert server * MIB < container_bytes("server", size, run) < 1.5 * server * MIB
    found = container_bytes("trainer", size, run) - 1.1 * checkpoint_copy(size, run)
    assert trainer * MIB < found < 1.5 * trainer * MIB


def test_ranks_with_devices_need_copies_of_their_state_on_the_host() -> None:
    """Of the weights, which are read tensor by tensor, a few tensors."""
    devices = spec(trainer={"devices": 8, "replicas": 2, "zeroStage": 3}, generator={"devices": 4})
    weights, tensor = 2 * QWEN3_30B.parameters, 4 * QWEN3_30B.largest_parameter
    copy = 12 * QWEN3_30B.parameters / 16
    rank = container_bytes("trainer", QWEN3_30B, devices)
    libraries = LIBRARY_BYTES["trainer"] + ACCELERATOR_LIBRARY_BYTES["trainer"]
    assert rank == pytest.approx(libraries + 1.1 * (copy + 3 * tensor), abs=2)
    assert rank < libraries + weights
    server = container_bytes("server", QWEN3_30B, devices)
    assert weights > server > 4 * ACCELERATOR_LIBRARY_BYTES["server"] + 4 * QWEN3_30B.largest_tensor


def test_preparation_does_not_grow_with_a_given_model() -> None:
    assert container_bytes("prepare", QWEN3_30B, spec()) == LIBRARY_BYTES["prepare"]
    assert [has_estimate(name) for name in ("prepare", "server", "trainer", "actor", "coordinator")] == [
        *(True, True, True, False, False)
    ]


@pytest.mark.parametrize("cache", [None, "1Gi"])
def test_server_counts_its_cache_once(cache: str | None) -> None:
    given = {} if cache is None else {"kvCache": cache}
    base = container_bytes("server", QWEN3_30B, spec(generator={"kvCache": "256Mi"}))
    extra = 0 if cache is None else 768 * MIB
    assert container_bytes("server", QWEN3_30B, spec(generator=given)) == pytest.approx(
        base + 1.1 * extra, abs=2
    )
