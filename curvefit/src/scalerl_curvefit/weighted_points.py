"""The points of a fit with their weights, and the prior that depends on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import Curve, FloatArray
from .earlier_runs import EarlierRunsPrior
from .posterior import Prior, make_prior
from .settings import FitSettings
from .sufficient_statistics import SufficientStatistics, sufficient_statistics

OUTLIER: Final = 0.1
"""An evaluation of a smaller weight is an outlier."""
MIN_TRUST: Final = 1e-6
"""Smallest weight of a point: the likelihood needs a precision above 0."""


@dataclass(frozen=True, slots=True)
class WeightedPoints:
    """The points at compute > 0, and the prior, for the posterior; arrays are (n,).

    Attributes:
        precision: relative weight 1/sd of each point.
        burnt: number of first points with less weight.
    """

    compute: FloatArray
    ln_compute: FloatArray
    reward: FloatArray
    precision: FloatArray
    burnt: int
    prior: Prior

    def sufficient_statistics(self, settings: FitSettings) -> SufficientStatistics:
        return sufficient_statistics(self.ln_compute, self.reward, self.precision, np.array(settings.rho))


def weighted_points(
    curve: Curve, settings: FitSettings, earlier: EarlierRunsPrior | None, trust: FloatArray
) -> WeightedPoints:
    """The points of `curve` at compute > 0.

    Args:
        earlier: prior from earlier runs, whose noise counts too.
        trust: (n,) weights of the points as evaluations, small for outliers.
    """
    first = curve.first_trained
    compute, reward = curve.compute[first:], curve.reward[first:]
    n = compute.size
    burnt = min(math.ceil(settings.burn_in_fraction * n), max(n - settings.burn_in_keeps, 0))
    noise_n, noise_dof = _noise(curve, reward, settings)
    noise_sd = float(np.sqrt(np.mean(noise_n**2)))
    precision = noise_sd / noise_n
    if earlier is not None and earlier.noise is not None:
        theirs, dof = earlier.noise
        noise_sd = math.sqrt((noise_dof * noise_sd**2 + dof * theirs**2) / (noise_dof + dof))
        noise_dof += dof
    precision[:burnt] /= settings.burn_in_sd_factor
    precision *= np.sqrt(np.maximum(trust, MIN_TRUST))
    begin = curve.reward[0] if first else reward[np.argmax(trust >= OUTLIER)]
    prior = make_prior(settings, float(compute[0]), float(compute[-1]), float(begin), noise_sd, noise_dof)
    return WeightedPoints(compute, np.log(compute), reward, precision, burnt, prior)


def _noise(curve: Curve, reward: FloatArray, settings: FitSettings) -> tuple[FloatArray, float]:
    """Prior noise sd of each point (n,), from the binomial sd if samples are known, and its weight in pseudo-points."""
    if curve.samples is None:
        return np.full(reward.size, settings.noise_guess), settings.guess_dof
    # One rate for all points: at a rate of 0 or 1 the binomial sd is 0, but an evaluation is not free of noise.
    rate = float(np.clip(np.mean(reward), 0.02, 0.98))
    binomial_n = np.sqrt(rate * (1.0 - rate) / curve.samples[-reward.size :])
    return np.hypot(settings.noise_share * binomial_n, settings.noise_floor), settings.noise_dof
