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
j quadrature points of A.
"""

from __future__ import annotations

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
    """The closed forms of the module docstring at every (shape node g, ρ r)."""

    ln_prior_gr: FloatArray
    e0_gr: FloatArray
    b_gr: FloatArray
    q_gr: FloatArray
    zero_gr: FloatArray
    slope_gr: FloatArray
    precision_gr: FloatArray


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
    low = np.array([prior.ln_cmid[0], prior.ln_b[0]])
    high = np.array([prior.ln_cmid[1], prior.ln_b[1]])
    step_2 = (high - low) / np.array(effort.coarse)
    frame_22 = np.diag(step_2)
    shape_g2 = low + _mesh(*effort.coarse) * step_2
    for stage in range(1, MAX_STAGES + 1):
        forms = _forms(points, prior, family, shape_g2)
        ln_weight_gr = _ln_weight(points, prior, forms)
        ln_weight_g = np.logaddexp.reduce(ln_weight_gr, axis=1)
        weight_g, tempered = _tempered(ln_weight_g, effort.nodes)
        if (stage >= effort.stages and not tempered) or stage == MAX_STAGES:
            break
        shape_g2, frame_22 = _refined(shape_g2, weight_g, CUT[tempered], frame_22, low, high, effort.fine)
    area = float(abs(np.linalg.det(frame_22)))
    return _integrate_a(points, prior, family, shape_g2, forms, ln_weight_gr, area, effort.a_points)


@lru_cache(maxsize=8)
def _mesh(rows: int, columns: int) -> FloatArray:
    """(rows·columns, 2) centres of unit cells."""
    i, j = np.meshgrid(np.arange(rows) + 0.5, np.arange(columns) + 0.5, indexing="ij")
    return np.stack([i.ravel(), j.ravel()], axis=1)


def _forms(points: Moments, prior: Prior, family: Family, shape_g2: FloatArray) -> _Forms:
    ln_b_g1 = shape_g2[:, 1:]
    s_gk = gain_share(family, points.ln_compute_k, shape_g2[:, :1], ln_b_g1)
    ss = (s_gk * s_gk) @ points.ss_diagonal_kr
    ss += 2.0 * ((s_gk[:, 1:] * s_gk[:, :-1]) @ points.ss_neighbour_kr)
    s_one, s_y = s_gk @ points.s_one_kr, s_gk @ points.s_y_kr
    tt, ts, ty = points.one_one_r - 2.0 * s_one + ss, s_one - ss, points.one_y_r - s_y
    innovation_share_r = 1.0 - points.rho_r**2
    lam_r = prior.noise_sd**2 * innovation_share_r / prior.r0_sd**2
    precision = tt + lam_r
    g = ty + lam_r * prior.r0
    spread0_r = prior.noise_dof * prior.noise_sd**2 * innovation_share_r
    ln_prior = (
        prior.ln_rho_weight_r
        - 0.5 * ((ln_b_g1 - prior.ln_b_mean) / prior.ln_b_sd) ** 2
        + 0.5 * (np.log(innovation_share_r) + np.log(lam_r) + prior.noise_dof * np.log(spread0_r))
        - 0.5 * np.log(precision)
    )
    return _Forms(
        ln_prior_gr=ln_prior,
        # The prior spread of v is added here once: SSE(A) below always comes with it.
        e0_gr=points.y_y_r + lam_r * prior.r0**2 - g * g / precision + spread0_r,
        b_gr=s_y - ts * g / precision,
        q_gr=np.maximum(ss - ts * ts / precision, 1e-12),
        zero_gr=g / precision,
        slope_gr=ts / precision,
        precision_gr=precision,
    )


def _ln_weight(points: Moments, prior: Prior, forms: _Forms) -> FloatArray:
    """ln of the node's mass, with the integral over A as peak × width (exact enough to steer the grid)."""
    dof = points.n + prior.noise_dof
    peak = np.clip(forms.b_gr / forms.q_gr, prior.a_lowest, prior.a_highest)
    spread = forms.e0_gr - 2.0 * forms.b_gr * peak + forms.q_gr * peak * peak
    width = np.minimum(np.sqrt(2.0 * np.pi * spread / (forms.q_gr * dof)), prior.a_highest - prior.a_lowest)
    return np.asarray(forms.ln_prior_gr - 0.5 * dof * np.log(spread) + np.log(width))


