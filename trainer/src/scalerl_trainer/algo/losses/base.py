"""The interface of a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Trainable tokens of whole sequences, flat (a sequence is never split). All tensors ``[N]``, float32.

    ``logprobs_n``            log π_train of each token, with gradient
    ``generator_logprobs_n``  log π_gen of each token as it was sampled; finite (checked by the engine)
    ``advantages_n``          Â of the token's sequence; with a teacher, of the token
    ``weights_n``             from ``aggregation``, with the normalisation of the whole batch
    ``sequence_n``            int64, sequence of the token: 0, 1, … within these tokens
    ``reference_logprobs_n``  log π_ref of each token, finite; None without a reference (see ``algo.kl``)
    ``teacher_logprobs_n``    log π_teacher of each token, finite; None without a teacher (see ``algo.distillation``)
    """

    logprobs_n: torch.Tensor
    generator_logprobs_n: torch.Tensor
    advantages_n: torch.Tensor
    weights_n: torch.Tensor
    sequence_n: torch.Tensor
    reference_logprobs_n: torch.Tensor | None = None
    teacher_logprobs_n: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """``loss``: scalar with gradient. ``sums``: detached sums over tokens, to be divided by their number."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """A differentiable function of the trainer's log-probabilities. No tokens: loss 0, gradient 0."""

    def __call__(self, tokens: TokenBatch) -> LossOutput: ...


def check_clip(loss: str, low: float, high: float) -> None:
    """Raises ValueError for a clip range that does not hold 1."""
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(f"{loss}'s clip range [1 - {low}, 1 + {high}] must hold 1 and stay above or at 0")


def weighted(objective_n: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """Σ −(w · objective), the last step of every loss."""
    return -(tokens.weights_n * objective_n).sum()
