"""Posterior predictive check: does the curve leave residuals that noise of one evaluation does not?

Noise of successive evaluations is correlated, and so are the residuals of a wrong curve. The noise is therefore measured
from the differences of successive residuals, which a slow misfit does not enter, and allowed a correlation of RHO, more than
most evaluations have. Of the residuals of the least-squares curve, without burn-in and outliers:

- *largest run*: |Σ r| over a run of equal signs, in standard deviations of such a sum. On 180 simulated sigmoids with a
  correlation of 0 to .6 the largest of a run is below 1.9 in 95 % and below 2.4 in 99 %.
- *misfit*: the root mean square of the residuals beyond the noise. It widens the departures of forecasts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from .collapse import robust_sd
from .curve import FloatArray

RHO: Final = 0.6
"""Correlation of successive evaluations that is taken for noise."""
MIN_SD: Final = 0.004
FEWEST: Final = 6
"""With fewer residuals nothing is checked."""
MAX_RUN: Final = 2.5
"""A larger run of residuals of one sign is no noise: the curve does not fit."""


@dataclass(frozen=True, slots=True)
class PredictiveCheck:
    """Residuals of a fitted curve against the noise.

    Attributes:
        run: largest sum of successive residuals of one sign, in standard deviations.
        length, mean: number of residuals of that run, and their mean.
        misfit: root mean square of the residuals beyond the noise.
    """

    run: float = 0.0
    length: int = 0
    mean: float = 0.0
    misfit: float = 0.0

    @property
    def warning(self) -> str:
        """Why the curve does not fit; empty if it does."""
        if self.run <= MAX_RUN:
            return ""
        side = "below" if self.mean < 0 else "above"
        return (
            f"{self.length} evaluations in a row lie {side} the fitted curve, by {abs(self.mean):.3f} in the mean: "
            "the curve does not fit"
        )


def predictive_check(residual: FloatArray) -> PredictiveCheck:
    """The check of residuals (n,) in the order of compute."""
    n = residual.size
    if n < FEWEST:
        return PredictiveCheck()
    step = robust_sd(np.diff(residual))
    sd = max(step / math.sqrt(2.0 * (1.0 - RHO)), MIN_SD)
    start = np.concatenate([[0], np.flatnonzero(np.diff(np.sign(residual))) + 1])
    length = np.diff(np.append(start, n))
    total = np.add.reduceat(residual, start)
    # Variance of a sum of L terms of an AR(1) sequence.
    variance = (length * (1 - RHO**2) - 2 * RHO * (1 - RHO**length)) / (1 - RHO) ** 2
    run = np.abs(total) / (sd * np.sqrt(variance))
    worst = int(np.argmax(run))
    beyond = float(residual @ residual) / n - 0.5 * step**2
    return PredictiveCheck(
        float(run[worst]),
        int(length[worst]),
        float(total[worst] / length[worst]),
        math.sqrt(max(beyond, 0.0)),
    )