def _tempered(ln_weight_g: FloatArray, enough: float) -> tuple[FloatArray, bool]:
    """Weights (max 1) for the next grid, flattened if too few nodes share the mass, and whether they were."""
    relative = ln_weight_g - ln_weight_g.max()

    def weights(power: float) -> FloatArray:
        return np.asarray(np.exp(power * relative))

    def effective(w: FloatArray) -> float:
        return float(w.sum() ** 2 / (w @ w))

    plain = weights(1.0)
    if effective(plain) >= enough:
        return plain, False
    low, high = -14.0, 0.0
    for _ in range(8):
        middle = 0.5 * (low + high)
        wide = effective(weights(float(np.exp(middle)))) >= TEMPERED_NODES
        low, high = (middle, high) if wide else (low, middle)
    return weights(float(np.exp(low))), True


def _refined(
    shape_g2: FloatArray,
    weight_g: FloatArray,
    cut: float,
    frame_22: FloatArray,
    low: FloatArray,
    high: FloatArray,
    fine: tuple[int, int],
) -> tuple[FloatArray, FloatArray]:
    """A finer grid in the principal axes of the mass; returns its nodes and its cell's two edge vectors."""
    share_g = weight_g / weight_g.sum()
    centre_2 = share_g @ shape_g2
    offset_g2 = shape_g2 - centre_2
    covariance = (offset_g2 * share_g[:, None]).T @ offset_g2 + frame_22 @ frame_22.T / 12.0
    _, axes_22 = np.linalg.eigh(covariance)
    axes_22 = axes_22[:, ::-1]  # the long axis first, as in Effort.fine
    along_g2 = offset_g2[weight_g > cut] @ axes_22
    margin_2 = 0.5 * np.abs(frame_22.T @ axes_22).sum(axis=0)
    start_2, stop_2 = along_g2.min(axis=0) - margin_2, along_g2.max(axis=0) + margin_2
    step_2 = (stop_2 - start_2) / np.array(fine)
    refined_g2 = centre_2 + (start_2 + _mesh(*fine) * step_2) @ axes_22.T
    inside = np.all((refined_g2 >= low) & (refined_g2 <= high), axis=1)
    return refined_g2[inside], axes_22 * step_2


def _integrate_a(
    points: Moments,
    prior: Prior,
    family: Family,
    shape_g2: FloatArray,
    forms: _Forms,
    ln_weight_gr: FloatArray,
    area: float,
    a_points: int,
) -> Nodes:
    g, r = np.nonzero(ln_weight_gr > ln_weight_gr.max() - NEGLIGIBLE)
    dof = points.n + prior.noise_dof
    e0, b, q = (values[g, r] for values in (forms.e0_gr, forms.b_gr, forms.q_gr))
    zero, slope, precision = (values[g, r] for values in (forms.zero_gr, forms.slope_gr, forms.precision_gr))
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
    ln_density_sj = forms.ln_prior_gr[g, r][:, None] - 0.5 * dof * np.log(spread_sj) + ln_rising_sj
    top = ln_density_sj.max()
    weight_sj = np.exp(ln_density_sj - top) * step[:, None]
    total = float(weight_sj.sum())
    ln_prior_volume = float(
        np.log((prior.ln_cmid[1] - prior.ln_cmid[0]) * prior.ln_b_sd * (prior.a_highest - prior.a_lowest))
    )
    return Nodes(
        family=family,
        ln_cmid_s=shape_g2[g, 0],
        ln_b_s=shape_g2[g, 1],
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
