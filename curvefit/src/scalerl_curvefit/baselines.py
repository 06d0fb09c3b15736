"""Baselines: the paper's grid search, and the power law that the paper advises against."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import Curve, FloatArray
from .errors import RequestError, TooFewPointsError

ARTICLE_A: Final = np.arange(0.500, 0.7451, 0.005)
"""A of the article's code: .500 … .745 in steps of .005 (50 values) [S]; the paper has .450 … .800 (§ fitting) [P]."""
CMID_VALUES: Final = 100
"""Linear values of Cmid, in the paper and the article [P]."""


@dataclass(frozen=True, slots=True)
class GridSearch:
    """The curve of the best pair (A, Cmid) of the grid.

    B: unbounded least-squares estimate of `curve_fit`.
    R0: fixed initial reward.

    Attributes:
        residual_sd: root mean square of the residuals.
        fits: number of `curve_fit` calls.
        edges: edges of the grid on which the pair lies, such as "A high".
    """

    A: float
    B: float
    Cmid: float
    R0: float
    residual_sd: float
    fits: int
    edges: tuple[str, ...]

    def reward(self, compute: FloatArray | float) -> FloatArray:
        """R at compute > 0."""
        share = 1.0 / (1.0 + (self.Cmid / np.asarray(compute, dtype=np.float64)) ** self.B)
        return np.asarray(self.R0 + (self.A - self.R0) * share)


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """R(C) = A − D/C^B."""

    A: float
    B: float
    D: float

    def reward(self, compute: FloatArray) -> FloatArray:
        """R at compute > 0."""
        return np.asarray(self.A - self.D * np.asarray(compute, dtype=np.float64) ** -self.B)


def paper_grid_search(
    curve: Curve,
    a_values: FloatArray | None = None,
    cmid_values: FloatArray | None = None,
    r0: float | None = None,
) -> GridSearch:
    """The least-squares method of the paper: SciPy's `curve_fit` for B alone at every pair of (A, Cmid).

    Args:
        a_values: `ARTICLE_A` by default.
        cmid_values: by default 100 linear values from the first compute to the last; the article uses 4,000 … 16,000 for a run of
            96,725 GPU-hours.
        r0: fixed R0; the first reward by default, since the paper's value is not published [?].

    Raises TooFewPointsError under 3 points at compute > 0; RequestError for an empty grid or when no
    pair converges.
    """
    # Imported here: scipy.optimize would be most of the sidecar's start-up time, and the sidecar does not use it.
    from scipy.optimize import OptimizeWarning, curve_fit

    trained = curve.compute > 0
    compute, reward = curve.compute[trained], curve.reward[trained]
    if compute.size < 3:
        raise TooFewPointsError(f"{compute.size} points at compute > 0; the grid search needs at least 3")
    a_grid = ARTICLE_A if a_values is None else np.asarray(a_values, dtype=np.float64)
    cmid_grid = (
        np.linspace(compute[0], compute[-1], CMID_VALUES)
        if cmid_values is None
        else np.asarray(cmid_values, dtype=np.float64)
    )
    if a_grid.size == 0 or cmid_grid.size == 0:
        raise RequestError("the grid is empty; give at least one A and one Cmid")
    start = float(curve.reward[0]) if r0 is None else r0
    best, best_sse, fits = None, np.inf, 0
    with warnings.catch_warnings(), np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # A flat pair has no covariance; its SSE still counts.
        warnings.simplefilter("ignore", OptimizeWarning)
        for i, a in enumerate(a_grid):
            for j, cmid in enumerate(cmid_grid):

                def model(c: FloatArray, b: float, a: float = a, cmid: float = cmid) -> FloatArray:
                    return np.asarray(start + (a - start) / (1.0 + (cmid / c) ** b))

                fits += 1
                try:
                    found, _ = curve_fit(model, compute, reward, p0=[1.0])
                except RuntimeError:  # No convergence at this pair: it cannot be the best one.
                    continue
                sse = float(np.sum((reward - model(compute, found[0])) ** 2))
                if sse < best_sse:
                    best, best_sse = (i, j, float(found[0])), sse
    if best is None:
        raise RequestError("no pair of the grid converged; widen it")
    i, j, b = best
    edges = [
        f"{name} {side}"
        for name, index, size in (("A", i, a_grid.size), ("Cmid", j, cmid_grid.size))
        for side, at in (("low", 0), ("high", size - 1))
        if index == at
    ]
    return GridSearch(
        A=float(a_grid[i]),
        B=b,
        Cmid=float(cmid_grid[j]),
        R0=start,
        residual_sd=float(np.sqrt(best_sse / compute.size)),
        fits=fits,
        edges=tuple(edges),
    )


def power_law(curve: Curve) -> PowerLaw:
    """Least-squares fit of R = A − D/C^B with A ≤ 1: a fine scan over B, with closed forms for A and D.

    The paper's argument against a power law [P]: on (1.5k, 50k) of its 100k-GPU-hour run it gives A = 1.0.

    Raises TooFewPointsError under 3 points at compute > 0.
    """
    trained = curve.compute > 0
    compute, reward = curve.compute[trained], curve.reward[trained]
    if compute.size < 3:
        raise TooFewPointsError(f"{compute.size} points at compute > 0; a power law needs at least 3")
    b_g = np.geomspace(0.02, 4.0, 400)
    unit = float(compute[-1])
    x_gn = (compute / unit)[None, :] ** -b_g[:, None]
    centred = x_gn - x_gn.mean(axis=1, keepdims=True)
    slope = (centred @ reward) / np.maximum((centred**2).sum(axis=1), 1e-300)
    a = reward.mean() - slope * x_gn.mean(axis=1)
    over = a > 1.0
    slope = np.where(over, (x_gn @ (reward - 1.0)) / (x_gn**2).sum(axis=1), slope)
    a = np.minimum(a, 1.0)
    sse = ((reward - a[:, None] - slope[:, None] * x_gn) ** 2).sum(axis=1)
    best = int(np.argmin(sse))
    return PowerLaw(A=float(a[best]), B=float(b_g[best]), D=float(-slope[best] * unit ** b_g[best]))
