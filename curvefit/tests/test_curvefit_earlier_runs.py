"""The prior from earlier runs: intervals, weights, excluded runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scalerl_curvefit as cf
from scalerl_curvefit.earlier_runs import BROAD_SHARE, ShapePrior
from scalerl_curvefit.simulate import ar1_noise

FIVE = range(1, 6)


def sigmoid(compute, asymptote=0.6, middle=20.0, exponent=1.8, start=0.2):
    return start + (asymptote - start) / (1.0 + (middle / compute) ** exponent)


def run_of(seed, points=40, noise=0.006, **shape):
    """One run of a task whose runs differ a little."""
    random = np.random.default_rng(seed)
    shape = {"asymptote": 0.6 + 0.01 * random.standard_normal(), **shape}
    shape["middle"] = shape.get("middle", 20.0) * np.exp(0.05 * random.standard_normal())
    compute = np.linspace(2.5, 100.0, points)
    return cf.Curve(compute, np.clip(sigmoid(compute, **shape) + ar1_noise(points, noise, 0.3, random), 0, 1))


def earlier(seeds=FIVE, **shape):
    return [cf.EarlierRun(f"run-{seed}", run_of(seed, **shape)) for seed in seeds]


def forecast(fitted):
    (at_twice,) = cf.forecast(fitted, [2.0 * fitted.now])
    return at_twice


def width(fitted):
    return forecast(fitted).high - forecast(fitted).low


def steps(rises_at, points=40, height=0.3, seed=0):
    """A run that has learned nothing until it rises at this share of its compute."""
    compute = np.linspace(2.5, 100.0, points)
    noise = 0.004 * np.random.default_rng(seed).standard_normal(points)
    return cf.Curve(compute, np.clip(0.1 + height * (compute > 100.0 * rises_at) + noise, 0, 1))


def test_prior_five_similar_runs_narrow_interval():
    ratios, inside = [], []
    for seed in range(10, 30):
        whole = run_of(seed)
        head = whole.head(16)
        alone, informed = cf.fit(head), cf.fit(head, earlier=earlier())
        ratios.append(width(informed) / width(alone))
        inside.append(forecast(informed).low <= whole.reward[31] <= forecast(informed).high)
    assert np.median(ratios) < 0.6
    assert np.mean(inside) >= 0.85


def test_fit_empty_prior_changes_nothing():
    head = run_of(0).head(16)
    assert cf.fit(head).earlier == ()
    assert forecast(cf.fit(head)) == forecast(cf.fit(head, earlier=[]))
    assert forecast(cf.fit(head, earlier=earlier())) == forecast(cf.fit(head, earlier=earlier()))


def test_prior_other_task_has_little_weight_and_reason():
    head = run_of(0).head(16)
    informed = cf.fit(head, earlier=earlier(start=0.7, asymptote=0.95))
    assert all(use.weight < 0.01 for use in informed.earlier)
    assert "another task or model" in informed.earlier[0].reason
    assert informed.prior.gains is None
    (one,) = cf.fit(head, earlier=earlier([1], start=0.7, asymptote=0.95)).earlier
    assert one.weight < 0.01
    assert "its rewards so far differ from this run's by 0.4" in one.reason
    # Of one run the draws differ by up to a tenth, and not by the same on every processor.
    other_task = earlier(start=0.7, asymptote=0.95)
    heads = [run_of(seed).head(16) for seed in range(4)]
    ratios = [width(cf.fit(head, earlier=other_task)) / width(cf.fit(head)) for head in heads]
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.1)


def test_prior_excludes_other_eval_version():
    labelled = cf.Curve(run_of(0).compute, run_of(0).reward, eval_version="b")
    other = cf.EarlierRun("old", cf.Curve(run_of(1).compute, run_of(1).reward, eval_version="a"))
    (use,) = cf.fit(labelled.head(16), earlier=[other]).earlier
    assert (use.name, use.weight) == ("old", 0.0)
    assert "evaluation version a" in use.reason


def test_prior_excludes_unfittable_runs_with_reasons():
    whole = run_of(1)
    mixed = cf.Curve(whole.compute, whole.reward, recipe=["a"] * 20 + ["b"] * 20)
    runs = [
        cf.EarlierRun("untrained", cf.Curve([0.0], [0.1])),
        cf.EarlierRun("short", whole.head(3)),
        cf.EarlierRun("mixed", mixed),
        cf.EarlierRun("ended", whole.head(10)),
        cf.EarlierRun("good", whole),
    ]
    uses = {use.name: use for use in cf.fit(run_of(0).head(16), earlier=runs).earlier}
    assert list(uses) == ["untrained", "short", "mixed", "ended", "good"]
    assert [uses[name].weight for name in ("untrained", "short", "mixed", "ended")] == [0, 0, 0, 0]
    assert "0 points" in uses["untrained"].reason
    assert "3 points" in uses["short"].reason
    assert "recipe" in uses["mixed"].reason
    assert "no further" in uses["ended"].reason
    assert uses["good"].weight > 0.5
    assert uses["good"].reason == ""


def test_summary_ends_at_fall():
    fallen = run_of(1).reward.copy()
    fallen[30:] -= 0.2
    runs = [*earlier([2, 3]), cf.EarlierRun("fell", cf.Curve(run_of(1).compute, fallen))]
    fitted = cf.fit(run_of(0).head(12), earlier=runs)
    assert "fell at compute" in fitted.earlier[-1].reason
    assert fitted.earlier[-1].weight > 0.5
    assert fitted.prior.gains.mean[-1] > 0.0


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_prior_other_compute_unit_has_no_weight(factor):
    other = run_of(1)
    (use,) = cf.fit(
        run_of(0).head(16), earlier=[cf.EarlierRun("hours", cf.Curve(other.compute * factor, other.reward))]
    ).earlier
    assert use.weight == 0.0
    assert "same unit" in use.reason


def test_prior_weight_scales_with_coverage_of_next_doubling():
    fitted = cf.fit(run_of(0).head(28), earlier=earlier([1]))
    assert fitted.earlier[0].weight == pytest.approx(np.log2(40 / 28), abs=0.1)
    assert "of the next doubling" in fitted.earlier[0].reason


def test_p_first_rise_follows_earlier_runs():
    head = steps(0.6, seed=9).head(20)
    alone = cf.p_gain_above(cf.fit(head), 100.0, 0.02)
    rising = [cf.EarlierRun(str(seed), steps(0.6, seed=seed)) for seed in FIVE]
    never = [cf.EarlierRun(str(seed), steps(2.0, seed=seed)) for seed in FIVE]
    fitted = cf.fit(head, earlier=rising)
    assert cf.p_gain_above(fitted, 100.0, 0.02) > 0.9 > alone
    assert cf.p_gain_above(cf.fit(head, earlier=never), 100.0, 0.02) < alone
    assert fitted.prior.p_first_rise(0.1, 0.02) > 0.6
    assert cf.fit(head, earlier=never).prior.p_first_rise(0.1, 0.02) < 0.05


def test_prior_uses_run_with_all_zero_rewards():
    zeros = cf.EarlierRun("zeros", cf.Curve(np.arange(1.0, 41.0), np.zeros(40)))
    head = cf.Curve(np.arange(1.0, 16.0), np.r_[np.zeros(14), 0.002])
    assert cf.fit(head, earlier=[zeros]).earlier[0].weight > 0.9


def test_p_gain_above_matches_draws_with_prior():
    fitted = cf.fit(run_of(0).head(16), earlier=earlier())
    drawn = cf.forecast_pool(fitted, 200_000)
    rewards = drawn.reward(np.array([fitted.now, 2 * fitted.now]))
    for least in (0.02, 0.08, 0.1, 0.15):
        share = np.mean(rewards[:, 1] - rewards[:, 0] > least)
        assert cf.p_gain_above(fitted, 2 * fitted.now, least) == pytest.approx(share, abs=0.01)


def test_late_rise_rate_includes_earlier_runs():
    rising = [cf.EarlierRun(str(seed), steps(0.6, seed=seed)) for seed in FIVE]
    prior = cf.fit(steps(0.6, seed=9).head(20), earlier=rising).prior
    assert prior.late_rise > 2 * cf.FitSettings().late_rise
    assert prior.gains.late_rise < cf.FitSettings().late_rise


def moments_of_a(nodes):
    mean = float((nodes.weight_js * nodes.a_js).sum())
    return mean, float(np.sqrt((nodes.weight_js * (nodes.a_js - mean) ** 2).sum()))


def test_shape_prior_reweights_nodes_and_keeps_broad_share():
    fitted = cf.fit(run_of(0).head(16))
    (nodes, _) = fitted.nodes
    near = ShapePrior(np.array([0.6, np.log(1.8), np.log(20.0)]), np.array([0.03, 0.25, 0.3]), 7.0)
    weighed = near.reweight(nodes)
    assert weighed.weight_js.sum() == pytest.approx(1.0)
    (mean, sd), (broad_mean, broad_sd) = moments_of_a(weighed), moments_of_a(nodes)
    assert abs(mean - 0.6) < abs(broad_mean - 0.6)
    assert sd < broad_sd
    nowhere = ShapePrior(np.array([40.0, 40.0, 40.0]), np.array([0.03, 0.25, 0.3]), 7.0)
    np.testing.assert_allclose(nowhere.reweight(nodes).weight_js, nodes.weight_js, rtol=1e-3 / BROAD_SHARE)


@given(
    st.lists(
        st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30),
        min_size=1,
        max_size=4,
    ),
    st.integers(4, 16),
)
@settings(max_examples=40, deadline=None)
def test_forecast_is_finite_for_any_earlier_runs(rewards, points):
    runs = [
        cf.EarlierRun(str(i), cf.Curve(np.arange(1.0, len(r) + 1.0) * 3.0, r)) for i, r in enumerate(rewards)
    ]
    fitted = cf.fit(run_of(0).head(points), earlier=runs)
    assert [use.name for use in fitted.earlier] == [run.name for run in runs]
    assert all(0.0 <= use.weight <= 1.0 for use in fitted.earlier)
    at_twice = forecast(fitted)
    assert 0.0 <= at_twice.low <= at_twice.median <= at_twice.high <= 1.0
    assert 0.0 <= cf.p_gain_above(fitted, 2 * fitted.now, 0.02) <= 1.0
    assert np.all(
        np.isfinite(cf.forecast_pool(fitted).reward(fitted.now * np.array([0.5, 1.0, 3.0, 1000.0])))
    )


def test_similarity_ignores_runs_without_weight():
    """The spread between runs is that of the runs with weight."""
    head = run_of(0).head(16)
    unlike = cf.EarlierRun("unlike", run_of(1, start=0.6, asymptote=0.95))
    zeros = cf.EarlierRun("zeros", cf.Curve(np.arange(1.0, 9.0), np.zeros(8)))
    alone = cf.fit(head, earlier=[unlike]).earlier[0].weight
    assert cf.fit(head, earlier=[unlike, zeros]).earlier[0].weight == pytest.approx(alone)
    assert alone < 0.05


def test_forecast_is_continuous_in_similarity():
    head, whole = run_of(0, noise=1e-9).head(16), run_of(1, noise=1e-9)
    shares, weights = [], []
    for shift in np.arange(0.0, 0.16, 0.005):
        fitted = cf.fit(head, earlier=[cf.EarlierRun("up", cf.Curve(whole.compute, whole.reward + shift))])
        weights.append(fitted.earlier[0].weight)
        shares.append(float(np.mean(fitted.pool.from_earlier_runs)))
    assert max(weights) > 0.9
    assert shares[-1] == 0.0
    assert np.max(np.abs(np.diff(shares))) < 0.15


def test_noise_prior_scales_with_weight():
    head = cf.Curve(run_of(0).compute[:12], run_of(0).reward[:12], samples=1000)
    other = run_of(3, noise=0.01)
    dof = []
    for shift in (0.0, 0.07):
        run = cf.EarlierRun("other", cf.Curve(other.compute, other.reward + shift, samples=1000))
        dof.append(cf.fit(head, earlier=[run]).prior.noise[1])
    assert 0 < dof[1] < 0.7 * dof[0]


def test_prior_other_noise_has_no_weight():
    head = run_of(0).head(16)
    (use,) = cf.fit(head, earlier=[cf.EarlierRun("noisy", run_of(3, noise=0.08))]).earlier
    assert use.weight < 0.1
    assert "scatter" in use.reason


def test_prior_other_path_to_the_same_level_has_less_weight():
    """A run of another task that has the same reward now."""
    compute = np.linspace(2.5, 100.0, 40)
    late = cf.Curve(compute, 0.05 + 0.9 / (1 + (40.0 / compute) ** 6))
    head = run_of(0).head(16)
    (use,) = cf.fit(head, earlier=[cf.EarlierRun("late", late)]).earlier
    level = float(np.interp(head.now, late.compute, late.reward))
    assert abs(level - head.reward[-1]) < 0.06
    assert use.weight < 0.1


def test_prior_of_three_foreign_runs_has_no_weight():
    """They agree with one another, and lie near this run: the weights of each alone do not notice."""
    head = run_of(0).head(16)
    foreign = earlier([1, 2, 3], start=0.28, asymptote=0.68)
    alone = cf.fit(head, earlier=foreign[:1]).earlier[0].weight
    informed = cf.fit(head, earlier=foreign)
    assert alone > 0.05
    assert [use.weight for use in informed.earlier] == [0.0, 0.0, 0.0]
    assert informed.prior.gains is None
    assert all(use.weight > 0.5 for use in cf.fit(head, earlier=earlier([1, 2, 3])).earlier)


def test_p_reward_above_before_now_matches_draws():
    fitted = cf.fit(run_of(0).head(16), earlier=earlier())
    at = 0.6 * fitted.now
    middle = float(np.median(cf.forecast_pool(fitted).reward(np.array([at]))))
    assert cf.p_reward_above(fitted, at, middle) == pytest.approx(0.5, abs=0.1)


def test_p_first_rise_ignores_noise_of_flat_runs():
    flat_runs = [
        cf.EarlierRun(
            str(seed),
            cf.Curve(
                np.linspace(2.5, 100, 40),
                np.clip(0.3 + ar1_noise(40, 0.02, 0.3, np.random.default_rng(seed)), 0, 1),
            ),
        )
        for seed in range(8)
    ]
    head = cf.Curve(np.linspace(2.5, 50, 20), 0.3 + ar1_noise(20, 0.02, 0.3, np.random.default_rng(99)))
    assert cf.fit(head, earlier=flat_runs).prior.p_first_rise(0.078, 0.02) < 0.078
