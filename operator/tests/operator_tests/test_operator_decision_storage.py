"""A record of decisions with a run's coordinator: one line after the other, whoever writes and whatever gets lost."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operator_tests.decision_service import DOWN, LOST, DecisionService
from operator_tests.manifests import UID, cluster_run
from operator_tests.scaling import evaluations, run, spec, status
from scalerl_api.wire import DecisionLines
from scalerl_operator.autoscaling.decide import decide
from scalerl_operator.autoscaling.decision_log import DecisionRecord, Line
from scalerl_operator.autoscaling.log_storage import RecordError, RecordLost
from scalerl_operator.autoscaling.models import Generators
from scalerl_operator.autoscaling.observation import observe, point
from scalerl_operator.autoscaling.replay import verify
from scalerl_operator.controller.cluster_autoscaler import CoordinatorStorage
from scalerl_operator.coordinator_client import CoordinatorRefused
from scalerl_operator.kube import errors

RULES = spec()
RUN = cluster_run()
CURVE = evaluations([0.2 + 0.01 * i for i in range(12)])


async def opened(service: DecisionService) -> DecisionRecord:
    return await DecisionRecord.load(CoordinatorStorage(RUN, UID, service, service))


async def write(record: DecisionRecord, count: int = 3) -> Line:
    points = [point(e) for e in CURVE[:count]]
    one = Generators(wanted=1, ready=1)
    seen = observe(run(), status(CURVE[:count]), points, one, unix_seconds=1.7e9 + count)
    return await record.append("autoscale", RULES, points, seen, decide(RULES, seen, record.known.history))


async def test_lines_follow_each_other_and_are_read_again() -> None:
    service = DecisionService()
    record = await opened(service)
    assert not service.path.exists(), "nothing is written before there is a decision"
    lines = [await write(record, count) for count in (2, 3, 4)]
    assert verify(service.content()) == (lines, [])
    again = await opened(service)
    assert (again.known.sequence, again.known.history) == (3, lines[-1].decision.history)
    assert [line.sequence for line in again.known.recent] == [0, 1, 2]
    assert service.patches == [], "the reconcile writes the status"


async def test_former_leader_writes_nothing_and_resumes_from_stored_state() -> None:
    service = DecisionService()
    old, new = await opened(service), await opened(service)
    await write(new, 2)
    with pytest.raises(RecordLost, match=r"decisions.jsonl of ml/math could not be written"):
        await write(old, 3)
    assert old.known.sequence == 1, "read again"
    await write(old, 3)
    with pytest.raises(RecordLost):
        await write(new, 4)
    await write(new, 4)
    assert [len(verify(service.content())[0]), verify(service.content())[1]] == [3, []]


@pytest.mark.parametrize(
    ("fate", "kept"),
    [([DOWN], False), ([LOST], True), ([LOST, DOWN], True)],
)
async def test_an_answer_that_does_not_arrive_is_no_answer(fate: list[str], kept: bool) -> None:
    """The decision is not acted upon; what was written all the same is found and not written twice."""
    service = DecisionService()
    record = await opened(service)
    await write(record, 2)
    service.fate = list(fate)
    with pytest.raises(RecordLost):
        await write(record, 3)
    if fate[1:]:
        # Not even read again: that comes first when the next is to be written.
        with pytest.raises(RecordLost, match="read again"):
            await write(record, 3)
    assert record.known.sequence == 1 + kept
    await write(record, 3)
    assert len(verify(service.content())[0]) == 2 + kept
    assert verify(service.content())[1] == []


@pytest.mark.parametrize(
    "refusal", [CoordinatorRefused("HTTP 413: too large"), errors.Fenced("does not lead")]
)
async def test_a_refusal_leaves_the_record_as_it_was(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    service = DecisionService()
    record = await opened(service)
    await write(record, 2)

    async def refuse(*_: object, **__: object) -> None:
        raise refusal

    with monkeypatch.context() as patched:
        patched.setattr(service, "record_decision", refuse)
        with pytest.raises(RecordError, match=str(refusal)) as refused:
            await write(record, 3)
    assert not isinstance(refused.value, RecordLost)
    assert record.known.sequence == 1
    await write(record, 3)
    assert len(verify(service.content())[0]) == 2


async def test_garbage_in_the_middle_is_left_alone_and_named() -> None:
    service = DecisionService()
    record = await opened(service)
    for count in range(2, 8):
        await write(record, count)
    good = service.content()
    lines = good.splitlines(keepends=True)
    for spoiled in (
        b"".join([*lines[:2], b"{\n", *lines[3:]]),
        b"".join([*lines[:2], *lines[3:]]),
        b"".join([*lines[:2], lines[3], *lines[3:]]),
    ):
        service.path.write_bytes(spoiled)
        with pytest.raises(RecordError, match=r"ml/math: line 3: .*; repair it, or move it away"):
            await opened(service)
        assert service.content() == spoiled
    service.path.write_bytes(good)
    assert (await opened(service)).known == record.known
    service.path.unlink()
    with pytest.raises(RecordLost):
        await write(record, 8)
    await write(record, 8)
    assert len(verify(service.content())[0]) == 1, "begun again by who moved it away"


async def test_an_earlier_coordinator_leaves_the_decisions_to_the_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is in the status before the append returns."""
    service = DecisionService(earlier=True)
    record = await opened(service)
    for count in range(2, 9):
        line = await write(record, count)
        newest = service.patches[-1]["status"]["decisions"][-1]
        assert (newest["sequence"], newest["state"]) == (line.sequence, line.decision.state.value)
    assert [one["sequence"] for one in service.patches[-1]["status"]["decisions"]] == [2, 3, 4, 5, 6]
    assert not service.path.exists()
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert said == [
        "ml/math: its coordinator, of an earlier release, keeps no log of decisions; the last 5 are in the status"
    ]


