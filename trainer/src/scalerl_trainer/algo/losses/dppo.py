"""DPPO: a trust region on the difference of probabilities instead of their ratio.

Divergence PPO (arXiv 2602.04879), in the variant with the binary total variation [S]::

    J = Σ_t m_t · r_t · Â_i        r_t = π_train / π_old
    m_t = 0 where |π_train(y_it) - π_old(y_it)| > δ and the gradient leads further away:
          Â_i > 0 with r_t > 1, or Â_i < 0 with r_t < 1;  else 1

The binary total variation compares the probabilities of "this token" and "any other token": it is a lower bound of the
total variation and needs no other token's probability. A ratio clip stops rare tokens early (1e-4 to 2e-4 is a ratio of 2)
and common tokens late (.5 to .6 is a ratio of 1.2); this criterion does the opposite. DPPO's implementations recommend
δ = .2 [S].
"""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, weighted
from scalerl_trainer.algo.mismatch import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True)
class Dppo:
    """``threshold``: δ, the largest difference of a token's two probabilities that a gradient may still increase."""

    threshold: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(
                f"DPPO's threshold is a difference of probabilities and must be in (0, 1], not {self.threshold}"
            )

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, and the number of masked tokens (``clipped``).

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
        ratio_n = (logprobs_n - before_n).clamp(max=LOG_RATIO_LIMIT).exp()
        loss = weighted(ratio_n.masked_fill(masked_n, 0.0) * tokens.advantages_n, tokens)
        return LossOutput(loss, {"clipped": masked_n.sum()})
