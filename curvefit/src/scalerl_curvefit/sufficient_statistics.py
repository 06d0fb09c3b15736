"""Sufficient statistics of the likelihood; their size does not grow with the number of points.

The model of n points is y = R0·(1 − s) + A·s + ε with ε an AR(1) sequence, so the likelihood consists of quadratic forms aᵀΩ_ρ b with a, b ∈ {s, 1, y} and Ω_ρ the (tridiagonal) AR(1) precision in
units of the innovation variance. `s` is smooth in ln C: between knots it is taken as linear in ln C,
s = H·s_knots, with knots at measured points. Then

    sᵀΩ s = s_kᵀ (HᵀΩH) s_k,      sᵀΩ b = s_kᵀ (HᵀΩ b),

and HᵀΩH is tridiagonal as well, because two neighbouring points always share an interval. These sums
cover *every* point with its true neighbour, so the AR(1) model is that of the full sequence: nothing is
binned, and 10,000 points have the weight of 10,000 correlated points. The only approximation is the
linear interpolation of `s`: its error is at most h²B²/80 of the gain at a knot distance h in ln C (4e-4
at B = 3 with 160 knots over four decades), and 0 where every point is a knot. More points get more knots
(`knot_count`).

Legend of suffixes: n points, k knots, r values of ρ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .curve import FloatArray

MIN_KNOTS: Final = 64
MAX_KNOTS: Final = 160


@dataclass(frozen=True, slots=True)
class SufficientStatistics:
    """Sufficient statistics of the points under AR(1) noise, for each ρ of a grid.

    Attributes:
        n: number of points.
        ln_compute_k: knots.
        rho_r: the AR(1) coefficients.
        ss_diagonal_kr, ss_neighbour_kr: HᵀΩH, so that sᵀΩs = Σ_k d_k s_k² + 2 Σ_k e_k s_k s_{k+1}.
        s_one_kr, s_y_kr: HᵀΩ1 and HᵀΩy.
        one_one_r, one_y_r, y_y_r: the forms 1ᵀΩ1, 1ᵀΩy and yᵀΩy.
    """

    n: int
    ln_compute_k: FloatArray
    rho_r: FloatArray
    ss_diagonal_kr: FloatArray
    ss_neighbour_kr: FloatArray
    s_one_kr: FloatArray
    s_y_kr: FloatArray
    one_one_r: FloatArray
    one_y_r: FloatArray
    y_y_r: FloatArray


def knot_count(n: int) -> int:
    """Largest number of knots for n points: n/3, but at least 64 and at most 160."""
    return int(np.clip(n // 3, MIN_KNOTS, MAX_KNOTS))


def knots(ln_compute: FloatArray, max_knots: int) -> NDArray[np.intp]:
    """Indices of the points that are knots: all, or about `max_knots` evenly spaced in ln C, ends included."""
    n = ln_compute.size
    if n <= max_knots:
        return np.arange(n)
    even = np.linspace(ln_compute[0], ln_compute[-1], max_knots)
    right = np.clip(np.searchsorted(ln_compute, even), 1, n - 1)
    nearest = np.where(even - ln_compute[right - 1] < ln_compute[right] - even, right - 1, right)
    return np.unique(np.concatenate(([0], nearest, [n - 1])))


def sufficient_statistics(
    ln_compute: FloatArray,
    reward: FloatArray,
    precision: FloatArray,
    rho: FloatArray,
    max_knots: int | None = None,
) -> SufficientStatistics:
    """Sums over all points, in O(n), independent of the size of the grid that uses them.

    Args:
        precision: (n,) relative weights 1/sd, mean square 1; the AR(1) sequence is ε·precision.
        max_knots: about the largest number of knots; `knot_count` by default.
    """
    knot = knots(ln_compute, max_knots or knot_count(ln_compute.size))
    interpolation = (
        _no_interpolation(precision)
        if knot.size == precision.size
        else _interpolation(ln_compute, precision, knot)
    )
    values_2n = np.stack([precision, precision * reward])
    # Ω_ρ = (1 + ρ²)·1 − ρ²·(ends) − ρ·(neighbours): the forms of each of the three terms, then one product for all ρ.
    ends_2n, neighbours_2n = np.zeros_like(values_2n), np.zeros_like(values_2n)
    ends_2n[:, [0, -1]] = values_2n[:, [0, -1]]
    neighbours_2n[:, 1:] = values_2n[:, :-1]
    neighbours_2n[:, :-1] += values_2n[:, 1:]
    forms_3m = [
        np.concatenate([*ss_k, *interpolation.sums(omega_values_2n), *_without_s(values_2n, omega_values_2n)])
        for ss_k, omega_values_2n in (
            (interpolation.identity_k, values_2n),
            (interpolation.ends_k, ends_2n),
            (interpolation.neighbours_k, neighbours_2n),
        )
    ]
    squares_r = rho * rho
    forms_mr = np.stack(forms_3m, axis=1) @ np.stack([1.0 + squares_r, -squares_r, -rho])
    k = knot.size
    return SufficientStatistics(
        n=precision.size,
        ln_compute_k=ln_compute[knot],
        rho_r=rho,
        ss_diagonal_kr=forms_mr[:k],
        ss_neighbour_kr=forms_mr[k : 2 * k - 1],
        s_one_kr=forms_mr[2 * k - 1 : 3 * k - 1],
        s_y_kr=forms_mr[3 * k - 1 : 4 * k - 1],
        one_one_r=forms_mr[-3],
        one_y_r=forms_mr[-2],
        y_y_r=forms_mr[-1],
    )


@dataclass(frozen=True, slots=True)
class _Interpolation:
    """The interpolation H with the diagonal matrix P of the precisions.

    Attributes:
        sums: rows v (2, n) → HᵀPv (2, k).
        identity_k, ends_k, neighbours_k: diagonal (k,) and off-diagonal (k − 1,) of HᵀPMPH, with M the identity, the ends
            and the neighbours.
    """

    sums: Callable[[FloatArray], FloatArray]
    identity_k: tuple[FloatArray, FloatArray]
    ends_k: tuple[FloatArray, FloatArray]
    neighbours_k: tuple[FloatArray, FloatArray]


def _no_interpolation(precision: FloatArray) -> _Interpolation:
    """Every point is a knot: H is 1."""
    squares = precision * precision
    none = np.zeros(precision.size)
    return _Interpolation(
        sums=lambda values_2n: precision * values_2n,
        identity_k=(squares, none[1:]),
        ends_k=(_ends_of(squares), none[1:]),
        neighbours_k=(none, precision[1:] * precision[:-1]),
    )


def _interpolation(ln_compute: FloatArray, precision: FloatArray, knot: NDArray[np.intp]) -> _Interpolation:
    """Linear interpolation between knots."""
    ln_compute_k, k_count = ln_compute[knot], knot.size
    left = np.clip(np.searchsorted(ln_compute_k, ln_compute, side="right") - 1, 0, k_count - 2)
    fraction = (ln_compute - ln_compute_k[left]) / (ln_compute_k[left + 1] - ln_compute_k[left])
    u, v = precision * (1.0 - fraction), precision * fraction
    # The later point of a neighbouring pair is in the interval of the earlier one or on its right end.
    same = left[1:] == left[:-1]
    u_next = np.where(same, u[1:], 0.0)
    v_next = np.where(same, v[1:], precision[1:])

    def at(where: NDArray[np.intp], values: FloatArray) -> FloatArray:
        return np.bincount(where, weights=values, minlength=k_count).astype(np.float64, copy=False)

    right = left + 1
    return _Interpolation(
        sums=lambda values_2n: np.stack([at(left, u * row) + at(right, v * row) for row in values_2n]),
        identity_k=(at(left, u * u) + at(right, v * v), at(left, u * v)[:-1]),
        ends_k=(_ends_of(precision[knot] ** 2), np.zeros(k_count - 1)),
        neighbours_k=(
            2.0 * (at(left[:-1], u[:-1] * u_next) + at(right[:-1], v[:-1] * v_next)),
            at(left[:-1], u[:-1] * v_next + v[:-1] * u_next)[:-1],
        ),
    )


def _ends_of(values: FloatArray) -> FloatArray:
    """`values` with all but the first and the last set to 0."""
    ends = np.zeros(values.size)
    ends[0], ends[-1] = values[0], values[-1]
    return ends


def _without_s(values_2n: FloatArray, omega_values_2n: FloatArray) -> FloatArray:
    """(1, 3) the forms 1·1, 1·y and y·y."""
    (one_one, one_y), (_, y_y) = values_2n @ omega_values_2n.T
    return np.array([[one_one, one_y, y_y]])