async def test_an_earlier_coordinators_decision_that_the_status_does_not_take_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = DecisionService(earlier=True)
    record = await opened(service)

    async def refuse(*_: object, **__: object) -> None:
        raise errors.Forbidden("no")

    with monkeypatch.context() as patched:
        patched.setattr(service, "patch", refuse)
        with pytest.raises(RecordError):
            await write(record, 2)
    assert record.known.sequence == 0
    await write(record, 2)
    await write(record, 3)
    assert record.known.sequence == 2, "an API server that was away erases nothing"


async def test_coordinator_with_a_log_takes_over_from_the_status() -> None:
    """A resumed run has the coordinator of this release; the same operator serves it."""
    service = DecisionService(earlier=True)
    record = await opened(service)
    await write(record, 2)
    await write(record, 3)
    service.earlier = False
    with pytest.raises(RecordLost):
        await write(record, 4)
    await write(record, 4)
    assert [line.sequence for line in verify(service.content())[0]] == [0]
    service.earlier = True
    with pytest.raises(RecordLost):
        await write(record, 5)
    await write(record, 5)
    assert service.patches[-1]["status"]["decisions"][-1]["sequence"] >= 0


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 12)), min_size=1, max_size=24),
    st.lists(st.sampled_from([None, None, None, None, DOWN, LOST]), max_size=24),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_of_two_writers_at_once_every_line_is_kept_once_and_in_order(
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
    ("answer", "lines"),
    [
        ({"content": b"one\ntwo\n"}, b"one\ntwo\n"),
        ({"content": b"", "size": 0}, b""),
        ({"content": b"", "size": 8}, None),
    ],
    ids=["all at once, by a coordinator without pages", "no decision yet", "cut while it is read"],
)
async def test_pages_end_with_what_the_coordinator_has(
    answer: dict[str, object], lines: bytes | None
) -> None:
    service = DecisionService()

    async def decisions(uid: str, offset: int) -> DecisionLines:
        return msgspec.convert(answer, DecisionLines)

    service.decisions = decisions  # type: ignore[method-assign]
    storage = CoordinatorStorage(RUN, UID, service, service)
    if lines is None:
        with pytest.raises(RecordError, match="ends at byte 0 of 8"):
            [page async for page in storage.pages()]
    else:
        assert b"".join([page async for page in storage.pages()]) == lines
