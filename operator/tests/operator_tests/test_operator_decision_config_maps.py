"""A record of decisions in ConfigMaps: one line after the other, whoever writes and whatever gets lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operator_tests.config_maps import DOWN, LOST, UID, ConfigMaps, cluster_run
from operator_tests.scaling import evaluations, run, spec, status
from scalerl_operator.autoscaling.decide import decide
from scalerl_operator.autoscaling.decision_log import DecisionRecord, Line
from scalerl_operator.autoscaling.log_storage import RecordError, RecordLost
from scalerl_operator.autoscaling.models import Generators
from scalerl_operator.autoscaling.observation import observe, point
from scalerl_operator.autoscaling.replay import verify
from scalerl_operator.controller import decision_config_maps
from scalerl_operator.controller.decision_config_maps import CLOSED, ConfigMapStorage
from scalerl_operator.kube import errors

RULES = spec()
RUN = cluster_run()
CURVE = evaluations([0.2 + 0.01 * i for i in range(12)])


async def opened(api: ConfigMaps) -> DecisionRecord:
    return await DecisionRecord.load(ConfigMapStorage(RUN, UID, api))


async def write(record: DecisionRecord, count: int = 3) -> Line:
    points = [point(e) for e in CURVE[:count]]
    one = Generators(wanted=1, ready=1)
    seen = observe(run(), status(CURVE[:count]), points, one, unix_seconds=1.7e9 + count)
    return await record.append("autoscale", RULES, points, seen, decide(RULES, seen, record.known.history))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three lines or so."""
    monkeypatch.setattr(decision_config_maps, "MAX_BYTES", 6_000)


