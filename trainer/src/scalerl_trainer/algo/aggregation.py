"""Aggregation of per-token objectives into one loss, as a weight per token.

With these weights the loss of any set of tokens is ``-(w_n * objective_n).sum()``, and the losses (and gradients) of
disjoint sets add up to those of their union, so ranks and micro-batches need no further division.

Schemes (ScaleRL, arXiv 2510.13786 [P]), with G_p the completions of prompt p and P prompts:

================== ================================================================= =====================
``PromptAverage``  (1/P) Σ_p (1/Σ_{i∈G_p}|y_i|) Σ_{i∈G_p} Σ_t                        ScaleRL, its DAPO
``SampleAverage``  (1/P) Σ_p (1/|G_p|) Σ_{i∈G_p} (1/|y_i|) Σ_t                       GRPO
``TokenAverage``   (1/Σ|y_i|) Σ_i Σ_t over the whole batch                           DAPO, Magistral
``Constant``       (1/(N·C)) Σ_i Σ_t, N completions, C a constant number of tokens   Dr. GRPO
================== ================================================================= =====================

|y| counts the trainable tokens; forced tokens are not sampled from the policy. Whether the papers count forced tokens
in the divisor is not known [?]; here the weights of a prompt sum to 1/P in either case. ``Constant`` has the same divisor
for all lengths, so its weights do not sum to 1; C is the longest completion that the recipe allows.

Shapes: see the package's legend.
"""

from __future__ import annotations

from typing import Literal

import torch

from scalerl_trainer.algo.advantages import group_indices
from scalerl_trainer.errors import BadBatchError

Aggregation = Literal["PromptAverage", "SampleAverage", "TokenAverage", "Constant"]


def sequence_weights(
    lengths_s: torch.Tensor,
    group_s: torch.Tensor,
    aggregation: Aggregation = "PromptAverage",
    constant: int = 1,
) -> torch.Tensor:
    """Weight of each trainable token of a sequence, float64 ``[S]``.

    A sequence without trainable tokens has weight 0 and does not count as a sample; a prompt without trainable tokens does
    not count as a prompt. The sum of the weights times the lengths is 1 (0 without trainable tokens), except for
    ``Constant``.

    Args:
        lengths_s: number of trainable tokens of each sequence of the whole batch, over all ranks, ``[S]``.
        group_s: identifier of each sequence's prompt, ``[S]``.
        constant: C of ``Constant``, tokens per completion.

    Raises ``BadBatchError`` if the shapes differ, a length is negative, or the scheme is unknown.

    >>> sequence_weights(torch.tensor([3, 1, 2]), torch.tensor([0, 0, 1]), "PromptAverage").tolist()
    [0.125, 0.125, 0.25]
    >>> sequence_weights(torch.tensor([2, 1, 4]), torch.tensor([0, 0, 1]), "SampleAverage").tolist()
    [0.125, 0.25, 0.125]
    >>> sequence_weights(torch.tensor([3, 1, 4]), torch.tensor([0, 0, 1]), "TokenAverage").tolist()
    [0.125, 0.125, 0.125]
    """
    if lengths_s.shape != group_s.shape or lengths_s.dim() != 1:
        raise BadBatchError(
            f"lengths {tuple(lengths_s.shape)} and groups {tuple(group_s.shape)} must be one entry per sequence"
        )
    if bool((lengths_s < 0).any()):
        raise BadBatchError("a sequence has a negative number of tokens")
    length_s = lengths_s.double()
    present_s = (length_s > 0).double()
    if aggregation == "TokenAverage":
        return present_s / length_s.sum().clamp(min=1)
    if aggregation == "Constant":
        return present_s / (present_s.sum().clamp(min=1) * constant)
    index_s, groups = group_indices(group_s)
    zeros_g = torch.zeros(groups, dtype=torch.float64)
    tokens_g = zeros_g.index_add(0, index_s, length_s)
    prompts = (tokens_g > 0).sum().clamp(min=1)
    if aggregation == "PromptAverage":
        return present_s / (prompts * tokens_g.clamp(min=1)[index_s])
    if aggregation == "SampleAverage":
        samples_g = zeros_g.index_add(0, index_s, present_s)
        return present_s / (prompts * samples_g.clamp(min=1)[index_s] * length_s.clamp(min=1))
    raise BadBatchError(
        f"aggregation {aggregation!r} is unknown: choose PromptAverage, SampleAverage, TokenAverage or Constant"
    )


def per_token(values_s: torch.Tensor, lengths_s: torch.Tensor) -> torch.Tensor:
    """Repeat each sequence's value for each of its trainable tokens, ``[N]``.

    >>> per_token(torch.tensor([1., 5.]), torch.tensor([2, 1])).tolist()
    [1.0, 1.0, 5.0]
    """
    return torch.repeat_interleave(values_s, lengths_s)
