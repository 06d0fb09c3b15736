"""Alarm: when a run counts as broken, and from when it no longer does. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_operator.autoscaling import method_1
from scalerl_operator.autoscaling.models import Alarm, History, Observation

MOST_TRUNCATED: Final = 0.10
HEALTHY_TRUNCATED: Final = 0.05
"""Truncation above 10 % precedes collapse, below 5 % is healthy (ScaleRL, §A [P])."""


def alarm(spec: AutoscalingSpec, seen: Observation, history: History) -> tuple[Alarm | None, str]:
    """The alarm after this look, raised now or not yet over, and why. ``history.alarm`` is the one that stands.

    | kind | raised | over |
    |---|---|---|
    | not finite | the newest reward or truncation is no number | it is one |
    | curve | the mean of three evaluations, all since somebody last let a broken run go on, is below the best such mean by more than noise and by half of minGain or more | it is within noise of the best, or an evaluation is the best so far |
    | truncated | 10 % or more of the newest completions | below 5 % |

    The sidecar finds a fall, from the points alone; without an answer an alarm of the same evaluation set stands.
    """
    latest, standing = seen.latest, history.alarm
    if latest is not None and (latest.reward is None or latest.truncated is None):
        what = "reward" if latest.reward is None else "truncation"
        return Alarm(kind="not finite"), f"the {what} of version {latest.version} is not a finite number"
    fallen, why = _fallen(spec, seen, history)
    if fallen is not None:
        return fallen, why
    threshold = HEALTHY_TRUNCATED if standing is not None and standing.kind == "truncated" else MOST_TRUNCATED
    if latest is not None and latest.truncated is not None and latest.truncated >= threshold:
        return Alarm(kind="truncated"), (
            f"{latest.truncated:.1%} of the completions of version {latest.version} are cut off at the length "
            f"limit: {MOST_TRUNCATED:.0%} precedes collapse, below {HEALTHY_TRUNCATED:.0%} is healthy"
        )
    return None, ""


def is_healthy(seen: Observation) -> bool:
    """Whether few of the newest completions are cut off at the length limit."""
    latest = seen.latest
    return latest is not None and latest.truncated is not None and latest.truncated < HEALTHY_TRUNCATED


def _fallen(spec: AutoscalingSpec, seen: Observation, history: History) -> tuple[Alarm | None, str]:
    standing, answer = history.alarm, seen.forecast
    if answer is None:
        if (
            standing is not None
            and standing.kind == "curve"
            and standing.eval_version == seen.points.eval_version
        ):
            return standing, "the alarm stands until a forecast can be made again"
        return None, ""
    if answer.method is msgspec.UNSET:
        return method_1.fallen(spec, seen, history, answer.guard)
    if answer.guard.fall is msgspec.UNSET:
        return None, ""
    return Alarm(kind="curve", eval_version=seen.points.eval_version), "; ".join(answer.guard.reasons)
