"""Hindcasts: forecasts from the first points of a run, compared with the later ones."""

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
"""A hindcast is made at C_now divided by each of these."""
MIN_POINTS: Final = 8
"""Fewest points at compute > 0 for a hindcast."""


@dataclass(frozen=True, slots=True)
class Hindcast:
    """A forecast from the points up to compute `made_at` for the last point within the doubling after it.

    Attributes:
        until, observed: compute and reward of that point.
        median, low, high: as in `Forecast`.
        below: forecast probability of a lower reward than `observed`.
    """

    made_at: float
    until: float
    observed: float
    median: float
    low: float
    high: float
    below: float


def hindcasts(curve: Curve, settings: FitSettings | None = None) -> tuple[Hindcast, ...]:
    """Hindcasts from a quarter and from half of the compute of one segment, where there are enough points; each costs a fit."""
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
        except CurveError:  # all rewards equal so far
            continue
        observed = float(curve.reward[until])
        drawn = forecast_pool(then).evaluation(curve.compute[until : until + 1])[:, 0]
        low, median, high = (float(q) for q in interval(drawn))
        made.append(
            Hindcast(
                head.now,
                float(curve.compute[until]),
                observed,
                median,
                low,
                high,
                float(np.mean(drawn < observed)),
            )
        )
    return tuple(made)
