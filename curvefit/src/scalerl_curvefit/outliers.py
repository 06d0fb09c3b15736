"""Weights of evaluations by a heavy-tailed noise model: one bad evaluation moves no forecast.

An evaluation is compared with its neighbours on both sides, the last one with those before it. Its deviation z is the
distance from the range that they span, in standard deviations of an evaluation. Its weight is 1 up to CUT of them and falls
as (CUT/z)^4 beyond, faster than that of Student's t, so that the influence of an evaluation vanishes with its distance.
Two neighbours that agree are no outliers; the first evaluation, from which a run rises, is none below
the next ones.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from .collapse import CONSECUTIVE, PAIRED, robust_sd
from .curve import Curve, FloatArray

CUT: Final = 4.0
FLOOR: Final = 0.008
"""Smallest standard deviation of an evaluation for this comparison."""
FEWEST: Final = 5
"""With fewer evaluations nothing is compared."""


def outlier_weights(curve: Curve) -> FloatArray:
    """(n,) weights, from 0 to 1, of the points at compute > 0."""
    reward = curve.reward[curve.first_trained :]
    n = reward.size
    if n < FEWEST:
        return np.ones(n)
    sd = max(FLOOR, robust_sd(np.diff(reward, 2)) / math.sqrt(6.0))
    if curve.samples is not None:
        rate = float(np.clip(np.median(reward), 0.02, 0.98))
        sd = max(sd, PAIRED * math.sqrt(rate * (1.0 - rate) / float(np.median(curve.samples[-n:]))))
    before, after = _median_before(reward), _median_before(reward[::-1])[::-1]
    low, high = np.minimum(before, after), np.maximum(before, after)
    # A run that rises or falls may go on to.
    recent = reward[-1 - CONSECUTIVE : -1]
    steps = np.diff(reward[-2 - CONSECUTIVE : -1])
    low[-1] = recent.min() + min(steps.min(), 0.0)
    high[-1] = recent.max() + max(steps.max(), 0.0)
    low[0], high[0] = 0.0, after[0]
    z = np.maximum(np.maximum(low - reward, reward - high) / sd, CUT)
    return np.asarray((CUT / z) ** 4)


def _median_before(reward: FloatArray) -> FloatArray:
    """(n,) median of the three rewards before each point, or of those that there are; NaN at the first."""
    median = np.full(reward.size, np.nan)
    median[1], median[2] = reward[0], 0.5 * (reward[0] + reward[1])
    first, second, third = reward[:-3], reward[1:-2], reward[2:-1]
    median[3:] = np.maximum(np.minimum(first, second), np.minimum(np.maximum(first, second), third))
    return median
