"""GSPO: the clipped surrogate with one importance ratio per completion.

arXiv 2507.18071 [P]::

    s_i = (π_train(y_i) / π_old(y_i))^(1/|y_i|) = exp(1/|y_i| Σ_t log π_train(y_it) - log π_old(y_it))
    J = mean over completions of min(s_i Â_i, clip(s_i, 1 - ε_low, 1 + ε_high) Â_i)

Here each token has its completion's term as its objective, so that the aggregation's weights apply as for every loss:
with ``SampleAverage`` their sum is the mean over completions. The gradient is that of s_i: each token of a completion
contributes s_i Â_i / |y_i| · ∇ log π, or nothing where the clip is active. |y_i| counts trainable tokens, since forced
tokens have no ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, check_clip, weighted
from scalerl_trainer.algo.mismatch import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True)
class Gspo:
    """The clip range of s is [1 - clip_low, 1 + clip_high]; 3e-4 and 4e-4 are the paper's values [P]."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_clip("GSPO", self.clip_low, self.clip_high)

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, and the number of tokens in completions without a gradient because of the clip (``clipped``).

        >>> zeros, index_n = torch.zeros(2), torch.zeros(2, dtype=torch.long)
        >>> batch = TokenBatch(torch.tensor([0.3, -0.1]), zeros, zeros + 1, zeros + 0.5, index_n)
        >>> round(Gspo(0.2, 0.2)(batch).loss.item(), 4)  # the mean difference is .1: s = e^.1
        -1.1052
        """
        difference_n = tokens.logprobs_n - tokens.generator_logprobs_n
        sequences = int(tokens.sequence_n.max()) + 1 if tokens.sequence_n.numel() else 0
        zeros_s = difference_n.new_zeros(sequences)
        length_s = zeros_s.index_add(0, tokens.sequence_n, torch.ones_like(difference_n))
        mean_s = zeros_s.index_add(0, tokens.sequence_n, difference_n) / length_s.clamp(min=1)
        ratio_n = mean_s.clamp(max=LOG_RATIO_LIMIT).exp()[tokens.sequence_n]
        free_n = ratio_n * tokens.advantages_n
        cut_n = ratio_n.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens.advantages_n
        loss = weighted(torch.minimum(free_n, cut_n), tokens)
        return LossOutput(loss, {"clipped": (cut_n < free_n).sum()})
