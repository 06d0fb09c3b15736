"""What may come beyond now: a pool of forecasts, with what no curve announces.

No shape holds on every run, so that a forecast is a mixture with fixed weights of three: the sigmoid's posterior, the
power law's, and the local trend, damped. Their weights and spreads are those that forecast validation curves of
language models best where each source is left out in turn (docs/forecast.md). Mixed as they are, three forecasts that
disagree are wider together than their errors; each is moved towards the common mean, by `pool_spread`.

Two things are added beyond now. A departure, normal, with an sd that grows with each doubling of compute, smaller the
nearer rewards are to 1. And a late rise: some runs rise once more, unannounced, at a rate a doubling that does not
depend on what they did before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from .curve import FloatArray
from .posterior import Nodes
from .sampling import Draws, sample, systematic
from .settings import FitSettings
from .trend import Trend

GOLDEN: Final = 0.5 * (5.0**0.5 - 1.0)
"""Multiples of it, without their whole part, are evenly spread however many there are."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Courses of one run, drawn; all arrays (d,), one entry a draw.

    curves: up to now, and beyond it where they are not of the trend. expert: which forecast a draw is of, an index into
    the families, or their number for the trend. departure: from what is expected, per doubling beyond now.
    rise_after, rise: doublings beyond now at which a late rise comes, and its size. noise: standard normal, of one
    evaluation.
    """

    curves: Draws
    expert: NDArray[np.intp]
    trend: Trend
    now: float
    settings: FitSettings
    departure: FloatArray
    rise_after: FloatArray
    rise: FloatArray
    noise: FloatArray

    def __len__(self) -> int:
        return len(self.curves)

    def doublings(self, compute: FloatArray) -> FloatArray:
        """Of compute beyond now, 0 before."""
        return np.asarray(np.maximum(np.log2(np.maximum(compute, self.now) / self.now), 0.0))

    def expected(self, compute: FloatArray) -> FloatArray:
        """(d, c) rewards at compute (c,), without departures, late rises and evaluation noise.

        Before now the fitted curves; from now on the forecasts, moved towards their mean.
        """
        reward_dc = self.curves.reward(compute)
        ahead = compute >= self.now
        if not ahead.any():
            return reward_dc
        gains_c = self.settings.trend_damping * self.trend.gain * self.doublings(compute[ahead])
        ahead_dc = reward_dc[:, ahead]
        by_trend = self.expert == len(self.curves.families)
        ahead_dc[by_trend] = self.trend.level + gains_c
        mean_c = ahead_dc.mean(axis=0)
        for expert in range(len(self.curves.families) + 1):
            of = self.expert == expert
            if of.any():
                ahead_dc[of] += (1.0 - self.settings.pool_spread) * (mean_c - ahead_dc[of].mean(axis=0))
        reward_dc[:, ahead] = ahead_dc
        return reward_dc

    def reward(self, compute: FloatArray) -> FloatArray:
        """(d, c) rewards at compute (c,) with departures and late rises, within [0, 1]."""
        doublings_c = self.doublings(compute)
        reward_dc = self.expected(compute)
        reward_dc += self.departure[:, None] * doublings_c
        reward_dc += self.rise[:, None] * (doublings_c > self.rise_after[:, None])
        return np.asarray(np.clip(reward_dc, 0.0, 1.0, out=reward_dc))

    def evaluation(self, compute: FloatArray) -> FloatArray:
        """(d, c) what one evaluation at compute (c,) shows: `reward` and its noise, within [0, 1]."""
        return np.asarray(np.clip(self.reward(compute) + (self.curves.sigma * self.noise)[:, None], 0.0, 1.0))


def departure_sd(trend: Trend, settings: FitSettings) -> float:
    """sd of the departure, per doubling."""
    return float(np.hypot(settings.departure, settings.departure_headroom * trend.headroom))


def drawn_pool(
    nodes: Sequence[Nodes],
    trend: Trend,
    now: float,
    settings: FitSettings,
    n: int,
    random: np.random.Generator,
) -> Pool:
    """`n` courses. The trend's carry curves of the first family, which they are on until now."""
    weights = np.array(settings.pool)
    counts = systematic(weights, n, random)
    own, by_trend = counts[:-1].copy(), int(counts[-1])
    own[0] += by_trend
    curves = sample(nodes, own.astype(np.float64), n, random)
    expert = curves.family.copy()
    expert[np.flatnonzero(expert == 0)[:by_trend]] = len(nodes)
    # Evenly spread, not drawn: a late rise is rare, and the upper end of an interval rests on few of them. Those that
    # come before any given compute have sizes that are evenly spread too.
    order = random.permutation(n)
    with np.errstate(divide="ignore"):
        rise_after = np.log1p(-(order + 0.5) / n) / np.log1p(-settings.late_rise)
    return Pool(
        curves=curves,
        expert=expert,
        trend=trend,
        now=now,
        settings=settings,
        departure=departure_sd(trend, settings) * ndtri((random.permutation(n) + 0.5) / n),
        rise_after=rise_after,
        rise=trend.headroom * np.modf((order + 0.5) * GOLDEN)[0],
        noise=random.standard_normal(n),
    )
