"""Fits a curve to points: point estimate, posterior, identifiability, and the prior bounds that limit it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .collapse import detect_collapse
from .curve import Curve, FloatArray
from .earlier_runs import EarlierRunsPrior, EarlierUse, earlier_runs_prior
from .errors import ComputeSpanError, ConstantRewardError, CurveError, RequestError, TooFewPointsError
from .least_squares import LeastSquaresFit, least_squares_fit
from .outliers import outlier_weights
from .pooling import ForecastPool, sample_forecast_pool
from .posterior import COARSE_GRID, FINE_GRID, Nodes, grid_posterior
from .predictive_check import PredictiveCheck, predictive_check
from .prior_bounds import Edge, edges_of_prior
from .run_summary import EarlierRun, RunSummary, SummarizedRun, summarize
from .sampling import Draws, interval, sample
from .settings import DEFAULTS, FitSettings
from .trend import Trend, trend
from .weighted_points import OUTLIER, WeightedPoints, weighted_points

MIN_POINTS: Final = 4
"""Fewest points that can be fitted: a curve has four parameters."""
ENOUGH_POINTS: Final = 10
MAX_P_BEFORE_CMID: Final = 0.2
MAX_A_WIDTH: Final = 0.15
"""The asymptote is not identifiable with fewer than ENOUGH_POINTS points, with a 90 % interval of A wider than
MAX_A_WIDTH, with a probability above MAX_P_BEFORE_CMID that Cmid still lies ahead, or where the curve does not fit
(`predictive_check`)."""
DRAWS: Final = 2000
SMALLEST: Final = 1e-6
"""Change of one of several equal rewards, so that they can be fitted."""
MIN_SPAN: Final = 1.05
"""Smallest ratio of the compute of the last point to that of the first."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Posterior median and 90 % interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: FloatArray) -> Estimate:
        """The estimate from draws (d,)."""
        (estimate,) = cls.each(values)
        return estimate

    @classmethod
    def each(cls, *values: FloatArray) -> list[Estimate]:
        """The estimates from several (d,)."""
        low_v, median_v, high_v = interval(np.stack(values).T).tolist()
        return [cls(*estimate) for estimate in zip(median_v, low_v, high_v, strict=True)]

    @property
    def width(self) -> float:
        """Width of the 90 % interval."""
        return self.high - self.low


@dataclass(frozen=True, eq=False)
class Fit:
    """The fit of one segment.

    A, B, Cmid, R0: medians with 90 % intervals, of the sigmoid. R0 extrapolates the fitted points to C → 0; it is
        weakly determined and may be negative.

    Attributes:
        sigma: evaluation noise (sd of one point).
        rho: its AR(1) coefficient, posterior mean.
        point: the least-squares curve.
        identifiable: whether the points determine A.
        warnings: reasons why they do not; empty if `identifiable`.
        edges: prior bounds with posterior mass next to them.
        p_before_cmid: probability that Cmid lies beyond the last point.
        points_used: number of points at compute > 0.
        burn_in_points: number of first points with less weight.
        now: compute of the last point.
        nodes: posterior of each of `settings.families`.
        trend: level and gain at the last point.
        draws: DRAWS curves of the first family, for the estimates.
        pool: DRAWS draws of the forecast pool, for the forecasts.
        seed: hash of points, settings and earlier runs; seed of all draws.
        check: whether the least-squares curve fits its points.
        outliers: number of points that have little weight, since their neighbours contradict them (`outliers`).
        prior: prior from earlier runs; None without any.
    """

    curve: Curve
    settings: FitSettings
    A: Estimate
    B: Estimate
    Cmid: Estimate
    R0: Estimate
    sigma: Estimate
    rho: float
    point: LeastSquaresFit
    identifiable: bool
    warnings: tuple[str, ...]
    edges: tuple[Edge, ...]
    p_before_cmid: float
    points_used: int
    burn_in_points: int
    now: float
    nodes: tuple[Nodes, ...]
    trend: Trend
    draws: Draws
    pool: ForecastPool
    seed: int
    check: PredictiveCheck
    outliers: int
    prior: EarlierRunsPrior | None = None

    @property
    def earlier(self) -> tuple[EarlierUse, ...]:
        """Weight of each earlier run, in the order given."""
        return () if self.prior is None else self.prior.uses

    @property
    def departure(self) -> float:
        """sd of the forecasts' departure per doubling of compute beyond now."""
        return self.pool.departure_sd


