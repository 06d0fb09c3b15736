"""The documented fields of metrics.jsonl are those that a step writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from scalerl_api.metrics_fields import (
    GRADIENT_KINDS,
    RUN_FIGURES,
    STEP_FIGURES,
    TASK_FIGURES,
    TRAINER_FIGURES,
)
from scalerl_api.mismatch import POSITIONS
from scalerl_api.recipe import ONE_OF, RecipeSpec
from scalerl_trainer.algo.losses import TokenBatch
from scalerl_trainer.algo.losses.make_loss import make_loss
from scalerl_trainer.algo.mismatch import RatioStatistics
from scalerl_trainer.engine import StepStats
from scalerl_trainer.models.routing import Routing
from scalerl_trainer.shard_conversion import Staleness
from scalerl_trainer.step_stats import stats_of_step

FIELDS = RUN_FIGURES.keys() | STEP_FIGURES.keys() | TASK_FIGURES.keys() | TRAINER_FIGURES.keys()
NOT_OF_THE_ENGINE = {
    *("wait_seconds", "shard_seconds", "forward_backward_seconds", "optimizer_seconds", "busy_seconds"),
    *("checkpoint_seconds", "checkpoint_uploaded", "export_seconds", "mfu", "start_kl", "start_kl_k1"),
    *("filtered_fraction", "ungraded_completions", "reward_mean", "reward_std", "shaped_reward_mean"),
    "completion_tokens_mean",
    *(name for name in TRAINER_FIGURES if name.startswith(("publish_", "probe_"))),
}
"""Fields of ``TRAINER_FIGURES`` from elsewhere: the leader, the publishes, the groups. A whole run writes them."""
OF_OTHER_RUNS = {
    *("mfu", "checkpoint_uploaded", "probe_failed", "reference_kl", "teacher_kl", "unreplayed_tokens"),
    *("router_entropy", "expert_load_max", "expert_load_min", "grad_norm_head", "grad_norm_other"),
    *(f"ratio_{what}_fraction" for what in ("clipped", "corrected", "off_policy_masked")),
    *("malformed_calls_fraction", "episode_turns", *(f"solved_at_turn_{turn}" for turn in (1, 2, 3, 4))),
    *("environment_tokens_fraction", "environment_seconds_fraction"),
    *("looped_fraction", "unanswered_fraction"),
}
"""Fields that the small run of :mod:`.test_trainer_main` does not write, whose generators only pretend."""


def without_range(name: str) -> str:
    """The field without the range of positions of a mismatch."""
    return next((name.removesuffix(f"_{at}") for at in POSITIONS if name.endswith(f"_{at}")), name)


def test_engine_writes_the_documented_fields() -> None:
    """With every loss and option of a recipe, and with experts."""
    one_n = torch.ones(1)
    tokens = TokenBatch(*[-one_n] * 2, one_n, one_n, torch.zeros(1, dtype=torch.long), *[-one_n] * 3)
    options: dict[str, Any] = {
        "kl": {"penalty": {"coefficient": "0.1"}},
        "correction": {"truncated": {}},
        "distillation": {"teacher": {"url": "http://teacher"}},
        "offPolicyMask": {"maxKl": "1"},
    }
    counted: set[str] = set()
    for loss in set(ONE_OF["loss"]) - {"plugin"}:
        recipe = RecipeSpec.model_validate({"loss": {loss: {}}, **options})
        counted |= make_loss(recipe)(tokens).sums.keys()
    router: Any = SimpleNamespace(_layers=1, _experts=2)
    one = RatioStatistics(1.0)
    stats = StepStats(
        *(0, True, 0.0, 1.0),
        gradient_norms=dict.fromkeys(GRADIENT_KINDS, 1.0),
        learning_rate=1.0,
        entropy=0.0,
        trainable_tokens=1,
        tokens=2,
        padding=0,
        sequences=1,
        micro_batches=1,
        ratios=one,
        ratios_by_position=(one,) * len(POSITIONS),
        fresh_ratios_by_position=(one,) * len(POSITIONS),
        loss_means=dict.fromkeys(counted, 0.0),
        routing=Routing.figures(router, torch.ones(3), 1),
        unreplayed_tokens=0,
    )
    written = {without_range(name) for name in stats_of_step(stats, Staleness())}
    assert written - RUN_FIGURES.keys() == TRAINER_FIGURES.keys() - NOT_OF_THE_ENGINE
