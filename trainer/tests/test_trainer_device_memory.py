"""GPUs of unlike memory: pretended ones, of ranks that are pretended too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scalerl_api.memory.model_size import ModelSize
from scalerl_api.memory.trainer_rank import trainer_rank_memory
from scalerl_api.spec import RunSpec
from scalerl_trainer import device_memory
from scalerl_trainer import main as trainer_main
from scalerl_trainer.device_memory import REPORTED, check_device_memory
from scalerl_trainer.engine import Rank
from scalerl_trainer.errors import EngineError

pytestmark = pytest.mark.slow

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
ELEMENTS = 8_030_261_248
SPEC = RunSpec.model_validate(
    {
        "model": {"path": "/m", "dtype": "bfloat16", "contextTokens": 4096},
        "task": {"jsonl": {"path": "/x"}, "verifier": {"name": "exact"}},
        "recipe": {"maxCompletionTokens": 1024},
        "generator": {"devices": 1},
        "trainer": {"devices": 4, "zeroStage": 3, "microBatchTokens": 4096, "activationCheckpointing": True},
        "budget": {"maxSteps": 1},
    }
)


def check(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cards: list[tuple[str, int] | None], rank: int
) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").touch()

    def properties(device: torch.device) -> Any:
        name, total = cards[rank] or ("", 0)
        return SimpleNamespace(name=name, total_memory=total)

    def all_gather(own: Any, kind: Any) -> list[Any]:
        assert own == cards[rank]
        return list(cards)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(
        device_memory, "stored_tensors", lambda folder: {"w": SimpleNamespace(elements=ELEMENTS)}
    )
    device = torch.device("cpu" if cards[rank] is None else "cuda")
    check_device_memory(SimpleNamespace(all_gather=all_gather), device, folder, SPEC)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 2])
def test_small_cards_are_named_with_their_ranks_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int
) -> None:
    large, small = ("H100", 80 << 30), ("A10", 22 << 30)
    with pytest.raises(EngineError) as raised:
        check(monkeypatch, tmp_path, [large, large, small, ("L4", 21 << 30)], rank)
    message = str(raised.value)
    assert "and rank 2 (A10) has 22.0 GiB, rank 3 (L4) has 21.0 GiB: place" in message
    assert "rank 0" not in message
    assert len(message.splitlines()) == 1


def test_ranks_with_room_and_ranks_without_accelerators_begin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    size = ModelSize.of_config(CONFIG, ELEMENTS)
    assert size is not None
    need = trainer_rank_memory(size, SPEC).total
    check(monkeypatch, tmp_path, [("H100", need)] * 3 + [("H100", int(REPORTED * need) + 1)], 3)
    with pytest.raises(EngineError, match="rank 3"):
        check(monkeypatch, tmp_path, [("H100", need)] * 3 + [("H100", int(REPORTED * need) - 1)], 3)
    check(monkeypatch, tmp_path, [None, None], 1)


def too_large_for_torch() -> None:
    torch.empty(1 << 60)


def too_large_for_numpy() -> None:
    np.empty(1 << 50)


def too_large_for_an_accelerator() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")


def too_large_for_nccl() -> None:
    raise RuntimeError("NCCL error in: x.cpp:7, unhandled cuda error\nCuda failure 2 'out of memory'")


@pytest.mark.parametrize(
    ("allocate", "message"),
    [
        (
            too_large_for_torch,
            "this rank's host is out of memory: give it more memory, or use more trainer.replicas",
        ),
        (too_large_for_numpy, "this rank's host is out of memory"),
        (too_large_for_nccl, "the accelerator is out of memory"),
        (too_large_for_an_accelerator, "the accelerator is out of memory: lower trainer.microBatchTokens"),
    ],
)
def test_allocation_that_fails_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    allocate: Callable[[], None],
    message: str,
) -> None:
    monkeypatch.setattr(trainer_main, "set_on_signals", lambda _: None)
    monkeypatch.setattr(trainer_main.Rank, "from_environment", lambda _: Rank(0, 1, 0, "127.0.0.1", 1))
    monkeypatch.setattr(trainer_main.ProcessEnvironment, "read", lambda: None)
    monkeypatch.setattr(trainer_main, "run", lambda *_: allocate())
    assert trainer_main.main(["--listen", "127.0.0.1:0"]) == 1
    (record,) = caplog.records
    assert record.getMessage().startswith(message)
    assert record.exc_info is None
