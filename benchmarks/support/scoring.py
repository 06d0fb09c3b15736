"""Scores forecasts on real curves against the measured rewards.

A forecaster is any callable ``(head, at) -> draws``: it gets the points known so far and a compute beyond them, and
returns draws (n,) of the reward of an evaluation there. `leave_one_source_out` chooses a forecaster's settings, so that
no forecast is scored with settings fitted to its own source.

    rows = score(forecaster, llm_curves())
    print(scores(rows).crps)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from scalerl_curvefit import Curve

from .llm_curves import LLMCurve

FloatArray = NDArray[np.float64]
Forecaster = Callable[[Curve, float], FloatArray]

MIN_POINTS = 6
"""Minimum number of points at compute > 0 before a forecast."""
NEAR = 1.1
"""Maximum ratio between the compute of a target's measured point and the requested compute."""
MIN_GAIN = 0.02
"""Gain in reward whose probability is scored."""


@dataclass(frozen=True, eq=False)
class Target:
    """One forecast to make, from the first points of a curve to a later measured point.

    origin: the curve.
    points: number of known points.
    at: compute of the later point.
    actual: reward of the later point.
    """

    origin: LLMCurve
    points: int
    at: float
    actual: float

    @property
    def head(self) -> Curve:
        return self.origin.curve.head(self.points)

    @property
    def last(self) -> float:
        return float(self.origin.curve.reward[self.points - 1])

    @property
    def doublings(self) -> float:
        """log2 of the ratio of `at` to the compute of the last known point."""
        return float(np.log2(self.at / self.origin.curve.compute[self.points - 1]))


@dataclass(frozen=True, eq=False)
class Row:
    """Scores of one forecast.

    target: the forecast's target.
    median: median of the draws.
    width: width of the central 90 % interval of the draws.
    inside_90, inside_50: whether the central interval contains the actual reward.
    pit: fraction of draws below the actual reward; ties count half (probability integral transform).
    crps: continuous ranked probability score of the draws.
    p_gain: fraction of draws more than `MIN_GAIN` above the last known reward.
    """

    target: Target
    median: float
    width: float
    inside_90: bool
    inside_50: bool
    pit: float
    crps: float
    p_gain: float

    @property
    def source(self) -> str:
        return self.target.origin.source

    @property
    def error(self) -> float:
        return self.median - self.target.actual

    @property
    def gained(self) -> bool:
        return self.target.actual - self.target.last > MIN_GAIN


def targets(curves: Sequence[LLMCurve], factor: float = 2.0) -> list[Target]:
    """Every prefix of a curve with enough points, for which a measured point is near `factor` times its compute."""
    return [t for c in curves for t in _targets_of(c, factor)]


@cache
def _targets_of(origin: LLMCurve, factor: float) -> tuple[Target, ...]:
    compute, reward = origin.curve.compute, origin.curve.reward
    found = []
    for points in range(origin.curve.first_trained + MIN_POINTS, len(compute)):
        aim = factor * compute[points - 1]
        there = points + int(np.argmin(np.abs(compute[points:] - aim)))
        if aim <= 1.001 * compute[-1] and 1 / NEAR <= compute[there] / aim <= NEAR:
            found.append(Target(origin, points, float(compute[there]), float(reward[there])))
    return tuple(found)


def crps(draws: FloatArray, actual: FloatArray | float) -> FloatArray:
    """Exact CRPS of the empirical distribution, (...): E|X − y| − ½·E|X − X'|. draws: (..., n); actual: (...)."""
    ordered = np.sort(draws, axis=-1)
    n = ordered.shape[-1]
    near = np.mean(np.abs(ordered - np.asarray(actual)[..., None]), axis=-1)
    return np.asarray(near - ordered @ (2 * np.arange(1, n + 1) - n - 1) / n**2)


def row_of(target: Target, draws: FloatArray) -> Row:
    """Score draws (n,) of the reward at the target."""
    low, quarter, median, three_quarters, high = np.quantile(draws, [0.05, 0.25, 0.5, 0.75, 0.95])
    actual = target.actual
    return Row(
        target=target,
        median=float(median),
        width=float(high - low),
        inside_90=bool(low <= actual <= high),
        inside_50=bool(quarter <= actual <= three_quarters),
        pit=float(np.mean(draws < actual) + np.mean(draws == actual) / 2),
        crps=float(crps(draws, actual)),
        p_gain=float(np.mean(draws - target.last > MIN_GAIN)),
    )


