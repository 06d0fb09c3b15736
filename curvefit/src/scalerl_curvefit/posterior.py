"""The grid posterior: what the points say of (A, Cmid, B, ρ), with R0 and σ integrated analytically.

Model (whitened by ρ, tilde): ỹ = A s̃ + R0 t̃ + innovation of variance v, t = 1 − s, with
R0 | v ~ N(r0, v/λ), v ~ scaled-inverse-χ²(ν0, s0²(1−ρ²)). At a node (ln Cmid, ln B, ρ) let
M = t̃·t̃ + λ and g = t̃·ỹ + λ r0. Given A the best R0 is m(A) = (g − (t̃·s̃) A)/M and

    SSE(A) = E0 − 2bA + qA²,  E0 = ỹ·ỹ + λr0² − g²/M,  b = s̃·ỹ − (t̃·s̃)g/M,  q = s̃·s̃ − (t̃·s̃)²/M.

    weight ∝ π(B) π(ρ) √(1−ρ²) √(λ/M) (ν0 s0²(1−ρ²))^{ν0/2} (SSE(A) + ν0 s0²(1−ρ²))^{−(n+ν0)/2} · P(R0 < A).

A is not put on a common grid: given the node its density is known in closed form, so each node gets
its own few quadrature points around its own mode b/q. (Cmid, B) is a grid that is laid again until it
resolves the mass, each time turned into the principal axes of the mass and shrunk around it: the ridge
between them is long and thin, and a fixed grid mis-covers it. While the grid is still too coarse for
the data, its weights are tempered, so that the best node of a coarse grid cannot hide a better region.

Legend of suffixes: g shape nodes (Cmid, B) of a grid, r values of ρ, s surviving (node, ρ) pairs,
j quadrature points of A, k knots. The long index comes last: NumPy is several times slower over rows of four.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from scipy.special import log_ndtr

from .curve import FloatArray
from .families import Family, gain_share
from .moments import Moments
from .settings import FitSettings

MAX_STAGES: Final = 8
LN_B_REACH: Final = 3.0
"""The grid of ln B reaches this many prior standard deviations."""
NEGLIGIBLE: Final = 11.0
"""Nodes whose peak density is below exp(−this) of the best are left out."""
TEMPERED_NODES: Final = 10.0
"""Nodes that share the tempered mass while a grid is too coarse: few, so that each stage shrinks it well."""
CUT: Final = (1e-4, 1e-2)
"""Nodes below this share of the best do not widen the next grid: plain, and tempered weights (which
are wider than the mass by themselves)."""
SURE_RISE: Final = 6.0
"""So many standard deviations between R0 and A leave no doubt (1e-9) that the curve rises."""
A_REACH: Final = 4.5
"""Quadrature of A at a node reaches this many of its conditional scales to either side."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How finely a posterior is laid.

    coarse, fine: first grid, ln Cmid × ln B, and each refinement, along × across the ridge.
    stages: at least so many. nodes: effective number (1/Σw²) of shape nodes that must share the mass
    before the grid counts as fine enough. a_points: quadrature points of A at a node.
    """

    coarse: tuple[int, int] = (28, 14)
    fine: tuple[int, int] = (26, 14)
    stages: int = 3
    nodes: float = 30.0
    a_points: int = 15


FULL: Final = Effort()
QUICK: Final = Effort(coarse=(22, 11), fine=(18, 10), stages=2, nodes=12.0, a_points=7)
"""Enough for the mean and the spread of one forecast."""


@dataclass(frozen=True, slots=True)
class Prior:
    """The prior in numbers: bounds and scales that settings and points give together."""

    ln_cmid: tuple[float, float]
    ln_b: tuple[float, float]
    ln_b_mean: float
    ln_b_sd: float
    a_lowest: float
    a_highest: float
    r0: float
    r0_sd: float
    noise_sd: float
    noise_dof: float
    ln_rho_weight_r: FloatArray


@dataclass(frozen=True, slots=True)
class Nodes:
    """Weighted nodes of one family; rows s are (Cmid, B, ρ), columns j are values of A.

    weight_sj sums to 1 and belongs to the cell A = a_sj ± a_step_s/2. ln_evidence is
    ln ∫ likelihood × prior up to a constant that all families share. Given a node and A:
    v ~ spread_sj/χ²(dof) and R0 ~ N(r0_at_zero_s − r0_slope_s·A, v/precision_s) below A.
    """

    family: Family
    ln_cmid_s: FloatArray
    ln_b_s: FloatArray
    rho_s: FloatArray
    a_sj: FloatArray
    a_step_s: FloatArray
    weight_sj: FloatArray
    spread_sj: FloatArray
    r0_at_zero_s: FloatArray
    r0_slope_s: FloatArray
    precision_s: FloatArray
    dof: float
    ln_evidence: float


@dataclass(frozen=True, slots=True)
class _Forms:
    """The closed forms of the module docstring at every (ρ r, shape node g)."""

    ln_prior_rg: FloatArray
    e0_rg: FloatArray
    b_rg: FloatArray
    q_rg: FloatArray
    zero_rg: FloatArray
    slope_rg: FloatArray
    precision_rg: FloatArray


def make_prior(
    settings: FitSettings, first: float, now: float, r0: float, noise_sd: float, noise_dof: float
) -> Prior:
    """Bounds and scales for points from compute `first` > 0 to `now`."""
    reach = LN_B_REACH * settings.ln_b_sd
    ln_b_mean = float(np.log(settings.b_median))
    return Prior(
        ln_cmid=(float(np.log(first / settings.cmid_below)), float(np.log(now * settings.cmid_above))),
        ln_b=(ln_b_mean - reach, ln_b_mean + reach),
        ln_b_mean=ln_b_mean,
        ln_b_sd=settings.ln_b_sd,
        a_lowest=settings.a_lowest,
        a_highest=settings.a_highest,
        r0=r0,
        r0_sd=settings.r0_sd,
        noise_sd=noise_sd,
        noise_dof=noise_dof,
        ln_rho_weight_r=np.log(np.array(settings.rho_weights) / sum(settings.rho_weights)),
    )


def grid_posterior(points: Moments, prior: Prior, family: Family, effort: Effort = FULL) -> Nodes:
    """Lay the grid, refine it around the mass until it resolves it, then integrate over A."""
    low_21 = np.array([[prior.ln_cmid[0]], [prior.ln_b[0]]])
    high_21 = np.array([[prior.ln_cmid[1]], [prior.ln_b[1]]])
    step_21 = (high_21 - low_21) / np.array([effort.coarse]).T
    frame_22 = np.diag(step_21[:, 0])
    shape_2g = low_21 + _mesh(*effort.coarse) * step_21
    for stage in range(1, MAX_STAGES + 1):
        forms = _forms(points, prior, family, shape_2g)
        ln_weight_rg = _ln_weight(points, prior, forms)
        ln_weight_g = _ln_sum(ln_weight_rg)
        weight_g, tempered = _tempered(ln_weight_g, effort.nodes)
        if (stage >= effort.stages and not tempered) or stage == MAX_STAGES:
            break
        shape_2g, frame_22 = _refined(
            shape_2g, weight_g, CUT[tempered], frame_22, low_21, high_21, effort.fine
        )
    area = float(abs(frame_22[0, 0] * frame_22[1, 1] - frame_22[0, 1] * frame_22[1, 0]))
    return _integrate_a(points, prior, family, shape_2g, forms, ln_weight_rg, area, effort.a_points)


@lru_cache(maxsize=8)
def _mesh(rows: int, columns: int) -> FloatArray:
    """(2, rows·columns) centres of unit cells."""
    i, j = np.meshgrid(np.arange(rows) + 0.5, np.arange(columns) + 0.5, indexing="ij")
    mesh_2g = np.stack([i.ravel(), j.ravel()])
    mesh_2g.flags.writeable = False
    return mesh_2g


def _forms(points: Moments, prior: Prior, family: Family, shape_2g: FloatArray) -> _Forms:
    ln_cmid_g, ln_b_g = shape_2g
    s_kg = gain_share(family, points.ln_compute_k[:, None], ln_cmid_g, ln_b_g)
    ss = points.ss_diagonal_kr.T @ (s_kg * s_kg)
    ss += 2.0 * (points.ss_neighbour_kr.T @ (s_kg[1:] * s_kg[:-1]))
    s_one, s_y = points.s_one_kr.T @ s_kg, points.s_y_kr.T @ s_kg
    one_one_r1, one_y_r1, y_y_r1 = points.one_one_r[:, None], points.one_y_r[:, None], points.y_y_r[:, None]
    tt, ts, ty = one_one_r1 - 2.0 * s_one + ss, s_one - ss, one_y_r1 - s_y
    innovation_share_r1 = (1.0 - points.rho_r**2)[:, None]
    lam_r1 = prior.noise_sd**2 * innovation_share_r1 / prior.r0_sd**2
    precision = tt + lam_r1
    g = ty + lam_r1 * prior.r0
    zero, slope = g / precision, ts / precision
    spread0_r1 = prior.noise_dof * prior.noise_sd**2 * innovation_share_r1
    ln_prior_r1 = prior.ln_rho_weight_r[:, None] + 0.5 * (
        np.log(innovation_share_r1) + np.log(lam_r1) + prior.noise_dof * np.log(spread0_r1)
    )
    ln_prior_g = -0.5 * ((ln_b_g - prior.ln_b_mean) / prior.ln_b_sd) ** 2
    return _Forms(
        ln_prior_rg=ln_prior_r1 + ln_prior_g - 0.5 * np.log(precision),
        # The prior spread of v is added here once: SSE(A) below always comes with it.
        e0_rg=y_y_r1 + lam_r1 * prior.r0**2 + spread0_r1 - g * zero,
        b_rg=s_y - ts * zero,
        q_rg=np.maximum(ss - ts * slope, 1e-12),
        zero_rg=zero,
        slope_rg=slope,
        precision_rg=precision,
    )


def _ln_weight(points: Moments, prior: Prior, forms: _Forms) -> FloatArray:
    """ln of the node's mass, with the integral over A as peak × width (exact enough to steer the grid)."""
    dof = points.n + prior.noise_dof
    peak = np.clip(forms.b_rg / forms.q_rg, prior.a_lowest, prior.a_highest)
    spread = forms.e0_rg + peak * (forms.q_rg * peak - 2.0 * forms.b_rg)
    width = np.minimum(np.sqrt(2.0 * np.pi * spread / (forms.q_rg * dof)), prior.a_highest - prior.a_lowest)
    return np.asarray(forms.ln_prior_rg - 0.5 * dof * np.log(spread) + np.log(width))


