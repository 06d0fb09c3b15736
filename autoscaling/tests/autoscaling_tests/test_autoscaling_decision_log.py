"""The record: what is written is what is read, a torn tail is cut, a full disk changes nothing; and its replay."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from autoscaler_inputs import answer, run, spec
from coordinator_statuses import evaluations, flat_curve, status
from decision_service import opened
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import ForecastAnswer, ForecastRequest
from scalerl_api.wire import DecisionLines, EvaluationPoint
from scalerl_autoscaling.decide import decide
from scalerl_autoscaling.decision_log import (
    MAX_LINE_BYTES,
    PAGE_BYTES,
    DecisionRecord,
    Line,
    RecordError,
    summary_of,
)
from scalerl_autoscaling.forecast_request import build_request
from scalerl_autoscaling.models import Generators, History, State
from scalerl_autoscaling.observation import observe, point
from scalerl_autoscaling.replay import replay_under, verify
from scalerl_curvefit import CurveError
from scalerl_curvefit.sidecar.forecast_answers import answer_forecast

RULES = spec(stopAfter=2)


def asked(request: ForecastRequest) -> tuple[ForecastAnswer | None, str]:
    try:
        return answer_forecast(request), ""
    except CurveError as error:
        return None, str(error)


def record_run(
    path: Path, evaluated: list[EvaluationPoint], rules: AutoscalingSpec = RULES, every: int = 1
) -> list[Line]:
    """Decide at every evaluation of a run, with real forecasts."""
    record, lines = asyncio.run(opened(path)), []
    whole = run(rules.model_dump(by_alias=True, exclude_none=True), budget={"maxSeconds": 5_000})
    for count in range(1, len(evaluated) + 1, every):
        points = [point(e) for e in evaluated[:count]]
        seen = observe(
            whole,
            status(evaluated[:count]),
            points,
            Generators(wanted=1, ready=1),
            unix_seconds=1.7e9 + count,
        )
        request = build_request(rules, points, seen, record.summary.history)
        forecast, trouble = (None, request) if isinstance(request, str) else asked(request)
        seen = replace(seen, forecast=forecast, trouble=trouble)
        decision = decide(rules, seen, record.summary.history)
        lines.append(asyncio.run(record.append("autoscale", rules, points, seen, decision)))
    return lines


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Line]]:
    path = tmp_path_factory.mktemp("record") / "decisions.jsonl"
    lines = record_run(path, flat_curve(40), every=3)
    return path.read_bytes(), lines


def test_replay_repeats_every_field(recorded: tuple[bytes, list[Line]]) -> None:
    content, lines = recorded
    read, found = verify(content)
    assert found == []
    assert read == lines
    assert {line.decision.state for line in lines} >= {State.INSUFFICIENT, State.CONTINUE, State.STOP}
    assert [len(line.added) for line in lines] == [1] + [3] * 13


@pytest.mark.parametrize("garbage", [b"", b"{", b"null", b"\xff\xfe", b'{"format":2}', b"[" * 100_000])
def test_verify_names_a_garbage_line(recorded: tuple[bytes, list[Line]], garbage: bytes) -> None:
    raw = recorded[0].splitlines(keepends=True)
    raw[4] = garbage + b"\n"
    read, found = verify(b"".join(raw))
    assert (found[0].line, found[0].field) == (5, "line")
    assert read == recorded[1][:4] + recorded[1][5:]


def test_record_of_an_older_method_is_read_and_repeated(recorded: tuple[bytes, list[Line]]) -> None:
    content, lines = recorded
    assert (old := content.replace(b'"edges":[', b'"hindcasts":[],"edges":[')) != content
    assert verify(old) == (lines, [])
    with_unknown = content.replace(b'"guard":{', b'"hindcasts":[],"guard":{', 1)
    assert verify(with_unknown)[1], "only the fit had that field"


def test_verify_names_a_torn_last_line(recorded: tuple[bytes, list[Line]]) -> None:
    _, found = verify(recorded[0][:-10])
    assert [(d.line, d.message) for d in found] == [(len(recorded[1]), "unfinished: its end is missing")]


@pytest.mark.parametrize("seed", range(30))
def test_verify_survives_any_changed_byte(recorded: tuple[bytes, list[Line]], seed: int) -> None:
    """Whatever is found is in a line from the changed one on."""
    content = bytearray(recorded[0])
    chooser = random.Random(seed)
    at = chooser.randrange(len(content))
    content[at] = chooser.choice([b for b in b'0123456789abcdef.,:"{ \n\xff' if b != content[at]])
    _, found = verify(bytes(content))
    assert all(difference.line > recorded[0].count(b"\n", 0, at) for difference in found)


def test_removed_or_added_line_is_found(recorded: tuple[bytes, list[Line]]) -> None:
    lines = recorded[0].splitlines(keepends=True)
    assert any(d.field == "sequence" for d in verify(b"".join(lines[:5] + lines[6:]))[1])
    assert any(d.line == 7 for d in verify(b"".join(lines[:6] + lines[5:]))[1])


def test_forecast_request_names_acknowledged_low_evaluations() -> None:
    evaluated = flat_curve(20)
    points = [point(e) for e in evaluated]
    seen = observe(run(), status(evaluated), points, Generators(wanted=1, ready=1), unix_seconds=1.7e9)
    request = build_request(RULES, points, seen, History(alarms_acknowledged_until=120))
    assert isinstance(request, ForecastRequest)
    assert request.alarms_after == next(p.tokens for p in points if p.version == 120)
    request = build_request(RULES, points, seen, History())
    assert isinstance(request, ForecastRequest)
    assert request.alarms_after == 0.0


def test_another_decision_than_follows_is_named_by_field(recorded: tuple[bytes, list[Line]]) -> None:
    _, lines = recorded
    forged = []
    for number, line in enumerate(lines):
        if number == 10:
            line = replace(
                line,
                decision=replace(line.decision, history=replace(line.decision.history, consecutive_votes=7)),
            )
        forged.append(line)
    _, found = verify(b"".join(msgspec.json.encode(line) + b"\n" for line in forged))
    assert [(d.line, d.field) for d in found] == [(11, "decision.history.streak"), (12, "before.streak")]


async def test_reopen_resumes_and_truncates_partial_line(
    tmp_path: Path, recorded: tuple[bytes, list[Line]]
) -> None:
    content, lines = recorded
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(content + content[:100])
    assert summary_of(path).sequence == len(lines)
    record = await opened(path)
    assert record.summary.history == lines[-1].decision.history
    assert record.summary.sequence == len(lines)
    seen = lines[-1].observation
    points = list(record.summary.points)
    decision = decide(RULES, seen, record.summary.history)
    await record.append("autoscale", RULES, points[:20], seen, decision)
    _, found = verify(path.read_bytes())
    assert [d.field for d in found] == [
        "observation.points.used",
        "observation.points.version",
        "observation.points.digest",
    ]
    assert summary_of(path).points == points[:20]


async def test_record_of_50_000_decisions_is_read_in_pages(
    tmp_path: Path, recorded: tuple[bytes, list[Line]]
) -> None:
    """Pages end within lines, and what is kept of the lines does not grow with them."""
    path = tmp_path / "decisions.jsonl"
    last = recorded[1][-1]
    history, short = last.decision.history, replace(last.observation, forecast=None, recent=[])
    with path.open("wb") as file:
        file.write(recorded[0])
        for sequence in range(len(recorded[1]), 50_000):
            line = replace(
                last,
                sequence=sequence,
                observation=short,
                before=history,
                kept=last.kept + len(last.added),
                added=[],
            )
            file.write(msgspec.json.encode(line) + b"\n")
    size = path.stat().st_size
    tracemalloc.start()
    loaded = await opened(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loaded.summary.sequence == 50_000
    assert peak < 16 * PAGE_BYTES < size
    assert summary_of(path) == loaded.summary


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            lambda content: content.replace(b'"streak":1', b'"streak":9', 1),
            "does not follow from the line before",
        ),
        (lambda content: b'{"format":3}\n', "line 1: format 3; this program reads format 2"),
        (lambda content: b'{"format":1}\n', "line 1: format 1; this program reads format 2"),
    ],
)
def test_inconsistent_record_is_not_acted_on_nor_changed(
    tmp_path: Path, recorded: tuple[bytes, list[Line]], spoil: Callable[[bytes], bytes], problem: str
) -> None:
    path, content = tmp_path / "decisions.jsonl", spoil(recorded[0])
    path.write_bytes(content)
    with pytest.raises(RecordError, match=f"{problem}; repair it, or move it away"):
        summary_of(path)
    assert path.read_bytes() == content


@pytest.fixture
def little_space(tmp_path: Path) -> Iterator[None]:
    """Files can grow to 4,000 bytes and no further, as on a disk that fills up in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_leaves_the_record_whole(tmp_path: Path, little_space: None) -> None:
    path = tmp_path / "decisions.jsonl"
    record = asyncio.run(opened(path))
    evaluated = evaluations([0.2, 0.3])
    points = [point(e) for e in evaluated]
    seen = observe(run(), status(evaluated), points, Generators(wanted=1, ready=1), unix_seconds=1.7e9)

    def write() -> None:
        decision = decide(RULES, seen, record.summary.history)
        asyncio.run(record.append("autoscale", RULES, points, seen, decision))

    while not path.exists() or path.stat().st_size < 3_000:
        write()
    written = record.summary.sequence
    with pytest.raises(RecordError, match="File too large"):
        write()
    assert record.summary.sequence == written
    lines, found = verify(path.read_bytes())
    assert (len(lines), found) == (written, [])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    write()
    assert verify(path.read_bytes())[1] == []


