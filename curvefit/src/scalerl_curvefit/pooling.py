"""The forecast pool: a mixture (linear opinion pool) of forecasts, with model discrepancy and late rises.

No curve family fits every run, so the forecast is a mixture of three experts with fixed weights: the posterior of the
sigmoid, that of the power law, and the damped local trend. The weights and spreads forecast validation curves of
language models best when each source is left out in turn (docs/forecast.md). A mixture of forecasts that disagree is
wider than its errors, so each is moved towards the common mean, by `pool_spread`.

Two terms are added beyond the last point (*now*). The departure (model discrepancy) is Student's t, with a scale that grows
with each doubling of compute, shrinks as rewards approach 1, and grows with the misfit of the curve to its own points. Its floor
is one of the whole forecast: experts that disagree need less of it, and those of many points, whose posteriors are narrow, more.
A late rise is a second rise without a sign in the earlier points, at a constant rate per doubling.

Earlier runs of the same task (`earlier_runs`) add a fourth expert: their gains from the same compute on. Its weight is its
precision relative to that of the others, at one doubling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from .curve import FloatArray
from .posterior import Nodes
from .sampling import Draws, sample, systematic
from .settings import FitSettings, LateRises
from .trend import Trend

GOLDEN: Final = 0.5 * (5.0**0.5 - 1.0)
"""Golden ratio: the fractional parts of its multiples are evenly spread for any number of them."""
OWN_PRECISION_WEIGHT: Final = 0.5
"""Weight of the precision of the run's own forecasts; that of the earlier runs' gains has weight 1."""
MAX_EARLIER_WEIGHT: Final = 0.95
"""Largest weight of the earlier runs' gains in the pool."""
FLAT_RISE: Final = {LateRises.GAMES: 0.88}
"""Probability per doubling of a late rise after a flat doubling with room above it. Of game agents 17 curves had a doubling that
gained under FLAT_GAIN, more than FLAT_ROOM below 1 and near their best: in the mean over curves .88 of these doublings
were followed by a gain of .04 or more in the next one, and .86 to .93 with any one game left out. Language models creep."""
FLAT_GAIN: Final = 0.04
FLAT_ROOM: Final = 0.1
FLAT_REACH: Final = 0.4
"""Largest size of such a rise, as a share of the distance to 1: they took .08 to .39 of it, .19 in the median."""
MAX_KNOWN: Final = 4
"""Expected rewards are kept of questions about so many computes at most: a picture asks for hundreds."""
CLOSED_DOF: Final = 4.0
"""Degrees of freedom at which the distribution function of Student's t is taken in closed form, 20 times as fast."""
NORMAL_QUANTILES: Final = np.linspace(-5.0, 5.0, 101)
"""Student's t is computed at these normal quantiles, and interpolated linearly."""


