"""The losses, a file each.

A loss maximises an objective per token; ``Loss.__call__`` returns minus its weighted sum. To add one (DAPO, GSPO,
Magistral, …): a frozen dataclass with its settings and a ``__call__``, a name in the spec (``LossSpec``), a case in
``spec_settings.make_loss``, golden values.
"""

from __future__ import annotations

from scalerl_trainer.algo.losses.base import Loss, LossOutput, TokenBatch
from scalerl_trainer.algo.losses.cispo import Cispo
from scalerl_trainer.algo.losses.grpo import Grpo
from scalerl_trainer.algo.losses.supervised import Supervised

__all__ = ["Cispo", "Grpo", "Loss", "LossOutput", "Supervised", "TokenBatch"]