def test_record_is_on_disk_before_it_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    path = tmp_path / "decisions.jsonl"
    record_run(path, evaluations([0.2]))
    assert path.stat().st_size in synced


def test_replay_under_the_same_policy(recorded: tuple[bytes, list[Line]]) -> None:
    def never(request: ForecastRequest) -> tuple[ForecastAnswer | None, str]:
        raise AssertionError("the same question has its answer in the record")

    assert not any(other.differs for other in replay_under(RULES, recorded[1], never))


def test_another_policy_is_asked_its_own_questions(recorded: tuple[bytes, list[Line]]) -> None:
    """Whether a gain of .0005 is left cannot be decided, where one of .04 is not."""
    others = list(replay_under(spec(stopAfter=2, minGain="0.0005"), recorded[1], asked))
    stopped = [other.decision for other in others if other.line.decision.state is State.STOP]
    assert stopped
    assert {decision.state for decision in stopped} == {State.INSUFFICIENT}
    undecidable = "minGain 0.0005 is below three standard deviations of an evaluation"
    assert any(reason.startswith(undecidable) for reason in stopped[0].reasons)


def test_another_patience_moves_the_stop(recorded: tuple[bytes, list[Line]]) -> None:
    def first_stop(decisions: list[State]) -> int:
        return decisions.index(State.STOP)

    patient = [o.decision.state for o in replay_under(spec(stopAfter=4), recorded[1], asked)]
    assert first_stop(patient) == first_stop([line.decision.state for line in recorded[1]]) + 2


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.05, 0.15, 0.9, None]), st.sampled_from([0.56, 0.2, None])),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 3),
)
@settings(max_examples=30, deadline=None)
def test_any_recorded_history_is_reproduced(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[tuple[float | None, float | None]],
    dropped: int,
) -> None:
    """Points may vanish in between, as after a restart from a checkpoint."""
    path = tmp_path_factory.mktemp("any") / "decisions.jsonl"
    record = asyncio.run(opened(path))
    whole = run()
    for count, (p_gain, reward) in enumerate(history, 5):
        evaluated = evaluations([0.2 + 0.01 * i for i in range(count - (dropped if count % 2 else 0))])
        evaluated[-1] = msgspec.structs.replace(
            evaluated[-1], reward=float("nan") if reward is None else reward
        )
        points = [point(e) for e in evaluated]
        seen = observe(
            whole, status(evaluated), points, Generators(wanted=1, ready=1), unix_seconds=1.7e9 + count
        )
        seen = replace(
            seen,
            forecast=None if p_gain is None else answer(p_gain),
            trouble="down" if p_gain is None else "",
        )
        decision = decide(RULES, seen, record.summary.history)
        asyncio.run(record.append("autoscale", RULES, points, seen, decision))
    lines, found = verify(path.read_bytes())
    assert (len(lines), found) == (len(history), [])


async def test_log_without_an_end_is_refused() -> None:
    """The coordinator determines what it sends, and how much it says there is."""
    read = 0

    async def page(offset: int) -> DecisionLines:
        nonlocal read
        read += 1
        return DecisionLines(content=b"x" * (MAX_LINE_BYTES // 2 + 1), size=10**12)

    async def write(offset: int, line: bytes) -> None:
        raise AssertionError("nothing is written")

    with pytest.raises(RecordError, match=r"more than \d+ bytes in a line"):
        await DecisionRecord(page, write).load()
    assert read == 2
