"""The observation that the policies decide on, from a run's status. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, convert

from scalerl_api.compute import rl_token_cost
from scalerl_api.spec import RunSpec
from scalerl_api.wire import EvaluationPoint, Status
from scalerl_autoscaling.models import (
    RECENT,
    Generators,
    Latest,
    Limits,
    Observation,
    PointSet,
    Progress,
    Recipe,
    Recorded,
    Spent,
    Staleness,
)


class Point(Recorded, frozen=True, kw_only=True):
    """One evaluation as recorded. A reward or truncation of None was not finite."""

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
    """The evaluation as recorded."""
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
    """The points with a finite reward from one weight version each, in the order given."""
    return [p for p in points if not p.mixed and p.reward is not None]


def point_set(points: Sequence[Point]) -> PointSet:
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


def limits(spec: RunSpec) -> Limits:
    """The run's budget as recorded."""
    seconds, hours = spec.budget.max_seconds, spec.budget.max_device_hours
    tokens = spec.budget.max_compute_tokens
    return Limits(
        steps=spec.budget.max_steps,
        seconds=None if seconds is None else float(seconds),
        device_hours=None if hours is None else float(hours),
        tokens=UNSET if tokens is None else float(tokens / rl_token_cost(spec.recipe)),
    )


def recipe(spec: RunSpec) -> Recipe:
    """The recipe as recorded."""
    return Recipe(
        batch_completions=spec.recipe.prompts_per_step * spec.recipe.completions_per_prompt,
        context_tokens=spec.model.context_tokens,
        fp32_head=spec.recipe.fp32_logits == "Both",
        loss=spec.recipe.loss.name,
    )


def observe(
    spec: RunSpec, status: Status, points: Sequence[Point], generators: Generators, *, unix_seconds: float
) -> Observation:
    """The observation of the run, without a forecast."""
    tokens = (
        UNSET
        if spec.budget.max_compute_tokens is None
        else status.compute_tokens / float(rl_token_cost(spec.recipe))
    )
    return Observation(
        unix_seconds=unix_seconds,
        spent=Spent(
            seconds=status.wall_seconds,
            device_seconds=status.device_seconds,
            steps=status.step,
            tokens=tokens,
            inherited_seconds=status.inherited_seconds or UNSET,
            inherited_device_seconds=status.inherited_device_seconds or UNSET,
        ),
        limits=limits(spec),
        recent=[convert(p, Progress, from_attributes=True) for p in points[-RECENT:]],
        latest=convert(points[-1], Latest, from_attributes=True) if points else None,
        points=point_set(points),
        generators=generators,
        staleness=Staleness(allowed=spec.recipe.max_staleness_steps, most=status.max_staleness_steps),
        recipe=recipe(spec),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