async def test_one_line_after_the_other_in_an_object_of_the_runs_own() -> None:
    api = ConfigMaps()
    record = await opened(api)
    assert api.objects == {}, "nothing is written before there is a decision"
    lines = [await write(record, count) for count in (2, 3, 4)]
    assert verify(api.content()) == (lines, [])
    (found,) = api.objects.values()
    metadata = found["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("test-decisions", "team")
    assert metadata["labels"]["scalerl.dev/run"] == "test"
    assert metadata["labels"]["scalerl.dev/run-uid"] == metadata["ownerReferences"][0]["uid"] == UID
    again = await opened(api)
    assert (again.known.sequence, again.known.history) == (3, lines[-1].decision.history)
    assert [brief.sequence for brief in again.known.recent] == [0, 1, 2]


async def test_a_full_object_is_closed_and_followed_by_the_next(small: None) -> None:
    api = ConfigMaps()
    record = await opened(api)
    lines = [await write(record, 2 + i % 9) for i in range(12)]
    names = list(api.objects)
    assert names[:3] == ["test-decisions", "test-decisions-2", "test-decisions-3"]
    assert verify(api.content()) == (lines, [])
    for number, name in enumerate(names, 1):
        text = api.objects[name]["data"]["decisions.jsonl"]
        assert text.endswith("\n")
        assert len(text) <= 6_000
        assert (CLOSED in api.objects[name]["metadata"]["annotations"]) == (number < len(names))
    assert (await opened(api)).known.sequence == 12


async def test_who_has_lost_the_lead_writes_nothing_and_goes_on_from_what_was_written() -> None:
    api = ConfigMaps()
    old, new = await opened(api), await opened(api)
    await write(new, 2)
    with pytest.raises(RecordLost, match=r"team/test-decisions could not be written"):
        await write(old, 3)
    assert old.known.sequence == 1, "read again"
    await write(old, 3)
    with pytest.raises(RecordLost):
        await write(new, 4)
    await write(new, 4)
    assert [len(verify(api.content())[0]), verify(api.content())[1]] == [3, []]


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_next_object_shuts_the_last_one_for_whoever_does_not_know_of_it(
    small: None, sealed: bool
) -> None:
    """The one that leads begins a next object; the other one's line is shorter and would still fit."""
    api = ConfigMaps()
    new = await opened(api)
    while CLOSED not in str(api.objects):
        old = await opened(api)
        before = api.content()
        await write(new, 12)
    if sealed:  # and dies before the next object is there
        api.objects.popitem()
        assert api.content() == before
    with pytest.raises(RecordLost):
        await write(old, 1)
    await write(old, 1)
    assert verify(api.content())[1] == []
    assert len(api.objects) == 2


@pytest.mark.parametrize(
    ("fate", "kept"),
    [([DOWN], False), ([LOST], True), ([LOST, DOWN], True)],
)
async def test_an_answer_that_does_not_arrive_is_no_answer(fate: list[str], kept: bool) -> None:
    """The decision is not acted upon; what was written all the same is found and not written twice."""
    api = ConfigMaps()
    record = await opened(api)
    await write(record, 2)
    api.fate = list(fate)
    with pytest.raises(RecordLost):
        await write(record, 3)
    if fate[1:]:
        # Not even read again: that comes first when the next is to be written.
        with pytest.raises(RecordLost, match="read again"):
            await write(record, 3)
    assert record.known.sequence == 1 + kept
    await write(record, 3)
    assert len(verify(api.content())[0]) == 2 + kept
    assert verify(api.content())[1] == []


async def test_a_refusal_leaves_the_record_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ConfigMaps()
    record = await opened(api)
    await write(record, 2)

    async def refuse(*_: object, **__: object) -> None:
        raise errors.Forbidden("exceeded quota: small")

    with monkeypatch.context() as patched:
        patched.setattr(api, "patch", refuse)
        with pytest.raises(RecordError, match="exceeded quota") as refused:
            await write(record, 3)
    assert not isinstance(refused.value, RecordLost)
    await write(record, 3)
    assert record.known.sequence == 2


async def test_what_was_changed_by_hand_is_left_alone_and_said(small: None) -> None:
    api = ConfigMaps()
    record = await opened(api)
    for count in range(2, 8):
        await write(record, count)
    first = api.objects["test-decisions"]
    good = first["data"]["decisions.jsonl"]
    first["data"]["decisions.jsonl"] = good.replace('"sequence":0,', '"sequence":7,', 1)
    first["metadata"]["resourceVersion"] = "7"
    with pytest.raises(
        RecordError, match=r"team/test-decisions: line 1: .*changed by hand: restore it, or delete"
    ):
        await opened(api)
    first["data"]["decisions.jsonl"] = good
    last = list(api.objects.values())[-1]
    last["data"]["decisions.jsonl"] = last["data"]["decisions.jsonl"][:-10]
    last["metadata"]["resourceVersion"] = "8"
    with pytest.raises(RecordError, match="its end is no whole line"):
        await opened(api)
    known = record.known.sequence
    with pytest.raises(RecordLost):
        await write(record, 9)
    assert record.known.sequence == known
    api.objects.clear()
    with pytest.raises(RecordLost, match="read again"):
        await write(record, 9)
    await write(record, 9)
    assert (record.known.sequence, verify(api.content())[1]) == (1, [])


async def test_an_object_of_that_name_that_is_not_this_runs_is_not_touched() -> None:
    api = ConfigMaps()
    await write(await opened(api), 2)
    before = api.content()
    other = ConfigMapStorage(RUN, "another-uid", api)
    with pytest.raises(RecordError, match="is not this run's: rename or delete it"):
        await DecisionRecord.load(other)
    assert (api.content(), api.writes) == (before, 1)


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
        api = ConfigMaps()
        both = [await opened(api), await opened(api)]
        api.fate = list(fate)
        told: list[Line] = []

        async def turn(who: int, count: int) -> None:
            try:
                told.append(await write(both[who], count))
            except RecordError:
                return

        if at_once:
            for pair in zip(turns[::2], turns[1::2], strict=False):
                by_writer = dict(pair)
                await asyncio.gather(*(turn(who, count) for who, count in by_writer.items()))
        else:
            for who, count in turns:
                await turn(who, count)
        lines, found = verify(api.content())
        assert found == []
        assert all(line in lines for line in told)
        assert len({line.sequence for line in lines}) == len(lines)

    limit = decision_config_maps.MAX_BYTES
    decision_config_maps.MAX_BYTES = 8_000
    try:
        asyncio.run(race())
    finally:
        decision_config_maps.MAX_BYTES = limit
