"""Negative log-likelihood for the warm start; it ignores advantages and generator log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, weighted


@dataclass(frozen=True, slots=True)
class Supervised:
    """−Σ w · log π_train."""

    token_local = True

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, and the sum over sequences of the probability of sampling exactly that completion (``solved``).

        On unseen examples, ``solved`` per sequence estimates the accuracy of sampling without sampling.

        >>> half, zeros = torch.full((3,), 0.5).log(), torch.zeros(3)
        >>> Supervised()(TokenBatch(half, zeros, zeros, zeros, torch.tensor([0, 0, 1]))).sums["solved"].item()
        0.75
        """
        logprobs_n = tokens.logprobs_n.detach()
        # As long as if every token were a sequence: their number would be read from the device. -inf where there is none.
        empty_s = torch.full_like(logprobs_n, -torch.inf).index_fill_(0, tokens.sequence_n, 0.0)
        total_s = empty_s.index_add_(0, tokens.sequence_n, logprobs_n)
        return LossOutput(weighted(tokens.logprobs_n, tokens), {"solved": total_s.exp().sum()})
