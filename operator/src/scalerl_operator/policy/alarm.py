"""Alarm: when a run counts as broken, and from when it no longer does. Pure."""

from __future__ import annotations

from typing import Final

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import GuardAnswer
from scalerl_operator.policy.facts import Alarm, History, Observation

MOST_TRUNCATED: Final = 0.10
HEALTHY_TRUNCATED: Final = 0.05
"""Truncation above 10 % precedes collapse, below 5 % is healthy (ScaleRL, §A [P])."""


LEAST_FALL: Final = 0.5
"""Of minGain: how far under the promise the newest evaluation must lie. Where evaluations vary more than
their samples explain, the promise is too narrow: over simulated healthy runs alarms went from 20 % to 7 %
by this, and of broken ones none was lost."""


IN_A_ROW: Final = 3
"""Evaluations that the guard looks at together."""


def alarm(spec: AutoscalingSpec, seen: Observation, history: History) -> tuple[Alarm | None, str]:
    """The alarm after this look, raised now or not yet over, and why. ``history.alarm`` is the one that stands.

    | kind | raised | over |
    |---|---|---|
    | not finite | the newest reward or truncation is no number | it is one |
    | curve | three evaluations in a row, all since somebody last let a broken run go on, fell below what the ones before them promised, the newest by half of minGain or more | the newest is above that promise again |
    | truncated | 10 % or more of the newest completions | below 5 % |

    Over only where the trouble is: a fit that has seen the fall expects less and raises no alarm any more.
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
    standing = history.alarm
    guard = None if seen.forecast is None else seen.forecast.guard
    if (
        standing is not None
        and standing.kind == "curve"
        and standing.eval_version == seen.points.eval_version
    ):
        return _still_fallen(seen, standing, guard)
    new = sum(progress.version > history.forgiven for progress in seen.recent)
    if (
        guard is not None
        and guard.broken
        and new >= IN_A_ROW
        and _fall(guard) >= LEAST_FALL * float(spec.min_gain)
    ):
        floor = guard.floor[-1] if guard.floor else None
        return Alarm(kind="curve", floor=floor, eval_version=seen.points.eval_version), _words(guard)
    return None, ""


def _still_fallen(seen: Observation, standing: Alarm, guard: GuardAnswer | None) -> tuple[Alarm | None, str]:
    if guard is None:
        return standing, "the alarm stands until a forecast can be made again"
    if guard.broken:
        return standing, _words(guard)
    reward = None if seen.latest is None else seen.latest.reward
    if standing.floor is not None and reward is not None and reward < standing.floor:
        return standing, (
            f"the reward, {reward:.3f}, has not come back to {standing.floor:.3f}, where it fell below its forecast"
        )
    return None, ""


def _fall(guard: GuardAnswer) -> float:
    """How far the newest evaluation lies under what was promised; all the way where the guard does not say."""
    return guard.floor[-1] - guard.seen[-1] if guard.floor and guard.seen else 1.0


def _words(guard: GuardAnswer) -> str:
    return "; ".join(guard.reasons) or "the curve fell below its forecast"
