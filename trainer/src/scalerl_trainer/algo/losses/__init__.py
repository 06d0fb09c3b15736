"""The losses, a file each.

A loss maximises an objective per token; ``Loss.__call__`` returns minus its weighted sum. To add one (DAPO, GSPO,
Magistral, …): a frozen dataclass with its settings and a ``__call__``, a line in ``LOSSES``, golden values.
"""

from __future__ import annotations

from scalerl_trainer.algo.losses.base import Loss, LossOutput, TokenBatch
from scalerl_trainer.algo.losses.cispo import Cispo
from scalerl_trainer.algo.losses.grpo import Grpo
from scalerl_trainer.algo.losses.supervised import Supervised

# Losses of a recipe. `Supervised` is for the warm start only.
LOSSES: dict[str, type[Loss]] = {"CISPO": Cispo, "GRPO": Grpo}

__all__ = ["LOSSES", "Cispo", "Grpo", "Loss", "LossOutput", "Supervised", "TokenBatch"]
