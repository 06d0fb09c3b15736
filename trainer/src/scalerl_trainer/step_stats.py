"""The engine's statistics of a step, as metrics.jsonl has them."""

from __future__ import annotations

from scalerl_api.mismatch import RATIO, SAMPLED
from scalerl_trainer.algo.distillation import TEACHER_KL
from scalerl_trainer.algo.kl import REFERENCE_KL
from scalerl_trainer.algo.mismatch import by_position
from scalerl_trainer.engine import StepStats
from scalerl_trainer.shard_conversion import Staleness


def stats_of_step(step_stats: StepStats, staleness: Staleness) -> dict[str, float]:
    """Scalars by name; those of ratios only if the step has tokens of the generators."""
    stats = {
        "loss": step_stats.loss,
        "grad_norm": step_stats.gradient_norm,
        "entropy": step_stats.entropy,
        "learning_rate": step_stats.learning_rate,
        "applied": float(step_stats.applied),
        "trained_tokens": float(0 if step_stats.skipped else step_stats.trainable_tokens),
        "computed_tokens": float(step_stats.tokens),
        "padding_fraction": step_stats.padding / max(1, step_stats.tokens + step_stats.padding),
        "staleness_mean": staleness.total / max(1, staleness.tokens),
        "staleness_max": float(staleness.largest),
        "guard_masked_tokens": float(step_stats.guard_masked_tokens),
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
    }
    if step_stats.ratios is not None:
        stats |= {
            "ratio_mean": step_stats.ratios.ratio_mean,
            "ratio_max": step_stats.ratios.ratio_max,
            "ratio_beyond_fraction": step_stats.ratios.beyond_fraction,
            "effective_sample_fraction": step_stats.ratios.effective_sample_fraction,
        }
        stats |= by_position(RATIO, step_stats.ratios_by_position)
    if step_stats.fresh_ratios_by_position:
        stats |= by_position(SAMPLED, step_stats.fresh_ratios_by_position)
    if step_stats.unreplayed_tokens is not None:
        stats["unreplayed_tokens"] = float(step_stats.unreplayed_tokens)
    stats |= {
        f"grad_norm_{kind}": norm for kind, norm in step_stats.gradient_norms.items()
    } | step_stats.routing
    return stats | {
        name if name in (REFERENCE_KL, TEACHER_KL) else f"ratio_{name}_fraction": value
        for name, value in step_stats.loss_means.items()
    }
