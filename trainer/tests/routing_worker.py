"""One rank: steps of a mixture of experts whose tokens are on rank 0, but for two of the first step."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
from experts_rank import experts_engine

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import TrainBatch
from scalerl_trainer.packing import Sequence

given: dict[str, Any] = ROUTING  # type: ignore[name-defined]  # noqa: F821
pipe: Connection = given["pipe"]
rank, world = given["rank"], given["world"]

MANY = [Sequence([3 + i, 4, 5], [6, 7 + i, 8, 9, 10 + i, 11]) for i in range(9)]
FEW = [Sequence([20], [21, 22])]

with experts_engine(given) as engine:
    norms, figures, losses = [], [], []
    used: list[int] = []
    take = engine._passes.routing.take

    def counting(device: torch.device) -> torch.Tensor:
        sums = take(device)
        used.append(int((sums.view(2, 9)[:, 1:] > 0).sum(1).max()))
        return sums

    engine._passes.routing.take = counting  # type: ignore[method-assign]
    for shared in (True, False, False):
        rows = MANY if rank == 0 else []
        if shared and rank == world - 1:
            rows = rows + FEW
        count = 6 * len(MANY) + 2 * shared
        tokens = sum(len(row.completion) for row in rows)
        batch = TrainBatch(
            rows, torch.full((len(rows),), 1 / count), torch.ones(len(rows)), torch.full((tokens,), -5.0)
        )
        stats = engine.step(batch, Cispo(5.0))
        assert stats.applied
        norms.append(stats.gradient_norm)
        figures.append(stats.routing)
        losses.append(stats.loss)
    pipe.send({"norms": norms, "figures": figures, "loss": losses, "own experts": used[0]})
