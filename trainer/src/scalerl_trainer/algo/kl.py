"""Penalty on the divergence from a frozen reference policy, KL(π ‖ π_ref), for any loss.

The penalty of a batch is the average of β k over its trainable tokens, with the loss's own weights, where k is one of
these estimators with d = log π - log π_ref::

    k1   d                 unbiased, may be negative
    k2   d² / 2            biased, never negative
    k3   exp(-d) - 1 + d   unbiased, never negative; GRPO's [P]

An unbiased value does not imply an unbiased gradient. For a token y ~ π, with E[∇log π(y)] = 0 and
∇KL(π ‖ π_ref) = E[d ∇log π(y)]:

===== ========================= ==========================================================================
k     derivative                mean of the derivative
===== ========================= ==========================================================================
k1    ∇log π                    0: no penalty. This module uses the gradient d ∇log π instead: unbiased
k2    d ∇log π                  ∇KL(π ‖ π_ref): unbiased
k3    (1 - exp(-d)) ∇log π      ∇KL(π_ref ‖ π), the forward KL: biased; both agree where d is small
===== ========================= ==========================================================================

All estimates are for one token given its prefix; the effect of a token on the divergence of later tokens is ignored.
Tokens sampled by an older policy bias both value and gradient; ``Corrected(WithKl(…))`` weights the penalty like the
loss, that is by π_prox/π_gen. ``recipe.kl`` selects the estimator and β.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch

from scalerl_api.recipe import KlEstimator
from scalerl_trainer.algo.losses.base import Loss, LossOutput, TokenBatch, is_token_local, weighted
from scalerl_trainer.algo.mismatch import LOG_RATIO_LIMIT
from scalerl_trainer.errors import BadBatchError

REFERENCE_KL = "reference_kl"
"""Key of the sum of the KL estimates in ``LossOutput.sums``."""


def kl_terms(
    logprobs_n: torch.Tensor, reference_logprobs_n: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Estimate of KL(π ‖ π_ref) at each token, nats, ``[N]``, with the gradient in the module's table.

    >>> kl_terms(torch.tensor([-1.0]), torch.tensor([-3.0]), "k2").tolist()
    [2.0]
    """
    d_n = logprobs_n - reference_logprobs_n
    if estimator == "k1":
        score_n = d_n.detach() * logprobs_n
        return d_n.detach() + score_n - score_n.detach()
    if estimator == "k2":
        return d_n.square() / 2
    # Clamped for both terms: a clamp of the exponential alone leaves a gradient that lowers the token's probability further.
    d_n = d_n.clamp(min=-LOG_RATIO_LIMIT)
    return (-d_n).exp() - 1 + d_n


@dataclass(frozen=True, slots=True)
class WithKl:
    """``loss`` plus the KL penalty."""

    loss: Loss
    estimator: KlEstimator
    """k1, k2 or k3."""
    coefficient: float
    """β, above 0."""

    def __post_init__(self) -> None:
        if self.estimator not in get_args(KlEstimator):
            raise ValueError(f"the KL estimator {self.estimator!r} is unknown: choose k1, k2 or k3")
        if not (self.coefficient > 0 and math.isfinite(self.coefficient)):
            raise ValueError(
                f"the coefficient of the KL penalty must be positive and finite, not {self.coefficient}:"
                " for no penalty, leave it out"
            )

    @property
    def token_local(self) -> bool:
        return is_token_local(self.loss)

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss with the penalty, the loss's sums, and the sum of the KL estimates, nats (``reference_kl``).

        Raises ``BadBatchError`` if the tokens have no reference log-probabilities.

        >>> from scalerl_trainer.algo.losses import Reinforce
        >>> one, index_n = torch.ones(1), torch.zeros(1, dtype=torch.long)
        >>> batch = TokenBatch(-one, -one, one, one, index_n, reference_logprobs_n=-3 * one)
        >>> WithKl(Reinforce(), "k2", 0.5)(batch).loss.item()  # 1 + .5 · 2² / 2
        2.0
        """
        if tokens.reference_logprobs_n is None:
            raise BadBatchError(
                "the KL penalty needs the reference policy's log-probability of each token, and this batch has none:"
                " give reference_logprobs_n, or train without the penalty"
            )
        kl_n = kl_terms(tokens.logprobs_n, tokens.reference_logprobs_n, self.estimator)
        output = self.loss(tokens)
        penalty = weighted(-self.coefficient * kl_n, tokens)
        return LossOutput(output.loss + penalty, {**output.sums, REFERENCE_KL: kl_n.detach().sum()})
