"""REINFORCE: the policy gradient without an importance ratio, as if the trained policy had sampled every token::

    J = Σ_t Â_i · log π_train(y_it)

It is unbiased on-policy only. Off-policy it ignores the change of the policy, unless a correction
(:mod:`scalerl_trainer.algo.corrections`) weights the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, weighted


@dataclass(frozen=True, slots=True)
class Reinforce:
    """The loss; it has no settings."""

    token_local = True

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, without sums.

        >>> import torch
        >>> half, one = torch.tensor([0.5]).log(), torch.ones(1)
        >>> round(Reinforce()(TokenBatch(half, -one, 2 * one, one, torch.zeros(1, dtype=torch.long))).loss.item(), 4)
        1.3863
        """
        return LossOutput(weighted(tokens.advantages_n * tokens.logprobs_n, tokens))
