"""The grid posterior of (A, Cmid, B, ρ), with R0 and σ integrated analytically.

Model (whitened by ρ, tilde): ỹ = A s̃ + R0 t̃ + innovation of variance v, t = 1 − s, with
R0 | v ~ N(r0, v/λ), v ~ scaled-inverse-χ²(ν0, s0²(1−ρ²)). At a node (ln Cmid, ln B, ρ) let
M = t̃·t̃ + λ and g = t̃·ỹ + λ r0. Given A the best R0 is m(A) = (g − (t̃·s̃) A)/M and

    SSE(A) = E0 − 2bA + qA²,  E0 = ỹ·ỹ + λr0² − g²/M,  b = s̃·ỹ − (t̃·s̃)g/M,  q = s̃·s̃ − (t̃·s̃)²/M.

    weight ∝ π(B) π(ρ) √(1−ρ²) √(λ/M) (ν0 s0²(1−ρ²))^{ν0/2} (SSE(A) + ν0 s0²(1−ρ²))^{−(n+ν0)/2} · P(R0 < A).

A has no common grid: given the node its density is known in closed form, so each node has a few quadrature
points of its own around its mode b/q. The grid of (Cmid, B) is refined until it resolves the mass, each time
rotated to the principal axes of the mass and shrunk around it: the ridge between them is long and thin, and a
fixed grid covers it badly. While the grid is too coarse for the data, its weights are tempered, so that the
best node of a coarse grid does not hide a better region.

Legend of suffixes: g shape nodes (Cmid, B) of a grid, r values of ρ, s surviving (node, ρ) pairs,
j quadrature points of A, k knots. The long index comes last: NumPy is several times slower over rows of four.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from .curve import FloatArray
from .families import Family, gain_share
from .settings import FitSettings
from .sufficient_statistics import SufficientStatistics

MAX_STAGES: Final = 8
LN_B_REACH: Final = 3.0
"""The grid of ln B reaches this many prior standard deviations."""
NEGLIGIBLE: Final = 11.0
"""Nodes whose peak density is below exp(−NEGLIGIBLE) of the best are left out."""
OUTSIDE: Final = -1e12
"""ln prior of nodes outside the prior's bounds: finite, but without weight even if tempered."""
TEMPERED_NODES: Final = 10.0
"""Effective number of nodes of tempered weights; small, so that each stage shrinks the grid."""
CUT: Final = (1e-4, 1e-2)
"""Nodes below this share of the best are outside the next grid: with plain weights, and with tempered ones (which are
wider than the mass)."""
SURE_RISE: Final = 6.0
"""With this many standard deviations between R0 and A, P(R0 < A) is 1 (to 1e-9)."""
A_REACH: Final = 4.5
"""Quadrature of A at a node reaches this many of its conditional scales to either side."""


@dataclass(frozen=True, slots=True)
class GridSettings:
    """Resolution of a grid posterior.

    Attributes:
        coarse: size of the first grid, ln Cmid × ln B.
        fine: size of each refinement, along × across the ridge.
        stages: smallest number of stages.
        nodes: effective number (1/Σw²) of shape nodes from which on the grid is fine enough.
        a_points: number of quadrature points of A at a node.
    """

    coarse: tuple[int, int] = (28, 14)
    fine: tuple[int, int] = (26, 14)
    stages: int = 3
    nodes: float = 30.0
    a_points: int = 15


FINE_GRID: Final = GridSettings()
COARSE_GRID: Final = GridSettings(coarse=(22, 11), fine=(18, 10), stages=2, nodes=12.0, a_points=7)
"""Enough for the mean and the spread of one forecast."""


@dataclass(frozen=True, slots=True)
class Prior:
    """Bounds and scales of the prior, from settings and points.

    Attributes:
        ln_cmid, ln_b: bounds (low, high).
        ln_b_mean, ln_b_sd: normal prior of ln B.
        a_lowest, a_highest: bounds of A.
        r0, r0_sd: normal prior of R0; the sd is for a noise sd of `noise_sd`.
        noise_sd, noise_dof: prior noise sd of an evaluation, and its weight in pseudo-points.
        ln_rho_weight_r: ln of the prior weight of each ρ.
    """

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


