"""One bad evaluation, and a curve that does not fit its own points."""

from __future__ import annotations

import numpy as np
import pytest

import scalerl_curvefit as cf
from scalerl_curvefit.outliers import outlier_weights
from scalerl_curvefit.predictive_check import MAX_RUN, predictive_check
from scalerl_curvefit.simulate import ar1_noise


def run_of(n: int, seed: int = 0, rho: float = 0.3) -> np.ndarray:
    compute = np.arange(1.0, n + 1)
    noise = ar1_noise(n, 0.0075, rho, np.random.default_rng(seed))
    return np.asarray(0.2 + 0.4 / (1 + (n / 5 / compute) ** 1.8) + noise)


def at_twice(rewards: np.ndarray, samples: int | None = None) -> cf.Forecast:
    (ahead,) = cf.forecast(
        cf.fit(cf.Curve(np.arange(1.0, rewards.size + 1), rewards, samples)), [2.0 * rewards.size]
    )
    return ahead


@pytest.mark.parametrize("samples", [None, 1000])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_one_bad_evaluation_of_fifteen_moves_the_median_little(value: float, samples: int | None) -> None:
    rewards = run_of(15)
    before = at_twice(rewards, samples)
    for i in (0, 1, 2, 7, 12, 13, 14):
        bad = rewards.copy()
        bad[i] = value
        after = at_twice(bad, samples)
        assert abs(after.median - before.median) <= 0.03, i
        assert after.high - after.low < 3 * (before.high - before.low), i


def test_outliers_are_single_evaluations() -> None:
    rewards = run_of(20)

    def weights(**changes: float) -> np.ndarray:
        seen = rewards.copy()
        for name, value in changes.items():
            seen[int(name[1:])] = value
        return outlier_weights(cf.Curve(np.arange(1.0, 21.0), seen))

    assert weights().min() > 0.9
    assert weights(_10=0.0)[10] < 1e-3
    assert weights(_19=0.0)[19] < 1e-3, "the last one may be confirmed by the next"
    assert weights(_18=0.0, _19=0.0)[18:].min() == 1.0, "two that agree are believed"
    step = np.where(np.arange(20) < 9, 0.2, 0.6)
    assert outlier_weights(cf.Curve(np.arange(1.0, 21.0), step)).min() == 1.0
    steep = np.array([0.0, 0.08, 0.16, 0.26, 0.36, 0.49])
    assert outlier_weights(cf.Curve(np.arange(1.0, 7.0), steep)).min() == 1.0
    assert outlier_weights(cf.Curve(np.arange(5.0), np.array([0.1, 0.9, 0.1, 0.9, 0.1]))).size == 4
    many = cf.Curve(np.arange(1.0, 10_001.0), np.full(10_000, 0.5))
    assert outlier_weights(many).tolist() == [1.0] * 10_000


def test_run_of_residuals_refuses_the_fit() -> None:
    rewards = run_of(40)
    fitted = cf.fit(cf.Curve(np.arange(1.0, 41.0), rewards))
    assert fitted.identifiable
    rewards[20:30] -= 0.05
    refused = cf.fit(cf.Curve(np.arange(1.0, 41.0), rewards))
    assert not refused.identifiable
    assert "evaluations in a row lie below the fitted curve" in refused.warnings[-1]
    assert refused.departure > 1.4 * fitted.departure


def ar1_noise_around_a_cubic(runs: int, rho: float, random: np.random.Generator) -> list[np.ndarray]:
    """Noise of 30 evaluations less a fit of four parameters, as a curve has."""
    x = np.arange(30.0)
    seen = [ar1_noise(30, 0.0075, rho, random) for _ in range(runs)]
    return [y - np.polyval(np.polyfit(x, y, 3), x) for y in seen]


def test_check_allows_correlated_noise() -> None:
    random = np.random.default_rng(0)
    for rho in (0.0, 0.3, 0.6):
        noise = ar1_noise_around_a_cubic(300, rho, random)
        assert np.mean([predictive_check(one).run > MAX_RUN for one in noise]) <= 0.02
    slow = predictive_check(0.03 * np.sin(np.arange(40) / 4) + 0.002 * random.standard_normal(40))
    assert slow.run > MAX_RUN
    assert slow.misfit == pytest.approx(0.03 / np.sqrt(2), rel=0.2)
    assert predictive_check(np.zeros(5)).warning == predictive_check(np.zeros(20)).warning == ""


def test_misfit_widens_forecasts() -> None:
    fitted = cf.fit(cf.Curve(np.arange(1.0, 41.0), run_of(40)))
    wavy = cf.fit(cf.Curve(np.arange(1.0, 41.0), run_of(40) + 0.02 * np.sin(np.arange(40) / 3)))
    (plain,), (wide,) = (cf.forecast(one, [80.0]) for one in (fitted, wavy))
    assert wavy.check.misfit > 0.01
    assert wide.curve_high - wide.curve_low > 1.3 * (plain.curve_high - plain.curve_low)


def test_compute_within_five_per_cent_is_refused() -> None:
    seconds = 1.7e9 + 600.0 * np.arange(20)
    with pytest.raises(
        cf.ComputeSpanError, match=r"from 1\.7e\+09 to 1\.70001e\+09, within a factor of 1\.05"
    ):
        cf.fit(cf.Curve(seconds, run_of(20)))
    assert cf.fit(cf.Curve(seconds - seconds[0] + 600.0, run_of(20))).points_used == 20
