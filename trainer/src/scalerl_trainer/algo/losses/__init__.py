"""The losses, one file each.

A loss maximises an objective per token; ``Loss.__call__`` returns the negative weighted sum. A new loss needs:

- a frozen dataclass with its settings and a ``__call__`` in this package;
- a model of ``recipe.loss`` in ``scalerl_api.recipe.loss``, and a field of ``LossSpec``;
- in that class ``token_local = True`` if no other token's log-probability changes its derivative by a token's;
- a case in ``make_loss.make_loss``, and its name below;
- values computed by hand in ``test_trainer_algo_golden.py``, and a recipe in the tests' ``trajectories.py``.
"""

from __future__ import annotations

from scalerl_trainer.algo.losses.base import Loss, LossOutput, TokenBatch, is_token_local
from scalerl_trainer.algo.losses.cispo import Cispo
from scalerl_trainer.algo.losses.dppo import Dppo
from scalerl_trainer.algo.losses.gspo import Gspo
from scalerl_trainer.algo.losses.ppo_clip import PpoClip
from scalerl_trainer.algo.losses.reinforce import Reinforce
from scalerl_trainer.algo.losses.supervised import Supervised

__all__ = [
    "Cispo",
    "Dppo",
    "Gspo",
    "Loss",
    "LossOutput",
    "PpoClip",
    "Reinforce",
    "Supervised",
    "TokenBatch",
    "is_token_local",
]
