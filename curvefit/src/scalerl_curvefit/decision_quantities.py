"""Quantities for stop and grow decisions: expected gains, probabilities, compute to a target. The autoscaler decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from scipy.special import stdtr

from .curve import FloatArray
from .errors import RequestError
from .families import compute_share
from .fitting import Estimate, Fit, draws, forecast_pool
from .pooling import ForecastPool, p_departure_below

BLOCKS: Final = 32
"""Number of sizes that `best_block` tries, from 1 % of now to the horizon."""
BLOCK_DRAWS: Final = 500
"""Draws for the expected gain of a block; a mean needs fewer than a quantile."""
DECIDABLE_SDS: Final = 3.0
"""A gain of fewer standard deviations of an evaluation cannot be forecast: on real curves no better than by its base rate."""
STEP: Final = 1e-4
"""Half step in ln C of the numeric derivative."""
TINY: Final = 1e-12
"""Scale that replaces a departure scale of 0, as at now or with settings of 0."""
SIZES: Final = (np.arange(8) + 0.5) / 8
"""Quadrature points for the size of the late rise, as shares of the largest."""


@dataclass(frozen=True, slots=True)
class ComputeToTarget:
    """Total compute at which a target is reached: median and 90 % interval, infinite where the target is not reached.

    Attributes:
        probability: P(A > target).
    """

    target: float
    probability: float
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Block:
    """The further compute with the largest net value.

    Attributes:
        compute: its size; 0 if none has a positive net value.
        gain: expected gain of reward.
        net: value of the gain − price of the compute.
    """

    compute: float
    gain: float
    net: float


def marginal_gain(fitted: Fit, at: float | None = None) -> Estimate:
    """dR/dC of the fitted curve at compute `at` (default: now), in reward per unit of compute.

    For the sigmoid it is (A − R0)·B·s(1 − s)/C; it is computed numerically for every family.
    """
    compute = fitted.now if at is None else _positive("at", at)
    drawn = draws(fitted)
    either_side = drawn.reward(compute * np.exp(np.array([-STEP, STEP])))
    return Estimate.of((either_side[:, 1] - either_side[:, 0]) / (2.0 * STEP * compute))


def gain(fitted: Fit, to: float) -> Estimate:
    """R(to) − R(now), including departures and late rises."""
    return Estimate.of(_gains(forecast_pool(fitted), np.array([_beyond(fitted, to)]))[:, 0])


def expected_gain(fitted: Fit, to: float) -> float:
    """E[R(to) − R(now)], including departures and late rises: what many runs like this one gain on average."""
    return float(_gains(forecast_pool(fitted), np.array([_beyond(fitted, to)])).mean())


def decidable_gain(fitted: Fit) -> float:
    """The smallest gain that can be distinguished from noise: three standard deviations of an evaluation."""
    return DECIDABLE_SDS * fitted.sigma.median


def samples_for(fitted: Fit, least: float) -> int | None:
    """Samples of an evaluation with which a gain of `least` can be distinguished from noise; None: not known, or no number suffices.

    The variance of an evaluation is that of its samples, which shrinks with their number, and a floor, which does not.
    """
    samples = fitted.curve.samples
    floor = fitted.settings.noise_floor
    wanted = (least / DECIDABLE_SDS) ** 2 - floor**2
    if samples is None or wanted <= 0:
        return None
    of_samples = max(fitted.sigma.median**2 - floor**2, 0.0)
    return math.ceil(float(samples[-1]) * of_samples / wanted)


def p_gain_above(fitted: Fit, to: float, least: float) -> float:
    """P(R(to) − R(now) > least)."""
    ahead = forecast_pool(fitted)
    now = np.clip(ahead.expected(np.array([fitted.now]))[:, 0], 0.0, 1.0)
    return _p_above(ahead, _beyond(fitted, to), now + least)


def p_reward_above(fitted: Fit, at: float, target: float) -> float:
    """P(R(at) > target) for the reward without evaluation noise."""
    return _p_above(forecast_pool(fitted), _positive("at", at), target)


def p_asymptote_above(fitted: Fit, target: float) -> float:
    """P(A > target)."""
    asymptote = draws(fitted).A
    return float(np.mean(asymptote > target))


def compute_to(fitted: Fit, target: float) -> ComputeToTarget:
    """Compute at which the curve reaches `target`: Cmid·((T − R0)/(A − T))^{1/B} for the sigmoid.

    Departures are not included, since they depend on compute, which is the unknown here.
    """
    if not 0.0 < target < 1.0:
        raise RequestError(f"target is {target:g}; it must be between 0 and 1")
    drawn = draws(fitted)
    asymptote = drawn.A
    reachable = asymptote > target
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(reachable, (target - drawn.R0) / (asymptote - drawn.R0), 0.5)
    inside = np.clip(share, 1e-12, 1.0 - 1e-12)
    ln_compute = compute_share(drawn.families[0], inside, drawn.ln_cmid, drawn.ln_b)
    compute = np.where(reachable, np.where(share <= 0.0, 0.0, np.exp(np.minimum(ln_compute, 700.0))), np.inf)
    low, median, high = (float(q) for q in np.quantile(compute, (0.05, 0.5, 0.95), method="higher"))
    return ComputeToTarget(target, float(reachable.mean()), median, low, high)


def best_block(fitted: Fit, value: float, price: float, horizon: float) -> Block:
    """The block ΔC that maximizes value·E[R(now + ΔC) − R(now)] − price·ΔC.

    Args:
        value: value of one unit of reward (from pass rate 0 to 1).
        price: price of one unit of compute.
        horizon: total compute up to which blocks are considered, > now.
    """
    if value < 0 or price < 0 or not np.isfinite([value, price]).all():
        raise RequestError(f"value is {value:g} and price {price:g}; both must be finite and not negative")
    sizes = np.geomspace(0.01, _beyond(fitted, horizon) / fitted.now - 1.0, BLOCKS) * fitted.now
    expected = _gains(forecast_pool(fitted, BLOCK_DRAWS), fitted.now + sizes).mean(axis=0)
    net = value * expected - price * sizes
    best = int(np.argmax(net))
    if net[best] <= 0:
        return Block(0.0, 0.0, 0.0)
    return Block(float(sizes[best]), float(expected[best]), float(net[best]))


def _p_above(ahead: ForecastPool, compute: float, level: FloatArray | float) -> float:
    """P(R(compute) > level); level is one number, or one per draw.

    Departures and late rises are integrated in closed form: decisions compare the probability with thresholds, and must not
    depend on the seed of the draws.
    """
    at = np.array([compute])
    (doublings,) = ahead.doublings(at)
    own, earlier = (max(float(scale_c[0]), TINY) for scale_c in ahead.departure_scale(at))
    over = ahead.expected(at)[:, 0] - level
    above = _rises_above(
        partial(p_departure_below, ahead.settings.departure_dof),
        over / own,
        ahead.reach / own,
        1.0 - (1.0 - ahead.late_rise) ** doublings,
    )
    if ahead.gains is not None and doublings > 0:
        # All draws of this expert have the same expected reward, so the first one is enough.
        of, dof = np.flatnonzero(ahead.from_earlier_runs), ahead.gains.dof
        rising = 1.0 - (1.0 - ahead.gains.late_rise) ** doublings
        above[of] = _rises_above(
            lambda x: stdtr(dof, x), over[of[:1]] / earlier, ahead.reach / earlier, rising
        )
    return float(np.mean(np.where(np.less(level, 0.0), 1.0, np.where(np.less(level, 1.0), above, 0.0))))


def _rises_above(
    below: Callable[[FloatArray], FloatArray], over: FloatArray, headroom: float, rising: float
) -> FloatArray:
    """P(departure + late rise > −over); `over` and `headroom` are in units of the departure's scale.

    Args:
        below: cumulative distribution function of the departure.
        rising: probability of a late rise.
    """
    with_rise = below(over[:, None] + headroom * SIZES).mean(axis=1)
    return np.asarray((1.0 - rising) * below(over) + rising * with_rise)


def _gains(ahead: ForecastPool, compute: FloatArray) -> FloatArray:
    reward_dc = ahead.reward(np.concatenate([[ahead.now], compute]))
    return np.asarray(reward_dc[:, 1:] - reward_dc[:, :1])


def _positive(name: str, compute: float) -> float:
    if not (np.isfinite(compute) and compute > 0):
        raise RequestError(f"{name} is {compute:g}; compute must be positive and finite")
    return float(compute)


def _beyond(fitted: Fit, compute: float) -> float:
    if _positive("compute", compute) <= fitted.now:
        raise RequestError(f"compute {compute:g} is not beyond the last point at {fitted.now:g}")
    return float(compute)
