"""The interface of a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Trainable tokens of whole sequences, flat; a sequence is never split.

    All tensors have shape ``[N]``, and dtype float32 where not noted. Log-probabilities are in nats.
    """

    logprobs_n: torch.Tensor
    """log π_train of each token, with gradient."""
    generator_logprobs_n: torch.Tensor
    """log π_gen of each token when it was sampled; finite (checked by the engine)."""
    advantages_n: torch.Tensor
    """Â of the token's sequence; with a teacher, of the token."""
    weights_n: torch.Tensor
    """Weights from ``aggregation``, with the normalisation of the whole batch."""
    sequence_n: torch.Tensor
    """Index of the token's sequence among these tokens, int64: 0, 1, …"""
    reference_logprobs_n: torch.Tensor | None = None
    """log π_ref of each token, finite; None without a reference policy (see ``algo.kl``)."""
    teacher_logprobs_n: torch.Tensor | None = None
    """log π_teacher of each token, finite; None without a teacher (see ``algo.distillation``)."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Result of a loss."""

    loss: torch.Tensor
    """Scalar with gradient."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Detached sums over tokens, which the engine divides by the number of trainable tokens."""


class Loss(Protocol):
    """A differentiable function of the trainer's log-probabilities; without tokens, loss and gradient are 0."""

    def __call__(self, tokens: TokenBatch) -> LossOutput: ...


def check_clip(loss: str, low: float, high: float) -> None:
    """Raise ``ValueError`` if the clip range [1 - low, 1 + high] does not contain 1 or has negative values."""
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(f"{loss}'s clip range [1 - {low}, 1 + {high}] must hold 1 and stay above or at 0")


def weighted(objective_n: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """−Σ w · objective, scalar: the last step of every loss."""
    return -(tokens.weights_n * objective_n).sum()
