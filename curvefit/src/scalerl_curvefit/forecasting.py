"""What the fit says of compute that has not been spent yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .curve import FloatArray
from .errors import RequestError
from .fitting import DRAWS, Fit
from .fitting import draws as draw_curves
from .sampling import Draws, interval


@dataclass(frozen=True, slots=True)
class Forecast:
    """Reward at a compute.

    median, low, high: median and 90 % interval of what an evaluation there will show: the curve, the
    discrepancy beyond now, and the noise of one evaluation.
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

    Beyond now each draw departs from its curve by τ·log2(C/C_now)·N(0, 1), τ learned from the run's own
    past forecasts (`hindcast`); rewards are kept within [0, 1].

    Raises RequestError for compute that is not positive and finite, and for a bad number of draws.
    """
    compute = _checked(at)
    drawn = draw_curves(fitted, draws)
    curve_dc = rewards(fitted, drawn, compute)
    seen_dc = np.clip(curve_dc + (drawn.sigma * drawn.noise)[:, None], 0.0, 1.0)
    curve_low, median, curve_high = interval(curve_dc)
    low, _, high = interval(seen_dc)
    columns = zip(compute, median, low, high, curve_low, curve_high, strict=True)
    return [Forecast(*map(float, row)) for row in columns]


def rewards(fitted: Fit, drawn: Draws, compute: FloatArray) -> FloatArray:
    """(d, c) rewards of the draws at compute (c,), with the discrepancy beyond now, within [0, 1]."""
    doublings = np.maximum(np.log2(np.asarray(compute, dtype=np.float64) / fitted.now), 0.0)
    departure = drawn.discrepancy[:, None] * doublings
    return np.asarray(np.clip(drawn.reward(compute) + departure, 0.0, 1.0))


def _checked(at: Sequence[float]) -> FloatArray:
    compute = np.atleast_1d(np.asarray(at, dtype=np.float64))
    if compute.ndim != 1 or compute.size == 0:
        raise RequestError("give at least one compute to forecast at")
    bad = ~(np.isfinite(compute) & (compute > 0))
    if np.any(bad):
        raise RequestError(f"cannot forecast at compute {compute[bad][0]:g}; it must be positive and finite")
    return compute
