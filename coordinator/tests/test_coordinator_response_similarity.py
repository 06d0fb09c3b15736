"""How much of new responses occurs in old ones, and what ``history.jsonl`` says of it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api.history import HistoryLine
from scalerl_api.wire import PastResponse, PromptRef, Split
from scalerl_coordinator import response_similarity
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.response_similarity import RUN_TOKENS, SimilarityFile, reused_tokens
from scalerl_coordinator.response_store import PastGroup, ResponseStore


def ids(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def counted(new: list[list[int]], old: list[list[int]]) -> int:
    """The definition, run by run."""
    known = {tuple(one[at : at + RUN_TOKENS]) for one in old for at in range(len(one) - RUN_TOKENS + 1)}
    return sum(
        any(
            tuple(one[begin : begin + RUN_TOKENS]) in known
            for begin in range(max(0, at - RUN_TOKENS + 1), at + 1)
            if begin + RUN_TOKENS <= len(one)
        )
        for one in new
        for at in range(len(one))
    )


RESPONSES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=3)


@given(new=RESPONSES, old=RESPONSES)
def test_reused_tokens_are_those_of_common_runs(new: list[list[int]], old: list[list[int]]) -> None:
    assert reused_tokens(list(map(ids, new)), list(map(ids, old))) == counted(new, old)


def lines(path: Path) -> list[HistoryLine]:
    return [msgspec.json.decode(line, type=HistoryLine) for line in path.read_bytes().splitlines()]


def put(store: ResponseStore, version: int, *responses: list[int], **more: Any) -> None:
    past = [PastResponse(version, ids(one)) for one in responses]
    store.put(PastGroup(PromptRef(1, Split.TRAIN, 7), b"12345678", past, **more))


def open_store(tmp_path: Path, slack_seconds: float = 0.5) -> ResponseStore:
    made = ResponseStore(
        tmp_path / "history",
        bytes(32),
        2**20,
        lines=tmp_path / "history.jsonl",
        difficulty=lambda prompt: prompt.index / 2,
        slack_seconds=slack_seconds,
    )
    made.start()
    return made


@pytest.fixture
def store(tmp_path: Path) -> ResponseStore:
    return open_store(tmp_path)


def test_similarity_compares_a_group_with_its_predecessor(tmp_path: Path, store: ResponseStore) -> None:
    put(store, 3, list(range(20)), list(range(50, 60)))
    put(store, 5, [99, *range(10)], [*range(50, 58), 98, 97])
    put(store, 6, [1], drafts=([5, 4], [3, 1]))
    store.close()
    common = {"task": 1, "prompt": 7, "difficulty": 3.5}
    assert lines(tmp_path / "history.jsonl") == [
        HistoryLine(
            **common,
            visit=1,
            version=5,
            previous_version=3,
            responses=2,
            tokens=21,
            previous_responses=2,
            previous_tokens=30,
            compared_tokens=21,
            reused_tokens=18,
        ),
        HistoryLine(
            **common,
            visit=2,
            version=6,
            previous_version=5,
            responses=1,
            tokens=1,
            previous_responses=2,
            previous_tokens=21,
            compared_tokens=1,
            drafted_tokens=9,
            accepted_tokens=4,
            drafted_by_position=[5, 4],
            accepted_by_position=[3, 1],
        ),
    ]


def test_similarity_compares_less_of_long_groups(
    tmp_path: Path, store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_similarity, "_MAX_TOKENS", 20)
    put(store, 0, [0] * 15)
    put(store, 1, [0] * 15, [0] * 15)
    store.close()
    late = open_store(tmp_path, slack_seconds=-1e9)
    put(late, 2, [0] * 15)
    late.close()
    assert [
        (line.tokens, line.compared_tokens, line.reused_tokens) for line in lines(tmp_path / "history.jsonl")
    ] == [
        (30, 15, 15),
        (15, 0, 0),
    ]


def test_lines_leave_the_reserve_of_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    path, disk, past = tmp_path / "history.jsonl", Disk(), [PastResponse(0, ids([0] * 15))]
    file = SimilarityFile(path, problems.append, disk)
    for free in (2**30 // 20, 2**29):
        monkeypatch.setattr(disk, "free", lambda _, free=free: (free, 2**30))
        file.add((0, 1), 1, past, past, None, None)
        file.flush()
    assert problems == [f"{path} cannot be written: the volume is nearly full"]
    assert len(lines(path)) == 1


def test_unwritable_lines_leave_the_store_alone(tmp_path: Path, store: ResponseStore) -> None:
    (tmp_path / "history.jsonl").mkdir()
    put(store, 0, [0] * 15)
    put(store, 1, [0] * 15)
    store.close()
    assert store.counters.stored == 2
    assert store.counters.dropped.total() == 0


def test_group_that_cannot_be_compared_is_stored(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise ValueError("not comparable")

    monkeypatch.setattr("scalerl_coordinator.response_similarity.reused_tokens", fail)
    put(store, 0, [0] * 15)
    put(store, 1, [0] * 15)
    store.close()
    assert store.counters.stored == 2
    assert store.counters.dropped.total() == 0
    assert [record.message for record in caplog.records] == [
        "cannot compare a group with the previous one of its prompt"
    ]
