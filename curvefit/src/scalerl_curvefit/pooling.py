"""What may come beyond now: a pool of forecasts, with what no curve announces.

No shape holds on every run, so that a forecast is a mixture with fixed weights of three: the sigmoid's posterior, the
power law's, and the local trend, damped. Their weights and spreads are those that forecast validation curves of
language models best where each source is left out in turn (docs/forecast.md). Mixed as they are, three forecasts that
disagree are wider together than their errors; each is moved towards the common mean, by `pool_spread`.

Two things are added beyond now. A departure, normal, with an sd that grows with each doubling of compute, smaller the
nearer rewards are to 1. And a late rise: some runs rise once more, unannounced, at a rate a doubling that does not
depend on what they did before.

With earlier runs of the same task (`earlier`) there is a fourth forecast: what they gained from the same compute on. Its
weight is that of its precision beside the others', at one doubling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtrit

from .curve import FloatArray
from .posterior import Nodes
from .sampling import Draws, sample, systematic
from .settings import FitSettings
from .trend import Trend

GOLDEN: Final = 0.5 * (5.0**0.5 - 1.0)
"""Multiples of it, without their whole part, are evenly spread however many there are."""


OWN_PRECISION_WEIGHT: Final = 0.5
"""Weight of the precision of the run's own forecasts, beside 1 of the earlier runs' gains."""
MAX_EARLIER_WEIGHT: Final = 0.95
"""Weight that the earlier runs' gains have at most."""
NORMAL_QUANTILES: Final = np.linspace(-5.0, 5.0, 101)
"""Quantiles of Student's t are taken at these of the normal distribution, and linearly between."""


