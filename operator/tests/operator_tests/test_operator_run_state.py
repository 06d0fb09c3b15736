"""How often the operator repairs what somebody else has changed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from scalerl_operator.controller.run_state import MAX_REPAIR_SECONDS, RunState

WHAT = ("Deployment", "r-generator")


def test_repairs_of_a_contested_object_back_off() -> None:
    state, made = RunState(), list[int]()
    for second in range(1, 1501):
        if state.may_repair(WHAT, second):
            made.append(second)
    waits = [later - earlier for earlier, later in pairwise(made)]
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert state.may_repair(("Service", "another"), 1500), "each object has its own back-off"
    quiet = made[-1] + 2 * MAX_REPAIR_SECONDS + 1
    assert state.repaired_lately(quiet - 1)
    assert state.may_repair(WHAT, quiet)
    assert state.may_repair(WHAT, quiet + 2), "after a while the back-off starts over"


def test_withheld_repair_says_when_it_is_due() -> None:
    state = RunState()
    assert state.may_repair(WHAT, 100)
    assert state.next_repair_seconds(100) is None
    assert not state.may_repair(WHAT, 100.5)
    assert state.next_repair_seconds(100.5) == pytest.approx(1.5)
    assert state.next_repair_seconds(102) is None, "if it was needed, it is done"
    assert state.next_repair_seconds(-1e6) is None, "a clock that was set back delays nothing"
    assert state.may_repair(WHAT, 102)