def fit(
    curve: Curve, settings: FitSettings | None = None, earlier: Sequence[EarlierRun | SummarizedRun] = ()
) -> Fit:
    """Fit R(C) = R0 + (A − R0)/(1 + (Cmid/C)^B) (ScaleRL eq. 1 [P]) to the points of one segment.

    Deterministic: the same points and settings give the same Fit and the same draws. Takes about 5 ms at 100 points
    and well under 100 ms at 10,000 (`sufficient_statistics`).

    Args:
        earlier: finished runs of the same task and model, on the same axis of compute, as a prior (`earlier_runs`). Runs of
            another evaluation version and runs too short to fit are left out; `Fit.earlier` gives the reason. Each `EarlierRun`
            costs a fit; a `SummarizedRun`, made with the same settings, costs none.

    Raises
    ------
    MixedSegmentsError: the recipe or evaluation version changes; fit one of `curve.segments()`.
    TooFewPointsError: fewer than 4 points at compute > 0.
    ComputeSpanError: compute grows by less than 5 % from the first point to the last.
    ConstantRewardError: all rewards equal.

    >>> c = np.arange(1.0, 31.0)
    >>> f = fit(Curve(c, 0.2 + 0.4 / (1 + (5 / c) ** 2)))
    >>> f.identifiable, round(f.A.median, 2)
    (True, 0.6)
    """
    settings = settings or DEFAULTS
    curve.require_one_segment()
    _require_points(curve)
    at = curve.first_trained
    trust = outlier_weights(curve)
    local = trend(curve.compute[at:], curve.reward[at:], settings, trust)
    known = [summarize_run(run, settings) if isinstance(run, EarlierRun) else run for run in earlier]
    summaries = [(run.name, _summary_for(run, curve)) for run in known]
    prior = earlier_runs_prior(summaries, curve, local, settings) if earlier else None
    points = weighted_points(curve, settings, prior, trust)
    sums = points.sufficient_statistics(settings)
    nodes = tuple(
        grid_posterior(sums, points.prior, family, COARSE_GRID if i else FINE_GRID)
        for i, family in enumerate(settings.families)
    )
    main = nodes[0]
    if prior is not None and prior.shape is not None:
        nodes = (prior.shape.reweight(main), *nodes[1:])
    seed = content_seed(curve, settings, [run.seed for run in known])
    random = np.random.default_rng(seed)
    drawn = sample(nodes[:1], np.ones(1), DRAWS, random)
    cmids = drawn.Cmid
    a, b, cmid, r0, sigma = Estimate.each(drawn.A, drawn.B, cmids, drawn.R0, drawn.sigma)
    before = float(np.mean(cmids > curve.now))
    used = len(curve) - at
    point = _point(main, points)
    checked = _checked(point, points, trust)
    warnings = _warnings(used, a, before, checked)
    return Fit(
        curve=curve,
        settings=settings,
        A=a,
        B=b,
        Cmid=cmid,
        R0=r0,
        sigma=sigma,
        rho=float(np.mean(drawn.rho)),
        point=point,
        identifiable=not warnings,
        warnings=warnings,
        edges=edges_of_prior(drawn, points.prior, settings),
        p_before_cmid=before,
        points_used=used,
        burn_in_points=points.burnt,
        now=curve.now,
        nodes=nodes,
        trend=local,
        draws=drawn,
        pool=_pool(nodes, local, curve.now, settings, prior, checked.misfit, DRAWS, random),
        seed=seed,
        check=checked,
        outliers=int(np.sum(trust < OUTLIER)),
        prior=prior,
    )


def draws(fitted: Fit, n: int = DRAWS) -> Draws:
    """`n` curves from the posterior of the first family; deterministic for a given fit and n."""
    _check_draws(n)
    if n == DRAWS:
        return fitted.draws
    return sample(fitted.nodes[:1], np.ones(1), n, np.random.default_rng(fitted.seed))


def forecast_pool(fitted: Fit, n: int = DRAWS) -> ForecastPool:
    """`n` draws of the run's future rewards; deterministic for a given fit and n."""
    _check_draws(n)
    if n == DRAWS:
        return fitted.pool
    random = np.random.default_rng(fitted.seed)
    misfit = fitted.check.misfit
    return _pool(fitted.nodes, fitted.trend, fitted.now, fitted.settings, fitted.prior, misfit, n, random)


def _pool(
    nodes: tuple[Nodes, ...],
    local: Trend,
    now: float,
    settings: FitSettings,
    prior: EarlierRunsPrior | None,
    misfit: float,
    n: int,
    random: np.random.Generator,
) -> ForecastPool:
    gains, late_rise = (None, None) if prior is None else (prior.gains, prior.late_rise)
    return sample_forecast_pool(nodes, local, now, settings, n, random, gains, late_rise, misfit)


