"""Corrections for the mismatch between the generator's policy and the trainer's, for any loss.

The policy that sampled a token (π_gen) and the trained policy (π) differ for two reasons: the weights have changed since,
and generator and trainer compute differently. The importance ratio of a loss includes both. A correction separates the
two: the loss uses the trainer's own policy at the step as π_old (π, detached; with one update per step its ratio is 1 and
no clip is active), and each token's term has an importance weight::

    truncated (TIS)   w = min(π/π_gen, C)
    masked (MIS)      w = π/π_gen where that is at most C, else 0

C is about 2 [S]. ``w`` has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from scalerl_trainer.algo.losses.base import Loss, LossOutput, TokenBatch
from scalerl_trainer.algo.mismatch import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True)
class Corrected:
    """``loss`` with importance weights."""

    loss: Loss
    cap: float = 2.0
    """C, the largest importance weight."""
    above: Literal["truncate", "mask"] = "truncate"
    """Treatment of a token with a ratio above the cap: its weight is truncated to the cap, or 0."""

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"the cap of importance weights must be positive, not {self.cap}")

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, its sums, and the number of tokens with a ratio above the cap (``corrected``).

        >>> import torch
        >>> from scalerl_trainer.algo.losses import Reinforce
        >>> one = torch.ones(1)
        >>> batch = TokenBatch(-one, -3 * one, one, one, torch.zeros(1, dtype=torch.long))
        >>> Corrected(Reinforce())(batch).loss.item(), Corrected(Reinforce(), above="mask")(batch).loss.item()
        (2.0, -0.0)
        """
        own_n = tokens.logprobs_n.detach()
        ratio_n = (own_n - tokens.generator_logprobs_n).clamp(max=LOG_RATIO_LIMIT).exp()
        beyond_n = ratio_n > self.cap
        weight_n = (
            ratio_n.clamp(max=self.cap) if self.above == "truncate" else ratio_n.masked_fill(beyond_n, 0.0)
        )
        output = self.loss(replace(tokens, generator_logprobs_n=own_n, weights_n=tokens.weights_n * weight_n))
        return LossOutput(output.loss, {**output.sums, "corrected": beyond_n.sum()})
