"""Masks the few tokens that would take a whole step's gradient, whatever the loss.

With g_t = ∂L/∂log π(y_t), the derivative of the batch's loss by a token's log-probability, g_t² / Σ g² is the token's share of
the squared gradient. In a batch of thousands of tokens it is about one over their number. An unbounded factor changes that: a
ratio π/π_gen of e^10 under a clipped surrogate with a negative advantage, exp(-d) of the KL estimator k3, a teacher's
log-probability of -100. Clipping of the gradient norm makes it worse: what remains of the step is that token.

A token is an *outlier* if its ratio is one (``mismatch.BEYOND_RATIO``), or if its loss has a larger factor than that::

    |g_t| > 10 · w_t · max(1, |Â_t|)      w_t the aggregation's weight, Â_t the advantage of the rewards

So a token that has a large share only because of its weight, such as the one token of a completion under ``SampleAverage``, is
none. Of the outliers, those with more than half of what they and all tokens with smaller gradients have together are masked:
with g_1² ≥ g_2² ≥ … of the outliers, and rest_k the squared gradient of all other tokens of the batch::

    mask 1 … k for the largest k with g_k² > rest_k

One such token holds more than half of the squared gradient; several that are equally large are masked together, however small
their shares. The rule depends on the whole batch, and so not on its split over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scalerl_trainer.algo.losses.base import TokenBatch
from scalerl_trainer.algo.mismatch import BEYOND_RATIO, beyond_ratio


@dataclass(frozen=True, slots=True)
class GradientGuard:
    """Masks tokens by the module's rule. The limits are not from a paper, and not calibrated on long runs."""

    min_tokens: int = 256
    """Batches with fewer trainable tokens are left alone: a large share is normal there."""


@dataclass(frozen=True, slots=True)
class SquaredGradients:
    """Squared derivatives of the loss by log-probabilities, of some tokens, float64."""

    ordinary: torch.Tensor
    """Sum over the tokens that are no outliers, scalar."""
    outliers_n: torch.Tensor
    """Of each token, ``[N]``: that of an outlier, 0 of another token."""


def squared_gradients(tokens: TokenBatch, gradient_n: torch.Tensor) -> SquaredGradients:
    """Squared derivatives of a loss by the log-probabilities of ``tokens``, from the derivatives.

    >>> tokens = TokenBatch(torch.tensor([0.0, -1.0]), torch.tensor([-4.0, -1.0]), *torch.ones(2, 2), torch.zeros(2).long())
    >>> found = squared_gradients(tokens, torch.tensor([-54.6, -1.0]))  # e^4 = 54.6
    >>> round(float(found.ordinary)), [round(square) for square in found.outliers_n.tolist()]
    (1, [2981, 0])
    """
    size_n = gradient_n.double().abs()
    limit_n = BEYOND_RATIO * tokens.weights_n * tokens.advantages_n.abs().clamp(min=1)
    outlier_n = beyond_ratio(tokens.logprobs_n, tokens.generator_logprobs_n) | (size_n > limit_n)
    square_n = size_n.square()
    return SquaredGradients(square_n.masked_fill(outlier_n, 0.0).sum(), square_n.masked_fill(~outlier_n, 0.0))


def smallest_masked(outliers: Sequence[float], rest: float) -> float | None:
    """The smallest squared gradient that is masked; None if no token is.

    Args:
        outliers: squared gradients of outliers, in any order.
        rest: that of all other tokens.

    >>> smallest_masked([9.0], 4.0), smallest_masked([9.0, 9.0], 4.0), smallest_masked([9.0, 5.0], 5.0)
    (9.0, 9.0, None)
    """
    found = None
    for square in sorted(outliers):
        if square > rest:
            found = square if found is None else found
        rest += square
    return found
