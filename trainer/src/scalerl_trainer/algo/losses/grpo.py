"""GRPO: the clipped surrogate of PPO with group advantages.

Form as in the table of losses (maximised) [P]::

    (1/G) Σ_i (1/|o_i|) Σ_t min(r Â, clip(r, 1 - ε, 1 + ε) Â)      r = π_train / π_old

π_old is the policy that sampled, so its log-probabilities are the generator's. The outer average is
``aggregation``'s (``SampleAverage`` for GRPO), the advantage ``advantages``' (``Group`` for GRPO). The KL term to a
reference model is absent: ScaleRL's rebuilt baselines and its recipe use none [P: no KL in the recipe]. With
ε_low ≠ ε_high and the ``PromptAverage`` aggregation this is DAPO's objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, weighted
from scalerl_trainer.algo.mismatch import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True)
class Grpo:
    """``epsilon_low`` and ``epsilon_high``: the clip range is [1 - low, 1 + high]; GRPO has 0.2 for both [P]."""

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2

    def __post_init__(self) -> None:
        if not (0 <= self.epsilon_low <= 1 and self.epsilon_high >= 0):
            raise ValueError(
                f"GRPO's clip range [1 - {self.epsilon_low}, 1 + {self.epsilon_high}] must hold 1 and stay "
                "above or at 0"
            )

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """Loss and the number of tokens whose gradient the clip stopped (``clipped``).

        >>> logprobs_n = torch.tensor([0.0], requires_grad=True)
        >>> one = torch.ones(1)
        >>> batch = TokenBatch(logprobs_n, torch.tensor([-1.0]), one, one, torch.zeros(1, dtype=torch.long))
        >>> round(Grpo()(batch).loss.item(), 6)  # e is cut to 1.2
        -1.2
        """
        ratio_n = (tokens.logprobs_n - tokens.generator_logprobs_n).clamp(max=LOG_RATIO_LIMIT).exp()
        free_n = ratio_n * tokens.advantages_n
        cut_n = ratio_n.clamp(1 - self.epsilon_low, 1 + self.epsilon_high) * tokens.advantages_n
        loss = weighted(torch.minimum(free_n, cut_n), tokens)
        return LossOutput(loss, {"clipped": (cut_n < free_n).sum()})
