"""One rank: two steps of a mixture of experts with recorded experts; the second has a proximal policy."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from experts_rank import experts_engine

from scalerl_trainer.algo.corrections import Corrected
from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import TrainBatch
from scalerl_trainer.models import load_model
from scalerl_trainer.packing import RoutedExperts, Sequence

given: dict[str, Any] = REPLAY  # type: ignore[name-defined]  # noqa: F821
pipe: Connection = given["pipe"]
rank, world = given["rank"], given["world"]

with experts_engine(given, router_replay=True) as engine:
    engine.keep_proximal(load_model(given["folder"], dtype="float32"))
    draw = np.random.default_rng(0)
    sequences = []
    for i in range(9):
        experts = np.array([draw.permutation(8)[:2] for _ in range(10)], np.uint8).reshape(5, 2, 2)
        routed = RoutedExperts(np.array([0, 1, 2, 5, 7]), experts) if given["record"] == "other" else None
        sequences.append(Sequence([3 + i, 4, 5], [6, 7 + i, 8, 9, 10 + i, 11], None, routed))
    rows = sequences if world == 1 else sequences[:6] if rank == 0 else sequences[6:]
    found: dict[str, list[float]] = {"loss": [], "norms": [], "unreplayed": []}
    engine.set_proximal()
    for _ in range(2):
        batch = TrainBatch(
            rows,
            torch.full((len(rows),), 1 / 54),
            torch.ones(len(rows)),
            torch.full((6 * len(rows),), -5.0),
        )
        stats = engine.step(batch, Corrected(Cispo(5.0), 2.0))
        assert stats.applied
        found["loss"].append(stats.loss)
        found["norms"].append(stats.gradient_norm)
        found["unreplayed"].append(stats.unreplayed_tokens or 0)
    pipe.send({"stats": found})
