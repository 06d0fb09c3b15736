"""GSPO: the clipped surrogate with one importance ratio per completion.

arXiv 2507.18071 [P]::

    s_i = (π_train(y_i) / π_old(y_i))^(1/|y_i|) = exp(1/|y_i| Σ_t log π_train(y_it) - log π_old(y_it))
    J = mean over completions of min(s_i Â_i, clip(s_i, 1 - ε_low, 1 + ε_high) Â_i)

This is its token form, GSPO-token (same paper [P]), in which a token has a ratio with the value of its completion's and a
gradient of its own::

    s_it = sg(s_i) · π_train(y_it) / sg(π_train(y_it))
    J = Σ_t min(s_it Â_it, clip(s_it, 1 - ε_low, 1 + ε_high) Â_it), weighted by the aggregation

Where all tokens of a completion have one advantage and one weight, value and gradient equal those of the first form: the
gradient of s_i is s_i / |y_i| Σ_t ∇log π_train(y_it). Otherwise (a teacher's advantages, a correction's weights) the first
form would give each token the mean of its completion's, so opposite advantages would cancel and a masked token would be
trained. |y_i| counts trainable tokens, since forced tokens have no ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_trainer.algo.losses.base import (
    LossOutput,
    TokenBatch,
    check_clip,
    clipped_surrogate,
    sequence_sums,
    weighted,
)
from scalerl_trainer.algo.mismatch import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True)
class Gspo:
    """The clip range of s is [1 - clip_low, 1 + clip_high]; 3e-4 and 4e-4 are the paper's values [P]."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_clip("GSPO", self.clip_low, self.clip_high)

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, and the number of tokens without a gradient because of the clip (``clipped``).

        >>> import torch
        >>> zeros, index_n = torch.zeros(2), torch.zeros(2, dtype=torch.long)
        >>> batch = TokenBatch(torch.tensor([0.3, -0.1]), zeros, zeros + 1, zeros + 0.5, index_n)
        >>> round(Gspo(0.2, 0.2)(batch).loss.item(), 4)  # the mean difference is .1: s = e^.1
        -1.1052
        """
        own_n = tokens.logprobs_n.detach()
        total_n, length_n = sequence_sums(own_n - tokens.generator_logprobs_n, tokens.sequence_n)
        mean_n = (total_n / length_n).to(own_n.dtype)
        # The difference, which is 0, comes first: a sum with a log-probability of -20 would round the ratio by 1e-6, differently
        # for each token, and the clip range is 3e-4 wide.
        ratio_n = (mean_n + (tokens.logprobs_n - own_n)).clamp(max=LOG_RATIO_LIMIT).exp()
        objective_n, clipped_n = clipped_surrogate(
            ratio_n, tokens.advantages_n, self.clip_low, self.clip_high
        )
        return LossOutput(weighted(objective_n, tokens), {"clipped": clipped_n.sum()})
