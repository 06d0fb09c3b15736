"""Does an earlier alarm of the guard still stand? A fit that has seen a fall expects less, and alarms no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import Curve
from .guard import CONSECUTIVE, MIN_HISTORY, GuardResult, guard
from .settings import FitSettings

LEAST: Final = 0.01
"""How far under its promise the newest evaluation must lie for an alarm that outlives the evaluations it came
from: half of what autoscaling asks for by default as `minGain`, as its policy has it."""
DENSE: Final = 200
"""Up to so many evaluations the guard looks again after every one, as it did while the run went on."""
SPARSE: Final = 24
"""Looks at more of them, evenly spaced: a fit of so many points follows a fall but slowly."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A run fell below its own forecast and has not come back.

    points: of the segment, those before the fall, which the promise was made from. compute: of the
    first evaluation under it. floor: what the newest one then had to stay above. depth: how far the
    worst of them lay under. over: evaluations since then, those included.
    """

    points: int
    compute: float
    floor: float
    depth: float
    over: int


def standing_fall(curve: Curve, settings: FitSettings | None = None) -> Fall | None:
    """The first alarm of the guard that still stands at the last point, as the autoscaler would hold it.

    An alarm is over once the newest evaluation lies above its floor again and raises no new one; at the
    latest with the best evaluation of all, before which nothing is looked at.
    Looks at the last segment only. At the last point itself any alarm of `guard` counts, however small.
    """
    last = curve.segments()[-1].curve
    fallen: Fall | None = None
    for n in _looks(last):
        seen = guard(last.head(n), settings=settings)
        if seen.broken:
            if fallen is None and (n == len(last) or seen.floor[-1] - seen.seen[-1] >= LEAST):
                fallen = _fall(last, n, seen)
        elif fallen is not None and seen.seen[-1] >= fallen.floor:
            fallen = None
    return fallen


def _looks(last: Curve) -> list[int]:
    best = len(last) - 1 - int(np.argmax(last.reward[::-1]))
    first = max(last.first_trained + MIN_HISTORY + CONSECUTIVE, best + 2)
    if len(last) - first <= DENSE:
        return list(range(min(first, len(last)), len(last) + 1))
    return [int(n) for n in np.unique(np.linspace(first, len(last), SPARSE).round())]


def _fall(last: Curve, n: int, seen: GuardResult) -> Fall:
    before = n - CONSECUTIVE
    return Fall(
        points=before,
        compute=float(last.compute[before]),
        floor=seen.floor[-1],
        depth=max(floor - reward for floor, reward in zip(seen.floor, seen.seen, strict=True)),
        over=len(last) - before,
    )