@dataclass(frozen=True, eq=False)
class Nodes:
    """Weighted nodes of one family; columns s are (Cmid, B, ρ), rows j are values of A.

    weight_js sums to 1 and belongs to the cell A = a_js ± a_step_s/2. Given a node and A:
    v ~ spread_js/χ²(dof) and R0 ~ N(r0_at_zero_s − r0_slope_s·A, v/precision_s) below A.
    """

    family: Family
    ln_cmid_s: FloatArray
    ln_b_s: FloatArray
    rho_s: FloatArray
    a_js: FloatArray
    a_step_s: FloatArray
    weight_js: FloatArray
    spread_js: FloatArray
    r0_at_zero_s: FloatArray
    r0_slope_s: FloatArray
    precision_s: FloatArray
    dof: float

    @cached_property
    def upto_sj(self) -> FloatArray:
        """Sums of the weights up to each (s, j), j fastest."""
        return self.weight_js.ravel(order="F").cumsum()


@dataclass(frozen=True, slots=True)
class _Sums:
    """Moments and prior, shaped for `_forms`; index m: HᵀΩ1 for each ρ, then HᵀΩy for each ρ."""

    ln_compute_k1: FloatArray
    ss_diagonal_rk: FloatArray
    ss_neighbour_rk: FloatArray
    s_one_y_mk: FloatArray
    one_one_r1: FloatArray
    one_y_r1: FloatArray
    e0_r1: FloatArray
    ln_prior_r1: FloatArray
    lam_r1: FloatArray
    lam_r0_r1: FloatArray
    dof: float
    low_21: FloatArray
    high_21: FloatArray
    prior: Prior


class _Forms(NamedTuple):
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


def grid_posterior(
    points: SufficientStatistics, prior: Prior, family: Family, effort: GridSettings = FINE_GRID
) -> Nodes:
    """Posterior of one family: refine the grid until it resolves the mass, then integrate over A."""
    sums = _sums(points, prior)
    step_21 = (sums.high_21 - sums.low_21) / np.array([effort.coarse]).T
    frame_22 = step_21 * np.eye(2)
    shape_2g = sums.low_21 + _mesh(*effort.coarse) * step_21
    for stage in range(1, MAX_STAGES + 1):
        forms = _forms(sums, family, shape_2g)
        ln_weight_rg = _ln_weight(sums, forms)
        weight_g, tempered = _tempered(_ln_sum(ln_weight_rg), effort.nodes)
        if stage == MAX_STAGES or (stage >= effort.stages and not tempered):
            break
        heavy_g = weight_g > CUT[tempered]
        shape_2g, frame_22 = _refined(shape_2g, weight_g, heavy_g, frame_22, effort.fine)
    return _integrate_a(points, prior, family, shape_2g, forms, ln_weight_rg, effort.a_points)


@lru_cache(maxsize=8)
def _mesh(rows: int, columns: int) -> FloatArray:
    """(2, rows·columns) centres of unit cells."""
    i, j = np.meshgrid(np.arange(rows) + 0.5, np.arange(columns) + 0.5, indexing="ij")
    mesh_2g = np.stack([i.ravel(), j.ravel()])
    mesh_2g.flags.writeable = False
    return mesh_2g


def _sums(points: SufficientStatistics, prior: Prior) -> _Sums:
    innovation_share_r1 = 1.0 - points.rho_r[:, None] ** 2
    lam_r1 = prior.noise_sd**2 * innovation_share_r1 / prior.r0_sd**2
    # The prior's part of the spread of v is added to E0 once, so that every SSE(A) includes it.
    v0_r1 = prior.noise_dof * prior.noise_sd**2 * innovation_share_r1
    return _Sums(
        ln_compute_k1=points.ln_compute_k[:, None],
        ss_diagonal_rk=np.ascontiguousarray(points.ss_diagonal_kr.T),
        ss_neighbour_rk=np.ascontiguousarray(points.ss_neighbour_kr.T),
        s_one_y_mk=np.concatenate([points.s_one_kr.T, points.s_y_kr.T]),
        one_one_r1=points.one_one_r[:, None],
        one_y_r1=points.one_y_r[:, None],
        e0_r1=points.y_y_r[:, None] + lam_r1 * prior.r0**2 + v0_r1,
        ln_prior_r1=prior.ln_rho_weight_r[:, None]
        + 0.5 * (np.log(innovation_share_r1) + np.log(lam_r1) + prior.noise_dof * np.log(v0_r1)),
        lam_r1=lam_r1,
        lam_r0_r1=lam_r1 * prior.r0,
        dof=points.n + prior.noise_dof,
        low_21=np.array([[prior.ln_cmid[0]], [prior.ln_b[0]]]),
        high_21=np.array([[prior.ln_cmid[1]], [prior.ln_b[1]]]),
        prior=prior,
    )


