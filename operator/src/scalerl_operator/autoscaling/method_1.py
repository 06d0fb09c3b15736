"""The rules that decisions on answers of method 1 were made by, kept so that their records replay. Pure.

Method 1 compared the last three evaluations with the 5 % quantile of a forecast made without them.
"""

from __future__ import annotations

from typing import Final

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import GuardAnswer
from scalerl_operator.autoscaling.models import Alarm, History, Observation

LEAST_FALL: Final = 0.5
"""Of minGain: how far under the forecast the newest evaluation had to lie."""
IN_A_ROW: Final = 3
"""Evaluations that were compared together."""
STOP_BELOW: Final = 0.1
RELEASE_AT: Final = 0.2
"""P(gain at the horizon > minGain) that voted for and against a stop; late rises were not in it."""


def fallen(
    spec: AutoscalingSpec, seen: Observation, history: History, guard: GuardAnswer
) -> tuple[Alarm | None, str]:
    """The alarm of a fall below the forecast, raised now or not yet over, and why."""
    standing = history.alarm
    if (
        standing is not None
        and standing.kind == "curve"
        and standing.eval_version == seen.points.eval_version
    ):
        return _still_fallen(seen, standing, guard)
    new = sum(progress.version > history.forgiven for progress in seen.recent)
    if guard.broken and new >= IN_A_ROW and _fall(guard) >= LEAST_FALL * float(spec.min_gain):
        floor = guard.floor[-1] if guard.floor else None
        return Alarm(kind="curve", floor=floor, eval_version=seen.points.eval_version), _words(guard)
    return None, ""


def too_little(guard: GuardAnswer) -> str:
    """Why there was no outlook for a run whose fall was too small for an alarm; empty if it had not fallen."""
    return f"{'; '.join(guard.reasons)}, too little for an alarm" if guard.broken and guard.reasons else ""


def _still_fallen(seen: Observation, standing: Alarm, guard: GuardAnswer) -> tuple[Alarm | None, str]:
    if guard.broken:
        return standing, _words(guard)
    reward = None if seen.latest is None else seen.latest.reward
    if standing.floor is not None and reward is not None and reward < standing.floor:
        return standing, (
            f"the reward, {reward:.3f}, has not come back to {standing.floor:.3f}, where it fell below its forecast"
        )
    return None, ""


def _fall(guard: GuardAnswer) -> float:
    """How far the newest evaluation lay under the forecast; all the way where the guard did not say."""
    return guard.floor[-1] - guard.seen[-1] if guard.floor and guard.seen else 1.0


def _words(guard: GuardAnswer) -> str:
    return "; ".join(guard.reasons) or "the curve fell below its forecast"
