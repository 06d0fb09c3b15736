"""The observation that the policies decide on, from a run's status. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec

from scalerl_api.spec import RunSpec
from scalerl_api.wire import EvaluationPoint, Status
from scalerl_operator.autoscaling.models import (
    RECENT,
    Generators,
    Latest,
    Limits,
    Load,
    Observation,
    PointSet,
    Progress,
    Recipe,
    Recorded,
    Spent,
    Staleness,
)


class Point(Recorded, frozen=True, kw_only=True):
    """One evaluation as it is recorded; a reward or truncation of None was not a finite number."""

    version: int
    tokens: int
    reward: float | None
    samples: int
    eval_version: str
    mixed: bool
    truncated: float | None
    seconds: float
    device_seconds: float


def point(evaluation: EvaluationPoint) -> Point:
    """The part of an evaluation that is recorded."""
    return Point(
        version=evaluation.version,
        tokens=evaluation.work_tokens,
        reward=_finite(evaluation.reward),
        samples=evaluation.samples,
        eval_version=evaluation.set_digest,
        mixed=evaluation.mixed_versions,
        truncated=_finite(evaluation.truncated_fraction),
        seconds=evaluation.wall_seconds,
        device_seconds=evaluation.device_seconds,
    )


def usable(points: Sequence[Point]) -> list[Point]:
    """Those that lie on the curve of one weight version each, in the order given."""
    return [p for p in points if not p.mixed and p.reward is not None]


def point_set(points: Sequence[Point]) -> PointSet:
    """What is said of the points in an observation."""
    used = usable(points)
    digest = hashlib.blake2b(msgspec.json.encode(used), digest_size=16).hexdigest()
    return PointSet(
        used=len(used),
        version=used[-1].version if used else -1,
        eval_version=used[-1].eval_version if used else "",
        digest=digest,
        mixed=sum(p.mixed for p in points),
        not_finite=sum(p.reward is None for p in points),
    )


def observe(
    spec: RunSpec,
    status: Status,
    points: Sequence[Point],
    generators: Generators,
    *,
    unix_seconds: float,
    load: Load | None = None,
    resumed: bool = False,
) -> Observation:
    """The observation of the run, without a forecast."""
    hours = spec.budget.max_device_hours
    recipe = spec.recipe
    return Observation(
        unix_seconds=unix_seconds,
        spent=Spent(seconds=status.wall_seconds, device_seconds=status.device_seconds, steps=status.step),
        limits=Limits(
            steps=spec.budget.max_steps,
            seconds=None if spec.budget.max_seconds is None else float(spec.budget.max_seconds),
            device_hours=None if hours is None else float(hours),
        ),
        recent=[
            Progress(version=p.version, tokens=p.tokens, seconds=p.seconds, device_seconds=p.device_seconds)
            for p in points[-RECENT:]
        ],
        latest=Latest(version=points[-1].version, reward=points[-1].reward, truncated=points[-1].truncated)
        if points
        else None,
        points=point_set(points),
        generators=generators,
        staleness=Staleness(allowed=recipe.max_staleness_steps, most=status.max_staleness_steps),
        recipe=Recipe(
            batch_completions=recipe.prompts_per_step * recipe.completions_per_prompt,
            context_tokens=spec.model.context_tokens,
            fp32_head=recipe.fp32_logits == "Both",
            loss=recipe.loss.name,
        ),
        load=load,
        resumed=resumed,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
