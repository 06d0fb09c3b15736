"""Forecasts of the reward at given compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .curve import FloatArray
from .errors import RequestError
from .fitting import DRAWS, Fit, forecast_pool
from .sampling import interval


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast of the reward at `compute`.

    Attributes:
        median, low, high: median and 90 % interval of an evaluation's reward there: forecast pool, departures and late rises
            beyond now, and the noise of one evaluation.
        curve_low, curve_high: 90 % interval of the reward itself, without the evaluation's noise.
    """

    compute: float
    median: float
    low: float
    high: float
    curve_low: float
    curve_high: float


def forecast(fitted: Fit, at: Sequence[float], draws: int = DRAWS) -> list[Forecast]:
    """Median and 90 % intervals at each compute in `at` (> 0), in the order given.

    Raises RequestError for compute that is not positive and finite, and for a bad number of draws.
    """
    compute = _checked(at)
    ahead = forecast_pool(fitted, draws)
    reward_dc = ahead.reward(compute)
    seen_dc = np.clip(reward_dc + (ahead.curves.sigma * ahead.noise)[:, None], 0.0, 1.0)
    curve_low, median, curve_high = interval(reward_dc)
    low, _, high = interval(seen_dc)
    columns = zip(compute, median, low, high, curve_low, curve_high, strict=True)
    return [Forecast(*map(float, row)) for row in columns]


def _checked(at: Sequence[float]) -> FloatArray:
    compute = np.atleast_1d(np.asarray(at, dtype=np.float64))
    if compute.ndim != 1 or compute.size == 0:
        raise RequestError("give at least one compute to forecast at")
    bad = ~(np.isfinite(compute) & (compute > 0))
    if np.any(bad):
        raise RequestError(f"cannot forecast at compute {compute[bad][0]:g}; it must be positive and finite")
    return compute
