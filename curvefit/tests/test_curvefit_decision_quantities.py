"""Decision quantities, hindcasts, forecast pool and trend, against closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, stdtr

import scalerl_curvefit as cf
from scalerl_curvefit.families import compute_share, gain_share
from scalerl_curvefit.pooling import GainPrior, p_departure_below, sample_forecast_pool
from scalerl_curvefit.simulate import SCALERL, Truth, simulated
from scalerl_curvefit.trend import trend


@pytest.fixture(scope="module")
def fitted() -> cf.Fit:
    return cf.fit(simulated(n=60, reach=5, seed=1))


@given(
    family=st.sampled_from(list(cf.Family)),
    share=st.floats(0.01, 0.99),
    cmid=st.floats(0.1, 1e9),
    b=st.floats(0.5, 5.0),
)
def test_gain_share_is_half_at_cmid_and_invertible(
    family: cf.Family, share: float, cmid: float, b: float
) -> None:
    ln_cmid, ln_b = np.log(cmid), np.log(b)
    assert float(gain_share(family, ln_cmid, ln_cmid, ln_b)) == pytest.approx(0.5)
    ln_compute = compute_share(family, np.array(share), ln_cmid, ln_b)
    assert float(gain_share(family, ln_compute, ln_cmid, ln_b)) == pytest.approx(share, rel=1e-6)


def test_marginal_gain_equals_sigmoid_derivative(fitted: cf.Fit) -> None:
    drawn = cf.draws(fitted)
    share = drawn.share(np.array([fitted.now]))[:, 0]
    closed = (drawn.A - drawn.R0) * drawn.B * share * (1 - share) / fitted.now
    assert cf.marginal_gain(fitted).median == pytest.approx(float(np.median(closed)), rel=1e-5)


def test_gain_agrees_with_p_gain_above(fitted: cf.Fit) -> None:
    gained = cf.gain(fitted, 2 * fitted.now)
    truth = float(SCALERL.reward(2 * fitted.now) - SCALERL.reward(fitted.now))
    assert gained.low < truth < gained.high
    assert cf.p_gain_above(fitted, 2 * fitted.now, gained.low) == pytest.approx(0.95, abs=0.01)
    assert cf.p_gain_above(fitted, 2 * fitted.now, gained.high) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("far", [0.5, 2.0, 4.0])
def test_p_gain_above_is_independent_of_drawn_departures(fitted: cf.Fit, far: float) -> None:
    at = far * fitted.now
    many = cf.forecast_pool(fitted, 200_000).reward(np.array([fitted.now, at]))
    for target in np.quantile(many[:, 1], (0.05, 0.5, 0.9)):
        assert cf.p_reward_above(fitted, at, target) == pytest.approx(np.mean(many[:, 1] > target), abs=0.02)
    if far > 1:
        least = float(np.quantile(many[:, 1] - many[:, 0], 0.9))
        assert cf.p_gain_above(fitted, at, least) == pytest.approx(0.1, abs=0.02)
        none = np.zeros(len(fitted.pool))
        unlucky = replace(fitted, pool=replace(fitted.pool, departure=none, rise=none))
        assert cf.p_gain_above(unlucky, at, least) == cf.p_gain_above(fitted, at, least)


def test_departures_are_students_t(fitted: cf.Fit) -> None:
    x = np.concatenate([np.linspace(-60.0, 60.0, 401), [-1e9, 0.0, 1e9]])
    assert p_departure_below(4.0, x) == pytest.approx(stdtr(4.0, x), abs=1e-14)
    assert p_departure_below(3.0, x) == pytest.approx(stdtr(3.0, x))
    assert p_departure_below(np.inf, x) == pytest.approx(ndtr(x))
    normal = cf.fit(fitted.curve, cf.FitSettings(departure_dof=np.inf))
    for pool, ratio in ((fitted.pool, 2.132 / 0.741), (normal.pool, 1.645 / 0.674)):
        quarter, outer = np.quantile(pool.departure, (0.75, 0.95))
        assert outer / quarter == pytest.approx(ratio, rel=0.01)
        assert np.quantile(pool.departure, 0.5) == pytest.approx(0.0, abs=1e-9)
    assert fitted.departure == pytest.approx(np.sqrt(2.0) * fitted.pool.departure_rate)
    assert normal.departure == normal.pool.departure_rate
    assert normal.pool.departure_rate == pytest.approx(fitted.pool.departure_rate, rel=0.02)


def test_p_reward_above_respects_reward_bounds(fitted: cf.Fit) -> None:
    wide = cf.fit(fitted.curve, cf.FitSettings(departure=5.0))
    assert cf.p_reward_above(wide, 4 * wide.now, 1.0) == 0.0
    assert 0.2 < cf.p_reward_above(wide, 4 * wide.now, 0.999) < 0.6
    assert cf.p_gain_above(wide, 4 * wide.now, 1.0) == 0.0
    assert cf.p_gain_above(wide, 4 * wide.now, -1.0) == 1.0


def test_compute_to_target(fitted: cf.Fit) -> None:
    near = cf.compute_to(fitted, 0.59)
    exact = SCALERL.Cmid * ((0.59 - 0.2) / (0.61 - 0.59)) ** (1 / 1.92)
    assert near.low < exact < near.high
    beyond = cf.compute_to(fitted, 0.9)
    assert beyond.probability == 0.0
    assert beyond.low == beyond.median == np.inf
    reached = cf.compute_to(fitted, 0.3)
    assert reached.probability == 1.0
    assert reached.high < fitted.now


def test_p_asymptote_above_decreases_with_target(fitted: cf.Fit) -> None:
    targets = np.linspace(0.3, 0.95, 8)
    for curve in (
        [cf.p_reward_above(fitted, 1e5, t) for t in targets],
        [cf.p_asymptote_above(fitted, t) for t in targets],
    ):
        assert all(a >= b for a, b in pairwise(curve))
        assert curve[0] == pytest.approx(1.0, abs=0.01)
        assert curve[-1] < fitted.settings.late_rise


def test_best_block_shrinks_with_price(fitted: cf.Fit) -> None:
    free = cf.best_block(fitted, value=1.0, price=0.0, horizon=4 * fitted.now)
    dear = cf.best_block(fitted, value=1.0, price=1.0, horizon=4 * fitted.now)
    some = cf.best_block(fitted, value=1.0, price=2e-7, horizon=4 * fitted.now)
    assert free.compute > 2 * fitted.now
    assert dear == cf.Block(0.0, 0.0, 0.0)
    assert some.compute <= free.compute
    assert some.net <= free.net


@pytest.mark.parametrize(
    "ask",
    [
        lambda f: cf.gain(f, f.now),
        lambda f: cf.marginal_gain(f, -1.0),
        lambda f: cf.compute_to(f, 1.0),
        lambda f: cf.best_block(f, -1.0, 1.0, 2 * f.now),
        lambda f: cf.p_reward_above(f, float("nan"), 0.5),
    ],
)
def test_decision_quantities_invalid_arguments_raise(fitted: cf.Fit, ask) -> None:
    with pytest.raises(cf.RequestError):
        ask(fitted)


def test_hindcasts_ignore_later_points() -> None:
    """What was forecast at half the compute does not change when later points do."""
    curve = simulated(n=60, reach=5, seed=1)
    changed = cf.Curve(curve.compute, np.where(np.arange(60) < 30, curve.reward, curve.reward * 0.5))
    one, two = cf.hindcasts(curve)[-1], cf.hindcasts(changed)[-1]
    assert (one.made_at, one.until, one.median) == (two.made_at, two.until, two.median)
    assert two.below < 0.01 < one.below
    assert one.low <= one.observed <= one.high


def test_hindcast_equals_forecast_of_head() -> None:
    curve = simulated(n=60, reach=5, seed=1)
    (made,) = cf.forecast(cf.fit(curve.head(30)), [2 * curve.compute[29]])
    past = cf.hindcasts(curve)[-1]
    assert (past.made_at, past.until) == (curve.compute[29], curve.compute[59])
    assert (past.low, past.high) == pytest.approx((made.low, made.high), rel=1e-12)


def test_hindcasts_need_enough_points() -> None:
    assert cf.hindcasts(simulated(n=12, reach=3)) == ()


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 100))
def test_forecast_interval_widens_with_distance(seed: int) -> None:
    fitted = cf.fit(simulated(n=50, reach=6, seed=seed))
    near, far = cf.forecast(fitted, [1.5 * fitted.now, 30 * fitted.now])
    assert far.curve_high - far.curve_low > near.curve_high - near.curve_low


def test_pool_has_experts_by_weight(fitted: cf.Fit) -> None:
    ahead, choices = cf.forecast_pool(fitted, 1000), fitted.settings
    counts = np.bincount(ahead.expert, minlength=3)
    np.testing.assert_allclose(counts / 1000, choices.pool, atol=0.001)
    assert set(ahead.curves.family[ahead.expert == 2]) == {0}


def test_pool_spread_moves_experts_to_common_mean(fitted: cf.Fit) -> None:
    def means(spread: float) -> np.ndarray:
        ahead = replace(fitted.pool, settings=replace(fitted.settings, pool_spread=spread))
        expected = ahead.expected(np.array([2 * fitted.now]))[:, 0]
        return np.array([expected.mean(), *(expected[ahead.expert == k].mean() for k in range(3))])

    apart, half, together = means(1.0), means(0.5), means(0.0)
    np.testing.assert_allclose(together, apart[0])
    np.testing.assert_allclose(half, 0.5 * (apart + together))


def test_pool_before_now_equals_fitted_curves(fitted: cf.Fit) -> None:
    past = np.linspace(0.1, 0.9, 5) * fitted.now
    np.testing.assert_array_equal(fitted.pool.expected(past), fitted.pool.curves.reward(past))


def test_pool_late_rises_have_rate_and_maximal_size(fitted: cf.Fit) -> None:
    ahead = cf.forecast_pool(fitted, 100_000)
    for doublings in (1.0, 3.0):
        share = np.mean(ahead.rise_after < doublings)
        assert share == pytest.approx(1 - (1 - fitted.settings.late_rise) ** doublings, abs=0.003)
    assert ahead.rise.max() <= fitted.trend.headroom
    never = cf.forecast_pool(cf.fit(fitted.curve, cf.FitSettings(late_rise=0.0)))
    assert np.isinf(never.rise_after).all()


def test_trend_level_and_gain_of_last_doubling() -> None:
    doublings = np.linspace(-4, 0, 41)
    local = trend(2.0**doublings, 0.5 + 0.03 * doublings, cf.FitSettings())
    assert (local.level, local.gain) == (pytest.approx(0.5), pytest.approx(0.03))
    assert local.headroom == pytest.approx(0.5)
    jumped = trend(2.0**doublings, np.where(doublings < -0.3, 0.2, 0.6), cf.FitSettings())
    assert jumped.level > 0.5


def test_trend_of_three_points() -> None:
    local = trend(np.array([1.0, 10.0, 100.0]), np.array([0.1, 0.2, 0.3]), cf.FitSettings())
    assert local.gain == pytest.approx(0.1 / np.log2(10))


def test_trend_gain_ignores_dense_points_alone() -> None:
    compute = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.05, 64.1, 64.2])
    reward = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.61, 0.6, 0.59])
    assert 0.0 < trend(compute, reward, cf.FitSettings()).gain < 0.1
    few = trend(1000.0 + np.arange(4.0), np.array([0.5, 0.51, 0.5, 0.52]), cf.FitSettings())
    assert abs(few.gain) < 0.05


def test_trend_level_of_sparse_points_is_last_point() -> None:
    far = trend(np.geomspace(1e-60, 1e50, 6), np.linspace(0.1, 0.6, 6), cf.FitSettings())
    assert far.level == pytest.approx(0.6)


def test_fit_published_windows_of_long_run() -> None:
    """A of the 100k-GPU-hour run from its windows, A .645, B 1.70, Cmid 10,909 [P]: within ±.015."""
    truth = Truth(0.645, 1.70, 10909.0)
    compute = np.arange(1, 38) * 1350.0
    reward = truth.reward(compute) + np.random.default_rng(1).normal(0, 0.004, 37)
    for start in (0.0, 1500.0, 5000.0):
        window = compute > start
        fitted = cf.fit(cf.Curve(compute[window], reward[window], samples=16_000))
        assert abs(fitted.A.median - 0.645) < 0.015
    law = cf.power_law(cf.Curve(compute[compute > 1500], reward[compute > 1500]))
    assert law.A > 0.9


def test_gain_share_sigmoid_matches_logistic_function() -> None:
    x = np.linspace(-40.0, 40.0, 801)
    got = gain_share(cf.Family.SIGMOID, x, np.float64(0.0), np.log(2.0))
    np.testing.assert_allclose(got, 0.5 + 0.5 * np.tanh(x), atol=5e-16)
    far = gain_share(cf.Family.SIGMOID, np.array([-np.inf, -1e4, 1e4]), np.float64(0.0), np.log(2.0))
    assert far.tolist() == [0.0, 0.0, 1.0]


def test_a_flat_run_of_a_game_rises_again_unless_it_is_near_the_top() -> None:
    compute = np.arange(1.0, 21.0)

    def p_gain(top: float, rises: cf.LateRises) -> float:
        curve = cf.Curve(compute, top - 0.1 / compute**2, samples=20_000)
        fitted = cf.fit(curve, cf.BY_RISES[rises])
        return cf.p_gain_above(fitted, 2 * fitted.now, 0.04)

    assert p_gain(0.35, cf.LateRises.GAMES) > 0.7
    assert p_gain(0.95, cf.LateRises.GAMES) < 0.13
    assert p_gain(0.35, cf.LateRises.LANGUAGE_MODELS) < 0.13


def test_an_earlier_run_of_little_weight_leaves_a_flat_game_its_chance() -> None:
    """As far as earlier runs count, their rate of late rises replaces that of flat doublings."""
    compute = np.arange(1.0, 21.0)
    curve = cf.Curve(compute, 0.35 - 0.1 / compute**2, samples=20_000)
    games = cf.BY_RISES[cf.LateRises.GAMES]
    alone = cf.fit(curve, games)
    chances = []
    for strength in (1e-6, 0.15, 1.0):
        ahead = np.array([0.0, 4.0])
        gains = GainPrior(ahead, 0 * ahead, 0.01 * ahead, 4.0, 0.02, strength)
        drawn = sample_forecast_pool(
            alone.nodes, alone.trend, alone.now, games, 4000, np.random.default_rng(0), gains, 0.02
        )
        chances.append(
            float((drawn.reward(np.array([2 * alone.now]))[:, 0] > alone.trend.level + 0.04).mean())
        )
    assert chances[0] > chances[1] > 0.5 > chances[2]
