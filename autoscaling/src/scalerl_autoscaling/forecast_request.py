"""Builds the request to the curve-fit sidecar and validates its answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from msgspec import UNSET

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import Flat, ForecastAnswer, ForecastRequest, Points
from scalerl_autoscaling.decide import MIN_ELASTICITY
from scalerl_autoscaling.decision_history import updated
from scalerl_autoscaling.models import History, Observation, Pace
from scalerl_autoscaling.observation import Point, usable
from scalerl_autoscaling.throughput import Remaining, pace_now, reach, remaining

T = TypeVar("T")

IMPLAUSIBLE: Final = "the forecast cannot be believed"
"""Start of ``Observation.trouble`` where the answer has an :func:`implausibility`."""
_LONGEST: Final = 80
SAME: Final = 1e-9
"""Relative difference up to which two computes are equal."""


def build_request(
    spec: AutoscalingSpec, points: Sequence[Point], observation: Observation, history: History
) -> ForecastRequest | str:
    """The request, or why there is none.

    Compute is in completion tokens of trained steps. The measured pace converts prices per device-hour to prices per token,
    and the remaining budget to compute.
    """
    used = usable(points)
    if not used:
        left_out = f"{observation.points.mixed} of several weight versions, {observation.points.not_finite} not finite"
        return f"none of {len(points)} evaluations can be used ({left_out}); see evaluation.holdSeconds"
    history = updated(spec, observation, history)
    now = pace_now(observation, history)
    value = price = most = budget = None
    if now is not None:
        limits = remaining(spec, observation, history)
        ahead = reach(now, limits)
        budget = None if ahead is None else used[-1].tokens + ahead
        if spec.price_per_device_hour is not None and spec.value_per_point is not None:
            value = 100.0 * float(spec.value_per_point)
            tokens_per_device_hour = 3600.0 * now.tokens_per_second / now.devices
            price = float(spec.price_per_device_hour) / tokens_per_device_hour
        if spec.target is not None:
            ahead = _most_reach(spec, observation, history, now, limits)
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
        late_rises="games" if spec.late_rises == "Games" else "language_models",
        alarms_after=max(
            (float(p.tokens) for p in used if p.version <= history.alarms_acknowledged_until), default=0.0
        ),
    )


def _most_reach(
    spec: AutoscalingSpec, observation: Observation, history: History, now: Pace, limits: Remaining
) -> float | None:
    """The compute within reach with as many generators as allowed: a target is out of reach only if those cannot reach it."""
    elastic = 1.0 if history.elasticity is None else history.elasticity
    reaches = [reach(now, limits)]
    if spec.generators is not None and elastic >= MIN_ELASTICITY:
        quota = observation.generators.quota
        most = spec.generators.max if quota is None else min(spec.generators.max, quota)
        more = max(0, most - observation.generators.wanted) * observation.generators.devices_each
        reaches.append(reach(now, limits, more, elastic))
    return max((one for one in reaches if one is not None), default=None)


def _one_if_same(values: list[T]) -> list[T] | T:
    return values[0] if len(set(values)) == 1 else values


def implausibility(request: ForecastRequest, answer: ForecastAnswer) -> str:
    """Why an answer of the right type is invalid or does not belong to the request; empty for a valid answer."""
    fit, outlook = answer.fit, answer.outlook
    last = request.points.compute[-1]
    if abs(fit.now + fit.segment_start - last) > SAME * max(1.0, abs(last)):
        return f"it is about compute {fit.now + fit.segment_start:g}, the last point is at {last:g}"
    if not 0 < fit.points_used <= len(request.points.compute):
        return f"{fit.points_used} points used of {len(request.points.compute)}"
    for name in ("A", "B", "Cmid", "R0", "sigma"):
        interval = getattr(fit, name)
        if not interval.low <= interval.median <= interval.high:
            return f"{name} is {interval.median:g} in an interval from {interval.low:g} to {interval.high:g}"
    if not 0.0 <= fit.A.low <= fit.A.high <= 1.0:
        return f"A from {fit.A.low:g} to {fit.A.high:g} is no pass rate"
    if outlook is None and not answer.collapse_check.broken:
        return "no outlook for a run that is not broken"
    uses = [] if answer.earlier is UNSET else answer.earlier
    named, wanted = [use.name for use in uses], [run.name for run in request.earlier]
    if named != wanted:
        return f"it weighs the earlier runs {_joined(named)}, asked with {_joined(wanted)}"
    probabilities: dict[str, float | None] = {"p_before_cmid": fit.p_before_cmid}
    if isinstance(answer.flat, Flat):
        probabilities |= {
            name: getattr(answer.flat, name) for name in ("share", "p_trend", "p_late", "p_gain")
        }
    if outlook is not None:
        if request.price is not None and outlook.best_block is None:
            return "no best block, which was asked for"
        if outlook.best_block is not None and outlook.best_block.compute < 0:
            return f"a block of {outlook.best_block.compute:g} tokens"
        if outlook.expected_gain is not UNSET and not -1.0 <= outlook.expected_gain <= 1.0:
            return f"an expected gain of {outlook.expected_gain:g}"
        probabilities["p_gain_above_min"] = outlook.p_gain_above_min
        if request.target is not None:
            probabilities["p_asymptote_above_target"] = outlook.p_asymptote_above_target
            if request.max_compute is not None:
                probabilities["p_target_at_max_compute"] = outlook.p_target_at_max_compute
    probabilities |= {f"the weight of the earlier run {use.name}": use.weight for use in uses}
    for name, p in probabilities.items():
        if p is None or not 0.0 <= p <= 1.0:
            return f"{name} is {p}"
    return ""


def _joined(names: Sequence[str]) -> str:
    text = ", ".join(names) or "(none)"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
