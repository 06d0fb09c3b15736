"""Statuses of a coordinator for tests, with the evaluations of its run."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from scalerl_api.wire import Counts, EvaluationPoint, Phase, Status
from scalerl_curvefit.simulate import simulated

EVERY = 100.0
"""Seconds between evaluations."""
TOKENS = 1000.0
"""Tokens a second."""


def evaluations(rewards: list[float], **changes: Any) -> list[EvaluationPoint]:
    return [
        replace(
            EvaluationPoint(
                version=10 * i,
                work_tokens=round(TOKENS * EVERY * i),
                reward=reward,
                standard_error=0.01,
                samples=4000,
                prompts=1000,
                set_digest="first set",
                mixed_versions=False,
                truncated_fraction=0.02,
                mean_tokens=50.0,
                wall_seconds=EVERY * i,
                device_seconds=4 * EVERY * i,
            ),
            **changes,
        )
        for i, reward in enumerate(rewards)
    ]


def flat_curve(count: int = 40) -> list[EvaluationPoint]:
    """A run that has long reached what it can: its remaining gain is far under .02."""
    rewards = simulated(n=count, reach=16.0, sigma=0.005, seed=3).reward
    return evaluations([0.2, *(float(r) for r in rewards)])


def status(points: list[EvaluationPoint], **changes: Any) -> Status:
    last = points[-1] if points else None
    values: dict[str, Any] = {
        "phase": Phase.RUNNING,
        "waiting_for": "",
        "step": last.version if last else 0,
        "published_version": last.version if last else 0,
        "stop_reason": "",
        "counts": Counts(**dict.fromkeys(Counts.__struct_fields__, 0)),
        "members": [],
        "points": points,
        "last_step_stats": {},
        "wall_seconds": last.wall_seconds if last else 0.0,
        "device_seconds": last.device_seconds if last else 0.0,
        "tokens_generated": 0,
        "tokens_trained": 0,
        "generator_busy_fraction": 0.5,
        "trainer_busy_fraction": 0.5,
        "max_staleness_steps": 1,
        "mean_staleness_steps": 0.5,
    }
    return Status(**values | changes)
