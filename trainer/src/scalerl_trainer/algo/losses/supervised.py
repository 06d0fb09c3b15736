"""Negative log-likelihood for the warm start; it ignores advantages and generator log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, weighted


@dataclass(frozen=True, slots=True)
class Supervised:
    """−Σ w · log π_train."""

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, and the sum over sequences of the probability of sampling exactly that completion (``solved``).

        On unseen examples, ``solved`` per sequence estimates the accuracy of sampling without sampling.

        >>> import torch
        >>> half, zeros = torch.full((3,), 0.5).log(), torch.zeros(3)
        >>> Supervised()(TokenBatch(half, zeros, zeros, zeros, torch.tensor([0, 0, 1]))).sums["solved"].item()
        0.75
        """
        logprobs_n = tokens.logprobs_n.detach()
        sequences = int(tokens.sequence_n.max()) + 1 if tokens.sequence_n.numel() else 0
        total_s = logprobs_n.new_zeros(sequences).index_add_(0, tokens.sequence_n, logprobs_n)
        return LossOutput(weighted(tokens.logprobs_n, tokens), {"solved": total_s.exp().sum()})
