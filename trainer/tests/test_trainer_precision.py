"""The engine's log-probabilities equal those of plain transformers, in bfloat16, at every position, without noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from free_port import free_port

from scalerl_trainer.errors import EngineError, ModelError
from scalerl_trainer.models.precision import buffer_dtypes, cast_parameters, check_buffer_dtypes

POSITIONS = ((0, 64), (64, 256), (256, 1024), (1024, 4095))


@pytest.fixture(scope="module")
def results(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("precision")
    process = module_processes.run("precision_worker.py", WORKER={"out": out, "port": free_port()})
    process.join(300)
    assert process.exitcode == 0
    found: dict[str, Any] = torch.load(out / "results.pt", weights_only=False)
    return found


@pytest.mark.slow
class TestAgainstPlainTransformers:
    @pytest.mark.parametrize("model", ["qwen2 1", "qwen2 3", "llama3 1", "gemma3 1"])
    def test_bfloat16_logprobs_agree_with_float32(self, model: str, results: dict[str, Any]) -> None:
        """Rotary tables in bfloat16 would give 0.06 to 0.3 in the first bucket and more than 1 in the last."""
        difference = results[model]
        means = [float(difference[begin:end].mean()) for begin, end in POSITIONS]
        assert max(means) < 2e-3, means

    @pytest.mark.parametrize("model", ["gpt2", "llama", "opt"])
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_step_and_scoring_have_equal_logprobs(
        self, model: str, checkpointing: bool, results: dict[str, Any]
    ) -> None:
        """The configurations ask for dropout of one half, and for skipped layers."""
        difference, computed = results[f"noise {model} {checkpointing}"]
        assert difference < 1e-5
        assert computed == (2 if checkpointing else 1), "activations are recomputed where that was asked for"


class Rotary(torch.nn.Linear):
    _keep_in_fp32_modules_strict: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)
        self.register_buffer("count", torch.ones(2, dtype=torch.long))


def test_cast_parameters_keeps_buffers() -> None:
    model = Rotary()
    before = buffer_dtypes(model)
    cast_parameters(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert buffer_dtypes(model) == {"inv_freq": torch.float32}
    check_buffer_dtypes(model, before)


def test_check_buffer_dtypes_raises() -> None:
    model = Rotary()
    before = buffer_dtypes(model)
    model.to(torch.bfloat16)
    with pytest.raises(EngineError) as caught:
        check_buffer_dtypes(model, before)
    assert str(caught.value) == (
        "the buffer inv_freq was torch.float32 when the model was loaded and is torch.bfloat16 in the engine: "
        "log-probabilities would differ from the generator's"
    )


def test_cast_parameters_float32_only_model_raises() -> None:
    class Router(Rotary):
        _keep_in_fp32_modules_strict = frozenset({"wei*"})

    with pytest.raises(ModelError) as caught:
        cast_parameters(Router(), torch.bfloat16)
    assert str(caught.value) == (
        "Router keeps 1 of its parameters in float32 (weight), which cannot be trained beside bfloat16: "
        "set model.dtype: float32"
    )
    cast_parameters(Router(), torch.float32)
