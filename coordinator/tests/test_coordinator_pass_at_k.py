"""pass@k against the mean over all subsets, and how often its interval holds the truth."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from coordinator_world import World, make_group, make_settings
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api.wire import PassAt
from scalerl_coordinator.pass_at_k import pass_at_k


@given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_pass_at_k_is_the_mean_over_all_subsets(data: st.DataObject, samples: int, k: int) -> None:
    k = min(k, samples)
    prompts = data.draw(
        st.lists(st.lists(st.booleans(), min_size=samples, max_size=samples), min_size=1, max_size=5)
    )
    means = []
    for outcomes in prompts:
        subsets = list(itertools.combinations(outcomes, k))
        means.append(Fraction(sum(any(subset) for subset in subsets), len(subsets)))
    found = pass_at_k([(sum(outcomes), samples) for outcomes in prompts], k)
    assert found.mean == pytest.approx(float(sum(means) / len(means)), abs=1e-12)


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.3, 1.5), (0.5, 0.5), (0.05, 2.0)])
def test_intervals_hold_the_truth_as_often_as_they_say(alpha: float, beta: float, k: int) -> None:
    """90 %: the truth is pass@k over the population that the prompts, and their chances, are drawn from."""
    draws = np.random.default_rng(0)
    chances = draws.beta(alpha, beta, size=(1000, 256))
    truth = float(np.mean(1.0 - (1.0 - draws.beta(alpha, beta, size=1_000_000)) ** k))
    passed = draws.binomial(16, chances)
    held = 0
    for counts in passed:
        found = pass_at_k([(int(c), 16) for c in counts], k)
        held += found.low <= truth <= found.high
    assert 0.88 <= held / len(passed) <= 0.94


@pytest.mark.parametrize("prompts", [3, 4, 8])
def test_intervals_of_few_prompts_are_wide_enough(prompts: int) -> None:
    draws = np.random.default_rng(1)
    held = 0
    for _ in range(1000):
        passed = draws.binomial(4, draws.beta(1.0, 1.0, size=prompts))
        found = pass_at_k([(int(c), 4) for c in passed], 1)
        held += found.low <= 0.5 <= found.high
    assert held / 1000 >= 0.87


@pytest.mark.parametrize("prompts", [2, 3, 7])
def test_intervals_have_a_width_where_all_prompts_are_alike(prompts: int) -> None:
    """1/3 and 2/3 are no floats: the mean of equal ones may differ from each."""
    found = pass_at_k([(1, 3)] * prompts, 2)
    assert found.high - found.low > 0.3


@pytest.mark.parametrize(("passed", "low", "high"), [([(0, 4)] * 50, 0.0, 0.06), ([(4, 4)] * 50, 0.94, 1.0)])
def test_intervals_have_a_width_where_all_prompts_agree(
    passed: list[tuple[int, int]], low: float, high: float
) -> None:
    found = pass_at_k(passed, 2)
    assert low <= found.low < found.high <= high
    assert pass_at_k([(1, 4)], 4).low < 1.0


def test_points_have_it() -> None:
    """Of four completions a prompt; a score below 1 is no pass, and a prompt that is given up passes never."""
    world = World(make_settings(evaluation_samples=4, held_out_prompts=3))
    member = world.register("g")
    world.hello("t")
    world.next("t")
    world.publish("t")
    world.beat(member, 0)
    first, second, third = world.lease(member, 0, 3)
    world.push(member, make_group(first, scores=[1.0, 0.0, 0.0, 0.0]))
    world.push(member, make_group(second, scores=[0.9, 0.0, 0.9, 0.0]))
    world.generator_requests.give_up_prompts({third.lease_id: "too long"}, world.now)
    (point,) = world.state.points
    assert [(at.k, at.mean) for at in point.pass_at] == [
        (2, pytest.approx(0.5 / 3)),
        (4, pytest.approx(1 / 3)),
    ]
    assert all(isinstance(at, PassAt) and at.low < at.mean < at.high for at in point.pass_at)
