"""Does an earlier alarm of the guard still stand? A fit that has seen a fall expects less, and alarms no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import Curve
from .guard import CONSECUTIVE, MIN_HISTORY, GuardResult, guards
from .settings import DEFAULTS, FitSettings

LEAST: Final = 0.01
"""How far under its promise the newest evaluation must lie for an alarm that outlives the evaluations it came
from. Autoscaling asks for half of its `minGain`, which this is where a run leaves that at its default."""
LOOKS: Final = 200
"""Up to so many evaluations the guard looks again after each, as it did while the run went on; of more, at
so many evenly spaced ones, and at each between the last quiet look and the first alarm."""


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

    An alarm is over once the newest evaluation lies above its floor again and raises no new one. Being the
    best so far does not end it: a run that stalls under its promise creeps from one best to the next.
    Looks at the last segment only. At the last point itself any alarm of `guard` counts, however small.
    """
    last, settings = curve.segments()[-1].curve, settings or DEFAULTS
    counts = _counts(last)
    fallen: Fall | None = None
    quiet = counts[0] - 1
    for n, seen in zip(counts, guards(last, counts, settings), strict=True):
        if fallen is None and _alarms(last, n, seen):
            fallen = _first_fall(last, range(quiet + 1, n), settings) or _fall(last, n, seen)
        elif fallen is not None and not seen.broken and seen.seen[-1] >= fallen.floor:
            fallen = None
        quiet = n
    return fallen


def _counts(last: Curve) -> list[int]:
    """After how many evaluations to look."""
    first = min(last.first_trained + MIN_HISTORY + CONSECUTIVE, len(last))
    looks = min(len(last) - first + 1, LOOKS)
    return [int(n) for n in np.linspace(first, len(last), looks).round()]


def _alarms(last: Curve, n: int, seen: GuardResult) -> bool:
    return seen.broken and (n == len(last) or seen.floor[-1] - seen.seen[-1] >= LEAST)


def _first_fall(last: Curve, counts: Sequence[int], settings: FitSettings) -> Fall | None:
    for n, seen in zip(counts, guards(last, counts, settings), strict=True):
        if _alarms(last, n, seen):
            return _fall(last, n, seen)
    return None


def _fall(last: Curve, n: int, seen: GuardResult) -> Fall:
    before = n - CONSECUTIVE
    return Fall(
        points=before,
        compute=float(last.compute[before]),
        floor=seen.floor[-1],
        depth=max(floor - reward for floor, reward in zip(seen.floor, seen.seen, strict=True)),
        over=len(last) - before,
    )
