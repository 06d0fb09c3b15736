"""DPPO: a trust region on the difference of probabilities instead of their ratio.

Divergence PPO (arXiv 2602.04879), in the variant with the binary total variation [S]::

    J = Σ_t m_t · r_t · Â_i        r_t = π_train / π_old
    m_t = 0 where |π_train(y_it) - π_old(y_it)| > δ and the gradient leads further away:
          Â_i > 0 with r_t > 1, or Â_i < 0 with r_t < 1;  else 1

The binary total variation compares the probabilities of "this token" and "any other token": it is a lower bound of the
total variation and needs no other token's probability. A ratio clip stops rare tokens early (1e-4 to 2e-4 is a ratio of 2)
and common tokens late (.5 to .6 is a ratio of 1.2); this criterion does the opposite. DPPO's implementations recommend
δ = .2 [S].

The criterion does not bound r_t: 1e-6 to 1e-1 is a ratio of 100,000 and a difference of .1. C does, 20 in the paper (§5.4
[S]): beyond it, C + C log(r_t / C) replaces r_t, whose gradient is that of a truncated importance weight, C Â_i ∇log π_train.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, weighted


@dataclass(frozen=True, slots=True)
class Dppo:
    """The trust region of the module."""

    token_local = True

    threshold: float = 0.2
    """δ, the largest difference of a token's two probabilities that a gradient may still increase."""
    ratio_cap: float = 20.0
    """C, the largest ratio."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(
                f"DPPO's threshold is a difference of probabilities and must be in (0, 1], not {self.threshold}"
            )
        if not self.ratio_cap >= 1:
            raise ValueError(f"DPPO's cap of the ratio must be at least 1, not {self.ratio_cap}")

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, and the numbers of masked tokens (``clipped``) and of truncated ratios (``truncated``).

        >>> import torch
        >>> one = torch.ones(1)
        >>> up = TokenBatch(torch.tensor([0.9]).log(), torch.tensor([0.6]).log(), one, one, torch.zeros(1, dtype=torch.long))
        >>> Dppo()(up).loss.item()  # .3 further up than where it was sampled: masked
        -0.0
        """
        logprobs_n, before_n = tokens.logprobs_n, tokens.generator_logprobs_n
        moved_n = logprobs_n.detach().exp() - before_n.exp()
        away_n = moved_n.sign() * tokens.advantages_n > 0
        masked_n = away_n & (moved_n.abs() > self.threshold)
        difference_n, most = logprobs_n - before_n, math.log(self.ratio_cap)
        ratio_n = difference_n.clamp(max=most).exp() + self.ratio_cap * (difference_n - most).clamp(min=0)
        loss = weighted(ratio_n.masked_fill(masked_n, 0.0) * tokens.advantages_n, tokens)
        truncated_n = ~masked_n & (difference_n > most)
        return LossOutput(loss, {"clipped": masked_n.sum(), "truncated": truncated_n.sum()})
