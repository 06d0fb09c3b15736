"""When a run counts as broken, and when it no longer does. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import GuardAnswer
from scalerl_operator.autoscaling.models import Alarm, History, Observation

MOST_TRUNCATED: Final = 0.10
HEALTHY_TRUNCATED: Final = 0.05
"""Truncation above 10 % precedes collapse, below 5 % is healthy (ScaleRL, §A [P])."""
METHOD_1_LEAST_FALL: Final = 0.5
"""Least distance of the newest evaluation under the forecast, as a share of minGain."""
METHOD_1_EVALUATIONS: Final = 3
"""Evaluations that method 1 compared with the forecast."""


def alarm(spec: AutoscalingSpec, observation: Observation, history: History) -> tuple[Alarm | None, str]:
    """The alarm after this observation, and why. ``history.alarm`` is the one that was active before.

    | kind | raised | cleared |
    |---|---|---|
    | not finite | the newest reward or truncation is not finite | it is finite |
    | curve | the mean of three evaluations, all since a broken run was last resumed, is below the best such mean by more than noise and by a quarter of minGain or more | it is within noise of the best, or an evaluation is the best so far |
    | truncated | 10 % or more of the newest completions are cut off | below 5 % |

    The sidecar detects the fall of a curve from the points. Without its answer, an alarm on the same evaluation set stays.
    """
    latest, active = observation.latest, history.alarm
    if latest is not None and (latest.reward is None or latest.truncated is None):
        what = "reward" if latest.reward is None else "truncation"
        return Alarm(kind="not finite"), f"the {what} of version {latest.version} is not a finite number"
    fallen, why = _curve_alarm(spec, observation, history)
    if fallen is not None:
        return fallen, why
    threshold = HEALTHY_TRUNCATED if active is not None and active.kind == "truncated" else MOST_TRUNCATED
    if latest is not None and latest.truncated is not None and latest.truncated >= threshold:
        return Alarm(kind="truncated"), (
            f"{latest.truncated:.1%} of the completions of version {latest.version} are cut off at the length "
            f"limit: {MOST_TRUNCATED:.0%} precedes collapse, below {HEALTHY_TRUNCATED:.0%} is healthy"
        )
    return None, ""


def is_healthy(observation: Observation) -> bool:
    """Whether few of the newest completions are cut off at the length limit."""
    latest = observation.latest
    return latest is not None and latest.truncated is not None and latest.truncated < HEALTHY_TRUNCATED


def small_fall(guard: GuardAnswer) -> str:
    """The fall for which method 1 gave no outlook, although it was too small for an alarm; empty without one."""
    return f"{'; '.join(guard.reasons)}, too little for an alarm" if guard.broken and guard.reasons else ""


def _curve_alarm(
    spec: AutoscalingSpec, observation: Observation, history: History
) -> tuple[Alarm | None, str]:
    active, answer, eval_version = history.alarm, observation.forecast, observation.points.eval_version
    if active is not None and (active.kind, active.eval_version) != ("curve", eval_version):
        active = None
    if answer is None:
        return active, "the alarm stands until a forecast can be made again"
    if answer.method is msgspec.UNSET:
        return _method_1_alarm(spec, observation, history.forgiven, active, answer.guard)
    if answer.guard.fall is msgspec.UNSET:
        return None, ""
    return Alarm(kind="curve", eval_version=eval_version), "; ".join(answer.guard.reasons)


def _method_1_alarm(
    spec: AutoscalingSpec, observation: Observation, forgiven: int, active: Alarm | None, guard: GuardAnswer
) -> tuple[Alarm | None, str]:
    """The alarm by method 1, so that its records replay.

    It compared the last three evaluations with the 5 % quantile of a forecast made without them.
    """
    reasons = "; ".join(guard.reasons) or "the curve fell below its forecast"
    if active is not None:
        if guard.broken:
            return active, reasons
        reward = None if observation.latest is None else observation.latest.reward
        if active.floor is not None and reward is not None and reward < active.floor:
            return active, (
                f"the reward, {reward:.3f}, has not come back to {active.floor:.3f}, where it fell below its forecast"
            )
        return None, ""
    new = sum(progress.version > forgiven for progress in observation.recent)
    # An answer without the numbers counts as a complete fall.
    fall = guard.floor[-1] - guard.seen[-1] if guard.floor and guard.seen else 1.0
    if guard.broken and new >= METHOD_1_EVALUATIONS and fall >= METHOD_1_LEAST_FALL * float(spec.min_gain):
        floor = guard.floor[-1] if guard.floor else None
        return Alarm(kind="curve", floor=floor, eval_version=observation.points.eval_version), reasons
    return None, ""
