"""Compute–reward curves: fit them, say how far they can be believed, and forecast.

What lives here: the points of a run and their checks (`curve`), the shapes (`families`), the point
fit by variable projection (`point`), the grid posterior (`moments`, `posterior`, `sampling`), the local trend (`trend`), the prior
from earlier runs (`earlier`), the pool of forecasts (`pool`), the fit (`fitting`) and what follows from it (`forecasting`, `outlook`). numpy and scipy only.

What never does: Kubernetes, torch, policies (whether to stop or grow is the operator's), plotting,
files and command lines.

>>> import numpy as np
>>> compute = np.arange(1.0, 41.0)
>>> reward = 0.2 + 0.4 / (1 + (8 / compute) ** 2)
>>> fitted = fit(Curve(compute, reward, samples=4000))
>>> ahead, = forecast(fitted, at=[2 * fitted.now])
>>> bool(abs(ahead.median - (0.2 + 0.4 / (1 + (8 / 80) ** 2))) < 0.01)
True
"""

from .baselines import GridSearch, PowerLaw, paper_grid_search, power_law
from .collapse import CollapseCheck, Fall, detect_collapse
from .compare import Better, Comparison, compare
from .curve import SIGNED_SCALE, UNIT_SCALE, Curve, Segment
from .decision_quantities import (
    Block,
    ComputeToTarget,
    best_block,
    compute_to,
    gain,
    marginal_gain,
    p_asymptote_above,
    p_gain_above,
    p_reward_above,
)
from .earlier_runs import EarlierRun, EarlierUse
from .errors import (
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
from .fitting import Edge, Estimate, Fit, draws, fit, forecast_pool
from .forecasting import Forecast, forecast
from .hindcast import Hindcast, hindcasts
from .least_squares import LeastSquaresFit
from .pooling import ForecastPool
from .sampling import Draws
from .settings import FitSettings

__all__ = [
    "SIGNED_SCALE",
    "UNIT_SCALE",
    "Better",
    "Block",
    "CollapseCheck",
    "Comparison",
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
    "Fall",
    "Family",
    "Fit",
    "FitSettings",
    "Forecast",
    "ForecastPool",
    "GridSearch",
    "Hindcast",
    "InputError",
    "LeastSquaresFit",
    "MixedSegmentsError",
    "NegativeComputeError",
    "NonFiniteError",
    "PowerLaw",
    "RequestError",
    "RewardRangeError",
    "SamplesError",
    "Segment",
    "SettingsError",
    "ShapeError",
    "TooFewPointsError",
    "UnsortedComputeError",
    "best_block",
    "compare",
    "compute_to",
    "detect_collapse",
    "draws",
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
]