def _ln_sum(ln_weight_rg: FloatArray) -> FloatArray:
    """ln Σ_r exp: one maximum for each node, in a third of the time of `logaddexp.reduce`."""
    top_g = ln_weight_rg.max(axis=0)
    return np.asarray(top_g + np.log(np.exp(ln_weight_rg - top_g).sum(axis=0)))


def _tempered(ln_weight_g: FloatArray, enough: float) -> tuple[FloatArray, bool]:
    """Weights (max 1) for the next grid, flattened if too few nodes share the mass, and whether they were."""
    relative = ln_weight_g - ln_weight_g.max()

    def effective(w: FloatArray) -> float:
        return float(w.sum() ** 2 / (w @ w))

    plain = np.exp(relative)
    if effective(plain) >= enough:
        return plain, False
    low, high = -14.0, 0.0
    for _ in range(8):
        middle = 0.5 * (low + high)
        wide = effective(np.exp(math.exp(middle) * relative)) >= TEMPERED_NODES
        low, high = (middle, high) if wide else (low, middle)
    return np.exp(math.exp(low) * relative), True


def _refined(
    shape_2g: FloatArray,
    weight_g: FloatArray,
    cut: float,
    frame_22: FloatArray,
    low_21: FloatArray,
    high_21: FloatArray,
    fine: tuple[int, int],
) -> tuple[FloatArray, FloatArray]:
    """A finer grid in the principal axes of the mass; returns its nodes and its cell's two edge vectors."""
    share_g = weight_g / weight_g.sum()
    centre_21 = (shape_2g @ share_g)[:, None]
    offset_2g = shape_2g - centre_21
    covariance = (offset_2g * share_g) @ offset_2g.T + frame_22 @ frame_22.T / 12.0
    _, axes_22 = np.linalg.eigh(covariance)
    axes_22 = axes_22[:, ::-1]  # the long axis first, as in Effort.fine
    along_2g = axes_22.T @ offset_2g[:, weight_g > cut]
    margin_2 = 0.5 * np.abs(frame_22.T @ axes_22).sum(axis=0)
    start_2, stop_2 = along_2g.min(axis=1) - margin_2, along_2g.max(axis=1) + margin_2
    step_2 = (stop_2 - start_2) / np.array(fine)
    refined_2g = centre_21 + axes_22 @ (start_2[:, None] + _mesh(*fine) * step_2[:, None])
    inside = np.all((refined_2g >= low_21) & (refined_2g <= high_21), axis=0)
    return refined_2g[:, inside], axes_22 * step_2


