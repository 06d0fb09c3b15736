"""Detects a plateau, and gives the probability of a rise after one.

No fit predicts a late rise, so its probability comes from public curves: 23 of language models and 36 of game
agents (`curvefit/data`; `benchmarks/late_rises.py` counts them). Rewards are means of three evaluations.

- *Late rises*: in 117 doublings of compute (from a quarter to a half and from a half to the whole of each record), seven
  rises of .02 or more began after a flat doubling (a gain under .02, at the best so far). They differ: of 45 doublings of
  language models three, by .03, .05 and .15, which creep on rather than jump; of 72 of game agents four, all of .1 or more.
  A far rise (.05 or more) began in 1 of 45 and in 4 of 72: the rates .016 and .062 in `settings` (docs/forecast.md).
- *First rises*: how many of the 59 curves were less than .02 above their start at each share of their record. All
  published curves rise at some time; a run of the user that has gained nothing never learns with prior probability .5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import ndtr

from .collapse import CONSECUTIVE, PAIRED, difference_sd
from .curve import Curve, FloatArray
from .settings import LateRises

LEAST: Final = 0.02
"""Smallest gain that counts as a rise."""
DOUBLINGS: Final = {LateRises.LANGUAGE_MODELS: 45, LateRises.GAMES: 72}
"""Number of doublings counted in the public curves."""
SIZES: Final = {
    LateRises.LANGUAGE_MODELS: (0.028, 0.049, 0.151),
    LateRises.GAMES: (0.098, 0.108, 0.146, 0.267),
}
"""Gains of the counted late rises."""
CURVES: Final = 59
"""Number of public curves."""
SHARES: Final = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Shares of a record, in compute."""
NOT_RISEN: Final = (9, 8, 6, 5, 4, 4)
"""Number of curves that had not risen by each share."""
NEVER_LEARNS: Final = 0.5
"""Prior probability that a run which has gained nothing never learns."""
TREND_FACTOR: Final = 4.0
"""The trend is fitted to the points from now divided by this, two doublings."""
MIN_EVALUATIONS: Final = 10
"""Fewest evaluations of a trend."""


@dataclass(frozen=True, slots=True)
class Plateau:
    """Evidence, without a fitted curve, on whether a run still gains.

    Attributes:
        share: spent share of the compute budget.
        gained: best mean of three evaluations minus the first one.
        slope, slope_sd: reward per doubling of compute, over the last two doublings, and its sd.
        p_trend: probability that the gain by this trend exceeds the smallest gain that matters.
        p_late: probability of a first rise later.
    """

    share: float
    gained: float
    slope: float
    slope_sd: float
    p_trend: float
    p_late: float

    @property
    def p_gain(self) -> float:
        """Probability of a gain that matters, by the trend or by a first rise."""
        return 1.0 - (1.0 - self.p_trend) * (1.0 - self.p_late)


def late_rises(curve: Curve, least: float = LEAST) -> tuple[int, list[float]]:
    """Number of doublings of a finished run that could have a late rise, and the gains of its late rises.

    A late rise, in means of three evaluations: over the doubling up to a quarter or a half of the record the run gained
    less than `least` and was within `least` of its best; within the next doubling it rose by `least` or more.
    """
    share, mean = record_means(curve)
    doublings, gains = 0, list[float]()
    for at in (0.25, 0.5):
        before, now, then = (int(np.searchsorted(share, s, side="right")) - 1 for s in (at / 2, at, 2 * at))
        if before < 0:
            continue
        doublings += 1
        flat = mean[now] - mean[before] < least and mean[now] > mean[: now + 1].max() - least
        gain = float(mean[now : then + 1].max() - mean[now])
        if flat and gain >= least:
            gains.append(gain)
    return doublings, gains


def record_means(curve: Curve) -> tuple[FloatArray, FloatArray]:
    """(n,) share of the record, and mean of the last three evaluations, at each of the n points with compute > 0."""
    at = curve.first_trained
    totals = np.concatenate([[0.0], np.cumsum(curve.reward[at:])])
    n = np.arange(1, totals.size)
    first = np.maximum(n - CONSECUTIVE, 0)
    return curve.compute[at:] / curve.now, (totals[n] - totals[first]) / (n - first)


def p_late_rise(doublings: float, least: float, rate: float, headroom: float) -> float:
    """Probability that a late rise by `least` or more begins within `doublings`.

    Args:
        rate: probability of a late rise per doubling.
        headroom: largest size of a rise; sizes are uniform.
    """
    hazard = rate * max(1.0 - least / headroom, 0.0) if headroom > 0 else 0.0
    return float(1.0 - (1.0 - hazard) ** max(doublings, 0.0))


def late_rise_sizes(least: float, rises: LateRises) -> tuple[float, float, float] | None:
    """Median, smallest and largest gain of the counted late rises of `least` or more."""
    sizes = [size for size in SIZES[rises] if size >= least]
    return (float(np.median(sizes)), sizes[0], sizes[-1]) if sizes else None


def p_first_rise(share: float) -> float:
    """Probability that a run still rises if it has gained nothing by `share` of its compute."""
    later = float(np.interp(share, SHARES, NOT_RISEN)) / CURVES
    learns = 1.0 - NEVER_LEARNS
    return learns * later / (learns * later + NEVER_LEARNS)


def detect_plateau(curve: Curve, least: float, horizon: float, budget: float) -> Plateau | None:
    """Evidence on whether one segment is flat; None with fewer than 10 evaluations in its last two doublings.

    Args:
        least: smallest gain that matters.
        horizon: multiple of now up to which the gain counts.
        budget: total compute that may be used, on the axis of the segment.

    The trend is a least-squares line in log C. Its sd allows for correlated evaluations (`collapse.difference_sd`).
    """
    last = curve.compute >= curve.now / TREND_FACTOR
    last &= curve.compute > 0
    if last.sum() < MIN_EVALUATIONS:
        return None
    reward = curve.reward[last]
    doubling = np.log2(curve.compute[last])
    doubling -= doubling.mean()
    spread = float(doubling @ doubling)
    # Order 2: curvature counts as noise, since the slope of a line through a curved trend is uncertain.
    noise = difference_sd(reward, order=2) * math.sqrt(CONSECUTIVE / 2.0)
    if curve.samples is not None:
        rate = float(np.clip(reward.mean(), 1.0 / float(np.max(curve.samples)), 0.98))
        noise = max(noise, PAIRED * math.sqrt(rate * (1.0 - rate) / float(np.mean(curve.samples[last]))))
    slope, slope_sd = float(doubling @ reward) / spread, max(noise, 1e-6) / math.sqrt(spread)
    ahead = math.log2(horizon)
    share = min(curve.now / budget, 1.0)
    p_trend = float(ndtr((slope * ahead - least) / (slope_sd * ahead)))
    all_means = np.convolve(
        curve.reward[curve.first_trained :], np.full(CONSECUTIVE, 1.0 / CONSECUTIVE), "valid"
    )
    gained = float(all_means.max() - all_means[0])
    return Plateau(share, gained, slope, slope_sd, p_trend, p_first_rise(share))
