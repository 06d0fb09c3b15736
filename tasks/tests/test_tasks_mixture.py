"""Which task of a mix a slot has: exact proportions, and nothing but weights and seed."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_tasks import Mixture

shares = st.lists(st.integers(1, 10**9), min_size=1, max_size=16).map(
    lambda parts: [Fraction(part, sum(parts)) for part in parts]
)


@given(weights=shares, seed=st.integers(0, 2**31), start=st.integers(0, 10**9), length=st.integers(1, 400))
def test_every_window_has_its_share_of_each_task(
    weights: list[Fraction], seed: int, start: int, length: int
) -> None:
    """Independent draws would miss by √(L · w · (1 − w)), about 10 of 400."""
    mixture = Mixture(weights, seed)
    tasks = [mixture.task(n) for n in range(start, start + length)]
    for task, weight in enumerate(weights):
        missed = abs(tasks.count(task) - length * weight)
        assert missed < max(1, len(weights) - 1)


@given(weights=shares, seed=st.integers(0, 2**31))
def test_place_counts_the_earlier_places_of_its_task(weights: list[Fraction], seed: int) -> None:
    mixture = Mixture(weights, seed)
    counts = [0] * len(weights)
    for n in range(200):
        task, before = mixture.place(n)
        assert before == counts[task]
        counts[task] += 1


@given(weights=shares, seed=st.integers(0, 2**31), order=st.permutations(range(60)))
def test_task_depends_on_weights_seed_and_slot_alone(
    weights: list[Fraction], seed: int, order: list[int]
) -> None:
    """Asked in any order, by any process."""
    forward = Mixture(weights, seed)
    tasks = [forward.task(n) for n in range(60)]
    assert {n: Mixture(weights, seed).task(n) for n in order} == dict(enumerate(tasks))


def test_long_run_is_exact() -> None:
    weights = [Fraction("0.3333"), Fraction("0.3333"), Fraction("0.3334")]
    mixture = Mixture(weights, 5)
    ends = [mixture.place(n)[1] for n in range(10**12, 10**12 + 9)]
    assert all(abs(end - 10**12 / 3) < 10**8 for end in ends), "a place costs no more, however far"
    tasks = [mixture.task(n) for n in range(20_000)]
    assert [abs(tasks.count(at) - 20_000 * weight) < 2 for at, weight in enumerate(weights)] == [True] * 3


def test_golden_sequence_does_not_change_between_releases() -> None:
    """A resumed run of an earlier release has the slots of that release."""
    mixture = Mixture([Fraction("0.5"), Fraction("0.3"), Fraction("0.2")], seed=7)
    assert "".join(str(mixture.task(n)) for n in range(20)) == "01010201020101020102"
    assert [Mixture([Fraction(1, 2)] * 2, seed).task(0) for seed in range(8)] != [0] * 8, "the seed counts"


@pytest.mark.parametrize("weights", [[], [Fraction(0), Fraction(1)]])
def test_weights_must_be_positive(weights: list[Fraction]) -> None:
    with pytest.raises(ValueError, match="positive weights"):
        Mixture(weights, 0)
