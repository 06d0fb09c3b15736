"""What a forecast keeps of a finished run: its level by compute, the shape of its curve, its noise and its late rises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .collapse import CONSECUTIVE, difference_sd
from .curve import Curve, FloatArray
from .plateau import late_rises
from .pooling import ForecastPool
from .trend import smoothed

KNOTS_PER_DOUBLING: Final = 6
"""Knots at which the level of an earlier run is stored."""
MAX_KNOTS: Final = 120
WINDOW: Final = 0.1
"""Doublings over which the weight of a point for the level of an earlier run falls by e, to either side: narrower than
the trend's, since a later rise must not raise the level before it."""
AHEAD: Final = np.array([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Doublings beyond now for gains, and beyond the end of a record for its own forecast."""
SCATTER_POINTS: Final = 8
SCATTER_FLOOR: Final = 0.006
"""Fewest points for a measured noise, and its floor."""


@dataclass(frozen=True, eq=False)
class EarlierRun:
    """A finished run.

    Attributes:
        curve: points of one segment, with the unit, reward scale and evaluation set of the new run.
    """

    name: str
    curve: Curve


@dataclass(frozen=True, slots=True, eq=False)
class RunSummary:
    """Summary of an earlier run for the prior.

    Attributes:
        doubling_k, level_k: log2 compute and smoothed reward, up to its end by its points, beyond by its own forecast.
        end: log2 compute of its last point.
        forecast_scale: scale of its own forecast per doubling beyond its end: of the Student's t of departures, with the variance
            of departures and of the experts' spread together.
        shape, shape_sd: (3,) medians and sds of A, ln B, ln Cmid.
        sigma: noise sd of an evaluation.
        scatter: the same from the differences of neighbours, without a curve.
        late: number of doublings that could have a late rise, and number that had one.
        fell: compute at which its reward fell, or None; only the points before are used.
    """

    doubling_k: FloatArray
    level_k: FloatArray
    end: float
    forecast_scale: float
    shape: FloatArray
    shape_sd: FloatArray
    sigma: float
    scatter: float
    late: tuple[int, int]
    fell: float | None = None

    def level(self, doubling: FloatArray) -> FloatArray:
        """Smoothed reward at log2 compute."""
        return np.asarray(np.interp(doubling, self.doubling_k, self.level_k))


@dataclass(frozen=True, slots=True, eq=False)
class SummarizedRun:
    """An earlier run without its points.

    Attributes:
        seed: hash of its points.
        eval_version: evaluation version of its last point.
        summary: its summary, or the reason why there is none.
    """

    name: str
    seed: int
    eval_version: str | None
    summary: RunSummary | str


def summarize(curve: Curve, pool: ForecastPool, fell: float | None = None) -> RunSummary:
    """Summarize a finished run from its points and its own forecast."""
    at = curve.first_trained
    doubling, reward = np.log2(curve.compute[at:]), curve.reward[at:]
    end = float(doubling[-1])
    count = int(np.clip(np.ceil((end - doubling[0]) * KNOTS_PER_DOUBLING), 2, MAX_KNOTS))
    knots = np.linspace(doubling[0], end, count)
    level_k = smoothed(doubling, reward, knots, WINDOW)
    ahead = pool.expected(pool.now * 2.0 ** np.concatenate([[0.0], AHEAD])).mean(axis=0)
    doublings, rises = late_rises(curve)
    drawn = pool.curves
    first = drawn.family == 0
    parameters = np.stack([drawn.A[first], drawn.ln_b[first], drawn.ln_cmid[first]])
    return RunSummary(
        doubling_k=np.concatenate([knots, end + AHEAD]),
        level_k=np.clip(np.concatenate([level_k, level_k[-1] + ahead[1:] - ahead[0]]), 0.0, 1.0),
        end=end,
        forecast_scale=pool.forecast_scale,
        shape=np.median(parameters, axis=1),
        shape_sd=parameters.std(axis=1),
        sigma=float(np.median(drawn.sigma)),
        scatter=neighbour_scatter(reward),
        late=(doublings, len(rises)),
        fell=fell,
    )


def neighbour_scatter(reward: FloatArray) -> float:
    """Noise sd of an evaluation from the differences of neighbours (n,), at least the prior's floor."""
    if reward.size < SCATTER_POINTS:
        return SCATTER_FLOOR
    return max(difference_sd(reward) * float(np.sqrt(CONSECUTIVE / 2.0)), SCATTER_FLOOR)
