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

Fits of one family go through together, one a row, for what they cost is NumPy's calls more than its sums.

Legend of suffixes: p fits, g shape nodes (Cmid, B) of a grid, r values of ρ, s surviving (node, ρ) pairs,
j quadrature points of A, k knots. The long index comes last: NumPy is several times slower over rows of four.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
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
OUTSIDE: Final = -1e12
"""ln prior of nodes beyond the prior's bounds: nothing, tempered or not, and still a number."""
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


@dataclass(frozen=True, slots=True)
class _Fits:
    """Moments and priors, one fit a row; m: sums with 1 for each ρ, then with y. Missing knots weigh nothing."""

    ln_compute_pk1: FloatArray
    ss_diagonal_prk: FloatArray
    ss_neighbour_prk: FloatArray
    s_one_y_pmk: FloatArray
    one_one_pr1: FloatArray
    one_y_pr1: FloatArray
    e0_pr1: FloatArray
    ln_prior_pr1: FloatArray
    lam_pr1: FloatArray
    lam_r0_pr1: FloatArray
    dof_p11: FloatArray
    ln_b_mean_p1: FloatArray
    ln_b_sd_p1: FloatArray
    low_p21: FloatArray
    high_p21: FloatArray
    a_lowest_p11: FloatArray
    a_highest_p11: FloatArray

    def rows(self, which_p: NDArray[np.bool_]) -> Self:
        """Some of the fits."""
        return type(self)(*(getattr(self, field.name)[which_p] for field in fields(self)))


class _Forms(NamedTuple):
    """The closed forms of the module docstring for every fit p, at every (ρ r, shape node g)."""

    ln_prior_prg: FloatArray
    e0_prg: FloatArray
    b_prg: FloatArray
    q_prg: FloatArray
    zero_prg: FloatArray
    slope_prg: FloatArray
    precision_prg: FloatArray


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
    return grid_posteriors([(points, prior)], family, effort)[0]


def grid_posteriors(
    fits: Sequence[tuple[Moments, Prior]], family: Family, effort: Effort = FULL
) -> list[Nodes]:
    """`grid_posterior` of each, in the time of not much more than one. All have the same values of ρ."""
    rows = _rows(fits)
    step_p21 = (rows.high_p21 - rows.low_p21) / np.array([effort.coarse]).T
    frame_p22 = step_p21 * np.eye(2)
    shape_p2g = rows.low_p21 + _mesh(*effort.coarse) * step_p21
    todo, nodes = np.arange(len(fits)), dict[int, Nodes]()
    for stage in range(1, MAX_STAGES + 1):
        forms = _forms(rows, family, shape_p2g)
        ln_weight_prg = _ln_weight(rows, forms)
        weight_pg, tempered_p = _tempered(_ln_sum(ln_weight_prg), effort.nodes)
        done_p = ~tempered_p if stage >= effort.stages else np.zeros_like(tempered_p)
        for p in range(todo.size) if stage == MAX_STAGES else np.flatnonzero(done_p):
            points, prior = fits[todo[p]]
            one = _Forms(*(values_prg[p] for values_prg in forms))
            nodes[todo[p]] = _integrate_a(
                points, prior, family, shape_p2g[p], one, ln_weight_prg[p], effort.a_points
            )
        if len(nodes) == len(fits):
            break
        if done_p.any():
            more_p = ~done_p
            todo, rows, tempered_p = todo[more_p], rows.rows(more_p), tempered_p[more_p]
            shape_p2g, frame_p22, weight_pg = shape_p2g[more_p], frame_p22[more_p], weight_pg[more_p]
        heavy_pg = weight_pg > np.where(tempered_p, CUT[True], CUT[False])[:, None]
        shape_p2g, frame_p22 = _refined(shape_p2g, weight_pg, heavy_pg, frame_p22, effort.fine)
    return [nodes[i] for i in range(len(fits))]


@lru_cache(maxsize=8)
def _mesh(rows: int, columns: int) -> FloatArray:
    """(2, rows·columns) centres of unit cells."""
    i, j = np.meshgrid(np.arange(rows) + 0.5, np.arange(columns) + 0.5, indexing="ij")
    mesh_2g = np.stack([i.ravel(), j.ravel()])
    mesh_2g.flags.writeable = False
    return mesh_2g


