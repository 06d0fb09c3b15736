"""Fits compute–reward curves and forecasts them, with calibrated intervals.

A forecast, from the request on the wire to the answer::

    autoscaler         sidecar
      │ POST forecast    app.Sidecar._forecast() ▶ _authorise() ▶ _read() ▶ _compute() in one thread
      ├───────────────▶  forecast_answers.forecast_steps(): _last_segment() ▶ Curve.segments()
      │                    each new earlier run: fitting.summarize_run() ▶ run_summary.summarize(), cached
      │                  fitting.fit()
      │                    trend.trend(): level and gain of the last doubling, without a shape
      │                    earlier_runs_prior(): gains, shape, noise and late rises of the earlier runs
      │                    weighted_points() ▶ sufficient_statistics() ▶ grid_posterior() for each of the families ▶ sampling.sample()
      │                    least_squares_fit(): the point estimate
      │                    sample_forecast_pool(): sigmoid, power law, trend, earlier runs; departures, late rises
      │                  collapse.detect_collapse(): a run that fell gets no forecast
      │                  forecasting.forecast() ▶ ForecastPool.reward() ▶ interval()
      │                  decision_quantities: gain(), p_gain_above(), compute_to(), best_block()
      │                  plateau.detect_plateau(), with a budget
      │◀ ForecastAnswer    _fit_answer(), _collapse_answer(), _outlook()

Further modules: `compare` (two recipes; `compare_seeds` with several runs each), `hindcast` (calibration), `baselines` (the
paper's grid search, and a power law), `simulate` (curves for tests).
Depends on numpy and scipy only: no Kubernetes, torch, plotting, files or command lines. The autoscaler decides whether to stop
or grow.

>>> import numpy as np
>>> compute = np.arange(1.0, 41.0)
>>> reward = 0.2 + 0.4 / (1 + (8 / compute) ** 2)
>>> fitted = fit(Curve(compute, reward, samples=4000))
>>> ahead, = forecast(fitted, at=[2 * fitted.now])
>>> bool(abs(ahead.median - (0.2 + 0.4 / (1 + (8 / 80) ** 2))) < 0.01)
True
"""

from .baselines import GridSearch, PowerLaw, paper_grid_search, power_law
from .collapse import Collapse, CollapseCheck, detect_collapse
from .compare import Better, Comparison, SeedComparison, compare, compare_seeds
from .curve import SIGNED_SCALE, UNIT_SCALE, Curve, Segment
from .decision_quantities import (
    Block,
    ComputeToTarget,
    best_block,
    compute_to,
    decidable_gain,
    expected_gain,
    gain,
    marginal_gain,
    p_asymptote_above,
    p_gain_above,
    p_reward_above,
    samples_for,
)
from .earlier_runs import EarlierUse
from .errors import (
    ComputeSpanError,
    ConstantRewardError,
    CurveError,
    DuplicateComputeError,
    InputError,
    MixedSegmentsError,
    NegativeComputeError,
    NonFiniteError,
    RequestError,
    RewardRangeError,
    SamplesError,
    SettingsError,
    ShapeError,
    TooFewPointsError,
    UnsortedComputeError,
)
from .families import Family
from .fitting import Estimate, Fit, draws, fit, forecast_pool, summarize_run
from .forecasting import Forecast, forecast
from .hindcast import Hindcast, hindcasts
from .least_squares import LeastSquaresFit
from .pooling import ForecastPool
from .prior_bounds import Edge
from .run_summary import EarlierRun, SummarizedRun
from .sampling import Draws
from .settings import BY_RISES, FitSettings, LateRises

__all__ = [
    "BY_RISES",
    "SIGNED_SCALE",
    "UNIT_SCALE",
    "Better",
    "Block",
    "Collapse",
    "CollapseCheck",
    "Comparison",
    "ComputeSpanError",
    "ComputeToTarget",
    "ConstantRewardError",
    "Curve",
    "CurveError",
    "Draws",
    "DuplicateComputeError",
    "EarlierRun",
    "EarlierUse",
    "Edge",
    "Estimate",
    "Family",
    "Fit",
    "FitSettings",
    "Forecast",
    "ForecastPool",
    "GridSearch",
    "Hindcast",
    "InputError",
    "LateRises",
    "LeastSquaresFit",
    "MixedSegmentsError",
    "NegativeComputeError",
    "NonFiniteError",
    "PowerLaw",
    "RequestError",
    "RewardRangeError",
    "SamplesError",
    "SeedComparison",
    "Segment",
    "SettingsError",
    "ShapeError",
    "SummarizedRun",
    "TooFewPointsError",
    "UnsortedComputeError",
    "best_block",
    "compare",
    "compare_seeds",
    "compute_to",
    "decidable_gain",
    "detect_collapse",
    "draws",
    "expected_gain",
    "fit",
    "forecast",
    "forecast_pool",
    "gain",
    "hindcasts",
    "marginal_gain",
    "p_asymptote_above",
    "p_gain_above",
    "p_reward_above",
    "paper_grid_search",
    "power_law",
    "samples_for",
    "summarize_run",
]
