"""Comparison of recipes, and the baselines."""

from __future__ import annotations

import numpy as np
import pytest

import scalerl_curvefit as cf
from scalerl_curvefit.simulate import SCALERL, Truth, simulated


def test_compare_different_asymptotes_by_a() -> None:
    better = simulated(Truth(0.61, 1.97, 2542.0), n=60, reach=8, seed=1)
    worse = simulated(Truth(0.535, 1.44, 2542.0), n=60, reach=8, seed=2)
    result = cf.compare(better, worse)
    assert (result.same_asymptote, result.by, result.better) == (False, "A", cf.Better.FIRST)
    assert result.probability > 0.95
    assert cf.compare(worse, better).better is cf.Better.SECOND


def test_compare_same_asymptote_by_b_at_mean_a() -> None:
    """Fixed A .605: ScaleRL B 2.01 against DAPO loss 1.77 [P]."""
    fast = simulated(Truth(0.605, 2.4, 2542.0), n=60, reach=8, seed=3, sigma=0.004)
    slow = simulated(Truth(0.605, 1.4, 2542.0), n=60, reach=8, seed=4, sigma=0.004)
    result = cf.compare(fast, slow)
    assert result.same_asymptote
    assert result.shared_a == pytest.approx(0.605, abs=0.01)
    np.testing.assert_allclose([result.first.point.A, result.second.point.A], result.shared_a, atol=1e-3)
    assert (result.by, result.better) == ("B", cf.Better.FIRST)
    assert result.probability > 0.9
    assert result.warnings == ()


def test_compare_seeds_compares_means_over_runs() -> None:
    """Of three runs each, by A; the probability is of one run against one, so it is the mean over the nine pairs."""
    better = [simulated(Truth(0.61, 1.97, 2542.0), n=60, reach=8, seed=s) for s in (1, 2, 3)]
    worse = [simulated(Truth(0.535, 1.44, 2542.0), n=60, reach=8, seed=s) for s in (4, 5, 6)]
    result = cf.compare_seeds(worse, better)
    assert (result.same_asymptote, result.by, result.better) == (False, "A", cf.Better.SECOND)
    pairs = [cf.compare(one, two).probability for one in worse for two in better]
    assert result.probability == pytest.approx(np.mean(pairs))
    # The first two are equal, so that one run more decides.
    mixed = cf.compare_seeds([better[0], worse[0]], [better[0], better[1]])
    assert mixed.better is cf.Better.SECOND
    assert [fitted.point.A for fitted in mixed.first] == [cf.fit(c).point.A for c in (better[0], worse[0])]


def test_compare_seeds_of_same_asymptote_are_refitted_at_the_mean_of_all() -> None:
    fast = [simulated(Truth(0.605, 2.4, 2542.0), n=60, reach=8, seed=s, sigma=0.004) for s in (3, 4)]
    slow = [simulated(Truth(0.605, 1.4, 2542.0), n=60, reach=8, seed=s, sigma=0.004) for s in (5, 6, 7)]
    result = cf.compare_seeds(fast, slow)
    levels = [np.mean([cf.fit(curve).point.A for curve in side]) for side in (fast, slow)]
    assert result.shared_a == pytest.approx(np.mean(levels))
    assert result.by == "B"
    assert result.better is cf.Better.FIRST
    np.testing.assert_allclose(
        [f.point.A for f in (*result.first, *result.second)], result.shared_a, atol=1e-3
    )


def test_compare_below_midpoint_is_undecided() -> None:
    result = cf.compare(simulated(reach=0.7, seed=1), simulated(reach=6, n=60, seed=2))
    assert result.better is cf.Better.UNDECIDED
    assert any(warning.startswith("first curve") for warning in result.warnings)
    assert not any(warning.startswith("second curve") for warning in result.warnings)


def test_compare_with_itself_is_tie() -> None:
    curve = simulated(n=60, reach=6, seed=2)
    result = cf.compare(curve, curve)
    assert (result.better, result.probability) == (cf.Better.TIE, 0.5)


def test_compare_doubts_a_at_bound() -> None:
    straight = cf.Curve(np.arange(1.0, 41.0), 0.2 + 0.01 * np.arange(1.0, 41.0))
    result = cf.compare(straight, simulated(n=60, reach=6, seed=2))
    assert any(warning.startswith("first curve: A is at its high bound, 1") for warning in result.warnings)


def test_paper_grid_search_finds_grid_point() -> None:
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


def test_paper_grid_search_reports_edges() -> None:
    compute = np.linspace(1000.0, 30000.0, 25)
    found = cf.paper_grid_search(
        cf.Curve(compute, SCALERL.reward(compute)), a_values=[0.5, 0.52], cmid_values=[2000.0, 2500.0, 3000.0]
    )
    assert "A high" in found.edges


def test_power_law_recovered_and_capped_at_one() -> None:
    compute = np.geomspace(10.0, 1e4, 50)
    law = cf.power_law(cf.Curve(compute, 0.7 - 0.9 * compute**-0.5))
    np.testing.assert_allclose([law.A, law.D], [0.7, 0.9], rtol=0.02)
    np.testing.assert_allclose(law.B, 0.5, rtol=0.02)
    rising = cf.power_law(cf.Curve(compute, 0.05 * np.log(compute)))
    np.testing.assert_allclose(rising.A, 1.0)
