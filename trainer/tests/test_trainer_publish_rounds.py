"""What the answers of a round decide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_trainer.publish.actor_control import Answer
from scalerl_trainer.publish.group_publisher import Rounds

OK, CAUSE, CLEARED = Answer(body=b""), Answer(error="gone"), Answer(error="lost a peer", cleared=True)


@pytest.mark.parametrize(
    ("without_cause", "answers", "waiting", "updated", "failed", "then"),
    [
        (0, {"a": OK, "b": OK}, "", "ab", "", 1),
        (0, {"a": OK, "b": CAUSE}, "", "a", "b", 0),
        (0, {"a": CLEARED, "b": CAUSE}, "a", "", "b", 0),
        (0, {"a": CLEARED, "b": CLEARED}, "ab", "", "", 1),
        (1, {"a": CLEARED, "b": CLEARED}, "ab", "", "", 2),
        (1, {"a": CLEARED, "b": CAUSE}, "a", "", "b", 0),
        (2, {"a": OK, "b": CLEARED}, "", "a", "b", 0),
    ],
)
def test_rounds_after(
    without_cause: int, answers: dict[str, Answer], waiting: str, updated: str, failed: str, then: int
) -> None:
    after = Rounds(tuple(answers), without_cause=without_cause).after(answers)
    assert ("".join(after.waiting), "".join(after.updated), "".join(after.failed)) == (
        waiting,
        updated,
        failed,
    )
    assert (after.count, after.without_cause) == (1, then)


@pytest.mark.parametrize(
    ("without_cause", "groups"), [(0, [("a", "b")]), (1, [("a", "b")]), (2, [("a",), ("b",)])]
)
def test_rounds_groups(without_cause: int, groups: list[tuple[str, ...]]) -> None:
    assert Rounds(("a", "b"), without_cause=without_cause).groups() == groups
    assert Rounds((), without_cause=without_cause).groups() == []


@given(st.integers(1, 6), st.data())
def test_rounds_end_and_lose_no_member(count: int, data: st.DataObject) -> None:
    members = tuple(str(n) for n in range(count))
    rounds = Rounds(members)
    while rounds.groups():
        answers = {m: data.draw(st.sampled_from([OK, CAUSE, CLEARED])) for m in rounds.waiting}
        rounds = rounds.after(answers)
        assert sorted(rounds.waiting + rounds.updated + rounds.failed) == sorted(members)
        assert rounds.count <= 3 * count + 3
