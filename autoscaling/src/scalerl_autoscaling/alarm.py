"""When a run counts as broken, and when it no longer does. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from scalerl_autoscaling.models import Alarm, History, Observation

MAX_TRUNCATED: Final = 0.10
HEALTHY_TRUNCATED: Final = 0.05
"""Truncation above 10 % precedes collapse, below 5 % is healthy (ScaleRL, §A [P])."""


def alarm(observation: Observation, history: History) -> tuple[Alarm | None, str]:
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
    fallen, why = _curve_alarm(observation, history)
    if fallen is not None:
        return fallen, why
    threshold = HEALTHY_TRUNCATED if active is not None and active.kind == "truncated" else MAX_TRUNCATED
    if latest is not None and latest.truncated is not None and latest.truncated >= threshold:
        return Alarm(kind="truncated"), (
            f"{latest.truncated:.1%} of the completions of version {latest.version} are cut off at the length "
            f"limit: {MAX_TRUNCATED:.0%} precedes collapse, below {HEALTHY_TRUNCATED:.0%} is healthy"
        )
    return None, ""


def is_healthy(observation: Observation) -> bool:
    """Whether few of the newest completions are cut off at the length limit."""
    latest = observation.latest
    return latest is not None and latest.truncated is not None and latest.truncated < HEALTHY_TRUNCATED


def _curve_alarm(observation: Observation, history: History) -> tuple[Alarm | None, str]:
    active, answer, eval_version = history.alarm, observation.forecast, observation.points.eval_version
    if active is not None and (active.kind, active.eval_version) != ("curve", eval_version):
        active = None
    if answer is None:
        return active, "the alarm stands until a forecast can be made again"
    if answer.collapse_check.collapse is msgspec.UNSET:
        return None, ""
    return Alarm(kind="curve", eval_version=eval_version), "; ".join(answer.collapse_check.reasons)
