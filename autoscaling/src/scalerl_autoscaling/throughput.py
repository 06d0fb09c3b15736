"""A run's pace, the elasticity of the pace in devices, and the compute within its limits. Pure.

Medians over the intervals between evaluations, so that one jump of a clock, one restart or one slow step does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Final

from msgspec import UNSET

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_autoscaling.models import History, Observation, Pace, Progress

INTERVALS: Final = 3
"""Fewest intervals between evaluations for a pace: one outlier cannot move the median of three."""
MIN_CHANGE: Final = 0.02
"""Change of ln(devices) under which an elasticity is only noise."""


def pace(recent: Sequence[Progress], since: float = -math.inf) -> Pace | None:
    """The pace over the intervals that began at ``since`` or later; None with fewer than ``INTERVALS`` in which all values rose."""
    good = [
        (
            b.tokens - a.tokens,
            b.seconds - a.seconds,
            b.device_seconds - a.device_seconds,
            b.version - a.version,
        )
        for a, b in pairwise(recent)
        if a.seconds >= since
    ]
    good = [interval for interval in good if min(interval) > 0]
    if len(good) < INTERVALS:
        return None
    return Pace(
        tokens_per_second=median(tokens / seconds for tokens, seconds, _, _ in good),
        devices=median(devices / seconds for _, seconds, devices, _ in good),
        tokens_per_step=median(tokens / steps for tokens, _, _, steps in good),
        intervals=len(good),
    )


def settled_pace(observation: Observation, history: History) -> Pace | None:
    """The pace with exactly the present generators."""
    return None if history.ready_since is None else pace(observation.recent, history.ready_since)


def pace_now(observation: Observation, history: History) -> Pace | None:
    """The pace with the present generators; over all recent evaluations while these are too few."""
    return settled_pace(observation, history) or pace(observation.recent)


def elasticity(before: Pace, after: Pace) -> float | None:
    """d ln(tokens/s) / d ln(devices); None if the devices hardly changed.

    >>> slow = Pace(tokens_per_second=100, devices=4, tokens_per_step=1, intervals=3)
    >>> fast = Pace(tokens_per_second=200, devices=8, tokens_per_step=1, intervals=3)
    >>> elasticity(slow, fast)
    1.0
    """
    devices = math.log(after.devices / before.devices)
    if abs(devices) < MIN_CHANGE:
        return None
    return math.log(after.tokens_per_second / before.tokens_per_second) / devices


@dataclass(frozen=True)
class Remaining:
    """What is left of the limits; None is no limit.

    Attributes:
        deadline_note: why the deadline was left out; empty if it was not.
    """

    steps: float | None
    seconds: float | None
    device_seconds: float | None
    deadline_note: str = ""
    tokens: float | None = None


def remaining(spec: AutoscalingSpec, observation: Observation, history: History) -> Remaining:
    """What is left of budget, deadline and ``maxDeviceHours``, never below 0."""
    limits, spent = observation.limits, observation.spent
    own_seconds = spent.seconds - (spent.inherited_seconds or 0.0)
    own_device_seconds = spent.device_seconds - (spent.inherited_device_seconds or 0.0)
    seconds = [] if limits.seconds is None else [limits.seconds - own_seconds]
    note = ""
    if spec.deadline is not None:
        if observation.unix_seconds < history.unix_seconds:
            note = "the clock went back, so the deadline does not count this time"
        else:
            seconds.append(datetime.fromisoformat(spec.deadline).timestamp() - observation.unix_seconds)
    hours = [float(h) for h in (limits.device_hours, spec.max_device_hours) if h is not None]
    tokens = None
    if limits.tokens is not UNSET and spent.tokens is not UNSET:
        tokens = max(0.0, limits.tokens - spent.tokens)
    return Remaining(
        steps=None if limits.steps is None else max(0.0, float(limits.steps - spent.steps)),
        seconds=max(0.0, min(seconds)) if seconds else None,
        device_seconds=max(0.0, 3600 * min(hours) - own_device_seconds) if hours else None,
        deadline_note=note,
        tokens=tokens,
    )


def reach(now: Pace, limits: Remaining, more_devices: float = 0.0, elastic: float = 1.0) -> float | None:
    """Compute within the limits with so many more devices, in tokens; None if nothing limits it.

    tokens/s grow by (devices'/devices)^elasticity. With an elasticity under 1, more devices get less compute out of a budget
    of device-hours; they help only against a limit of time.
    """
    factor = (now.devices + more_devices) / now.devices
    speed = now.tokens_per_second * factor**elastic
    within = [] if limits.tokens is None else [limits.tokens]
    if limits.steps is not None:
        within.append(limits.steps * now.tokens_per_step)
    if limits.seconds is not None:
        within.append(limits.seconds * speed)
    if limits.device_seconds is not None:
        within.append(limits.device_seconds * speed / (now.devices + more_devices))
    return min(within) if within else None
