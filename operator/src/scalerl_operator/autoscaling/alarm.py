"""When a run counts as broken, and from when it no longer does. Pure."""

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
"""Of minGain: how far under the forecast the newest evaluation had to lie."""
METHOD_1_EVALUATIONS: Final = 3
"""That were compared together."""


def alarm(spec: AutoscalingSpec, observation: Observation, history: History) -> tuple[Alarm | None, str]:
    """The alarm after this observation, raised now or not yet over, and why. ``history.alarm`` is the active one.

    | kind | raised | over |
    |---|---|---|
    | not finite | the newest reward or truncation is no number | it is one |
    | curve | the mean of three evaluations, all since a broken run was last resumed, is below the best such mean by more than noise and by half of minGain or more | it is within noise of the best, or an evaluation is the best so far |
    | truncated | 10 % or more of the newest completions | below 5 % |

    The sidecar finds a fall, from the points alone; without an answer an alarm of the same evaluation set stands.
    """
    latest, active = observation.latest, history.alarm
    if latest is not None and (latest.reward is None or latest.truncated is None):
        what = "reward" if latest.reward is None else "truncation"
        return Alarm(kind="not finite"), f"the {what} of version {latest.version} is not a finite number"
    fallen, why = _fallen(spec, observation, history)
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


def too_small_fall(guard: GuardAnswer) -> str:
    """Why method 1 gave no outlook for a run whose fall was too small for an alarm; empty if it had not fallen."""
    return f"{'; '.join(guard.reasons)}, too little for an alarm" if guard.broken and guard.reasons else ""


def _fallen(spec: AutoscalingSpec, observation: Observation, history: History) -> tuple[Alarm | None, str]:
    active, answer = history.alarm, observation.forecast
    if answer is None:
        if (
            active is not None
            and active.kind == "curve"
            and active.eval_version == observation.points.eval_version
        ):
            return active, "the alarm stands until a forecast can be made again"
        return None, ""
    if answer.method is msgspec.UNSET:
        return _fallen_method_1(spec, observation, history, answer.guard)
    if answer.guard.fall is msgspec.UNSET:
        return None, ""
    return Alarm(kind="curve", eval_version=observation.points.eval_version), "; ".join(answer.guard.reasons)


def _fallen_method_1(
    spec: AutoscalingSpec, observation: Observation, history: History, guard: GuardAnswer
) -> tuple[Alarm | None, str]:
    """By the rules of method 1, so that its records replay.

    It compared the last three evaluations with the 5 % quantile of a forecast made without them.
    """
    active = history.alarm
    if (
        active is not None
        and active.kind == "curve"
        and active.eval_version == observation.points.eval_version
    ):
        return _still_fallen(observation, active, guard)
    new = sum(progress.version > history.forgiven for progress in observation.recent)
    if (
        guard.broken
        and new >= METHOD_1_EVALUATIONS
        and _fall(guard) >= METHOD_1_LEAST_FALL * float(spec.min_gain)
    ):
        floor = guard.floor[-1] if guard.floor else None
        return Alarm(kind="curve", floor=floor, eval_version=observation.points.eval_version), _reasons(guard)
    return None, ""


def _still_fallen(observation: Observation, active: Alarm, guard: GuardAnswer) -> tuple[Alarm | None, str]:
    if guard.broken:
        return active, _reasons(guard)
    reward = None if observation.latest is None else observation.latest.reward
    if active.floor is not None and reward is not None and reward < active.floor:
        return active, (
            f"the reward, {reward:.3f}, has not come back to {active.floor:.3f}, where it fell below its forecast"
        )
    return None, ""


def _fall(guard: GuardAnswer) -> float:
    """How far the newest evaluation lay under the forecast; all the way where the guard did not say."""
    return guard.floor[-1] - guard.seen[-1] if guard.floor and guard.seen else 1.0


def _reasons(guard: GuardAnswer) -> str:
    return "; ".join(guard.reasons) or "the curve fell below its forecast"