@dataclass(frozen=True, slots=True, eq=False)
class GainPrior:
    """What earlier runs gained beyond this compute: Student's t of `dof` degrees of freedom, with mean and scale at each
    of `doublings`, which start at 0; linear between, constant beyond.

    late_rise: probability in a doubling of one that no earlier run had. trust: from 0 to 1, in all of it."""

    doublings: FloatArray
    mean: FloatArray
    scale: FloatArray
    dof: float
    late_rise: float
    strength: float

    def at(self, doublings: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean and scale."""
        return np.interp(doublings, self.doublings, self.mean), np.interp(
            doublings, self.doublings, self.scale
        )


@dataclass(frozen=True, slots=True, eq=False)
class ForecastPool:
    """Draws of what one run may do; all arrays (d,), one entry a draw.

    curves: up to now, and beyond it where they are of a family. expert: which forecast a draw is of, an index into
    the families, their number for the trend, or one more for the earlier runs. departure: from what is expected, in units
    of `departure_scale`. late_rise: probability in a doubling. rise_after, rise: doublings beyond now at which a late
    rise comes, and its size. noise: standard normal, of one evaluation.
    """

    curves: Draws
    expert: NDArray[np.intp]
    trend: Trend
    now: float
    settings: FitSettings
    gains: GainPrior | None
    departure: FloatArray
    late_rise: float
    rise_after: FloatArray
    rise: FloatArray
    noise: FloatArray

    def __len__(self) -> int:
        return len(self.curves)

    @property
    def from_earlier_runs(self) -> NDArray[np.bool_]:
        """(d,) whether a draw is of the earlier runs' gains."""
        return np.asarray(self.expert == len(self.curves.families) + 1)

    @property
    def mean_late_rise(self) -> float:
        """Probability of a late rise in a doubling, over all draws."""
        if self.gains is None:
            return self.late_rise
        share = float(np.mean(self.from_earlier_runs))
        return share * self.gains.late_rise + (1.0 - share) * self.late_rise

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
        doublings_c, families = self.doublings(compute[ahead]), len(self.curves.families)
        ahead_dc = reward_dc[:, ahead]
        by_trend = self.settings.trend_damping * self.trend.gain * doublings_c
        ahead_dc[self.expert == families] = self.trend.level + by_trend
        if self.gains is not None:
            ahead_dc[self.from_earlier_runs] = self.trend.level + self.gains.at(doublings_c)[0]
        mean_c = ahead_dc.mean(axis=0)
        for expert in range(families + 2):
            of = self.expert == expert
            if of.any():
                ahead_dc[of] += (1.0 - self.settings.pool_spread) * (mean_c - ahead_dc[of].mean(axis=0))
        reward_dc[:, ahead] = ahead_dc
        return reward_dc

    def departure_scale(self, compute: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(c,) scales of the departure at compute (c,): normal, and Student's t where a draw is of the earlier runs."""
        doublings_c = self.doublings(compute)
        own = departure_sd(self.trend, self.settings) * doublings_c
        return own, own if self.gains is None else self.gains.at(doublings_c)[1]

    def reward(self, compute: FloatArray) -> FloatArray:
        """(d, c) rewards at compute (c,) with departures and late rises, within [0, 1]."""
        doublings_c = self.doublings(compute)
        reward_dc = self.expected(compute)
        own_c, earlier_c = self.departure_scale(compute)
        reward_dc += self.departure[:, None] * (
            own_c if self.gains is None else np.where(self.from_earlier_runs[:, None], earlier_c, own_c)
        )
        reward_dc += self.rise[:, None] * (doublings_c > self.rise_after[:, None])
        return np.asarray(np.clip(reward_dc, 0.0, 1.0, out=reward_dc))

    def evaluation(self, compute: FloatArray) -> FloatArray:
        """(d, c) what one evaluation at compute (c,) shows: `reward` and its noise, within [0, 1]."""
        return np.asarray(np.clip(self.reward(compute) + (self.curves.sigma * self.noise)[:, None], 0.0, 1.0))


def departure_sd(trend: Trend, settings: FitSettings) -> float:
    """sd of the departure, per doubling."""
    return float(np.hypot(settings.departure, settings.departure_headroom * trend.headroom))


def sample_forecast_pool(
    nodes: Sequence[Nodes],
    trend: Trend,
    now: float,
    settings: FitSettings,
    n: int,
    random: np.random.Generator,
    gains: GainPrior | None = None,
    late_rise: float | None = None,
) -> ForecastPool:
    """`n` draws. The trend's carry curves of the first family, which they are on until now.

    gains: of earlier runs. late_rise: in place of that of the settings.
    """
    late_rise = settings.late_rise if late_rise is None else late_rise
    counts = systematic(np.array(settings.pool), n, random)
    own, by_trend = counts[:-1].copy(), int(counts[-1])
    own[0] += by_trend
    curves = sample(nodes, own.astype(np.float64), n, random)
    expert = curves.family.copy()
    expert[np.flatnonzero(expert == 0)[:by_trend]] = len(nodes)
    # Evenly spread, not drawn: a late rise is rare, and the upper end of an interval rests on few of them. Those that
    # come before any given compute have sizes that are evenly spread too.
    order = random.permutation(n)
    with np.errstate(divide="ignore"):
        rise_after = np.log1p(-(order + 0.5) / n) / np.log1p(-late_rise)
    drawn = ForecastPool(
        curves=curves,
        expert=expert,
        trend=trend,
        now=now,
        settings=settings,
        gains=None,
        departure=ndtri((random.permutation(n) + 0.5) / n),
        late_rise=late_rise,
        rise_after=rise_after,
        rise=trend.headroom * np.modf((order + 0.5) * GOLDEN)[0],
        noise=random.standard_normal(n),
    )
    return drawn if gains is None else _with_gains(drawn, gains, random)


def _with_gains(own: ForecastPool, gains: GainPrior, random: np.random.Generator) -> ForecastPool:
    """The pool with some of its draws, those of all forecasts alike, given to the earlier runs'."""
    at, n = np.array([2.0 * own.now]), len(own)
    variance = float(np.var(own.expected(at)) + departure_sd(own.trend, own.settings) ** 2)
    scale = float(gains.at(np.ones(1))[1][0])
    given = round(
        n * gains.strength * min(1.0 / (1.0 + OWN_PRECISION_WEIGHT * scale**2 / variance), MAX_EARLIER_WEIGHT)
    )
    of = random.permutation(n)[:given]
    expert, departure = own.expert.copy(), own.departure.copy()
    expert[of] = len(own.curves.families) + 1
    spread = ndtri((np.arange(given) + 0.5) / max(given, 1))
    departure[of] = np.interp(spread, NORMAL_QUANTILES, stdtrit(gains.dof, ndtr(NORMAL_QUANTILES)))
    rise_after = own.rise_after.copy()
    rise_after[of] *= np.log1p(-own.late_rise) / np.log1p(-gains.late_rise)
    return replace(own, expert=expert, gains=gains, departure=departure, rise_after=rise_after)
