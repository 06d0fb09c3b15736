"""One of two ranks: losses and gradient norms of three steps of each model in ``folders``, by engine."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engines_and_stages import Stage, engine_of

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    Rank,
    TrainBatch,
    destroy_process_group,
    init_process_group,
)
from scalerl_trainer.models import open_model
from scalerl_trainer.packing import Sequence

given: dict[str, Any] = FAMILIES  # type: ignore[name-defined]  # noqa: F821
pipe: Connection = given["pipe"]
rank: int = given["rank"]

torch.set_num_threads(1)
device = init_process_group(
    Rank(rank, 2, rank, "127.0.0.1", given["port"]), device="cpu", timeout_seconds=120
)


def steps(folder: Path, stage: Stage) -> list[float]:
    model, weights = open_model(folder, dtype="float32")
    settings = EngineSettings(
        **engine_of(stage),
        dtype="float32",
        micro_batch_tokens=64,
        warmup_steps=0,
        learning_rate=1e-3,
        ratio_guard=None,
        gradient_guard=None,
    )
    engine = Engine(model, settings, device, weights=weights)
    rows = [Sequence([3, 4, 5], [6, 7, 8, 9 + rank])]
    batch = TrainBatch(rows, torch.full((1,), 0.125), torch.ones(1), torch.full((4,), -5.0))
    stats = [engine.step(batch, Cispo()) for _ in range(3)]
    engine.close()
    return [value for one in stats for value in (one.loss, one.gradient_norm)]


pipe.send(
    {name: [steps(folder, stage) for stage in (3, "FSDP2")] for name, folder in given["folders"].items()}
)
destroy_process_group()
