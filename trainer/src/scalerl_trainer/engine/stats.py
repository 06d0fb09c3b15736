"""Results of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from scalerl_trainer.algo.mismatch import RatioStatistics


@dataclass(frozen=True, slots=True)
class FlatLogprobs:
    """Log-probabilities of trainable tokens in flat order, float32 on the CPU."""

    logprobs_n: torch.Tensor
    trainable_s: torch.Tensor
    """Number of trainable tokens of each sequence."""

    def per_sequence(self) -> list[torch.Tensor]:
        """Log-probabilities of each sequence's trainable tokens."""
        return list(torch.split(self.logprobs_n, self.trainable_s.tolist()))


@dataclass(frozen=True, slots=True)
class ParameterBucket:
    """Some whole parameters, with their names in the transformers model."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    tensors: tuple[torch.Tensor, ...]
    """Empty on ranks other than 0. A tensor may be the live parameter: read it before the next step, and do not write to
    it."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Result of a step. All but ``seconds`` and ``broken`` are over the whole batch and equal on all ranks."""

    step: int
    """Number of updates before this step."""
    applied: bool
    """False if the weights did not change: the batch had no trainable token (loss 0), or the step was skipped."""
    loss: float
    gradient_norm: float
    """Norm of the global gradient before clipping; NaN if it was not computed."""
    gradient_norms: dict[str, float] = field(default_factory=dict, kw_only=True)
    """The same by kind of parameter (:mod:`.gradient_norms`); empty if no update was applied."""
    learning_rate: float
    entropy: float
    """Mean over trainable tokens, in nats."""
    trainable_tokens: int
    tokens: int
    """Computed tokens of prompts and completions."""
    padding: int
    """Computed positions without a token."""
    sequences: int
    micro_batches: int
    ratios: RatioStatistics | None
    """Ratios of trainer to generator over all trainable tokens; None without generator log-probabilities."""
    skipped: str = ""
    """Why the step was skipped, else empty. A skipped step leaves weights, optimizer and the number of updates unchanged."""
    broken: dict[int, int] = field(default_factory=dict)
    """If the step was skipped: number of tokens whose ratio is an outlier or not a number, by index into this rank's
    sequences."""
    guard_masked_tokens: int = 0
    """Number of tokens that ``algo.gradient_guard`` masked."""
    ratios_by_position: tuple[RatioStatistics, ...] = ()
    """``ratios`` by ``scalerl_api.mismatch.POSITIONS``; empty without generator log-probabilities."""
    fresh_ratios_by_position: tuple[RatioStatistics, ...] = ()
    """The same over the tokens of ``TrainBatch.fresh_n``; empty if that is unknown."""
    differences_n: torch.Tensor | None = None
    """log π_train − log π_gen of each of this rank's trainable tokens, in nats, float32 ``[N]`` on the device; None without
    generator log-probabilities."""
    loss_means: dict[str, float] = field(default_factory=dict)
    """The loss's own statistics, as means over trainable tokens."""
    routing: dict[str, float] = field(default_factory=dict)
    """Figures of :meth:`.routing.Routing.figures`; empty for a model without experts."""
    unreplayed_tokens: int | None = None
    """Computed tokens for which the trainer chose the experts, as no generator recorded any; None without router replay."""
    seconds: dict[str, float] = field(default_factory=dict)
    """This rank's durations: ``pack``, ``compute`` (forward and backward), ``wait`` (for what reads the weights on another
    thread), ``copy`` (for a checkpoint's copy), ``update`` (the rest of the gradient reduction and the optimizer), ``total``."""
