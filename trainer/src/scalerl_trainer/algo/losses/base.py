"""The interface of a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from scalerl_trainer.errors import EngineError


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
    """Â of the token's sequence; with a teacher, or with advantages of turns, of the token."""
    weights_n: torch.Tensor
    """Weights from ``aggregation``, with the normalisation of the whole batch."""
    sequence_n: torch.Tensor
    """Index of the token's sequence among these tokens, int64: 0, 1, …, less than N."""
    reference_logprobs_n: torch.Tensor | None = None
    """log π_ref of each token, finite; None without a reference policy (see ``algo.kl``)."""
    teacher_logprobs_n: torch.Tensor | None = None
    """log π_teacher of each token, finite; None without a teacher (see ``algo.distillation``)."""
    proximal_logprobs_n: torch.Tensor | None = None
    """log π_prox of each token, without gradient: of the policy before the first of the updates that share sampled weights
    (see ``algo.corrections``). None if that is the trained policy itself."""


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


def is_token_local(loss: Loss) -> bool:
    """Whether a loss has ``token_local = True``: no other token's log-probability changes its derivative by a token's.

    The gradients of such a loss are computed in the forward pass (:mod:`scalerl_trainer.models.head`), which is faster.
    """
    return bool(getattr(loss, "token_local", False))


def check_token_local(loss: Loss) -> None:
    """Raise ``EngineError`` if other log-probabilities change derivatives of a loss that says :func:`is_token_local`, of made-up tokens."""
    generator = torch.Generator().manual_seed(0)
    advantages_n, *logprobs = torch.randn(6, 64, generator=generator).mul(2).unbind()
    ones_n, sequence_n = torch.ones(64), torch.arange(64) // 4
    own_n, generator_n, reference_n, teacher_n, proximal_n = (-values_n.abs() for values_n in logprobs)

    def derivative(known: int, proximal_n: torch.Tensor | None) -> torch.Tensor:
        leaf_n = torch.where(torch.arange(64) < known, own_n, 0.0).requires_grad_()
        others = generator_n, advantages_n, ones_n, sequence_n, reference_n, teacher_n, proximal_n
        return torch.autograd.grad(loss(TokenBatch(leaf_n, *others)).loss, leaf_n)[0][:known]

    for proximal in (None, proximal_n):
        for known in range(1, 64):
            if not torch.equal(derivative(known, proximal), derivative(64, proximal)[:known]):
                raise EngineError(
                    f"{type(loss).__name__} has token_local = True, but other tokens' log-probabilities change a token's derivative: "
                    "leave token_local out"
                )


def check_clip(loss: str, low: float, high: float) -> None:
    """Raise ``ValueError`` if the clip range [1 - low, 1 + high] does not contain 1 or has negative values."""
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(f"{loss}'s clip range [1 - {low}, 1 + {high}] must hold 1 and stay above or at 0")


def check_dual_clip(loss: str, high: float, dual: float | None) -> None:
    """Raise ``ValueError`` if the dual clip is inside of the clip range, or not above 1."""
    if dual is not None and not (dual > 1 and dual >= 1 + high):
        raise ValueError(
            f"{loss}'s dual clip {dual} must be more than 1, and at least the upper clip {1 + high}"
        )


def clipped_surrogate(
    ratio_n: torch.Tensor, advantages_n: torch.Tensor, low: float, high: float, dual: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's surrogate min(r A, clip(r, 1 - low, 1 + high) A), and bool ``[N]``: which tokens it leaves without a gradient.

    That minimum has no bound where A < 0 and r is large. ``dual`` is c of the dual clip, max(that, c A) where A < 0
    (arXiv 1912.09729 [P]); None for none.
    """
    free_n = ratio_n * advantages_n
    cut_n = ratio_n.clamp(1 - low, 1 + high) * advantages_n
    objective_n, clipped_n = torch.minimum(free_n, cut_n), cut_n < free_n
    if dual is not None:
        beyond_n = (advantages_n < 0) & (ratio_n > dual)
        objective_n = torch.where(beyond_n, dual * advantages_n, objective_n)
        clipped_n = clipped_n | beyond_n
    return objective_n, clipped_n


def sequence_sums(values_n: torch.Tensor, sequence_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of each sequence's values, and its number of tokens; both float64, of tokens' sequences, ``[N]``."""
    # There are at most as many sequences as tokens. Their number would be read from the device.
    zeros_s = torch.zeros_like(values_n, dtype=torch.float64)
    total_s = zeros_s.index_add(0, sequence_n, values_n.double())
    return total_s[sequence_n], zeros_s.index_add(0, sequence_n, zeros_s + 1)[sequence_n]


def weighted(objective_n: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """−Σ w · objective, scalar: the last step of every loss."""
    return -(tokens.weights_n * objective_n).sum()
