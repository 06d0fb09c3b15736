"""One file per loss, all behind one small interface.

A loss maximises an objective per token; ``Loss.__call__`` returns minus its weighted sum. To add one (DAPO, GSPO,
Magistral, …): a frozen dataclass with its settings and a ``__call__``, one line in ``LOSSES``, golden values.
"""

from __future__ import annotations

from scalerl_trainer.algo.losses.base import Loss, LossOutput, TokenBatch
from scalerl_trainer.algo.losses.cispo import Cispo
from scalerl_trainer.algo.losses.grpo import Grpo
from scalerl_trainer.algo.losses.supervised import Supervised

# What a recipe may name. `Supervised` is not here: it is the warm start's, not a reinforcement-learning loss.
LOSSES: dict[str, type[Loss]] = {"CISPO": Cispo, "GRPO": Grpo}

__all__ = ["LOSSES", "Cispo", "Grpo", "Loss", "LossOutput", "Supervised", "TokenBatch"]
