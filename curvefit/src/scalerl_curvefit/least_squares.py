"""The point estimate: least squares by variable projection (Golub & Pereyra 1973).

For given (Cmid, B) the model is linear in (A, R0), so the search is over two parameters only, by Levenberg–Marquardt steps with
Kaufman's Jacobian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import FloatArray
from .families import Family, gain_share

STEPS: Final = 40
TINY: Final = 1e-12


@dataclass(frozen=True, slots=True)
class LeastSquaresFit:
    """The fitted curve R(C) = R0 + (A − R0)·s(C).

    Attributes:
        residual_sd: root mean square of the (precision-weighted) residuals.
    """

    A: float
    B: float
    Cmid: float
    R0: float
    residual_sd: float
    family: Family = Family.SIGMOID

    def reward(self, compute: FloatArray) -> FloatArray:
        """R at compute ≥ 0, any shape."""
        with np.errstate(divide="ignore"):
            ln_compute = np.log(np.asarray(compute, dtype=np.float64))
        share = gain_share(self.family, ln_compute, np.log(np.float64(self.Cmid)), np.log(np.float64(self.B)))
        return np.asarray(self.R0 + (self.A - self.R0) * share)


def linear_part(
    share_n: FloatArray, reward_n: FloatArray, precision_n: FloatArray, a_range: tuple[float, float]
) -> tuple[float, float, FloatArray]:
    """Best (A, R0) with R0 ≤ A and A within a_range for a given s, and the weighted residuals (n,)."""
    s, t, y = share_n * precision_n, (1.0 - share_n) * precision_n, reward_n * precision_n
    ss, tt, ts, sy, ty = (float(form) for form in (s @ s, t @ t, s @ t, s @ y, t @ y))
    determinant = ss * tt - ts * ts
    if determinant > TINY * ss * tt:
        a, r0 = (sy * tt - ty * ts) / determinant, (ty * ss - sy * ts) / determinant
    else:
        a = r0 = (sy + ty) / (ss + 2.0 * ts + tt)
    bounded = min(max(a, a_range[0]), a_range[1])
    if bounded != a:
        a, r0 = bounded, (ty - ts * bounded) / max(tt, TINY)
    if r0 > a:  # The model has no falling curve; the nearest one is flat.
        a = r0 = min(max((sy + ty) / (ss + 2.0 * ts + tt), a_range[0]), a_range[1])
    return a, r0, np.asarray(y - a * s - r0 * t)


def least_squares_fit(
    ln_compute: FloatArray,
    reward: FloatArray,
    precision: FloatArray,
    start: tuple[float, float],
    low: FloatArray,
    high: FloatArray,
    a_range: tuple[float, float],
    family: Family = Family.SIGMOID,
) -> LeastSquaresFit:
    """Least squares from `start` = (ln Cmid, ln B), kept within the box [low, high]."""

    def at(shape: FloatArray) -> tuple[float, float, FloatArray]:
        share = gain_share(family, ln_compute, shape[0], shape[1])
        return linear_part(share, reward, precision, a_range)

    shape = np.clip(np.array(start), low, high)
    a, r0, residual = at(shape)
    sse, damping = float(residual @ residual), 1e-3
    for _ in range(STEPS):
        jacobian = _jacobian(family, ln_compute, precision, shape, a - r0)
        trial = np.clip(shape + _damped_step(jacobian, residual, damping), low, high)
        trial_a, trial_r0, trial_residual = at(trial)
        trial_sse = float(trial_residual @ trial_residual)
        if trial_sse <= sse:
            settled = sse - trial_sse <= 1e-10 * sse
            shape, a, r0, residual, sse = trial, trial_a, trial_r0, trial_residual, trial_sse
            damping *= 0.2
            if settled:
                break
        else:
            damping *= 6.0
            if damping > 1e8:
                break
    return LeastSquaresFit(
        A=a,
        B=float(np.exp(shape[1])),
        Cmid=float(np.exp(shape[0])),
        R0=r0,
        residual_sd=float(np.sqrt(sse / reward.size)),
        family=family,
    )


def _damped_step(jacobian_2n: FloatArray, residual_n: FloatArray, damping: float) -> FloatArray:
    """Levenberg–Marquardt's step (2,): (JᵀJ + damping·diag JᵀJ) step = Jᵀr, by Cramer's rule."""
    (m, k), (_, b) = (jacobian_2n @ jacobian_2n.T).tolist()
    c, d = (jacobian_2n @ residual_n).tolist()
    m, b = m * (1.0 + damping) + TINY, b * (1.0 + damping) + TINY
    determinant = max(m * b - k * k, TINY * m * b)
    return np.array([(c * b - d * k) / determinant, (d * m - c * k) / determinant])


def _jacobian(
    family: Family, ln_compute: FloatArray, precision: FloatArray, shape: FloatArray, gain: float
) -> FloatArray:
    """Kaufman's Jacobian (2, n): d model/d shape, projected orthogonally to the directions of A and R0."""
    h = 1e-5
    moved = np.array([[0.0, 0.0], [h, 0.0], [0.0, h]])[:, :, None] + shape[:, None]
    share, *shares = gain_share(family, ln_compute, moved[:, 0], moved[:, 1])
    derivative = (gain / h) * precision * (np.stack(shares) - share)
    first = _unit(share * precision)
    second = (1.0 - share) * precision
    second = _unit(second - (first @ second) * first)
    for direction in (first, second):
        derivative -= np.multiply.outer(derivative @ direction, direction)
    return np.asarray(derivative)


def _unit(vector: FloatArray) -> FloatArray:
    """`vector` scaled to length 1; zeros for a zero vector, which occurs if s is 0 or 1 at all points."""
    length = float(np.sqrt(vector @ vector))
    return vector / length if length > TINY else np.zeros_like(vector)