def _rows(fits: Sequence[tuple[Moments, Prior]]) -> _Fits:
    moments, priors = zip(*fits, strict=True)
    k_count = max(points.ln_compute_k.size for points in moments)

    def padded(columns: Iterable[FloatArray], length: int = k_count) -> FloatArray:
        """(k, r) each → (p, r, length), with zeros."""
        filled_prk = np.zeros((len(fits), moments[0].rho_r.size, length))
        for filled_rk, column_kr in zip(filled_prk, columns, strict=True):
            filled_rk[:, : len(column_kr)] = column_kr.T
        return filled_prk

    ln_compute_pk1 = np.zeros((len(fits), k_count, 1))
    for row_k1, points in zip(ln_compute_pk1, moments, strict=True):
        row_k1[: points.ln_compute_k.size, 0] = points.ln_compute_k
    s_one_prk, s_y_prk = padded(m.s_one_kr for m in moments), padded(m.s_y_kr for m in moments)
    one_one_pr1, one_y_pr1, y_y_pr1, rho_pr1, ln_rho_weight_pr1 = np.array(
        [(m.one_one_r, m.one_y_r, m.y_y_r, m.rho_r, prior.ln_rho_weight_r) for m, prior in fits]
    ).swapaxes(0, 1)[:, :, :, None]
    noise_sd, noise_dof, r0, r0_sd, ln_b_mean, ln_b_sd, a_lowest, a_highest = np.array(
        [
            (q.noise_sd, q.noise_dof, q.r0, q.r0_sd, q.ln_b_mean, q.ln_b_sd, q.a_lowest, q.a_highest)
            for q in priors
        ]
    ).T[:, :, None, None]
    innovation_share_pr1 = 1.0 - rho_pr1**2
    lam_pr1 = noise_sd**2 * innovation_share_pr1 / r0_sd**2
    # The prior's part of the spread of v: it is added to E0 once, so that SSE(A) always comes with it.
    v0_pr1 = noise_dof * noise_sd**2 * innovation_share_pr1
    return _Fits(
        ln_compute_pk1=ln_compute_pk1,
        ss_diagonal_prk=padded(m.ss_diagonal_kr for m in moments),
        ss_neighbour_prk=padded((m.ss_neighbour_kr for m in moments), k_count - 1),
        s_one_y_pmk=np.concatenate([s_one_prk, s_y_prk], axis=1),
        one_one_pr1=one_one_pr1,
        one_y_pr1=one_y_pr1,
        e0_pr1=y_y_pr1 + lam_pr1 * r0**2 + v0_pr1,
        ln_prior_pr1=ln_rho_weight_pr1
        + 0.5 * (np.log(innovation_share_pr1) + np.log(lam_pr1) + noise_dof * np.log(v0_pr1)),
        lam_pr1=lam_pr1,
        lam_r0_pr1=lam_pr1 * r0,
        dof_p11=np.array([m.n for m in moments])[:, None, None] + noise_dof,
        ln_b_mean_p1=ln_b_mean[:, 0],
        ln_b_sd_p1=ln_b_sd[:, 0],
        low_p21=np.array([[[q.ln_cmid[0]], [q.ln_b[0]]] for q in priors]),
        high_p21=np.array([[[q.ln_cmid[1]], [q.ln_b[1]]] for q in priors]),
        a_lowest_p11=a_lowest,
        a_highest_p11=a_highest,
    )


def _forms(rows: _Fits, family: Family, shape_p2g: FloatArray) -> _Forms:
    ln_cmid_pg, ln_b_pg = shape_p2g[:, 0], shape_p2g[:, 1]
    s_pkg = gain_share(family, rows.ln_compute_pk1, ln_cmid_pg[:, None], ln_b_pg[:, None])
    s_one, s_y = np.split(rows.s_one_y_pmk @ s_pkg, 2, axis=1)
    ss = 2.0 * (rows.ss_neighbour_prk @ (s_pkg[:, 1:] * s_pkg[:, :-1]))
    ss += rows.ss_diagonal_prk @ np.multiply(s_pkg, s_pkg, out=s_pkg)
    ts = s_one - ss
    tt, ty = rows.one_one_pr1 - s_one - ts, rows.one_y_pr1 - s_y
    precision = tt + rows.lam_pr1
    g = ty + rows.lam_r0_pr1
    zero, slope = g / precision, ts / precision
    ln_prior_pg = -0.5 * ((ln_b_pg - rows.ln_b_mean_p1) / rows.ln_b_sd_p1) ** 2
    inside_pg = ((shape_p2g >= rows.low_p21) & (shape_p2g <= rows.high_p21)).all(axis=1)
    ln_prior_pg[~inside_pg] = OUTSIDE
    return _Forms(
        ln_prior_prg=rows.ln_prior_pr1 + ln_prior_pg[:, None] - 0.5 * np.log(precision),
        e0_prg=rows.e0_pr1 - g * zero,
        b_prg=s_y - ts * zero,
        q_prg=np.maximum(ss - ts * slope, 1e-12),
        zero_prg=zero,
        slope_prg=slope,
        precision_prg=precision,
    )


def _ln_weight(rows: _Fits, forms: _Forms) -> FloatArray:
    """ln of the node's mass, with the integral over A as peak × width (exact enough to steer the grid)."""
    low, high = rows.a_lowest_p11, rows.a_highest_p11
    peak = np.minimum(np.maximum(forms.b_prg / forms.q_prg, low), high)
    spread = forms.e0_prg + peak * (forms.q_prg * peak - 2.0 * forms.b_prg)
    width = np.minimum(np.sqrt((2.0 * np.pi) * spread / (forms.q_prg * rows.dof_p11)), high - low)
    return np.asarray(forms.ln_prior_prg - (0.5 * rows.dof_p11) * np.log(spread) + np.log(width))


