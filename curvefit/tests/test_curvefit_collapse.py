"""Alarms of a fall and of truncation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scalerl_curvefit as cf
from scalerl_curvefit.simulate import ar1_noise, simulated


def collapsing(seed: int = 0, at: int = 24) -> cf.Curve:
    curve = simulated(n=36, reach=4, seed=seed)
    falling = 0.05 * np.maximum(np.arange(36) - at + 1, 0)
    return cf.Curve(curve.compute, np.clip(curve.reward - falling, 0, 1))


def test_detect_collapse_healthy_run_raises_no_alarm() -> None:
    result = cf.detect_collapse(simulated(seed=3))
    assert (result.broken, result.checked, result.reasons, result.collapse) == (False, True, (), None)


def test_detect_collapse_alarm_reports_fall() -> None:
    curve = collapsing()
    assert not cf.detect_collapse(curve.head(24)).broken
    result = cf.detect_collapse(curve.head(28))
    fall = result.collapse
    assert fall is not None
    assert (fall.points, fall.over, fall.compute) == (24, 4, curve.compute[24])
    assert fall.newest == pytest.approx(curve.reward[25:28].mean())
    assert fall.depth > 0.1
    assert result.floor == pytest.approx(fall.best - fall.noise)
    assert result.reasons[0].startswith("the mean of the last 3 evaluations, .4")
    for said in (
        "below the best of 3 in a row, .5",
        f"at compute {fall.best_compute:.4g}; noise explains .0",
    ):
        assert said in result.reasons[0]


def test_detect_collapse_needs_three_low_evaluations() -> None:
    curve = simulated(seed=3)
    reward = curve.reward.copy()
    reward[-2:] -= 0.3
    assert not cf.detect_collapse(cf.Curve(curve.compute, reward)).broken
    fallen = curve.reward.copy()
    fallen[-3:] -= 0.3
    assert cf.detect_collapse(cf.Curve(curve.compute, fallen)).broken


def test_detect_collapse_ignores_single_bad_evaluation() -> None:
    steady = np.tile([0.58, 0.62], 16)
    low = [*steady, 0.585, 0.58, 0.3]
    assert not cf.detect_collapse(cf.Curve(np.arange(1.0, 36.0), low)).broken
    assert cf.detect_collapse(cf.Curve(np.arange(1.0, 37.0), [*low, 0.3])).broken


def test_detect_collapse_after_fast_rise() -> None:
    """The bend of the rise is no noise that would explain the fall."""
    u = np.arange(20)
    rise = 0.5 + 0.3 * (1.0 - np.exp(-u / 2.0)) + ar1_noise(20, 0.004, 0.0, np.random.default_rng(1))
    fallen = rise - 0.02 * np.clip(u - 11, 0, 4)
    assert not any(cf.detect_collapse(cf.Curve(u[:n] + 1.0, rise[:n])).broken for n in range(8, 21))
    assert cf.detect_collapse(cf.Curve(u + 1.0, fallen)).broken


def test_detect_collapse_noise_ignores_evaluations_at_zero() -> None:
    """With 100 samples at .4 the binomial sd is .05, whatever the mean of all rewards so far is."""
    reward = np.concatenate([np.zeros(40), np.linspace(0.1, 0.4, 4), np.repeat([0.43, 0.36, 0.42], 6)])
    curve = cf.Curve(np.arange(1.0, reward.size + 1.0), reward, np.full(reward.size, 100.0))
    assert not any(cf.detect_collapse(curve.head(n)).broken for n in range(44, reward.size + 1))


@pytest.mark.parametrize(
    ("truncation", "broken"), [(0.04, False), ([0.2, 0.099], False), ([0.01, 0.10], True)]
)
def test_detect_collapse_truncation_threshold(truncation, broken: bool) -> None:
    assert cf.detect_collapse(simulated(seed=3), truncation).broken is broken


def test_detect_collapse_invalid_truncation_raises() -> None:
    with pytest.raises(cf.RequestError):
        cf.detect_collapse(simulated(), [12.0])


def test_detect_collapse_too_few_evaluations_is_unchecked() -> None:
    falling = cf.Curve(np.arange(1.0, 9.0), [0.5, 0.51, 0.5, 0.505, 0.5, 0.2, 0.2, 0.2])
    assert cf.detect_collapse(falling).broken
    young = cf.detect_collapse(falling.head(7))
    assert (young.broken, young.checked) == (False, False)


def test_detect_collapse_checks_last_segment_only() -> None:
    """A new recipe that starts low again is no collapse; without its label the same points are."""
    old, new = simulated(n=24, seed=1), simulated(n=12, reach=1, seed=2)
    compute, reward = [*old.compute, *(old.now + new.compute)], [*old.reward, *new.reward]
    assert cf.detect_collapse(cf.Curve(compute[:28], reward[:28])).broken
    assert not cf.detect_collapse(cf.Curve(compute, reward, recipe=["a"] * 24 + ["b"] * 12)).broken
    young = cf.detect_collapse(cf.Curve(compute[:28], reward[:28], recipe=["a"] * 24 + ["b"] * 4))
    assert (young.broken, young.checked) == (False, False)


def _sagging(points: int = 40) -> cf.Curve:
    """A run that falls by .05 in two evaluations and stays there."""
    curve = simulated(n=points, reach=4, seed=5, sigma=0.004)
    fallen = np.where(np.arange(points) < 28, 0.0, np.minimum(np.arange(points) - 27, 2) * 0.025)
    return cf.Curve(curve.compute, curve.reward - fallen)


def test_detect_collapse_alarm_lasts_until_recovery() -> None:
    curve = _sagging()
    fall = cf.detect_collapse(curve).collapse
    assert fall is not None
    assert 27 <= fall.points <= 29
    assert fall.compute == curve.compute[fall.points]
    assert fall.over == len(curve) - fall.points
    back = curve.reward.copy()
    back[-3:] = fall.best - 0.5 * fall.noise
    assert not cf.detect_collapse(cf.Curve(curve.compute, back)).broken
    nearly = back - 0.7 * fall.noise * (np.arange(40) >= 37)
    assert cf.detect_collapse(cf.Curve(curve.compute, nearly)).broken


def test_detect_collapse_acknowledged_fall_raises_no_alarm() -> None:
    """After a held run is resumed, at the lower reward: only a new fall counts."""
    curve = _sagging()
    assert not cf.detect_collapse(curve, after=float(curve.compute[31])).broken
    again = cf.Curve(curve.compute, curve.reward - 0.1 * (np.arange(40) >= 37))
    assert cf.detect_collapse(again, after=float(curve.compute[31])).broken
    assert not cf.detect_collapse(again, after=float(curve.compute[33])).checked


def test_detect_collapse_smallest_fall() -> None:
    curve = _sagging()
    depth = cf.detect_collapse(curve).collapse.depth  # type: ignore[union-attr]
    assert cf.detect_collapse(curve, least=depth - 0.002).broken
    assert not cf.detect_collapse(curve, least=0.07).broken


def test_detect_collapse_slow_start_and_stall_raise_no_alarm() -> None:
    """A public run of a language model that the guard held by its forecast while at its best reward."""
    path = Path(__file__).parents[1] / "data" / "llm_curves.json"
    public = json.loads(path.read_text())["curves"]["kanishk_llama_base-ppo_val"]
    run = cf.Curve(public["compute"], public["reward"], samples=1024)
    assert not any(cf.detect_collapse(run.head(n)).broken for n in range(1, len(run) + 1))
    i = np.arange(24)
    steep = 0.15 + 0.02 * np.minimum(i, 11) + np.random.default_rng(0).normal(0.0, 0.003, 24)
    stall = cf.Curve(1.0 + i, np.where(i < 12, steep, steep[:12].max() + 0.0004 * (i - 11)))
    assert not any(cf.detect_collapse(stall.head(n)).broken for n in range(8, 25))


@settings(max_examples=200, deadline=None)
@given(
    rewards=st.lists(st.floats(0, 1), min_size=8, max_size=60),
    samples=st.sampled_from([None, 64, 4000]),
)
def test_detect_collapse_no_alarm_at_best_reward(rewards: list[float], samples: int | None) -> None:
    curve = cf.Curve(np.arange(1.0, len(rewards) + 1), rewards, samples=samples)
    for n in range(8, len(rewards) + 1):
        result = cf.detect_collapse(curve.head(n))
        if result.broken:
            assert rewards[n - 1] < max(rewards[:n])
            assert result.collapse is not None
            assert 0 < result.collapse.points < n
            assert result.collapse.depth > result.collapse.noise


def test_detect_collapse_error_rate() -> None:
    """Flat: the hardest case, since every mean may be the best."""
    compute, alarms = np.arange(1.0, 41.0), 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        curve = cf.Curve(compute, 0.4 + ar1_noise(40, 0.01, 0.0, random))
        alarms += any(cf.detect_collapse(curve.head(n)).broken for n in range(8, 41))
    assert alarms <= 5


def test_detect_collapse_long_run() -> None:
    long = simulated(n=1500, reach=4, seed=1, sigma=0.004)
    assert not cf.detect_collapse(long).broken
    for at in (1000, 1013):
        fall = cf.detect_collapse(
            cf.Curve(long.compute, long.reward - 0.1 * (np.arange(1500) >= at))
        ).collapse
        assert fall is not None
        assert at - 1 <= fall.points <= at
        assert fall.over == 1500 - fall.points