def summarize_run(run: EarlierRun, settings: FitSettings | None = None) -> SummarizedRun:
    """Fit a finished run for use as a prior. Raises nothing: an error becomes the reason in `summary`."""
    settings = settings or DEFAULTS
    curve = run.curve
    try:
        curve.require_one_segment()
        trained = curve.reward[curve.first_trained :]
        if trained.size and np.ptp(trained) == 0.0:
            curve = with_changed_last_reward(curve)  # a run that learned nothing is evidence too
        collapse = detect_collapse(curve).collapse
        if collapse is not None:
            curve = curve.head(collapse.points)
        compute = None if collapse is None else collapse.compute
        summary: RunSummary | str = summarize(curve, fit(curve, settings).pool, compute)
    except CurveError as error:
        summary = str(error)
    return SummarizedRun(run.name, content_seed(run.curve), _eval_version(run.curve), summary)


def _summary_for(run: SummarizedRun, curve: Curve) -> RunSummary | str:
    """The summary of an earlier run for the prior of `curve`, or the reason why it has no weight."""
    of = run.eval_version, _eval_version(curve)
    if None not in of and of[0] != of[1]:
        return f"its rewards are of evaluation version {of[0]}, this run's of {of[1]}"
    return run.summary


def _eval_version(curve: Curve) -> str | None:
    return curve.eval_version[-1] if curve.eval_version else None


def with_changed_last_reward(curve: Curve) -> Curve:
    """A curve of equal rewards with the last one changed by `SMALLEST`, so that it can be fitted."""
    reward = curve.reward.copy()
    reward[-1] += SMALLEST if reward[-1] < 0.5 else -SMALLEST
    return Curve(curve.compute, reward, curve.samples, curve.eval_version)


def _check_draws(n: int) -> None:
    if not 1 <= n <= 1_000_000:
        raise RequestError(f"draws must be between 1 and 1,000,000, got {n}")


def content_seed(curve: Curve, settings: FitSettings | None = None, earlier: Sequence[int] = ()) -> int:
    """64 bits of a hash over the points, the settings if given, and the seeds of earlier runs."""
    digest = hashlib.blake2b(digest_size=8)
    for column in (curve.compute, curve.reward, curve.samples):
        digest.update(b"-" if column is None else column.tobytes())
    for seed in earlier:
        digest.update(seed.to_bytes(8, "big"))
    if settings is not None:
        digest.update(repr(settings).encode())
    return int.from_bytes(digest.digest(), "big")


def _require_points(curve: Curve) -> None:
    reward = curve.reward[curve.first_trained :]
    n = reward.size
    if n < MIN_POINTS:
        raise TooFewPointsError(
            f"{n} points at compute > 0; a curve of four parameters needs at least {MIN_POINTS}, "
            f"and {ENOUGH_POINTS} before its asymptote means anything"
        )
    first = float(curve.compute[curve.first_trained])
    if curve.now < MIN_SPAN * first:
        raise ComputeSpanError(
            f"compute runs from {first:g} to {curve.now:g}, within a factor of {MIN_SPAN:g}: it must count from the start "
            "of the run (Unix seconds do not; subtract their value at the start), and grow further before a curve can be fitted"
        )
    if np.ptp(reward) == 0.0:
        raise ConstantRewardError(
            f"all {n} rewards are {reward[0]:g}; check that the evaluation sees the trained weights, "
            "or wait for the first change"
        )


def _point(nodes: Nodes, points: WeightedPoints) -> LeastSquaresFit:
    best = int(np.argmax(nodes.weight_js.max(axis=0)))
    start = (float(nodes.ln_cmid_s[best]), float(nodes.ln_b_s[best]))
    low, high = np.array([points.prior.ln_cmid, points.prior.ln_b]).T
    return least_squares_fit(
        points.ln_compute,
        points.reward,
        points.precision,
        start,
        low,
        high,
        (points.prior.a_lowest, points.prior.a_highest),
        nodes.family,
    )


def _warnings(points: int, a: Estimate, before: float, checked: PredictiveCheck) -> tuple[str, ...]:
    warnings = []
    if points < ENOUGH_POINTS:
        warnings.append(f"{points} points, fewer than {ENOUGH_POINTS}")
    if a.width > MAX_A_WIDTH:
        warnings.append(f"90 % interval of A is {a.width:.2f} wide, more than {MAX_A_WIDTH}")
    if before > MAX_P_BEFORE_CMID:
        warnings.append(f"half of the gain still lies ahead with probability {before:.2f}")
    if checked.warning:
        warnings.append(checked.warning)
    return tuple(warnings)


def _checked(point: LeastSquaresFit, points: WeightedPoints, trust: FloatArray) -> PredictiveCheck:
    """The check of the points with full weight."""
    kept = trust >= OUTLIER
    kept[: points.burnt] = False
    return predictive_check(points.reward[kept] - point.reward(points.compute[kept]))
