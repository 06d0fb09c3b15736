"""One of two ranks: loads models of several families under ZeRO 3 (and 1) and gathers them, small buckets, as a publish does."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from scalerl_trainer.engine import Engine, EngineSettings, Rank, destroy_process_group, init_process_group
from scalerl_trainer.models import open_model
from scalerl_trainer.models.checkpoint_names import stored_names

given: dict[str, Any] = NAMES  # type: ignore[name-defined]  # noqa: F821
pipe: Connection = given["pipe"]

torch.set_num_threads(1)
device = init_process_group(
    Rank(given["rank"], given["world"], given["rank"], "127.0.0.1", given["port"]),
    device="cpu",
    timeout_seconds=240,
)
answer = {}
for family, folder in given["folders"].items():
    for stage in (1, 3):
        settings = EngineSettings(zero_stage=stage, dtype="float32")
        model, weights = open_model(Path(folder), dtype="float32")
        engine = Engine(model, settings, device, stored_names(Path(folder)), weights)
        gathered = [
            (name, tensor.clone().numpy()) for name, tensor in engine.weights.gather_checkpoint(40_000)
        ]
        answer[family, stage] = engine.weights.checkpoint_shapes(), gathered
        engine.close()
pipe.send(answer)
destroy_process_group()
