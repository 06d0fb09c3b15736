"""Rises that nothing announces: how often they come in real curves, and what that says of a run that is flat.

No fit sees a late rise coming, so its probability is taken from public curves: 23 of language models and 36 of game
agents (`curvefit/data`; `benchmarks/late_rises.py` counts them). Rewards are means of three evaluations.

- *Late rises*: of 117 doublings of compute (from a quarter to a half and from a half to the whole of each record), seven
  began after a flat doubling (a gain under .02, at the best so far) and brought .02 or more: 3 of 45 with language
  models, 4 of 72 with game agents.
- *First rises*: how many of the 59 curves stood less than .02 above their start at each share of their record. All of
  them rise at some time, for nobody publishes the others; a run of one's own that has shown nothing is taken to be one
  that never learns with probability .5, before its evaluations count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import ndtr

from .collapse import CONSECUTIVE, PAIRED, difference_sd
from .curve import Curve, FloatArray

LEAST: Final = 0.02
"""Gain that counts as a rise."""
DOUBLINGS: Final = 117
SIZES: Final = (0.028, 0.049, 0.098, 0.108, 0.146, 0.151, 0.267)
"""Gains of the late rises that were counted."""
CURVES: Final = 59
SHARES: Final = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
NOT_RISEN: Final = (9, 8, 6, 5, 4, 4)
"""Curves that had not risen by each share."""
NEVER_LEARNS: Final = 0.5
"""Beforehand, of a run that has shown nothing."""
BACK: Final = 4.0
"""The trend of a flat run is that of its last two doublings."""
ENOUGH: Final = 10
"""Fewest evaluations of a trend."""


@dataclass(frozen=True, slots=True)
class Plateau:
    """What says that nothing more comes of a run, whatever a curve fitted to it says.

    gained: best mean of three evaluations above the first of them.
    slope, slope_sd: reward gained with each doubling of compute, over the last two. p_trend: that the next gain by this
    trend exceeds the least one. p_late: that a first rise is still to come. p_gain: either.
    share: of the compute that may be used, spent.
    """

    share: float
    gained: float
    slope: float
    slope_sd: float
    p_trend: float
    p_late: float

    @property
    def p_gain(self) -> float:
        """P(gain > least)."""
        return 1.0 - (1.0 - self.p_trend) * (1.0 - self.p_late)


def late_rises(curve: Curve, least: float = LEAST) -> tuple[int, list[float]]:
    """The doublings of one finished run's record that could show a late rise, and the gains of those that did.

    Rewards are means of three evaluations. Over the doubling up to a quarter or a half of the record such a run gained
    under `least` and stood within `least` of its best; within the next doubling it rose by `least` or more.
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
    """Shares of the record, and at each the mean of the last three evaluations, at compute above 0."""
    at = curve.first_trained
    totals = np.concatenate([[0.0], np.cumsum(curve.reward[at:])])
    n = np.arange(1, totals.size)
    first = np.maximum(n - CONSECUTIVE, 0)
    return curve.compute[at:] / curve.now, (totals[n] - totals[first]) / (n - first)


def p_late_rise(doublings: float, least: float, times: float = 1.0) -> float:
    """Probability that a rise by `least` or more, which nothing announces, begins within so many doublings.

    times: how often such rises come, as a multiple of how often they do in public curves.
    """
    seen = sum(size >= least for size in SIZES)
    hazard = min(times * (seen + 0.5) / (DOUBLINGS + 1.0), 1.0)
    return float(1.0 - (1.0 - hazard) ** max(doublings, 0.0))


def late_rise_sizes(least: float) -> tuple[float, float, float] | None:
    """Median, least and greatest gain of the late rises counted that brought `least` or more."""
    sizes = [size for size in SIZES if size >= least]
    return (float(np.median(sizes)), sizes[0], sizes[-1]) if sizes else None


def p_first_rise(share: float) -> float:
    """Probability that a run which has gained nothing at a share of its compute still rises."""
    later = float(np.interp(share, SHARES, NOT_RISEN)) / CURVES
    learns = 1.0 - NEVER_LEARNS
    return learns * later / (learns * later + NEVER_LEARNS)


def detect_plateau(curve: Curve, least: float, horizon: float, budget: float) -> Plateau | None:
    """The evidence that one segment is flat; None with fewer than 10 evaluations in its last two doublings' reach.

    least: gain that matters. horizon: multiple of now up to which it counts. budget: total compute that may be used, on
    the axis of the segment.

    The trend is a straight line in log C by least squares. Its sd takes neighbouring evaluations for as alike as the
    differences of their means of three are (`guard.difference_sd`).
    """
    last = curve.compute >= curve.now / BACK
    last &= curve.compute > 0
    if last.sum() < ENOUGH:
        return None
    reward = curve.reward[last]
    doubling = np.log2(curve.compute[last])
    doubling -= doubling.mean()
    spread = float(doubling @ doubling)
    # What bends is no line, and its slope is the less known.
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
