"""Negative log-likelihood, for the warm start. Advantages and generator log-probabilities are not looked at."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, weighted


@dataclass(frozen=True, slots=True)
class Supervised:
    """-(w · log π_train), summed."""

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """Loss; there are no further sums."""
        return LossOutput(weighted(tokens.logprobs_n, tokens))