@dataclass(frozen=True, slots=True, eq=False)
class GainPrior:
    """Distribution of the gain beyond now, from earlier runs: Student's t.

    Attributes:
        doublings: (k,) doublings of compute beyond now, from 0.
        mean, scale: (k,) location and scale of the gain at each of `doublings`; linear between them, constant beyond.
        dof: degrees of freedom.
        late_rise: probability, per doubling, of a rise that no earlier run had.
        strength: factor of the expert's weight, from 0 to 1.
    """

    doublings: FloatArray
    mean: FloatArray
    scale: FloatArray
    dof: float
    late_rise: float
    strength: float

    def at(self, doublings: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Location and scale of the gain at these doublings beyond now."""
        return np.interp(doublings, self.doublings, self.mean), np.interp(
            doublings, self.doublings, self.scale
        )


@dataclass(frozen=True, slots=True, eq=False)
class ForecastPool:
    """Draws of a run's future rewards; all arrays are (d,), one entry per draw.

    Attributes:
        curves: fitted curves; used up to now by all draws, and beyond by those whose expert is a family.
        expert: index of the family; the number of families for the trend; that number plus one for the earlier runs.
        misfit: root mean square of the fitted curve's residuals beyond noise.
        expert_sd: sd of the experts' rewards at one doubling beyond now, without earlier runs.
        gains: distribution of the earlier runs' gains; None without earlier runs.
        departure: deviation from the expected reward, in units of `departure_scale`.
        late_rise, reach: probability of a late rise per doubling, and its largest size.
        rise_after, rise: doublings beyond now at which the late rise begins, and its size.
        noise: noise of one evaluation, standard normal.
        known: what `expected` has been asked for at single computes; most answers need only now and twice the compute.
    """

    curves: Draws
    expert: NDArray[np.intp]
    trend: Trend
    now: float
    settings: FitSettings
    misfit: float
    expert_sd: float
    gains: GainPrior | None
    departure: FloatArray
    late_rise: float
    reach: float
    rise_after: FloatArray
    rise: FloatArray
    noise: FloatArray
    known: dict[float, FloatArray] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.curves)

    @property
    def from_earlier_runs(self) -> NDArray[np.bool_]:
        """(d,) whether the expert of a draw is the earlier runs."""
        return np.asarray(self.expert == len(self.curves.families) + 1)

    @property
    def departure_rate(self) -> float:
        """Scale of the departure per doubling: what the experts lack to a floor, a share of the headroom, the curve's misfit so far."""
        settings = self.settings
        lacking = max(settings.departure**2 - self.expert_sd**2, 0.0)
        headroom = settings.departure_headroom * self.trend.headroom
        return float(np.sqrt(lacking + headroom**2 + (settings.misfit * self.misfit) ** 2))

    @property
    def departure_sd(self) -> float:
        """sd of the departure per doubling."""
        return self.departure_rate / math.sqrt(1.0 - 2.0 / self.settings.departure_dof)

    @property
    def forecast_scale(self) -> float:
        """Scale per doubling of a Student's t, that of departures, with the variance of departures and experts together."""
        return math.hypot(
            self.departure_rate, self.expert_sd * math.sqrt(1.0 - 2.0 / self.settings.departure_dof)
        )

    @property
    def mean_late_rise(self) -> float:
        """Probability of a late rise per doubling, over all draws."""
        if self.gains is None:
            return self.late_rise
        share = float(np.mean(self.from_earlier_runs))
        return share * self.gains.late_rise + (1.0 - share) * self.late_rise

    def doublings(self, compute: FloatArray) -> FloatArray:
        """Doublings from now to `compute`, at least 0."""
        return np.asarray(np.maximum(np.log2(np.maximum(compute, self.now) / self.now), 0.0))

    def expected(self, compute: FloatArray) -> FloatArray:
        """(d, c) rewards at compute (c,), without departures, late rises and evaluation noise.

        Before now they are those of the fitted curves, from now on those of the experts, moved towards their mean.
        """
        if compute.size > MAX_KNOWN:
            return self._expected(compute).T
        if len(self.known) > 2 * MAX_KNOWN:
            self.known.clear()
        wanted = [c for c in compute.tolist() if c not in self.known]
        if wanted:
            self.known.update(zip(wanted, self._expected(np.array(wanted)), strict=True))
        return np.stack([self.known[c] for c in compute.tolist()]).T

    def _expected(self, compute: FloatArray) -> FloatArray:
        """`expected`, as (c, d)."""
        reward_cd = self.curves.reward(compute).T
        ahead = compute >= self.now
        if not ahead.any():
            return reward_cd
        doublings_c, families = self.doublings(compute[ahead]), len(self.curves.families)
        ahead_cd = reward_cd[ahead]
        of_expert = [np.flatnonzero(self.expert == expert) for expert in range(families + 2)]
        by_trend = self.settings.trend_damping * self.trend.gain * doublings_c
        ahead_cd[:, of_expert[families]] = (self.trend.level + by_trend)[:, None]
        if self.gains is not None:
            ahead_cd[:, of_expert[-1]] = (self.trend.level + self.gains.at(doublings_c)[0])[:, None]
        mean_c = ahead_cd.mean(axis=1)
        for of in of_expert:
            if of.size:
                apart_c = mean_c - ahead_cd[:, of].mean(axis=1)
                ahead_cd[:, of] += ((1.0 - self.settings.pool_spread) * apart_c)[:, None]
        reward_cd[ahead] = ahead_cd
        return reward_cd

    def departure_scale(self, compute: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(c,) scales of the departure at compute (c,): of the run's own forecasts, and of the earlier runs' gains."""
        doublings_c = self.doublings(compute)
        own = self.departure_rate * doublings_c
        return own, own if self.gains is None else self.gains.at(doublings_c)[1]

    def reward(self, compute: FloatArray) -> FloatArray:
        """(d, c) rewards at compute (c,) with departures and late rises, within [0, 1]."""
        doublings_c1 = self.doublings(compute)[:, None]
        reward_cd = self.expected(compute).T
        own_c, earlier_c = self.departure_scale(compute)
        scale_cd = own_c[:, None]
        if self.gains is not None:
            scale_cd = np.where(self.from_earlier_runs, earlier_c[:, None], scale_cd)
        reward_cd += self.departure * scale_cd
        reward_cd += self.rise * (doublings_c1 > self.rise_after)
        return np.clip(reward_cd, 0.0, 1.0, out=reward_cd).T

    def evaluation(self, compute: FloatArray) -> FloatArray:
        """(d, c) rewards of one evaluation at compute (c,): `reward` with its noise, within [0, 1]."""
        return np.clip(self.reward(compute).T + self.curves.sigma * self.noise, 0.0, 1.0).T


def sample_forecast_pool(
    nodes: Sequence[Nodes],
    trend: Trend,
    now: float,
    settings: FitSettings,
    n: int,
    random: np.random.Generator,
    gains: GainPrior | None = None,
    late_rise: float | None = None,
    misfit: float = 0.0,
) -> ForecastPool:
    """`n` draws of the forecast pool. Draws of the trend have curves of the first family up to now.

    Args:
        gains: distribution of the earlier runs' gains.
        late_rise: probability of a late rise per doubling, in place of the settings'.
        misfit: root mean square of the fitted curve's residuals beyond noise.
    """
    own_rate, reach = _rise(settings, trend)
    if late_rise is None or gains is None:
        late_rise = own_rate
    elif own_rate > settings.late_rise:  # flat; the earlier runs' rate is that of doublings of any kind
        late_rise = own_rate + gains.strength * (late_rise - own_rate)
        reach += gains.strength * (trend.headroom - reach)
    counts = systematic(np.array(settings.pool), n, random)
    own, by_trend = counts[:-1].copy(), int(counts[-1])
    own[0] += by_trend
    curves = sample(nodes, own.astype(np.float64), n, random)
    expert = curves.family.copy()
    expert[np.flatnonzero(expert == 0)[:by_trend]] = len(nodes)
    # Stratified instead of random: late rises are rare, and the upper end of an interval depends on few of them. The golden
    # ratio stratifies the sizes of those before any given compute too.
    order = random.permutation(n)
    late, sizes = _strata(n)
    with np.errstate(divide="ignore"):
        rise_after = late[order] / np.log1p(-late_rise)
    drawn = ForecastPool(
        curves=curves,
        expert=expert,
        trend=trend,
        now=now,
        settings=settings,
        misfit=misfit,
        expert_sd=0.0,
        gains=None,
        departure=_departures(settings.departure_dof, n)[random.permutation(n)],
        late_rise=late_rise,
        reach=reach,
        rise_after=rise_after,
        rise=reach * sizes[order],
        noise=random.standard_normal(n),
    )
    spread = replace(drawn, expert_sd=float(np.std(drawn.expected(np.array([2.0 * now])))))
    spread.known.update(drawn.known)
    return spread if gains is None else _with_gains(spread, gains, random)


def _rise(settings: FitSettings, trend: Trend) -> tuple[float, float]:
    """Probability of a late rise per doubling, and its largest size: higher after a flat doubling, where it was counted so."""
    flat = FLAT_RISE.get(settings.rises)
    if flat is None or trend.gain >= FLAT_GAIN or trend.headroom <= FLAT_ROOM:
        return settings.late_rise, trend.headroom
    return flat, FLAT_REACH * trend.headroom


@lru_cache(maxsize=4)
def _strata(n: int) -> tuple[FloatArray, FloatArray]:
    """(n,) ln of the probability of no late rise up to the one of each draw, and the sizes as shares of the largest."""
    middle = np.arange(n) + 0.5
    return np.log1p(-middle / n), np.modf(middle * GOLDEN)[0]


@lru_cache(maxsize=4)
def _departures(dof: float, n: int) -> FloatArray:
    """(n,) evenly spaced quantiles of Student's t."""
    return np.asarray(stdtrit(dof, (np.arange(n) + 0.5) / n))


def p_departure_below(dof: float, x: FloatArray) -> FloatArray:
    """Cumulative distribution function of Student's t, at x of any shape."""
    if dof != CLOSED_DOF:
        return np.asarray(ndtr(x) if np.isinf(dof) else stdtr(dof, x))
    share = 0.25 * x * x
    share /= 1.0 + share
    return np.asarray(0.5 + 0.25 * np.sign(x) * np.sqrt(share) * (3.0 - share))


def _with_gains(own: ForecastPool, gains: GainPrior, random: np.random.Generator) -> ForecastPool:
    """The pool with a random part of its draws, from all experts, reassigned to the earlier runs."""
    n, variance = len(own), own.expert_sd**2 + own.departure_sd**2
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
