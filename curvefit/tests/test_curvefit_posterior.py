"""The posterior against brute force on a dense grid of every parameter, without analytic integrals."""

from __future__ import annotations

import numpy as np
import pytest

import scalerl_curvefit as cf
from scalerl_curvefit.families import gain_share
from scalerl_curvefit.simulate import Truth, simulated

RHO = 0.3
CHOICES = cf.FitSettings(rho=(RHO,), rho_weights=(1.0,), burn_in_fraction=0.0, noise_guess=0.01)


def brute_force(curve: cf.Curve, family: cf.Family) -> dict[str, np.ndarray]:
    """5, 50 and 95 % quantiles of A, ln Cmid, R0 and R(2C), by summing over (Cmid, B, A, R0)."""
    compute, y, n = curve.compute, curve.reward, len(curve)
    s0, nu = CHOICES.noise_guess, CHOICES.guess_dof
    lam = s0**2 * (1 - RHO**2) / CHOICES.r0_sd**2
    ln_cmid = np.linspace(np.log(compute[0] / 4), np.log(compute[-1] * 8), 40)
    ln_b = np.log(1.85) + np.linspace(-1.5, 1.5, 17)
    a, r0 = np.linspace(0, 1, 81), np.linspace(-0.4, 0.9, 79)
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    omega = np.linalg.inv(RHO**lag / (1 - RHO**2))
    low = np.linalg.cholesky(omega).T
    ln_mass, twice = [], []
    a2, r2 = np.meshgrid(a, r0, indexing="ij")
    for c in ln_cmid:
        for b in ln_b:
            s = gain_share(family, np.log(compute), c, b)
            w, v, z = low @ s, low @ (1 - s), low @ y
            sse = (
                z @ z
                - 2 * a2 * (w @ z)
                - 2 * r2 * (v @ z)
                + a2**2 * (w @ w)
                + r2**2 * (v @ v)
                + 2 * a2 * r2 * (w @ v)
            )
            spread = sse + lam * (r2 - y[0]) ** 2 + nu * s0**2 * (1 - RHO**2)
            prior = -0.5 * ((b - np.log(1.85)) / CHOICES.ln_b_sd) ** 2
            ln_mass.append(np.where(r2 <= a2, prior - 0.5 * (n + 1 + nu) * np.log(spread), -np.inf))
            share = float(gain_share(family, np.log(2 * compute[-1]), c, b))
            twice.append(r2 + (a2 - r2) * share)
    ln_mass = np.array(ln_mass)
    mass = np.exp(ln_mass - ln_mass.max())
    by_a, by_r0 = mass.sum(axis=(0, 2)), mass.sum(axis=(0, 1))
    by_cmid = mass.sum(axis=(1, 2)).reshape(ln_cmid.size, ln_b.size).sum(axis=1)
    order = np.argsort(np.array(twice).ravel())
    return {
        "A": weighted(a, by_a),
        "R0": weighted(r0, by_r0),
        "ln Cmid": weighted(ln_cmid, by_cmid),
        "R(2C)": weighted(np.array(twice).ravel()[order], mass.ravel()[order]),
    }


def weighted(values: np.ndarray, mass: np.ndarray) -> np.ndarray:
    below = (np.cumsum(mass) - 0.5 * mass) / mass.sum()
    return np.interp([0.05, 0.5, 0.95], below, values)


@pytest.mark.parametrize("reach", [0.6, 1.5, 4.0])
def test_posterior_quantiles_match_brute_force(reach: float) -> None:
    curve = simulated(Truth(0.61, 1.92, 10.0), n=14, reach=reach, sigma=0.015, seed=7)
    want = brute_force(curve, cf.Family.SIGMOID)
    drawn = cf.draws(cf.fit(curve, CHOICES), 20_000)
    got = {
        "A": drawn.A,
        "R0": drawn.R0,
        "ln Cmid": np.log(drawn.Cmid),
        "R(2C)": drawn.reward(np.array([2 * curve.now]))[:, 0],
    }
    for name, tolerance in (("A", 0.025), ("R0", 0.025), ("ln Cmid", 0.12), ("R(2C)", 0.025)):
        np.testing.assert_allclose(
            np.quantile(got[name], (0.05, 0.5, 0.95)), want[name], atol=tolerance, err_msg=name
        )


def test_posterior_of_flat_points_excludes_falling_curves() -> None:
    """Nearly flat noise: without the bound R0 ≤ A half of the mass would fall."""
    random = np.random.default_rng(5)
    curve = cf.Curve(np.linspace(1, 14, 14), 0.4 + random.normal(0, 0.02, 14))
    want = brute_force(curve, cf.Family.SIGMOID)
    drawn = cf.draws(cf.fit(curve, CHOICES), 20_000)
    np.testing.assert_allclose(np.quantile(drawn.A, (0.5, 0.95)), want["A"][1:], atol=0.02)
    np.testing.assert_allclose(np.quantile(drawn.R0, (0.05, 0.5)), want["R0"][:2], atol=0.04)
