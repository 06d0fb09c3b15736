"""One rank: the bytes of an engine's tensors between backward pass and update of a second step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    Rank,
    TrainBatch,
    deepspeed_config,
    destroy_process_group,
    init_process_group,
)
from scalerl_trainer.engine.deepspeed_backend import DeepSpeedBackend
from scalerl_trainer.models import open_model
from scalerl_trainer.packing import Sequence

given: dict[str, Any] = COUNTERS  # type: ignore[name-defined]  # noqa: F821
pipe: Connection = given["pipe"]


def storages() -> Iterator[torch.UntypedStorage]:
    """Of all tensors that Python's collector or the engine's parameters know, each once."""
    seen = set()
    for each in gc.get_objects():
        if not issubclass(type(each), torch.Tensor):
            continue
        for tensor in (each, each.grad if each.is_leaf else None, getattr(each, "ds_tensor", None)):
            if tensor is not None and tensor.untyped_storage().data_ptr() not in seen:
                seen.add(tensor.untyped_storage().data_ptr())
                yield tensor.untyped_storage()


def live() -> int:
    return sum(storage.nbytes() for storage in storages())


torch.set_num_threads(1)
device = init_process_group(
    Rank(given["rank"], given["world"], given["rank"], "127.0.0.1", given["port"]),
    device="cpu",
    timeout_seconds=240,
)
deepspeed_config.BUCKET_ELEMENTS = given["bucket"]
settings = EngineSettings(
    zero_stage=given["stage"], dtype=given["dtype"], warmup_steps=0, micro_batch_tokens=64, ratio_guard=None
)
model, weights = open_model(Path(given["folder"]), dtype=given["dtype"])
engine = Engine(model, settings, device, weights=weights)
del model, weights
counted = []
step = DeepSpeedBackend.step


def counting(self: DeepSpeedBackend, rate: float) -> float:
    gc.collect()
    counted.append(live())
    return step(self, rate)


DeepSpeedBackend.step = counting  # type: ignore[method-assign]
rows = [Sequence([3, 4, 5], [6, 7, 8, 9])]
batch = TrainBatch(rows, torch.full((1,), 0.25), torch.ones(1), torch.full((4,), -6.0))
for _ in range(2):
    assert engine.step(batch, Cispo(5.0)).applied
pipe.send(counted[-1])
engine.close()
destroy_process_group()