def _integrate_a(
    points: Moments,
    prior: Prior,
    family: Family,
    shape_2g: FloatArray,
    forms: _Forms,
    ln_weight_rg: FloatArray,
    area: float,
    a_points: int,
) -> Nodes:
    g, r = np.nonzero((ln_weight_rg > ln_weight_rg.max() - NEGLIGIBLE).T)
    dof = points.n + prior.noise_dof
    e0, b, q = (values[r, g] for values in (forms.e0_rg, forms.b_rg, forms.q_rg))
    zero, slope, precision = (values[r, g] for values in (forms.zero_rg, forms.slope_rg, forms.precision_rg))
    mode = np.clip(b / q, prior.a_lowest, prior.a_highest)
    reach = A_REACH * np.sqrt((e0 - 2.0 * b * mode + q * mode * mode) / (q * dof))
    lowest, highest = np.maximum(mode - reach, prior.a_lowest), np.minimum(mode + reach, prior.a_highest)
    step = (highest - lowest) / a_points
    a_sj = lowest[:, None] + step[:, None] * (np.arange(a_points) + 0.5)
    spread_sj = e0[:, None] + a_sj * (q[:, None] * a_sj - 2.0 * b[:, None])
    r0_sd_sj = np.sqrt(spread_sj / (dof * precision[:, None]))
    # In logarithms: points that fall all along leave next to no probability of a rising curve anywhere.
    rise_sj = (a_sj * (1.0 + slope[:, None]) - zero[:, None]) / r0_sd_sj
    ln_rising_sj = np.zeros_like(rise_sj)
    close = rise_sj < SURE_RISE
    ln_rising_sj[close] = log_ndtr(rise_sj[close])
    ln_density_sj = forms.ln_prior_rg[r, g][:, None] - 0.5 * dof * np.log(spread_sj) + ln_rising_sj
    top = ln_density_sj.max()
    weight_sj = np.exp(ln_density_sj - top) * step[:, None]
    total = float(weight_sj.sum())
    ln_prior_volume = float(
        np.log((prior.ln_cmid[1] - prior.ln_cmid[0]) * prior.ln_b_sd * (prior.a_highest - prior.a_lowest))
    )
    return Nodes(
        family=family,
        ln_cmid_s=shape_2g[0, g],
        ln_b_s=shape_2g[1, g],
        rho_s=points.rho_r[r],
        a_sj=a_sj,
        a_step_s=step,
        weight_sj=weight_sj / total,
        spread_sj=spread_sj,
        r0_at_zero_s=zero,
        r0_slope_s=slope,
        precision_s=precision,
        dof=dof,
        ln_evidence=float(top + np.log(total * area)) - ln_prior_volume,
    )