def _forms(sums: _Sums, family: Family, shape_2g: FloatArray) -> _Forms:
    ln_cmid_g, ln_b_g = shape_2g
    s_kg = gain_share(family, sums.ln_compute_k1, ln_cmid_g, ln_b_g)
    s_one, s_y = np.split(sums.s_one_y_mk @ s_kg, 2)
    ss = 2.0 * (sums.ss_neighbour_rk @ (s_kg[1:] * s_kg[:-1]))
    ss += sums.ss_diagonal_rk @ np.multiply(s_kg, s_kg, out=s_kg)
    ts = s_one - ss
    tt, ty = sums.one_one_r1 - s_one - ts, sums.one_y_r1 - s_y
    precision = tt + sums.lam_r1
    g = ty + sums.lam_r0_r1
    zero, slope = g / precision, ts / precision
    ln_prior_g = -0.5 * ((ln_b_g - sums.prior.ln_b_mean) / sums.prior.ln_b_sd) ** 2
    inside_g = ((shape_2g >= sums.low_21) & (shape_2g <= sums.high_21)).all(axis=0)
    ln_prior_g[~inside_g] = OUTSIDE
    return _Forms(
        ln_prior_rg=sums.ln_prior_r1 + ln_prior_g - 0.5 * np.log(precision),
        e0_rg=sums.e0_r1 - g * zero,
        b_rg=s_y - ts * zero,
        q_rg=np.maximum(ss - ts * slope, 1e-12),
        zero_rg=zero,
        slope_rg=slope,
        precision_rg=precision,
    )


def _ln_weight(sums: _Sums, forms: _Forms) -> FloatArray:
    """ln of each node's mass, with peak × width for the integral over A, which is exact enough to refine the grid."""
    low, high = sums.prior.a_lowest, sums.prior.a_highest
    peak = np.minimum(np.maximum(forms.b_rg / forms.q_rg, low), high)
    spread = forms.e0_rg + peak * (forms.q_rg * peak - 2.0 * forms.b_rg)
    width = np.minimum(np.sqrt((2.0 * np.pi) * spread / (forms.q_rg * sums.dof)), high - low)
    return np.asarray(forms.ln_prior_rg - (0.5 * sums.dof) * np.log(spread) + np.log(width))


def _ln_sum(ln_weight_rg: FloatArray) -> FloatArray:
    """ln Σ_r exp, in a third of the time of `logaddexp.reduce`."""
    top_g = ln_weight_rg.max(axis=0)
    return np.asarray(top_g + np.log(np.exp(ln_weight_rg - top_g).sum(axis=0)))


def _tempered(ln_weight_g: FloatArray, enough: float) -> tuple[FloatArray, bool]:
    """Weights (max 1) for the next grid, tempered if too few nodes share the mass, and whether they are tempered."""
    relative_g = ln_weight_g - ln_weight_g.max()
    weight_g = np.exp(relative_g)
    if _effective(weight_g) >= enough:
        return weight_g, False
    low, high = -14.0, 0.0
    for _ in range(8):
        middle = 0.5 * (low + high)
        wide = _effective(np.exp(math.exp(middle) * relative_g)) >= TEMPERED_NODES
        low, high = (middle, high) if wide else (low, middle)
    return np.exp(math.exp(low) * relative_g), True


def _effective(weight_g: FloatArray) -> float:
    """Effective number of nodes, (Σw)²/Σw²."""
    return float(weight_g.sum() ** 2 / (weight_g @ weight_g))


