"""What the forecast is asked: the points that can be used, and the spec's questions in their unit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import ForecastRequest, Points
from scalerl_operator.autoscaling.decide import LEAST_ELASTICITY
from scalerl_operator.autoscaling.generator_memory import remember
from scalerl_operator.autoscaling.models import History, Observation
from scalerl_operator.autoscaling.observation import Point, usable
from scalerl_operator.autoscaling.throughput import left, pace_now, reach

T = TypeVar("T")


def question(
    spec: AutoscalingSpec, points: Sequence[Point], seen: Observation, history: History
) -> ForecastRequest | str:
    """The request, or why there is nothing to ask.

    Compute is in completion tokens of trained steps; prices per device-hour become prices per token
    by the measured pace, and what may still be used becomes a compute the same way.
    """
    used = usable(points)
    if not used:
        left_out = f"{seen.points.mixed} of several weight versions, {seen.points.not_finite} not finite"
        return f"none of {len(points)} evaluations can be used ({left_out}); see evaluation.holdSeconds"
    history = remember(spec, seen, history)
    now = pace_now(seen, history)
    value = price = most = budget = None
    if now is not None:
        ahead = reach(now, left(spec, seen, history))
        budget = None if ahead is None else used[-1].tokens + ahead
        if spec.price_per_device_hour is not None and spec.value_per_point is not None:
            value = 100.0 * float(spec.value_per_point)
            tokens_per_device_hour = 3600.0 * now.tokens_per_second / now.devices
            price = float(spec.price_per_device_hour) / tokens_per_device_hour
        if spec.target is not None:
            ahead = _most_reach(spec, seen, history)
            most = None if ahead is None else used[-1].tokens + ahead
    return ForecastRequest(
        points=Points(
            compute=[float(p.tokens) for p in used],
            reward=[p.reward for p in used if p.reward is not None],
            samples=_one_if_same([float(p.samples) for p in used]),
            eval_version=_one_if_same([p.eval_version for p in used]),
        ),
        at=[] if float(spec.horizon) == 2.0 else [float(spec.horizon) * used[-1].tokens],
        horizon=float(spec.horizon),
        min_gain=float(spec.min_gain),
        target=None if spec.target is None else float(spec.target),
        max_compute=most if most else None,
        value=value,
        price=price,
        budget=budget,
        alarms_after=max((float(p.tokens) for p in used if p.version <= history.forgiven), default=0.0),
    )


def _most_reach(spec: AutoscalingSpec, seen: Observation, history: History) -> float | None:
    """With as many generators as there may be: a target is out of reach only if those cannot reach it."""
    now, rest = pace_now(seen, history), left(spec, seen, history)
    if now is None:
        return None
    elastic = 1.0 if history.elasticity is None else history.elasticity
    reaches = [reach(now, rest)]
    if spec.generators is not None and elastic >= LEAST_ELASTICITY:
        quota = seen.generators.quota
        most = spec.generators.max if quota is None else min(spec.generators.max, quota)
        more = max(0, most - seen.generators.wanted) * seen.generators.devices_each
        reaches.append(reach(now, rest, more, elastic))
    known = [one for one in reaches if one is not None]
    return max(known) if known else None


def _one_if_same(values: list[T]) -> list[T] | T:
    return values[0] if len(set(values)) == 1 else values
