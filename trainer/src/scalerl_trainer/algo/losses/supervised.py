"""Negative log-likelihood, for the warm start; ignores advantages and generator log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, weighted


@dataclass(frozen=True, slots=True)
class Supervised:
    """-(w · log π_train), summed."""

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """Loss, and ``solved``: Σ over sequences of the probability of sampling exactly that completion.

        On unseen examples ``solved`` per sequence is the expected sampling accuracy, without sampling.

        >>> import torch
        >>> half, zeros = torch.full((3,), 0.5).log(), torch.zeros(3)
        >>> Supervised()(TokenBatch(half, zeros, zeros, zeros, torch.tensor([0, 0, 1]))).sums["solved"].item()
        0.75
        """
        logprobs_n = tokens.logprobs_n.detach()
        sequences = int(tokens.sequence_n.max()) + 1 if tokens.sequence_n.numel() else 0
        total_s = logprobs_n.new_zeros(sequences).index_add_(0, tokens.sequence_n, logprobs_n)
        return LossOutput(weighted(tokens.logprobs_n, tokens), {"solved": total_s.exp().sum()})
