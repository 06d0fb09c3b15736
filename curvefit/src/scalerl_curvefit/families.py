"""Curve families: the share s of the gain that is reached at a given compute.

Each is R(C) = R0·(1 − s) + A·s with s rising from 0 to 1 and s(Cmid) = 1/2: R0, A and Cmid mean the same in each, and A and
R0 stay linear (variable projection, analytic integrals).

- sigmoid:      s = 1/(1 + (Cmid/C)^B)                        ScaleRL eq. 1 [P]
- stretched:    s = 1 − exp(−ln 2 · (C/Cmid)^B)               faster approach than any power
- power law:    s = 1 − (1 + (2^{1/B} − 1)·C/Cmid)^{−B}        A − D/C^B once C ≫ Cmid
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import numpy as np
from scipy.special import logit

from .curve import FloatArray

LN2: Final = float(np.log(2.0))


class Family(StrEnum):
    """Shape of s(C)."""

    SIGMOID = "sigmoid"
    STRETCHED = "stretched_exponential"
    POWER_LAW = "power_law"


def gain_share(family: Family, ln_compute: FloatArray, ln_cmid: FloatArray, ln_b: FloatArray) -> FloatArray:
    """s(C) ∈ [0, 1]; arguments broadcast."""
    b = np.exp(ln_b)
    if family is Family.SIGMOID:
        # Half the time of tanh and a fifth of SciPy's expit. Far below Cmid the power is infinite, its share 0.
        with np.errstate(over="ignore"):
            power = np.asarray(np.exp(b * (ln_cmid - ln_compute)))
        power += 1.0
        return np.asarray(np.divide(1.0, power, out=power))
    distance = ln_compute - ln_cmid
    if family is Family.STRETCHED:
        return np.asarray(-np.expm1(-LN2 * np.exp(np.minimum(b * distance, 50.0))))
    # log and exp take half the time of log1p and expm1; the share is off by 1e-16 of the whole gain, not of itself.
    power = np.asarray(1.0 + np.expm1(LN2 / b) * np.exp(distance))
    np.log(power, out=power)
    power *= -b
    np.exp(power, out=power)
    return np.asarray(np.subtract(1.0, power, out=power))


def compute_share(family: Family, share: FloatArray, ln_cmid: FloatArray, ln_b: FloatArray) -> FloatArray:
    """ln C at which a share of the gain in (0, 1) is reached: the inverse of `gain_share`."""
    b = np.exp(ln_b)
    if family is Family.SIGMOID:
        return np.asarray(ln_cmid + logit(share) / b)
    if family is Family.STRETCHED:
        return np.asarray(ln_cmid + np.log(-np.log1p(-share) / LN2) / b)
    return np.asarray(ln_cmid + np.log(np.expm1(-np.log1p(-share) / b)) - np.log(np.expm1(LN2 / b)))
