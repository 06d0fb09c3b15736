"""Fits: recovery of known curves, use of every point, identifiability, invalid settings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import scalerl_curvefit as cf
from scalerl_curvefit.families import gain_share
from scalerl_curvefit.simulate import SCALERL, Truth, ar1_noise, simulated
from scalerl_curvefit.sufficient_statistics import _interpolation, _no_interpolation, sufficient_statistics


def test_fit_recovers_noiseless_curve() -> None:
    compute = np.linspace(200.0, 12000.0, 60)
    fitted = cf.fit(cf.Curve(compute, SCALERL.reward(compute)))
    point = fitted.point
    got = [point.A, point.R0, point.B, point.Cmid / 2542.0]
    np.testing.assert_allclose(got, [0.61, 0.2, 1.92, 1.0], atol=1e-3)
    assert fitted.identifiable
    assert fitted.A.low < 0.61 < fitted.A.high


def test_forecast_at_twice_the_compute() -> None:
    curve = simulated(seed=3)
    (ahead,) = cf.forecast(cf.fit(curve), at=[2 * curve.now])
    assert ahead.median == pytest.approx(float(SCALERL.reward(2 * curve.now)), abs=0.02)
    assert ahead.low < ahead.curve_low < ahead.median < ahead.curve_high < ahead.high + 0.01


def test_fit_below_midpoint_is_not_identifiable() -> None:
    fitted = cf.fit(simulated(reach=0.5, seed=1))
    assert not fitted.identifiable
    assert any("A is" in warning for warning in fitted.warnings)
    assert fitted.A.width > 0.2


def test_fit_is_deterministic() -> None:
    one, two = cf.fit(simulated(seed=5)), cf.fit(simulated(seed=5))
    assert (one.A, one.B, one.Cmid, one.R0, one.seed) == (two.A, two.B, two.Cmid, two.R0, two.seed)
    assert cf.forecast(one, [9e3, 3e4]) == cf.forecast(two, [9e3, 3e4])
    assert cf.fit(simulated(seed=6)).seed != one.seed


@pytest.mark.parametrize("n", [5, 12, 300])
def test_sufficient_statistics_match_dense_ar1_likelihood(n: int) -> None:
    """All quadratic forms against the explicit inverse of the AR(1) covariance."""
    random = np.random.default_rng(n)
    ln_compute = np.sort(random.uniform(0, 4, n))
    reward, precision = random.uniform(0, 1, n), random.uniform(0.5, 2, n)
    rho = np.array([0.0, 0.6])
    sums = sufficient_statistics(ln_compute, reward, precision, rho, max_knots=n)
    s = gain_share(cf.Family.SIGMOID, ln_compute, np.float64(2.0), np.float64(0.5))
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    for r, coefficient in enumerate(rho):
        covariance = coefficient**lag / (1 - coefficient**2)
        omega = np.diag(precision) @ np.linalg.inv(covariance) @ np.diag(precision)
        ss = s**2 @ sums.ss_diagonal_kr[:, r] + 2 * (s[1:] * s[:-1]) @ sums.ss_neighbour_kr[:, r]
        got = [ss, s @ sums.s_one_kr[:, r], s @ sums.s_y_kr[:, r], sums.one_y_r[r], sums.y_y_r[r]]
        one = np.ones(n)
        want = [
            s @ omega @ s,
            s @ omega @ one,
            s @ omega @ reward,
            one @ omega @ reward,
            reward @ omega @ reward,
        ]
        np.testing.assert_allclose(got, want, rtol=1e-9)


def test_knots_leave_posterior_unchanged() -> None:
    """2,000 points through 160 knots against all 2,000 as knots: the same forms to 1e-3 of the noise."""
    compute = np.linspace(10.0, 12000.0, 2000)
    reward = SCALERL.reward(compute) + ar1_noise(2000, 0.0075, 0.6, np.random.default_rng(1))
    rho = np.array([0.0, 0.6])
    thin, full = (
        sufficient_statistics(np.log(compute), reward, np.ones(2000), rho, max_knots=k) for k in (160, 2000)
    )
    for sums, name in ((thin, "thin"), (full, "full")):
        assert sums.n == 2000, name

    def sse(sums: object, r: int) -> float:
        s = gain_share(cf.Family.SIGMOID, sums.ln_compute_k, np.log(2542.0), np.log(1.92))
        ss = s**2 @ sums.ss_diagonal_kr[:, r] + 2 * (s[1:] * s[:-1]) @ sums.ss_neighbour_kr[:, r]
        one_s, s_y = s @ sums.s_one_kr[:, r], s @ sums.s_y_kr[:, r]
        gain, r0 = 0.41, 0.2
        return float(
            sums.y_y_r[r]
            + gain**2 * ss
            + r0**2 * sums.one_one_r[r]
            - 2 * gain * s_y
            - 2 * r0 * sums.one_y_r[r]
            + 2 * gain * r0 * one_s
        )

    for r in range(2):
        assert sse(thin, r) == pytest.approx(sse(full, r), rel=1e-3)


def test_interval_narrows_with_correlated_points() -> None:
    """100 times the points at the same ρ: ten times narrower, still around the truth."""
    few, many = cf.fit(simulated(n=100, seed=2)), cf.fit(simulated(n=10_000, seed=2))
    assert many.A.low < 0.61 < many.A.high
    assert 0.05 < many.A.width / few.A.width < 0.2


def test_fit_reports_prior_bounds() -> None:
    """Rewards that rise straight on: neither Cmid nor A is determined, and both bounds are named."""
    compute = np.linspace(1.0, 40.0, 40)
    fitted = cf.fit(cf.Curve(compute, 0.1 + 0.01 * compute))
    assert "A" in {edge.parameter for edge in fitted.edges}
    assert not fitted.identifiable
    assert cf.fit(simulated(n=60, reach=6)).edges == ()


def test_fit_falling_curve_reports_bound_of_rise() -> None:
    """Its B and Cmid come from that bound alone."""
    compute = np.arange(1.0, 31.0)
    fitted = cf.fit(cf.Curve(compute, 0.6 - 0.01 * compute))
    (edge,) = [edge for edge in fitted.edges if edge.parameter == "A - R0"]
    assert (edge.side, edge.bound) == ("low", 0.0)
    assert edge.mass > 0.9


def test_fit_ignores_point_at_compute_zero() -> None:
    curve = simulated(seed=4)
    with_zero = cf.Curve([0.0, *curve.compute], [0.05, *curve.reward])
    fitted = cf.fit(with_zero, cf.FitSettings(burn_in_fraction=0.0))
    assert fitted.points_used == len(curve)
    without = cf.fit(curve, cf.FitSettings(burn_in_fraction=0.0))
    np.testing.assert_allclose(fitted.point.A, without.point.A, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"r0_sd": 0.0}, "r0_sd"),
        ({"burn_in_fraction": 1.0}, "burn_in_fraction"),
        ({"rho": (1.0,)}, "rho"),
        ({"rho": ()}, "rho"),
        ({"a_highest": 1.5}, "a_highest"),
        ({"departure": -0.1}, "departure"),
        ({"departure_dof": 2.0}, "departure_dof"),
        ({"departure_dof": float("nan")}, "departure_dof"),
        ({"pool": (1.0,)}, "pool"),
        ({"pool": (0.0, 0.5, 0.5)}, "pool"),
        ({"late_rise": 1.5}, "late_rise"),
        ({"noise_share": 0.0}, "noise_share"),
        ({"cmid_above": 0.5}, "cmid_above"),
        ({"ln_b_sd": float("nan")}, "ln_b_sd"),
        ({"families": ()}, "families"),
    ],
)
def test_settings_invalid_values_raise(change: dict[str, object], says: str) -> None:
    with pytest.raises(cf.SettingsError, match=says):
        cf.FitSettings(**change)


@pytest.mark.parametrize("at", [[], [0.0], [-1.0], [float("inf")]])
def test_forecast_invalid_compute_raises(at: list[float]) -> None:
    with pytest.raises(cf.RequestError):
        cf.forecast(cf.fit(simulated()), at=at)
    with pytest.raises(cf.RequestError):
        cf.draws(cf.fit(simulated()), 0)


@settings(max_examples=40, deadline=None)
@example(n=55, seed=509, unit=1e-6, shape="falling")  # No rising curve anywhere near the points.
@given(
    n=st.integers(4, 60),
    seed=st.integers(0, 10_000),
    unit=st.sampled_from([1e-6, 1.0, 1e12]),
    shape=st.sampled_from(["curve", "noise", "falling", "jump"]),
)
def test_fit_any_valid_points_give_ordered_finite_intervals(
    n: int, seed: int, unit: float, shape: str
) -> None:
    random = np.random.default_rng(seed)
    compute = np.cumsum(random.uniform(0.1, 3.0, n))
    reward = {
        "curve": Truth(0.61, 1.92, 10.0).reward(compute),
        "noise": np.full(n, 0.5),
        "falling": 0.9 - 0.4 * compute / compute[-1],
        "jump": np.where(np.arange(n) < n // 2, 0.05, 0.95),
    }[shape] + random.normal(0, 0.02, n)
    fitted = cf.fit(cf.Curve(compute * unit, np.clip(reward, 0, 1)))
    ahead = cf.forecast(fitted, [fitted.now / 2, 2 * fitted.now, 100 * fitted.now])
    values = [(f.low, f.curve_low, f.median, f.curve_high, f.high) for f in ahead]
    assert np.all(np.isfinite(values))
    assert all(0 <= f.low <= f.median <= f.high <= 1 for f in ahead)
    assert fitted.A.low <= fitted.A.median <= fitted.A.high <= 1
    drawn = cf.draws(fitted, 500)
    assert np.all(drawn.R0 <= drawn.A + 1e-12)
    paths = drawn.reward(np.geomspace(0.1, 10, 20) * fitted.now)
    assert np.all(np.diff(paths, axis=1) >= -1e-9)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), unit=st.sampled_from([1e-5, 3600.0, 1e9]))
def test_fit_is_invariant_to_compute_unit(seed: int, unit: float) -> None:
    curve = simulated(seed=seed)
    plain, scaled = cf.fit(curve), cf.fit(cf.Curve(curve.compute * unit, curve.reward))
    np.testing.assert_allclose(scaled.point.A, plain.point.A, atol=1e-4)
    assert scaled.Cmid.median == pytest.approx(plain.Cmid.median * unit, rel=0.05)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(4, 50), seed=st.integers(0, 1000))
def test_interpolation_is_identity_at_knots(n: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    ln_compute, precision = np.sort(random.uniform(0, 4, n)), random.uniform(0.5, 2, n)
    short, plain = _no_interpolation(precision), _interpolation(ln_compute, precision, np.arange(n))
    rows = random.normal(size=(2, n))
    np.testing.assert_allclose(short.sums(rows), plain.sums(rows), rtol=1e-12)
    for name in ("identity_k", "ends_k", "neighbours_k"):
        for got, want in zip(getattr(short, name), getattr(plain, name), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)
