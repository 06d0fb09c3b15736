"""What goes into a step and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch

from scalerl_trainer.algo.mismatch import RatioStatistics
from scalerl_trainer.packing import Sequence


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One rank's share of a batch. ``n`` runs over its trainable tokens in flat order, ``s`` over its sequences.

    ``weights_s``             from ``algo.aggregation.sequence_weights`` over the whole batch, then this share
    ``advantages_s``          from ``algo.advantages.advantages`` over the whole batch, then this share
    ``generator_logprobs_n``  None takes the batch as sampled from the present weights: ratio 1
    ``fresh_n``               bool, True where the present weights sampled the token and all before it in its
                              completion; None: unknown
    """

    sequences: Items[Sequence]
    weights_s: torch.Tensor
    advantages_s: torch.Tensor
    generator_logprobs_n: torch.Tensor | None = None
    fresh_n: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class FlatLogprobs:
    """``logprobs_n`` and ``entropies_n``: float32 on the CPU in flat order; ``trainable_s``: tokens per sequence."""

    logprobs_n: torch.Tensor
    entropies_n: torch.Tensor
    trainable_s: torch.Tensor

    def per_sequence(self) -> list[torch.Tensor]:
        """Log-probabilities of each sequence."""
        return list(torch.split(self.logprobs_n, self.trainable_s.tolist()))


@dataclass(frozen=True, slots=True)
class ParameterBucket:
    """Whole parameters under their names in the transformers model, in lockstep on all ranks.

    ``tensors`` is filled on rank 0 and empty elsewhere; ``shapes`` and ``names`` are known everywhere. A tensor may be
    the live parameter: use it before the next step, and do not write to it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class StepStats:
    """A finished step. Everything but ``seconds`` is over the whole batch and equal on all ranks.

    ``step``           how many updates the weights had seen before it
    ``applied``        False when the weights were not changed: the whole batch held no trainable token (loss 0), or
                       the step was skipped
    ``skipped``        why the step was skipped; empty where it was not. Weights, optimizer and ``step`` stay as they are
    ``broken``         of a skipped step, by index into this rank's sequences: how many of its tokens are beyond the
                       ratio, or not a number
    ``gradient_norm``  of the global gradient, before clipping; NaN where it was not come to
    ``entropy``        mean over trainable tokens, nats
    ``ratios``         trainer against generator over all trainable tokens; None without generator log-probabilities
    ``ratios_by_position``        the same by ``scalerl_api.mismatch.POSITIONS``; empty without
    ``fresh_ratios_by_position``  over tokens of ``TrainBatch.fresh_n``; empty when that is unknown
    ``loss_means``     the loss's own sums, per trainable token
    ``tokens``         of prompts and completions that were computed; ``padding``: places computed for nothing
    ``seconds``        of this rank: ``pack``, ``compute`` (forward and backward), ``update`` (reduction left over,
                       optimizer), ``total``
    """

    step: int
    applied: bool
    loss: float
    gradient_norm: float
    learning_rate: float
    entropy: float
    trainable_tokens: int
    tokens: int
    padding: int
    sequences: int
    micro_batches: int
    ratios: RatioStatistics | None
    skipped: str = ""
    broken: dict[int, int] = field(default_factory=dict)
    ratios_by_position: tuple[RatioStatistics, ...] = ()
    fresh_ratios_by_position: tuple[RatioStatistics, ...] = ()
    loss_means: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
