"""How benchmarks score forecasts of language-model curves."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from scalerl_curvefit import Curve

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from support.llm_curves import LLMCurve, llm_curves
from support.scoring import (
    Forecaster,
    Target,
    crps,
    leave_one_source_out,
    pit_histogram,
    row_of,
    score,
    scores,
    targets,
)


def straight(name: str = "straight", source: str = "here") -> LLMCurve:
    """Rewards that rise by .01 a step: .01 at 1, .40 at 40."""
    steps = np.arange(41.0)
    return LLMCurve(name, source, "MIT", "accuracy", Curve(steps, steps / 100))


def stays(head: Curve, at: float) -> np.ndarray:
    return np.full(100, head.reward[-1])


def test_crps_is_the_normal_distributions_closed_form() -> None:
    """σ·[z(2Φ(z) − 1) + 2φ(z) − 1/√π]."""
    draws = norm.ppf((np.arange(20_000) + 0.5) / 20_000, 0.4, 0.1)
    z = (0.55 - 0.4) / 0.1
    expected = 0.1 * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
    assert crps(draws, 0.55) == pytest.approx(expected, abs=2e-5)


def test_crps_of_one_draw_is_the_absolute_error() -> None:
    assert crps(np.array([[0.3], [0.5]]), np.array([0.4, 0.1])) == pytest.approx([0.1, 0.4])


def test_targets_start_at_six_trained_points_and_were_measured() -> None:
    made = targets([straight()], 2.0)
    assert [t.points - 1 for t in made] == list(range(6, 21))
    assert all(t.at == 2 * (t.points - 1) and t.doublings == 1.0 for t in made)
    assert all(t.actual - t.last == pytest.approx((t.points - 1) / 100) for t in made)
    assert len(made[0].head) == 7


def test_targets_leave_out_what_was_not_measured_near() -> None:
    compute = [*range(1, 8), 30]
    gap = LLMCurve("gap", "here", "MIT", "accuracy", Curve(compute, np.linspace(0, 0.5, 8)))
    assert targets([gap], 2.0) == []


def test_targets_of_the_shared_curves() -> None:
    counts = [len(targets(llm_curves(), factor)) for factor in (1.5, 2.0, 4.0)]
    assert counts == [156, 96, 11]


def test_scores_of_persistence() -> None:
    got = scores(score(stays, [straight()]))
    assert got.rmse_gain == 0.0
    assert got.bias == pytest.approx(-0.13)
    assert got.crps == pytest.approx(0.13)
    assert got.coverage_90 == 0.0
    assert got.brier == 1.0
    assert got.base_brier == 0.0
    assert np.isnan(got.slope)


def test_scores_of_a_calibrated_forecaster() -> None:
    random = np.random.default_rng(0)
    draws = np.linspace(0, 1, 1001)
    rows = []
    for actual in random.random(4000):
        rows.append(row_of(Target(straight(), points=7, at=12.0, actual=float(actual)), draws))
        assert rows[-1].pit == pytest.approx(actual, abs=1e-3)
    got = scores(rows)
    assert got.coverage_90 == pytest.approx(0.9, abs=0.015)
    assert got.coverage_50 == pytest.approx(0.5, abs=0.025)
    assert got.width == pytest.approx(0.9)
    assert pit_histogram(rows) == pytest.approx([0.1] * 10, abs=0.015)


def test_leave_one_source_out_never_learns_from_the_scored_source() -> None:
    curves = [straight("a", "one"), straight("b", "two"), straight("c", "two")]
    learnt_from: list[set[str]] = []

    def learn(others: list[LLMCurve]) -> Forecaster:
        learnt_from.append({c.source for c in others})
        return stays

    rows = leave_one_source_out(learn, curves)
    assert learnt_from == [{"two"}, {"one"}]
    assert sorted({r.target.origin.name for r in rows}) == ["a", "b", "c"]


def test_leave_one_out_leaves_no_curve_without_targets_to_learn_from() -> None:
    short = LLMCurve("short", "three", "MIT", "accuracy", Curve([1, 2, 3], [0.1, 0.2, 0.3]))
    learnt_from: list[list[str]] = []

    def learn(others: list[LLMCurve]) -> Forecaster:
        learnt_from.append([c.name for c in others])
        return stays

    leave_one_source_out(learn, [straight("a", "one"), straight("b", "two"), short])
    assert learnt_from == [["b"], ["a"]]
    with pytest.raises(ValueError, match="every target at 2× is of one; leave out less"):
        leave_one_source_out(learn, [straight("a", "one"), short])
