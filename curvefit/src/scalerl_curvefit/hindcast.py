"""What forecasts of this run would have been, made at past moments, beside what came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import Curve
from .errors import CurveError
from .fitting import fit, forecast_pool
from .sampling import interval
from .settings import FitSettings

LOOKBACK_FACTORS: Final = (4.0, 2.0)
"""Past moments, as C_now divided by these."""
MIN_POINTS: Final = 8
"""Points at compute > 0 that a past moment needs to be worth a forecast."""


@dataclass(frozen=True, slots=True)
class Hindcast:
    """A forecast made with the points up to compute `made_at` for the last one within the doubling after it.

    until, seen: compute and reward of that one. median, low, high: as `Forecast` has them. below: probability of a
    lower reward than `seen`.
    """

    made_at: float
    until: float
    seen: float
    median: float
    low: float
    high: float
    below: float


def hindcasts(curve: Curve, settings: FitSettings | None = None) -> tuple[Hindcast, ...]:
    """Forecasts made at a quarter and at half of the present compute of one segment, where points suffice.

    Each takes as long as a fit.
    """
    made = []
    for back in LOOKBACK_FACTORS:
        count = int(np.searchsorted(curve.compute, curve.now / back * (1 + 1e-9), side="right"))
        until = (
            int(np.searchsorted(curve.compute, 2.0 * curve.compute[count - 1] * (1 + 1e-9), side="right")) - 1
        )
        if count - curve.first_trained < MIN_POINTS or until < count:
            continue
        head = curve.head(count)
        try:
            then = fit(head, settings)
        except CurveError:  # nothing had changed yet
            continue
        seen = float(curve.reward[until])
        drawn = forecast_pool(then).evaluation(curve.compute[until : until + 1])[:, 0]
        low, median, high = (float(q) for q in interval(drawn))
        made.append(
            Hindcast(
                head.now, float(curve.compute[until]), seen, median, low, high, float(np.mean(drawn < seen))
            )
        )
    return tuple(made)
