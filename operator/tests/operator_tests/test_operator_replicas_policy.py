"""Who says how many generators there are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_tests.scaling import spec
from scalerl_operator.autoscaling.replicas import Replicas, decide

RANGE = {"generators": {"min": 1, "max": 4}}


@pytest.mark.parametrize(
    ("replicas", "remembered", "expected"),
    [
        # Nothing was chosen: the spec's number, also one that was just changed.
        (2, {}, Replicas(2)),
        # Chosen just now; the same again; something else.
        (2, {"new": 3}, Replicas(3, 2, 3)),
        (2, {"base": 2, "chosen": 3}, Replicas(3, 2, 3)),
        (2, {"base": 2, "chosen": 3, "new": 3}, Replicas(3, 2, 3)),
        (2, {"base": 2, "chosen": 3, "new": 4}, Replicas(4, 2, 4)),
        # Back to what the spec says is a choice as well.
        (2, {"base": 2, "chosen": 3, "new": 2}, Replicas(2, 2, 2)),
        # A person scales, up, down, or to the very number chosen: theirs, whatever is chosen meanwhile.
        (1, {"base": 2, "chosen": 3}, Replicas(1, 2, 3, pinned=True)),
        (4, {"base": 2, "chosen": 3, "new": 2}, Replicas(4, 2, 3, pinned=True)),
        (3, {"base": 2, "chosen": 3}, Replicas(3, 2, 3, pinned=True)),
        (9, {"base": 2, "chosen": 3}, Replicas(9, 2, 3, pinned=True)),
        # Never beyond the range, whatever it was when the number was chosen.
        (2, {"new": 9}, Replicas(4, 2, 4)),
        (2, {"base": 2, "chosen": 9}, Replicas(4, 2, 4)),
        (2, {"base": 2, "chosen": 0}, Replicas(1, 2, 1)),
    ],
)
def test_who_says_how_many(replicas: int, remembered: dict[str, int], expected: Replicas) -> None:
    assert decide(replicas, spec(**RANGE), **remembered) == expected


@pytest.mark.parametrize("rules", [{"mode": "Advisory"} | RANGE, {"mode": "Off"} | RANGE, {}])
def test_who_may_not_choose_is_forgotten(rules: dict[str, Any]) -> None:
    assert decide(2, spec(**rules), base=2, chosen=3, new=4) == Replicas(2)
    assert decide(1, spec(**rules), base=2, chosen=3) == Replicas(1)


def test_what_was_handed_back_is_taken_up_again() -> None:
    pinned = decide(1, spec(**RANGE), base=2, chosen=3)
    assert decide(2, spec(**RANGE), base=pinned.base, chosen=pinned.chosen) == Replicas(3, 2, 3)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.one_of(st.none(), st.integers(0, 9))), min_size=1, max_size=20)
)
def test_a_persons_number_always_stands(looks: list[tuple[int, int | None]]) -> None:
    base = chosen = None
    for replicas, new in looks:
        found = decide(replicas, spec(**RANGE), base=base, chosen=chosen, new=new)
        assert decide(replicas, spec(**RANGE), base=found.base, chosen=found.chosen) == found, "settled"
        if found.wanted != replicas:
            assert 1 <= found.wanted <= 4
            assert found.base == replicas
        base, chosen = found.base, found.chosen
