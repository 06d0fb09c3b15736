"""What a loss is given and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Trainable tokens of whole sequences, flat (a sequence is never split). All tensors ``[N]``, float32.

    ``logprobs_n``            log π_train of each token, with gradient
    ``generator_logprobs_n``  log π_gen of each token as it was sampled; finite (checked by the engine)
    ``advantages_n``          Â of the token's sequence
    ``weights_n``             from ``aggregation``: they hold the normalisation of the whole batch
    ``sequence_n``            int64, which sequence a token belongs to: 0, 1, … within these tokens
    """

    logprobs_n: torch.Tensor
    generator_logprobs_n: torch.Tensor
    advantages_n: torch.Tensor
    weights_n: torch.Tensor
    sequence_n: torch.Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """``loss``: scalar with gradient. ``sums``: detached sums over tokens, to be divided by their number."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """A differentiable function of the trainer's log-probabilities. No tokens: loss 0, gradient 0."""

    def __call__(self, tokens: TokenBatch) -> LossOutput: ...


def weighted(objective_n: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """-(w · objective), summed: what every loss ends with."""
    return -(tokens.weights_n * objective_n).sum()