def _refined(
    shape_2g: FloatArray,
    weight_g: FloatArray,
    heavy_g: NDArray[np.bool_],
    frame_22: FloatArray,
    fine: tuple[int, int],
) -> tuple[FloatArray, FloatArray]:
    """A finer grid in the principal axes of the mass, around the heavy nodes.

    Returns its nodes and the two edge vectors of its cells, the columns of `frame_22`.
    """
    share_g = weight_g / weight_g.sum()
    centre_21 = (shape_2g @ share_g)[:, None]
    offset_2g = shape_2g - centre_21
    covariance_22 = (offset_2g * share_g) @ offset_2g.T + frame_22 @ frame_22.T / 12.0
    _, axes_22 = np.linalg.eigh(covariance_22)
    axes_22 = axes_22[:, ::-1]  # the long axis first, as in GridSettings.fine
    along_2g = axes_22.T @ offset_2g[:, heavy_g]
    margin_2 = 0.5 * np.abs(axes_22.T @ frame_22).sum(axis=1)
    start_2, stop_2 = along_2g.min(axis=1) - margin_2, along_2g.max(axis=1) + margin_2
    step_2 = (stop_2 - start_2) / np.array(fine)
    refined_2g = axes_22 @ (start_2[:, None] + _mesh(*fine) * step_2[:, None])
    refined_2g += centre_21
    return refined_2g, axes_22 * step_2


def _integrate_a(
    points: SufficientStatistics,
    prior: Prior,
    family: Family,
    shape_2g: FloatArray,
    forms: _Forms,
    ln_weight_rg: FloatArray,
    a_points: int,
) -> Nodes:
    g, r = np.nonzero((ln_weight_rg > ln_weight_rg.max() - NEGLIGIBLE).T)
    dof = points.n + prior.noise_dof
    kept = r * shape_2g.shape[1] + g
    ln_prior, e0, b, q, zero, slope, precision = (values_rg.take(kept) for values_rg in forms)
    mode = np.clip(b / q, prior.a_lowest, prior.a_highest)
    reach = A_REACH * np.sqrt((e0 - 2.0 * b * mode + q * mode * mode) / (q * dof))
    lowest, highest = np.maximum(mode - reach, prior.a_lowest), np.minimum(mode + reach, prior.a_highest)
    step = (highest - lowest) / a_points
    # In place: new arrays of this size cost page faults.
    a_js = step * (np.arange(a_points) + 0.5)[:, None]
    a_js += lowest
    spread_js = q * a_js
    spread_js -= 2.0 * b
    spread_js *= a_js
    spread_js += e0
    ln_density_js = np.log(spread_js)
    ln_density_js *= -0.5 * dof
    ln_density_js += ln_prior
    # P(R0 < A), computed only where the rise of the curve, at either end of A, is below SURE_RISE standard deviations.
    ends_2s = spread_js[[0, -1]].max(axis=0) / (dof * precision)
    rise_2s = a_js[[0, -1]] * (1.0 + slope) - zero
    unsure = np.flatnonzero(rise_2s.min(axis=0) < SURE_RISE * np.sqrt(ends_2s))
    if unsure.size:
        rise_ju = (a_js[:, unsure] * (1.0 + slope[unsure]) - zero[unsure]) / np.sqrt(
            spread_js[:, unsure] / (dof * precision[unsure])
        )
        # In logarithms: for falling points the probability of a rising curve underflows everywhere.
        ln_rising_ju, close = np.zeros_like(rise_ju), rise_ju < SURE_RISE
        ln_rising_ju[close] = log_ndtr(rise_ju[close])
        ln_density_js[:, unsure] += ln_rising_ju
    ln_density_js -= ln_density_js.max()
    weight_js = np.exp(ln_density_js, out=ln_density_js)
    weight_js *= step
    weight_js /= float(weight_js.sum())
    return Nodes(
        family=family,
        ln_cmid_s=shape_2g[0, g],
        ln_b_s=shape_2g[1, g],
        rho_s=points.rho_r[r],
        a_js=a_js,
        a_step_s=step,
        weight_js=weight_js,
        spread_js=spread_js,
        r0_at_zero_s=zero,
        r0_slope_s=slope,
        precision_s=precision,
        dof=dof,
    )
