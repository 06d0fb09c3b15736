"""All that a likelihood needs to know of the points, in sums that do not grow with them.

The model of n points is y = R0·(1 − s) + A·s + ε with ε an AR(1) sequence, so that every likelihood
is made of quadratic forms aᵀΩ_ρ b with a, b ∈ {s, 1, y} and Ω_ρ the (tridiagonal) AR(1) precision in
units of the innovation variance. `s` is smooth in ln C: between knots it is taken as linear in ln C,
s = H·s_knots, with knots at measured points. Then

    sᵀΩ s = s_kᵀ (HᵀΩH) s_k,      sᵀΩ b = s_kᵀ (HᵀΩ b),

and HᵀΩH is tridiagonal as well, because two neighbouring points always share an interval. These sums
are taken over *every* point with its true neighbour, so the AR(1) model is that of the full sequence:
nothing is averaged, no correlation is lost to binning, and 10,000 points weigh as 10,000 correlated
points do. The only approximation is the linear piece of `s`: its error is at most h²B²/80 of the gain
at a knot distance h in ln C (4e-4 at B = 3 with 160 knots over four decades), and none where every
point is a knot. More points, which resolve more, get more knots (`knot_count`).

Legend of suffixes: n points, k knots, r values of ρ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .curve import FloatArray

FEWEST_KNOTS: Final = 64
MOST_KNOTS: Final = 160


@dataclass(frozen=True, slots=True)
class Moments:
    """Sufficient statistics of the points under AR(1) noise, for each ρ of a grid.

    n: number of points. ln_compute_k: knots. rho_r: the AR(1) coefficients.
    ss_diagonal_kr, ss_neighbour_kr: HᵀΩH, so that sᵀΩs = Σ_k d_k s_k² + 2 Σ_k e_k s_k s_{k+1}.
    s_one_kr, s_y_kr: HᵀΩ1 and HᵀΩy. one_one_r, one_y_r, y_y_r: the forms without s.
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
    """About n/3 knots for n points, at least all of the first 64, at most 160."""
    return int(np.clip(n // 3, FEWEST_KNOTS, MOST_KNOTS))


def knots(ln_compute: FloatArray, max_knots: int) -> NDArray[np.intp]:
    """Indices of the points that serve as knots: all, or about `max_knots` even in ln C, ends included."""
    n = ln_compute.size
    if n <= max_knots:
        return np.arange(n)
    even = np.linspace(ln_compute[0], ln_compute[-1], max_knots)
    right = np.clip(np.searchsorted(ln_compute, even), 1, n - 1)
    nearest = np.where(even - ln_compute[right - 1] < ln_compute[right] - even, right - 1, right)
    return np.unique(np.concatenate(([0], nearest, [n - 1])))


def moments(
    ln_compute: FloatArray,
    reward: FloatArray,
    precision: FloatArray,
    rho: FloatArray,
    max_knots: int | None = None,
) -> Moments:
    """Sums over all points; O(n) once, whatever the size of the grid that uses them.

    precision: (n,) relative weights 1/sd, mean square 1; the AR(1) sequence is ε·precision.
    max_knots: at most about so many knots; by default `knot_count` says.
    """
    knot = knots(ln_compute, max_knots or knot_count(ln_compute.size))
    ln_compute_k = ln_compute[knot]
    k_count = knot.size
    left = np.clip(np.searchsorted(ln_compute_k, ln_compute, side="right") - 1, 0, k_count - 2)
    fraction = (ln_compute - ln_compute_k[left]) / (ln_compute_k[left + 1] - ln_compute_k[left])
    u, v = precision * (1.0 - fraction), precision * fraction
    # The later point of a pair, seen from the interval of the earlier one: it can only be in the
    # same interval or on its right end.
    same = left[1:] == left[:-1]
    u_next = np.where(same, u[1:], 0.0)
    v_next = np.where(same, v[1:], precision[1:])

    def at_knots(values: FloatArray, where: NDArray[np.intp]) -> FloatArray:
        return np.bincount(where, weights=values, minlength=k_count).astype(np.float64, copy=False)

    diagonal_0 = at_knots(u * u, left) + at_knots(v * v, left + 1)
    neighbour_0 = at_knots(u * v, left)
    diagonal_1 = 2.0 * (at_knots(u[:-1] * u_next, left[:-1]) + at_knots(v[:-1] * v_next, left[:-1] + 1))
    neighbour_1 = at_knots(u[:-1] * v_next + v[:-1] * u_next, left[:-1])
    ends = np.zeros(k_count)
    ends[0], ends[-1] = precision[0] ** 2, precision[-1] ** 2

    squares_r, one_r = rho * rho, np.ones(rho.size)

    def combined(own: FloatArray, end: FloatArray, neighbours: FloatArray) -> FloatArray:
        """(1 + ρ²)·own − ρ²·ends − ρ·neighbours, the three parts of Ω_ρ, for all ρ at once: (..., r)."""
        return np.asarray(
            np.multiply.outer(own, one_r + squares_r)
            - np.multiply.outer(end, squares_r)
            - np.multiply.outer(neighbours, rho)
        )

    def onto_knots(values: FloatArray) -> FloatArray:
        return at_knots(u * values, left) + at_knots(v * values, left + 1)

    def with_s(values: FloatArray) -> FloatArray:
        """HᵀΩ·values, (k, r)."""
        sides = np.zeros(values.size)
        sides[1:] += values[:-1]
        sides[:-1] += values[1:]
        end = np.zeros(k_count)
        end[0], end[-1] = precision[0] * values[0], precision[-1] * values[-1]
        return combined(onto_knots(values), end, onto_knots(sides))

    def form(a: FloatArray, b: FloatArray) -> FloatArray:
        """aᵀΩb, (r,)."""
        end = a[0] * b[0] + a[-1] * b[-1]
        return combined(a @ b, end, a[1:] @ b[:-1] + a[:-1] @ b[1:])

    y = precision * reward
    return Moments(
        n=ln_compute.size,
        ln_compute_k=ln_compute_k,
        rho_r=rho,
        ss_diagonal_kr=combined(diagonal_0, ends, diagonal_1),
        ss_neighbour_kr=combined(neighbour_0, np.zeros(k_count), neighbour_1)[:-1],
        s_one_kr=with_s(precision),
        s_y_kr=with_s(y),
        one_one_r=form(precision, precision),
        one_y_r=form(precision, y),
        y_y_r=form(y, y),
    )