def score(forecaster: Forecaster, curves: Sequence[LLMCurve], factor: float = 2.0) -> list[Row]:
    """One row for each of `targets`, in their order."""
    return [row_of(t, forecaster(t.head, t.at)) for t in targets(curves, factor)]


def leave_one_source_out(
    learn: Callable[[list[LLMCurve]], Forecaster], curves: Sequence[LLMCurve], factor: float = 2.0
) -> list[Row]:
    """Rows of all curves; each source is forecast by the forecaster that `learn` fits to the other sources' curves."""
    return leave_one_out(learn, curves, factor, lambda c: c.source)


def leave_one_out(
    learn: Callable[[list[LLMCurve]], Forecaster],
    curves: Sequence[LLMCurve],
    factor: float,
    group: Callable[[LLMCurve], str],
) -> list[Row]:
    """Rows of all curves; each group is forecast by the forecaster that `learn` fits to the other groups' curves.

    Curves without a target are ignored. Raises ValueError if all other curves are of one group.
    """
    curves = [c for c in curves if targets([c], factor)]
    names = sorted({group(c) for c in curves})
    if len(names) < 2:
        raise ValueError(
            f"every target at {factor:g}× is of {', '.join(names) or 'no group'}; leave out less"
        )
    rows = []
    for left_out in names:
        forecaster = learn([c for c in curves if group(c) != left_out])
        rows += score(forecaster, [c for c in curves if group(c) == left_out], factor)
    return rows


@dataclass(frozen=True)
class Scores:
    """Summary of rows.

    n: number of rows.
    coverage_90, coverage_50: fraction of actual rewards inside the central intervals.
    width: median width of the 90 % interval.
    median_error: median of |median − actual|.
    crps: mean CRPS.
    bias: mean of median − actual.
    rmse_gain: 1 − RMSE / RMSE of persistence.
    brier: Brier score of `p_gain`.
    base_brier: Brier score of a constant forecast of the observed frequency of gains.
    slope: regression slope of actual gain on predicted gain.
    """

    n: int
    coverage_90: float
    coverage_50: float
    width: float
    median_error: float
    crps: float
    bias: float
    rmse_gain: float
    brier: float
    base_brier: float
    slope: float


def scores(rows: Iterable[Row]) -> Scores:
    """Summarise at least one row; the slope is NaN for fewer than three rows or equal predicted gains."""
    rows = list(rows)
    error = np.array([r.error for r in rows])
    actual = np.array([r.target.actual - r.target.last for r in rows])
    predicted = error + actual
    gained = np.array([r.gained for r in rows], float)
    p_gain = np.array([r.p_gain for r in rows])
    spread = np.var(predicted)
    stays = float(np.sqrt(np.mean(actual**2)))
    return Scores(
        n=len(rows),
        coverage_90=float(np.mean([r.inside_90 for r in rows])),
        coverage_50=float(np.mean([r.inside_50 for r in rows])),
        width=float(np.median([r.width for r in rows])),
        median_error=float(np.median(np.abs(error))),
        crps=float(np.mean([r.crps for r in rows])),
        bias=float(np.mean(error)),
        rmse_gain=1 - float(np.sqrt(np.mean(error**2))) / stays if stays else float("nan"),
        brier=float(np.mean((p_gain - gained) ** 2)),
        base_brier=float(gained.mean() * (1 - gained.mean())),
        slope=float(np.cov(predicted, actual, bias=True)[0, 1] / spread)
        if len(rows) > 2 and spread > 1e-12
        else float("nan"),
    )


def pit_histogram(rows: Iterable[Row], bins: int = 10) -> list[float]:
    """Fraction of rows in each of `bins` equal intervals of the PIT; uniform if the forecasts are calibrated."""
    counts, _ = np.histogram([r.pit for r in rows], bins=bins, range=(0, 1))
    return [float(c) for c in counts / counts.sum()]
