"""Inputs and results of the engine."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch

from scalerl_trainer.algo.mismatch import RatioStatistics
from scalerl_trainer.packing import Sequence


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One rank's shard of a batch. ``n`` runs over its trainable tokens in flat order, ``s`` over its sequences.

    ``weights_s``             of ``algo.aggregation.sequence_weights`` over the whole batch
    ``advantages_s``          of ``algo.advantages.advantages`` over the whole batch
    ``generator_logprobs_n``  None: sampled from the present weights, ratio 1
    ``teacher_logprobs_n``    None: no teacher
    ``fresh_n``               bool, True where the present weights sampled the token and all earlier ones of its
                              completion; None: unknown
    """

    sequences: Items[Sequence]
    weights_s: torch.Tensor
    advantages_s: torch.Tensor
    generator_logprobs_n: torch.Tensor | None = None
    fresh_n: torch.Tensor | None = None
    teacher_logprobs_n: torch.Tensor | None = None


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
    """Whole parameters with their names in the transformers model.

    ``tensors`` is empty on ranks other than 0. A tensor may be the live parameter: read it before the next step, and do
    not write to it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class StepStats:
    """Result of a step. All but ``seconds`` and ``broken`` are over the whole batch and equal on all ranks.

    ``step``           number of updates before it
    ``applied``        False if the weights did not change: no trainable token in the whole batch (loss 0), or skipped
    ``skipped``        reason why the step was skipped, else empty; weights, optimizer and ``step`` are unchanged
    ``broken``         of a skipped step: number of tokens that are ratio outliers or not a number, by index into this
                       rank's sequences
    ``gradient_norm``  of the global gradient, before clipping; NaN if not computed
    ``entropy``        mean over trainable tokens, nats
    ``ratios``         trainer against generator over all trainable tokens; None without generator log-probabilities
    ``ratios_by_position``        the same by ``scalerl_api.mismatch.POSITIONS``; empty without
    ``fresh_ratios_by_position``  over tokens of ``TrainBatch.fresh_n``; empty when that is unknown
    ``loss_means``     the loss's own sums, per trainable token
    ``tokens``         computed tokens of prompts and completions
    ``padding``        computed positions without a token
    ``seconds``        of this rank: ``pack``, ``compute`` (forward and backward), ``update`` (rest of the reduction,
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
