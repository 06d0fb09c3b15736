"""The guard, the comparison of recipes, and the methods kept for reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scalerl_curvefit as cf
from scalerl_curvefit.simulate import SCALERL, Truth, ar1_noise, simulated


def collapsing(seed: int = 0, at: int = 24) -> cf.Curve:
    curve = simulated(n=36, reach=4, seed=seed)
    falling = 0.05 * np.maximum(np.arange(36) - at + 1, 0)
    return cf.Curve(curve.compute, np.clip(curve.reward - falling, 0, 1))


def test_a_healthy_run_raises_no_alarm() -> None:
    result = cf.detect_collapse(simulated(seed=3))
    assert (result.broken, result.checked, result.reasons, result.fall) == (False, True, (), None)


def test_a_collapse_raises_an_alarm_that_says_what_was_seen() -> None:
    curve = collapsing()
    assert not cf.detect_collapse(curve.head(24)).broken
    result = cf.detect_collapse(curve.head(28))
    fall = result.fall
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


def test_two_low_evaluations_are_no_collapse() -> None:
    curve = simulated(seed=3)
    reward = curve.reward.copy()
    reward[-2:] -= 0.3
    assert not cf.detect_collapse(cf.Curve(curve.compute, reward)).broken
    fallen = curve.reward.copy()
    fallen[-3:] -= 0.3
    assert cf.detect_collapse(cf.Curve(curve.compute, fallen)).broken


def test_one_bad_evaluation_after_two_a_little_low_is_no_collapse() -> None:
    steady = np.tile([0.58, 0.62], 16)
    low = [*steady, 0.585, 0.58, 0.3]
    assert not cf.detect_collapse(cf.Curve(np.arange(1.0, 36.0), low)).broken
    assert cf.detect_collapse(cf.Curve(np.arange(1.0, 37.0), [*low, 0.3])).broken


def test_a_fall_soon_after_a_fast_rise_is_found() -> None:
    """The bend of the rise is no noise that would explain the fall."""
    u = np.arange(20)
    rise = 0.5 + 0.3 * (1.0 - np.exp(-u / 2.0)) + ar1_noise(20, 0.004, 0.0, np.random.default_rng(1))
    fallen = rise - 0.02 * np.clip(u - 11, 0, 4)
    assert not any(cf.detect_collapse(cf.Curve(u[:n] + 1.0, rise[:n])).broken for n in range(8, 21))
    assert cf.detect_collapse(cf.Curve(u + 1.0, fallen)).broken


def test_evaluations_at_zero_say_nothing_of_the_noise_further_up() -> None:
    """With 100 samples at .4 the binomial sd is .05, whatever the mean of all rewards so far is."""
    reward = np.concatenate([np.zeros(40), np.linspace(0.1, 0.4, 4), np.repeat([0.43, 0.36, 0.42], 6)])
    curve = cf.Curve(np.arange(1.0, reward.size + 1.0), reward, np.full(reward.size, 100.0))
    assert not any(cf.detect_collapse(curve.head(n)).broken for n in range(44, reward.size + 1))


@pytest.mark.parametrize(
    ("truncation", "broken"), [(0.04, False), ([0.2, 0.099], False), ([0.01, 0.10], True)]
)
def test_truncation_alarms_at_ten_percent_of_the_latest(truncation, broken: bool) -> None:
    assert cf.detect_collapse(simulated(seed=3), truncation).broken is broken


def test_truncation_must_be_rates() -> None:
    with pytest.raises(cf.RequestError):
        cf.detect_collapse(simulated(), [12.0])


def test_too_little_history_is_said_not_guessed() -> None:
    falling = cf.Curve(np.arange(1.0, 9.0), [0.5, 0.51, 0.5, 0.505, 0.5, 0.2, 0.2, 0.2])
    assert cf.detect_collapse(falling).broken
    young = cf.detect_collapse(falling.head(7))
    assert (young.broken, young.checked) == (False, False)


def test_the_guard_looks_at_the_last_segment_only() -> None:
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


def test_an_alarm_stands_until_the_run_has_come_back_to_its_best() -> None:
    curve = _sagging()
    fall = cf.detect_collapse(curve).fall
    assert fall is not None
    assert 27 <= fall.points <= 29
    assert fall.compute == curve.compute[fall.points]
    assert fall.over == len(curve) - fall.points
    back = curve.reward.copy()
    back[-3:] = fall.best - 0.5 * fall.noise
    assert not cf.detect_collapse(cf.Curve(curve.compute, back)).broken
    nearly = back - 0.7 * fall.noise * (np.arange(40) >= 37)
    assert cf.detect_collapse(cf.Curve(curve.compute, nearly)).broken


def test_what_somebody_knows_of_raises_no_alarm_again() -> None:
    """After a held run is resumed, at the lower reward: only a new fall counts."""
    curve = _sagging()
    assert not cf.detect_collapse(curve, after=float(curve.compute[31])).broken
    again = cf.Curve(curve.compute, curve.reward - 0.1 * (np.arange(40) >= 37))
    assert cf.detect_collapse(again, after=float(curve.compute[31])).broken
    assert not cf.detect_collapse(again, after=float(curve.compute[33])).checked


def test_a_fall_smaller_than_what_matters_is_none() -> None:
    curve = _sagging()
    depth = cf.detect_collapse(curve).fall.depth  # type: ignore[union-attr]
    assert cf.detect_collapse(curve, least=depth - 0.002).broken
    assert not cf.detect_collapse(curve, least=0.07).broken


def test_a_slow_start_and_a_stall_are_no_fall() -> None:
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
def test_no_alarm_at_the_best_reward_so_far(rewards: list[float], samples: int | None) -> None:
    curve = cf.Curve(np.arange(1.0, len(rewards) + 1), rewards, samples=samples)
    for n in range(8, len(rewards) + 1):
        result = cf.detect_collapse(curve.head(n))
        if result.broken:
            assert rewards[n - 1] < max(rewards[:n])
            assert result.fall is not None
            assert 0 < result.fall.points < n
            assert result.fall.depth > result.fall.noise


def test_alarms_of_runs_that_never_fall_keep_to_the_error_rate() -> None:
    """Flat: the hardest case, since every mean may be the best."""
    compute, alarms = np.arange(1.0, 41.0), 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        curve = cf.Curve(compute, 0.4 + ar1_noise(40, 0.01, 0.0, random))
        alarms += any(cf.detect_collapse(curve.head(n)).broken for n in range(8, 41))
    assert alarms <= 5


def test_a_long_run_is_checked_at_every_evaluation() -> None:
    long = simulated(n=1500, reach=4, seed=1, sigma=0.004)
    assert not cf.detect_collapse(long).broken
    for at in (1000, 1013):
        fall = cf.detect_collapse(cf.Curve(long.compute, long.reward - 0.1 * (np.arange(1500) >= at))).fall
        assert fall is not None
        assert at - 1 <= fall.points <= at
        assert fall.over == 1500 - fall.points


def test_recipes_with_different_asymptotes_are_told_by_a() -> None:
    better = simulated(Truth(0.61, 1.97, 2542.0), n=60, reach=8, seed=1)
    worse = simulated(Truth(0.535, 1.44, 2542.0), n=60, reach=8, seed=2)
    result = cf.compare(better, worse)
    assert (result.same_asymptote, result.by, result.better) == (False, "A", cf.Better.FIRST)
    assert result.probability > 0.95
    assert cf.compare(worse, better).better is cf.Better.SECOND


def test_recipes_with_one_asymptote_are_told_by_b_at_the_mean_a() -> None:
    """Fixed A .605: ScaleRL B 2.01 against DAPO loss 1.77 [P]."""
    fast = simulated(Truth(0.605, 2.4, 2542.0), n=60, reach=8, seed=3, sigma=0.004)
    slow = simulated(Truth(0.605, 1.4, 2542.0), n=60, reach=8, seed=4, sigma=0.004)
    result = cf.compare(fast, slow)
    assert result.same_asymptote
    assert result.shared_a == pytest.approx(0.605, abs=0.01)
    np.testing.assert_allclose([result.first.point.A, result.second.point.A], result.shared_a, atol=1e-3)
    assert (result.by, result.better) == ("B", cf.Better.FIRST)
    assert result.probability > 0.9
    assert result.doubts == ()


def test_runs_below_their_midpoint_are_not_told_apart() -> None:
    result = cf.compare(simulated(reach=0.7, seed=1), simulated(reach=6, n=60, seed=2))
    assert result.better is cf.Better.UNDECIDED
    assert any(doubt.startswith("first curve") for doubt in result.doubts)
    assert not any(doubt.startswith("second curve") for doubt in result.doubts)


def test_a_recipe_against_itself_is_a_tie() -> None:
    curve = simulated(n=60, reach=6, seed=2)
    result = cf.compare(curve, curve)
    assert (result.better, result.probability) == (cf.Better.TIE, 0.5)


def test_bounds_that_set_a_are_doubts_of_a_comparison() -> None:
    straight = cf.Curve(np.arange(1.0, 41.0), 0.2 + 0.01 * np.arange(1.0, 41.0))
    result = cf.compare(straight, simulated(n=60, reach=6, seed=2))
    assert any(doubt.startswith("first curve: A is at its high bound, 1") for doubt in result.doubts)


def test_the_papers_grid_search_finds_the_grid_point() -> None:
    """Clean points of a curve that lies on the grid: that pair, and B to 1e-3."""
    compute = np.linspace(1000.0, 30000.0, 25)
    truth = Truth(0.61, 1.92, 6000.0)
    found = cf.paper_grid_search(
        cf.Curve(compute, truth.reward(compute)),
        a_values=np.arange(0.58, 0.64, 0.005),
        cmid_values=np.arange(4000.0, 8001.0, 500.0),
        r0=0.2,
    )
    assert found.fits == 117
    np.testing.assert_allclose([found.A, found.Cmid, found.B], [0.61, 6000.0, 1.92], rtol=1e-3)
    np.testing.assert_allclose(found.reward(compute), truth.reward(compute), atol=1e-4)
    assert found.edges == ()


def test_the_papers_grid_search_reports_its_edges() -> None:
    compute = np.linspace(1000.0, 30000.0, 25)
    found = cf.paper_grid_search(
        cf.Curve(compute, SCALERL.reward(compute)), a_values=[0.5, 0.52], cmid_values=[2000.0, 2500.0, 3000.0]
    )
    assert "A high" in found.edges


def test_a_power_law_is_recovered_and_capped_at_one() -> None:
    compute = np.geomspace(10.0, 1e4, 50)
    law = cf.power_law(cf.Curve(compute, 0.7 - 0.9 * compute**-0.5))
    np.testing.assert_allclose([law.A, law.D], [0.7, 0.9], rtol=0.02)
    np.testing.assert_allclose(law.B, 0.5, rtol=0.02)
    rising = cf.power_law(cf.Curve(compute, 0.05 * np.log(compute)))
    np.testing.assert_allclose(rising.A, 1.0)
