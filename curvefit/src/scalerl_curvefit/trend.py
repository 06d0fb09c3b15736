"""The local trend: present level and gain over the last doubling of compute, without a curve family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import FloatArray
from .settings import FitSettings

MIN_GAIN_POINTS: Final = 3
"""Fewest points for the gain over the last doubling; earlier points are added if needed."""
TINY: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Trend:
    """Level and gain at the last point.

    Attributes:
        level: smoothed reward now.
        gain: gain over the last doubling of compute, or over all points if they span less; by least squares in log2 C.
    """

    level: float
    gain: float

    @property
    def headroom(self) -> float:
        """Distance from the level to the highest reward, 1."""
        return 1.0 - min(max(self.level, 0.0), 1.0)


def trend(
    compute: FloatArray, reward: FloatArray, settings: FitSettings, trust: FloatArray | None = None
) -> Trend:
    """The trend at the last of these points (n,), n ≥ 3, all at compute > 0.

    Args:
        trust: (n,) weights of the points (`outliers`); 1 by default.

    The level is the value at C_now of a line through all points, with weight exp(−h/trend_window) for a point h doublings
    ago: dense evaluations are averaged, and among sparse ones the newest dominates.
    """
    doublings = np.log2(compute / compute[-1])
    trust = np.ones(doublings.size) if trust is None else trust
    level, _ = _line(doublings, reward, trust * np.exp(doublings / settings.trend_window))
    # Include the last point before the doubling: evaluations close together do not determine a slope.
    since = int(np.searchsorted(doublings, -0.999))
    last = max(doublings.size - max(since - 1, 0), MIN_GAIN_POINTS)
    _, slope = _line(doublings[-last:], reward[-last:], trust[-last:])
    return Trend(level, slope * min(1.0, -float(doublings[-last])))


def smoothed(doubling: FloatArray, reward: FloatArray, at: FloatArray, window: float) -> FloatArray:
    """(k,) rewards at log2 compute `at` (k,), by local linear regression with weight exp(−h/window) at h doublings."""
    off_kn = doubling - at[:, None]
    away_kn = np.abs(off_kn)
    weight_kn = np.exp((away_kn.min(axis=1, keepdims=True) - away_kn) / window)
    weight_kn /= weight_kn.sum(axis=1, keepdims=True)
    x_mean, y_mean = (weight_kn * off_kn).sum(axis=1), weight_kn @ reward
    centred_kn = weight_kn * (off_kn - x_mean[:, None])
    spread = (centred_kn * off_kn).sum(axis=1)
    slope = np.where(spread > TINY, centred_kn @ reward / np.maximum(spread, TINY), 0.0)
    return np.asarray(y_mean - slope * x_mean)


def _line(x: FloatArray, y: FloatArray, weight: FloatArray) -> tuple[float, float]:
    """Value at x = 0 and slope of the weighted least-squares line; slope 0 where all weight is on one x."""
    weight = weight / weight.sum()
    x_mean, y_mean = float(weight @ x), float(weight @ y)
    off = x - x_mean
    spread = float(weight @ (off * off))
    slope = float(weight @ (off * (y - y_mean))) / spread if spread > TINY else 0.0
    return y_mean - slope * x_mean, slope
