"""A status that another release has written is read as far as it is understood."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api.conditions import Phase
from scalerl_api.reasons import Reason
from scalerl_api.status import RunStatus

NOW = "2026-01-01T00:00:00Z"
DONE = {"type": "Completed", "status": "True", "reason": "BudgetReached", "lastTransitionTime": NOW}
WHOLE = RunStatus.model_validate(
    {
        "phase": "Running",
        "observedGeneration": 3,
        "conditions": [DONE, {"type": "Failed", "status": "False", "reason": "NotFinished"} | {"lastTransitionTime": NOW}],
        "step": 7,
        "suspension": "Suspended",
        "decisions": [{"sequence": 1, "time": NOW, "state": "CONTINUE"}],
        "trainer": {"attempt": 2, "restarts": 1},
    }
).to_object()  # fmt: skip


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"phase": "Hibernating"}, {"phase": Phase.PENDING}),
        ({"suspension": "Napping"}, {"suspension": ""}),
        ({"trainer": {"attempt": 4, "restarts": -1}}, {"trainer.attempt": 4, "trainer.restarts": 0}),
        ({"trainer": "many"}, {"trainer.attempt": 0}),
        ({"conditions": [DONE | {"status": "Perhaps"}, DONE | {"type": "A"}]}, {"types": ["A"]}),
        ({"conditions": [DONE, {"type": "B"}]}, {"types": ["Completed"]}),
        ({"conditions": "none"}, {"types": []}),
        ({"somethingNew": {"a": 1}}, {"step": 7}),
    ],
)
def test_unknown_values_are_omitted(said: dict[str, Any], read: dict[str, Any]) -> None:
    status = RunStatus.read(WHOLE | said)
    assert status.step == 7, "the rest is kept"
    for path, wanted in read.items():
        found: Any = status
        if path == "types":
            found = [c.type for c in status.conditions]
        else:
            for name in path.split("."):
                found = getattr(found, name)
        assert found == wanted, path


def test_status_of_this_release_is_read_unchanged() -> None:
    assert RunStatus.read(WHOLE) == RunStatus.model_validate(WHOLE)
    assert RunStatus.read(None) == RunStatus.read({}) == RunStatus()


json = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["", "Running", "True", NOW]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "status", "reason", "attempt", "lastTransitionTime"]), inner
        )
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(WHOLE)), json))
def test_any_status_is_accepted(changes: dict[str, Any]) -> None:
    before = WHOLE | changes
    status = RunStatus.read(before)
    assert RunStatus.model_validate(status.to_object()) == status


def test_reason_of_a_later_release_is_other_release() -> None:
    assert Reason.read("BudgetReached") is Reason.BUDGET_REACHED
    assert Reason.read("ProphecyFulfilled") is Reason.OTHER_RELEASE
