"""The grid posterior: what the points say of (A, Cmid, B, ρ), with R0 and σ integrated analytically.

Model (whitened by ρ, tilde): ỹ = A s̃ + R0 t̃ + innovation of variance v, t = 1 − s, with
R0 | v ~ N(r0, v/λ), v ~ scaled-inverse-χ²(ν0, s0²(1−ρ²)). At a node (ln Cmid, ln B, ρ) let
M = t̃·t̃ + λ and g = t̃·ỹ + λ r0. Given A the best R0 is m(A) = (g − (t̃·s̃) A)/M and

    SSE(A) = E0 − 2bA + qA²,  E0 = ỹ·ỹ + λr0² − g²/M,  b = s̃·ỹ − (t̃·s̃)g/M,  q = s̃·s̃ − (t̃·s̃)²/M.

    weight ∝ π(B) √(1−ρ²) √(λ/M) (ν0 s0²(1−ρ²))^{ν0/2} (SSE(A) + ν0 s0²(1−ρ²))^{−(n+ν0)/2} · P(R0 < A).

A is not put on a common grid: given the node its density is known in closed form, so each node gets
its own few quadrature points around its own mode b/q. (Cmid, B) is a grid that is laid three times or
more, each time turned into the principal axes of the mass and shrunk around it: the ridge between
them is long and thin, and a fixed grid mis-covers it.

Legend of suffixes: g shape nodes (Cmid, B) of a grid, r values of ρ, s surviving (node, ρ) pairs,
j quadrature points of A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import ndtr

from .curve import FloatArray
from .families import Family, gain_share
from .moments import Moments
from .settings import FitSettings

COARSE: Final = (34, 18)
"""First grid: ln Cmid × ln B."""
FINE: Final = (26, 14)
"""Each refinement: along × across the ridge."""
STAGES: Final = 3
MAX_STAGES: Final = 7
LN_B_REACH: Final = 3.0
"""The grid of ln B reaches this many prior standard deviations."""
NEGLIGIBLE: Final = 11.0
"""Nodes whose peak density is below exp(−this) of the best are left out."""
A_POINTS: Final = (7, 17)
"""Quadrature points of A while refining, and at the end."""
A_REACH: Final = 5.0
ENOUGH_NODES: Final = 25.0
"""Effective number of shape nodes (1/Σw²) below which one more refinement is made."""


@dataclass(frozen=True, slots=True)
class Prior:
    """The prior in numbers: bounds and scales that FitSettings and the points give together."""

    ln_cmid: tuple[float, float]
    ln_b: tuple[float, float]
    ln_b_mean: float
    ln_b_sd: float
    a_highest: float
    r0: float
    r0_sd: float
    noise_sd: float
    noise_dof: float


@dataclass(frozen=True, slots=True)
class Nodes:
    """Weighted nodes of one family; rows s are (Cmid, B, ρ), columns j are values of A.

    weight_sj sums to 1. ln_evidence: ln ∫ likelihood × prior, up to a constant that all families share.
    r0 of a draw: N(r0_at_zero_s − r0_slope_s·A, v/precision_s), v from SSE(A) + prior.
    """

    family: Family
    ln_cmid_s: FloatArray
    ln_b_s: FloatArray
    rho_s: FloatArray
    a_sj: FloatArray
    a_step_s: FloatArray
    weight_sj: FloatArray
    sse_sj: FloatArray
    r0_at_zero_s: FloatArray
    r0_slope_s: FloatArray
    precision_s: FloatArray
    dof: float
    ln_evidence: float


def make_prior(settings: FitSettings, first: float, now: float, r0: float, noise_sd: float) -> Prior:
    """Bounds of the grid for points from compute `first` to `now`."""
    reach = LN_B_REACH * settings.ln_b_sd
    ln_b_mean = float(np.log(settings.b_median))
    return Prior(
        ln_cmid=(float(np.log(first / settings.cmid_below)), float(np.log(now * settings.cmid_above))),
        ln_b=(ln_b_mean - reach, ln_b_mean + reach),
        ln_b_mean=ln_b_mean,
        ln_b_sd=settings.ln_b_sd,
        a_highest=settings.a_highest,
        r0=r0,
        r0_sd=settings.r0_sd,
        noise_sd=noise_sd,
        noise_dof=settings.noise_dof,
    )


def grid_posterior(points: Moments, prior: Prior, family: Family) -> Nodes:
    """Nodes that carry the posterior mass of one family, after refining around it."""
    cells = [(high - low) / count for (low, high), count in zip((prior.ln_cmid, prior.ln_b), COARSE, strict=True)]
    axes = [low + step * (np.arange(count) + 0.5) for (low, _), step, count in zip((prior.ln_cmid, prior.ln_b), cells, COARSE, strict=True)]
    centre_2, frame_22, half_2 = _whole(prior)
    ...
