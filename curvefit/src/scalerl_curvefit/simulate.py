"""Simulated curves with known parameters, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import Curve, FloatArray


@dataclass(frozen=True, slots=True)
class Truth:
    """R(C) = R0 + (A − R0)/(1 + (Cmid/C)^B). The paper does not publish R0; the default .2 is an assumption."""

    A: float
    B: float
    Cmid: float
    R0: float = 0.2

    def reward(self, compute: FloatArray | float) -> FloatArray:
        """R at compute > 0."""
        share = 1.0 / (1.0 + (self.Cmid / np.asarray(compute, dtype=np.float64)) ** self.B)
        return np.asarray(self.R0 + (self.A - self.R0) * share)


SCALERL: Final = Truth(A=0.61, B=1.92, Cmid=2542.0)
"""The ScaleRL row of table 1, Cmid in GPU-hours [P]."""


def ar1_noise(n: int, sigma: float, rho: float, random: np.random.Generator) -> FloatArray:
    """(n,) stationary AR(1) noise with sd `sigma` and coefficient `rho`."""
    innovation = random.standard_normal(n) * sigma * np.sqrt(1.0 - rho * rho)
    innovation[0] = random.standard_normal() * sigma
    for i in range(1, n):
        innovation[i] += rho * innovation[i - 1]
    return np.asarray(innovation)


def simulated(
    truth: Truth = SCALERL,
    *,
    n: int = 37,
    reach: float = 4.0,
    sigma: float = 0.0075,
    rho: float = 0.3,
    seed: int = 0,
) -> Curve:
    """`n` evenly spaced evaluations up to compute reach·Cmid, with AR(1) noise."""
    compute = np.linspace(reach / n, reach, n) * truth.Cmid
    noise = ar1_noise(n, sigma, rho, np.random.default_rng(seed))
    return Curve(compute, np.clip(truth.reward(compute) + noise, 0.0, 1.0))
