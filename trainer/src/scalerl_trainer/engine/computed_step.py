"""What a step computes before and in its update, and the :class:`.StepStats` of these."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from scalerl_trainer.algo.mismatch import RatioStatistics
from scalerl_trainer.engine.passes import TABLES, Accumulated, outlier_counts
from scalerl_trainer.engine.stats import StepStats
from scalerl_trainer.models.routing import Routing
from scalerl_trainer.train_batch import TrainBatch


@dataclass(frozen=True, slots=True)
class Computed:
    """What forward and backward of a batch leave."""

    done: Accumulated
    rows: torch.Tensor
    """All ranks' ``done.sums``, ``[world, K]`` on the CPU."""
    every: tuple[RatioStatistics, ...]
    """Ratios by position of all tokens, masked ones too."""
    fresh: tuple[RatioStatistics, ...]
    """The same of fresh tokens."""
    ratios: RatioStatistics
    """The sum of ``every``."""
    skipped: str | None
    """Why the weights must not change, equal on all ranks; None if they may."""
    masked: int = 0
    """Number of tokens that ``algo.gradient_guard`` masked, over all ranks."""


@dataclass(frozen=True, slots=True)
class Update:
    """What the optimizer did with the gradients."""

    skipped: str | None
    """Why the weights did not change; None if they did."""
    gradient_norm: float = math.nan
    gradient_norms: dict[str, float] = field(default_factory=dict)


def step_stats(
    computed: Computed,
    update: Update,
    *,
    step: int,
    learning_rate: float,
    batch: TrainBatch,
    counts: torch.Tensor,
    routing: Routing,
    replays: bool,
    seconds: dict[str, float],
) -> StepStats:
    """The result of a step with trainable tokens.

    Args:
        step: number of updates before it.
        counts: of :func:`.exchange_sizes`.
        replays: whether recorded experts are replayed.
    """
    done, total = computed.done, computed.rows.sum(0)
    own_sums_end = 2 + TABLES + len(done.names)
    micro_batches, trainable, tokens, padding, sequences = (int(c) for c in counts.sum(0)[:5])
    sampled = batch.generator_logprobs_n is not None
    fresh_known = bool(counts[:, 6].any())
    return StepStats(
        step=step,
        applied=update.skipped is None,
        skipped=update.skipped or "",
        broken=outlier_counts(done.beyond) if update.skipped else {},
        guard_masked_tokens=computed.masked,
        loss=float(total[0]),
        gradient_norm=update.gradient_norm,
        gradient_norms=update.gradient_norms,
        learning_rate=learning_rate,
        entropy=float(total[1]) / trainable,
        trainable_tokens=trainable,
        tokens=tokens,
        padding=padding,
        sequences=sequences,
        micro_batches=micro_batches,
        ratios=computed.ratios if sampled else None,
        differences_n=done.differences_n if sampled else None,
        ratios_by_position=computed.every if sampled else (),
        fresh_ratios_by_position=computed.fresh if fresh_known else (),
        loss_means={
            name: float(value) / trainable
            for name, value in zip(done.names, total[2 + TABLES : own_sums_end], strict=True)
        },
        routing=routing.figures(total[own_sums_end:], trainable),
        unreplayed_tokens=tokens - int(counts[:, 7].sum()) if replays else None,
        seconds=seconds,
    )
