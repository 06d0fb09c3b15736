"""The curve of a mix: the mean of its tasks' evaluation sets, each with the task's weight."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Final

from scalerl_api.wire import MEAN_SET, EvaluationPoint, PassAt

MEAN_TASK: Final = -1
"""Stands for the weighted mean of all tasks, in place of the task of an evaluation set."""


def weighted_mean(points: Iterable[EvaluationPoint], weights: Sequence[Fraction]) -> list[EvaluationPoint]:
    """The weighted mean of each version for which every task has a point, by version.

    Errors are combined as for independent sets: √Σ (w · error)². Parts and labels are left out, because their names differ
    between tasks.

    Args:
        points: points of all evaluation sets; those of the mix's tasks have a ``task`` below the number of weights.
        weights: by task; they sum to 1.
    """
    by_version: dict[int, dict[int, EvaluationPoint]] = {}
    for point in points:
        if 0 <= point.task < len(weights):
            by_version.setdefault(point.version, {})[point.task] = point
    return [
        _mean([of[task] for task in range(len(weights))], list(map(float, weights)))
        for _, of in sorted(by_version.items())
        if len(of) == len(weights)
    ]


def _mean(points: list[EvaluationPoint], weights: list[float]) -> EvaluationPoint:
    def mean(value: Callable[[EvaluationPoint], float]) -> float:
        return math.fsum(w * value(p) for w, p in zip(weights, points, strict=True))

    identity = [(p.set_digest, w) for w, p in zip(weights, points, strict=True)]
    return EvaluationPoint(
        version=points[0].version,
        work_tokens=points[0].work_tokens,
        reward=mean(lambda p: p.reward),
        standard_error=_error(weights, [p.standard_error for p in points]),
        samples=sum(p.samples for p in points),
        prompts=sum(p.prompts for p in points),
        set_digest=hashlib.sha256(repr(identity).encode()).hexdigest(),
        mixed_versions=any(p.mixed_versions for p in points),
        truncated_fraction=mean(lambda p: p.truncated_fraction),
        mean_tokens=mean(lambda p: p.mean_tokens),
        wall_seconds=max(p.wall_seconds for p in points),
        device_seconds=max(p.device_seconds for p in points),
        given_up_prompts=sum(p.given_up_prompts for p in points),
        task=MEAN_TASK,
        set_name=MEAN_SET,
        pass_at=_pass_at(points, weights),
    )


def _pass_at(points: list[EvaluationPoint], weights: list[float]) -> list[PassAt]:
    """pass@k for each k that all points have."""
    estimates = [{at.k: at for at in p.pass_at} for p in points]
    means = []
    for k in sorted(set(estimates[0]).intersection(*estimates[1:])):
        of_tasks = [estimate[k] for estimate in estimates]
        mean = math.fsum(w * at.mean for w, at in zip(weights, of_tasks, strict=True))
        below = _error(weights, [at.mean - at.low for at in of_tasks])
        above = _error(weights, [at.high - at.mean for at in of_tasks])
        means.append(PassAt(k, mean, max(0.0, mean - below), min(1.0, mean + above)))
    return means


def _error(weights: list[float], errors: list[float]) -> float:
    return math.hypot(*(w * error for w, error in zip(weights, errors, strict=True)))
