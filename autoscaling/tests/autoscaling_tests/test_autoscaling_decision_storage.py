"""A record of decisions with a run's coordinator: one line after the other, whatever writes it and whatever is lost."""

from __future__ import annotations

import asyncio

import pytest
from autoscaler_inputs import run, spec
from coordinator_statuses import evaluations, status
from decision_service import DOWN, LOST, DecisionService
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api.wire import DecisionLines
from scalerl_autoscaling.decide import decide
from scalerl_autoscaling.decision_log import DecisionRecord, Line, RecordError
from scalerl_autoscaling.models import Generators
from scalerl_autoscaling.observation import observe, point
from scalerl_autoscaling.replay import verify
from scalerl_lifecycle.coordinator_client import CoordinatorRefused

RULES = spec()
CURVE = evaluations([0.2 + 0.01 * i for i in range(12)])


async def opened(service: DecisionService) -> DecisionRecord:
    record = service.record()
    await record.load()
    return record


async def write(record: DecisionRecord, count: int = 3) -> Line:
    points = [point(e) for e in CURVE[:count]]
    one = Generators(wanted=1, ready=1)
    seen = observe(run(), status(CURVE[:count]), points, one, unix_seconds=1.7e9 + count)
    return await record.append("autoscale", RULES, points, seen, decide(RULES, seen, record.summary.history))


async def test_lines_follow_each_other_and_are_read_again() -> None:
    service = DecisionService()
    record = await opened(service)
    assert not service.path.exists(), "nothing is written before there is a decision"
    lines = [await write(record, count) for count in (2, 3, 4)]
    assert verify(service.content()) == (lines, [])
    again = await opened(service)
    assert (again.summary.sequence, again.summary.history) == (3, lines[-1].decision.history)
    assert [line.sequence for line in again.summary.recent] == [0, 1, 2]


async def test_former_leader_writes_nothing_and_resumes() -> None:
    service = DecisionService()
    old, new = await opened(service), await opened(service)
    await write(new, 2)
    with pytest.raises(RecordError, match=r"decisions.jsonl could not be written"):
        await write(old, 3)
    assert old.summary.sequence == 1, "read again"
    await write(old, 3)
    with pytest.raises(RecordError):
        await write(new, 4)
    await write(new, 4)
    assert [len(verify(service.content())[0]), verify(service.content())[1]] == [3, []]


@pytest.mark.parametrize(
    ("fate", "kept"),
    [([DOWN], False), ([LOST], True), ([LOST, DOWN], True)],
)
async def test_unanswered_write_is_not_acted_on(fate: list[str], kept: bool) -> None:
    """The decision is not acted upon; what was written all the same is found and not written twice."""
    service = DecisionService()
    record = await opened(service)
    await write(record, 2)
    service.fate = list(fate)
    with pytest.raises(RecordError):
        await write(record, 3)
    if fate[1:]:
        # Not even read again: that comes first when the next is to be written.
        with pytest.raises(RecordError, match="read again"):
            await write(record, 3)
    assert record.summary.sequence == 1 + kept
    await write(record, 3)
    assert len(verify(service.content())[0]) == 2 + kept
    assert verify(service.content())[1] == []


async def test_refusal_leaves_the_record_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    service = DecisionService()
    record = await opened(service)
    await write(record, 2)

    async def refuse(*_: object, **__: object) -> None:
        raise CoordinatorRefused("HTTP 413: too large")

    with monkeypatch.context() as patched:
        patched.setattr(service, "record_decision", refuse)
        with pytest.raises(RecordError, match="cannot be written: HTTP 413"):
            await write(record, 3)
    assert record.summary.sequence == 1
    await write(record, 3)
    assert len(verify(service.content())[0]) == 2


async def test_garbage_inside_the_log_is_named_and_kept() -> None:
    service = DecisionService()
    record = await opened(service)
    for count in range(2, 8):
        await write(record, count)
    good = service.content()
    lines = good.splitlines(keepends=True)
    for damaged in (
        b"".join([*lines[:2], b"{\n", *lines[3:]]),
        b"".join([*lines[:2], *lines[3:]]),
        b"".join([*lines[:2], lines[3], *lines[3:]]),
    ):
        service.path.write_bytes(damaged)
        with pytest.raises(RecordError, match=r"decisions.jsonl: line 3: .*; repair it, or move it away"):
            await opened(service)
        assert service.content() == damaged
    service.path.write_bytes(good)
    assert (await opened(service)).summary == record.summary
    service.path.unlink()
    with pytest.raises(RecordError):
        await write(record, 8)
    await write(record, 8)
    assert len(verify(service.content())[0]) == 1, "begun again by who moved it away"


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 12)), min_size=1, max_size=24),
    st.lists(st.sampled_from([None, None, None, None, DOWN, LOST]), max_size=24),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_two_writers_keep_every_line_once_in_order(
    turns: list[tuple[int, int]], fate: list[str | None], at_once: bool
) -> None:
    async def race() -> None:
        service = DecisionService()
        both = [await opened(service), await opened(service)]
        service.fate = list(fate)
        acknowledged: list[Line] = []

        async def turn(who: int, count: int) -> None:
            try:
                acknowledged.append(await write(both[who], count))
            except RecordError:
                return

        if at_once:
            for pair in zip(turns[::2], turns[1::2], strict=False):
                by_writer = dict(pair)
                await asyncio.gather(*(turn(who, count) for who, count in by_writer.items()))
        else:
            for who, count in turns:
                await turn(who, count)
        lines, found = verify(service.content())
        assert found == []
        assert all(line in lines for line in acknowledged)
        assert len({line.sequence for line in lines}) == len(lines)

    asyncio.run(race())


@pytest.mark.parametrize(
    "size", [{}, {"size": 8}], ids=["a coordinator without pages", "cut while it is read"]
)
async def test_pages_end_with_what_the_coordinator_has(size: dict[str, int]) -> None:
    service = DecisionService()
    await write(await opened(service))
    answers = [DecisionLines(content=service.content())] if not size else [DecisionLines(content=b"", size=8)]

    async def decisions(offset: int) -> DecisionLines:
        return answers.pop()

    service.decisions = decisions  # type: ignore[method-assign]
    if size:
        with pytest.raises(RecordError, match="ends at byte 0 of 8"):
            await opened(service)
    else:
        assert (await opened(service)).summary.sequence == 1
