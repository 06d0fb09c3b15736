"""REINFORCE: the policy gradient as if every token was sampled by the policy that is trained::

    J = Σ_t Â_i · log π_train(y_it)

Unbiased on-policy only. Off-policy it ignores by how much the policy has moved, unless a correction
(:mod:`scalerl_trainer.algo.corrections`) weights the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, weighted


@dataclass(frozen=True, slots=True)
class Reinforce:
    """No settings."""

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """Loss.

        >>> import torch
        >>> half, one = torch.tensor([0.5]).log(), torch.ones(1)
        >>> round(Reinforce()(TokenBatch(half, -one, 2 * one, one, torch.zeros(1, dtype=torch.long))).loss.item(), 4)
        1.3863
        """
        return LossOutput(weighted(tokens.advantages_n * tokens.logprobs_n, tokens))