def _ln_sum(ln_weight_prg: FloatArray) -> FloatArray:
    """ln Σ_r exp: one maximum for each node, in a third of the time of `logaddexp.reduce`."""
    top_pg = ln_weight_prg.max(axis=1)
    return np.asarray(top_pg + np.log(np.exp(ln_weight_prg - top_pg[:, None]).sum(axis=1)))


def _tempered(ln_weight_pg: FloatArray, enough: float) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Weights (max 1) for the next grid, flattened where too few nodes share the mass, and where they were."""
    relative_pg = ln_weight_pg - ln_weight_pg.max(axis=1, keepdims=True)
    weight_pg = np.exp(relative_pg)
    tempered_p = np.array([_effective(weight_g) < enough for weight_g in weight_pg])
    for p in np.flatnonzero(tempered_p):
        low, high = -14.0, 0.0
        for _ in range(8):
            middle = 0.5 * (low + high)
            wide = _effective(np.exp(math.exp(middle) * relative_pg[p])) >= TEMPERED_NODES
            low, high = (middle, high) if wide else (low, middle)
        weight_pg[p] = np.exp(math.exp(low) * relative_pg[p])
    return weight_pg, tempered_p


def _effective(weight_g: FloatArray) -> float:
    """(Σw)²/Σw²: how many nodes share the mass."""
    return float(weight_g.sum() ** 2 / (weight_g @ weight_g))


def _refined(
    shape_p2g: FloatArray,
    weight_pg: FloatArray,
    heavy_pg: NDArray[np.bool_],
    frame_p22: FloatArray,
    fine: tuple[int, int],
) -> tuple[FloatArray, FloatArray]:
    """Finer grids in the principal axes of the mass, around all that is heavy.

    Returns their nodes and their cells' two edge vectors, the columns of `frame_p22`.
    """
    share_pg1 = (weight_pg / weight_pg.sum(axis=1, keepdims=True))[:, :, None]
    centre_p21 = shape_p2g @ share_pg1
    offset_p2g = shape_p2g - centre_p21
    covariance_p22 = offset_p2g @ (share_pg1 * offset_p2g.swapaxes(1, 2))
    covariance_p22 += frame_p22 @ frame_p22.swapaxes(1, 2) / 12.0
    _, axes_p22 = np.linalg.eigh(covariance_p22)
    axes_p22 = axes_p22[:, :, ::-1]  # the long axis first, as in Effort.fine
    across_p22 = axes_p22.swapaxes(1, 2)
    along_p2g, heavy_p1g = across_p22 @ offset_p2g, heavy_pg[:, None]
    margin_p2 = 0.5 * np.abs(across_p22 @ frame_p22).sum(axis=2)
    start_p2 = np.where(heavy_p1g, along_p2g, np.inf).min(axis=2) - margin_p2
    stop_p2 = np.where(heavy_p1g, along_p2g, -np.inf).max(axis=2) + margin_p2
    step_p2 = (stop_p2 - start_p2) / np.array(fine)
    refined_p2g = axes_p22 @ (start_p2[:, :, None] + _mesh(*fine) * step_p2[:, :, None])
    refined_p2g += centre_p21
    return refined_p2g, axes_p22 * step_p2[:, None]


def _integrate_a(
    points: Moments,
    prior: Prior,
    family: Family,
    shape_2g: FloatArray,
    forms_rg: _Forms,
    ln_weight_rg: FloatArray,
    a_points: int,
) -> Nodes:
    g, r = np.nonzero((ln_weight_rg > ln_weight_rg.max() - NEGLIGIBLE).T)
    dof = points.n + prior.noise_dof
    kept = r * shape_2g.shape[1] + g
    ln_prior, e0, b, q, zero, slope, precision = (values_rg.take(kept) for values_rg in forms_rg)
    mode = np.clip(b / q, prior.a_lowest, prior.a_highest)
    reach = A_REACH * np.sqrt((e0 - 2.0 * b * mode + q * mode * mode) / (q * dof))
    lowest, highest = np.maximum(mode - reach, prior.a_lowest), np.minimum(mode + reach, prior.a_highest)
    step = (highest - lowest) / a_points
    # In place below: each of these arrays anew would cost the kernel's pages too.
    a_js = step * (np.arange(a_points) + 0.5)[:, None]
    a_js += lowest
    spread_js = q * a_js
    spread_js -= 2.0 * b
    spread_js *= a_js
    spread_js += e0
    ln_density_js = np.log(spread_js)
    ln_density_js *= -0.5 * dof
    ln_density_js += ln_prior
    # Where R0 may lie above A: the rise of the curve in standard deviations, judged by the ends first.
    ends_2s = spread_js[[0, -1]].max(axis=0) / (dof * precision)
    rise_2s = a_js[[0, -1]] * (1.0 + slope) - zero
    unsure = np.flatnonzero(rise_2s.min(axis=0) < SURE_RISE * np.sqrt(ends_2s))
    if unsure.size:
        rise_ju = (a_js[:, unsure] * (1.0 + slope[unsure]) - zero[unsure]) / np.sqrt(
            spread_js[:, unsure] / (dof * precision[unsure])
        )
        # In logarithms: points that fall all along leave next to no probability of a rising curve anywhere.
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
