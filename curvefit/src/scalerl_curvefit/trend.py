"""The local trend: where the rewards are now and what the last doubling of compute gained, without a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import FloatArray
from .settings import FitSettings

FEWEST: Final = 3
"""Points that the gain of the last doubling is taken from, if need be from before it."""


@dataclass(frozen=True, slots=True)
class Trend:
    """level: of the rewards now. gain: over the last doubling of compute, by least squares in log2 C."""

    level: float
    gain: float

    @property
    def headroom(self) -> float:
        """Distance from the level to the highest reward, 1."""
        return 1.0 - min(max(self.level, 0.0), 1.0)


def trend(compute: FloatArray, reward: FloatArray, settings: FitSettings) -> Trend:
    """The trend at the last of these points (n,), n ≥ 3, all at compute > 0.

    The level is a line through all points at C_now, a point h doublings ago weighing exp(−h/trend_window): many
    evaluations in the last of compute average their noise, few keep the newest.
    """
    doublings = np.log2(compute / compute[-1])
    level, _ = _line(doublings, reward, np.exp(doublings / settings.trend_window))
    last = max(int(np.sum(doublings >= -1.001)), FEWEST)
    _, gain = _line(doublings[-last:], reward[-last:], np.ones(last))
    return Trend(level, gain)


def _line(x: FloatArray, y: FloatArray, weight: FloatArray) -> tuple[float, float]:
    """Value at x = 0 and slope of the weighted least-squares line."""
    weight = weight / weight.sum()
    x_mean, y_mean = float(weight @ x), float(weight @ y)
    off = x - x_mean
    slope = float(weight @ (off * (y - y_mean)) / (weight @ (off * off)))
    return y_mean - slope * x_mean, slope
