"""Plateau detection, and probabilities of late rises from counts of public curves."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import scalerl_curvefit as cf
from scalerl_curvefit import plateau
from scalerl_curvefit.simulate import ar1_noise

COMPUTE = np.arange(1.0, 21.0)


def log_linear(slope: float, seed: int, sigma: float = 0.0075, rho: float = 0.0) -> cf.Curve:
    """20 evaluations that gain `slope` with each doubling."""
    noise = ar1_noise(20, sigma, rho, np.random.default_rng(seed))
    return cf.Curve(COMPUTE, 0.3 + slope * np.log2(COMPUTE) + noise)


def flat(curve: cf.Curve, budget: float = 40.0) -> plateau.Plateau:
    found = plateau.detect_plateau(curve, least=0.02, horizon=2.0, budget=budget)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def counts() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "late_rises.py"
    spec = importlib.util.spec_from_file_location("late_rises", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_constants_match_public_curves(counts: ModuleType) -> None:
    both = counts.counted()
    for rises, file in zip(cf.LateRises, ("llm_curves", "procgen_curves"), strict=True):
        assert both[file]["doublings"] == plateau.DOUBLINGS[rises]
        assert tuple(both[file]["sizes"]) == plateau.SIZES[rises]
        # The rate in use lies within what so few far rises leave open: by half or by one more.
        far = sum(size >= 0.05 for size in plateau.SIZES[rises])
        rate = cf.BY_RISES[rises].late_rise
        assert 0.5 * far <= rate * plateau.DOUBLINGS[rises] <= far + 1
    assert sum(one["curves"] for one in both.values()) == plateau.CURVES
    not_risen = np.sum([one["not_risen"] for one in both.values()], axis=0)
    assert (counts.SHARES, tuple(not_risen)) == (plateau.SHARES, plateau.NOT_RISEN)


def test_p_late_rise_decreases_with_size_and_increases_with_doublings() -> None:
    def p(doublings: float, least: float, headroom: float = 0.4) -> float:
        return plateau.p_late_rise(doublings, least, 0.016, headroom)

    assert p(1.0, 0.1) == pytest.approx(0.016 * 0.75)
    assert p(2.0, 0.02) > p(1.0, 0.02) > p(1.0, 0.1) > p(1.0, 0.4) == p(0.0, 0.02) == p(1.0, 0.1, 0.0) == 0.0
    assert plateau.late_rise_sizes(0.02, cf.LateRises.LANGUAGE_MODELS) == (0.049, 0.028, 0.151)
    assert plateau.late_rise_sizes(0.02, cf.LateRises.GAMES) == (0.127, 0.098, 0.267)
    assert plateau.late_rise_sizes(0.5, cf.LateRises.GAMES) is None
    first = [plateau.p_first_rise(share) for share in (0.1, 0.3, 0.5, 0.7, 1.0)]
    assert first == sorted(first, reverse=True)
    assert plateau.p_first_rise(0.5) == pytest.approx(5 / 64)


def test_detect_plateau_separates_flat_and_rising_runs() -> None:
    still = [flat(log_linear(0.0, seed)) for seed in range(40)]
    assert np.mean([one.p_gain < 0.15 for one in still]) >= 0.85
    assert {one.share for one in still} == {0.5}
    assert np.mean([one.slope for one in still]) == pytest.approx(0.0, abs=0.002)
    assert all(flat(log_linear(0.06, seed)).p_trend > 0.9 for seed in range(20))


def test_detect_plateau_error_rate() -> None:
    """With independent and with correlated noise."""
    for rho, most in ((0.0, 0.12), (0.5, 0.3)):
        called = [flat(log_linear(0.02, seed, rho=rho)).p_trend < 0.07 for seed in range(200)]
        assert np.mean(called) <= most


def test_detect_plateau_needs_evaluations_and_reports_gain() -> None:
    assert plateau.detect_plateau(log_linear(0.0, 0).head(9), 0.02, 2.0, 40.0) is None
    assert flat(log_linear(0.0, 0)).gained < 0.02
    assert flat(log_linear(0.06, 0)).gained > 0.1
    silent = cf.Curve(COMPUTE, np.zeros(20), samples=1000)
    assert flat(silent).p_trend == pytest.approx(0.0, abs=1e-6)


def test_detect_plateau_curvature_widens_slope_sd() -> None:
    """Collapse detection excludes curvature from the noise; the trend line must not."""
    compute, noise = np.arange(1.0, 41.0), ar1_noise(40, 0.004, 0.0, np.random.default_rng(0))
    bending, level = 0.2 + 0.4 / (1 + (10 / compute) ** 2), np.full(40, 0.4)
    bent, straight = (
        plateau.detect_plateau(cf.Curve(compute, reward + noise), least=0.02, horizon=2.0, budget=80.0)
        for reward in (bending, level)
    )
    assert bent is not None
    assert straight is not None
    assert bent.slope_sd > 1.5 * straight.slope_sd
