"""The log of decisions that the operator sends: acknowledged lines are kept once, in order, and whole."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from coordinator_client import Client, ErrorAnswer
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api import endpoints, wire
from scalerl_coordinator import decisions
from scalerl_coordinator.decisions import MAX_LINE_BYTES, PAGE_BYTES, DecisionLog
from scalerl_lifecycle.coordinator_client import (
    CoordinatorClient,
    CoordinatorRefused,
    CoordinatorUnreachable,
    StaleOffset,
)


async def post(visitor: Client, offset: int, line: bytes) -> None:
    await visitor.post(endpoints.DECISIONS, wire.DecisionLine(offset=offset, line=line), wire.Ack)


async def test_operators_client_reads_what_it_wrote(local) -> None:
    async with aclosing(CoordinatorClient(local.url, "secret")) as client:
        assert await client.decisions(0) == wire.DecisionLines(content=b"", size=0)
        await client.record_decision(0, b'{"a":1}\n')
        await client.record_decision(8, b'{"b":2}\n')
        await client.record_decision(8, b'{"b":2}\n')
        with pytest.raises(StaleOffset, match="superseded"):
            await client.record_decision(8, b'{"c":3}\n')
        with pytest.raises(StaleOffset):
            await client.record_decision(0, b'{"a":1}\n')
        with pytest.raises(CoordinatorRefused, match="bad-request"):
            await client.record_decision(16, b"{}\n{}\n")
        assert await client.decisions(0) == wire.DecisionLines(content=b'{"a":1}\n{"b":2}\n', size=16)
        assert await client.decisions(8) == wire.DecisionLines(content=b'{"b":2}\n', size=16)
        assert await client.decisions(16) == wire.DecisionLines(content=b"", size=16)
        with pytest.raises(StaleOffset, match="superseded"):
            await client.decisions(17)
    assert local.paths.decisions.read_bytes() == b'{"a":1}\n{"b":2}\n'


async def test_decisions_need_the_token(local, visitor) -> None:
    visitor.headers["Authorization"] = "Bearer wrong"
    with pytest.raises(ErrorAnswer) as refused:
        await post(visitor, 0, b"{}\n")
    assert refused.value.status == 401
    async with visitor.session.get(local.url + endpoints.DECISIONS, headers=visitor.headers) as response:
        assert response.status == 401
    assert not local.paths.decisions.exists()


@pytest.mark.parametrize("offset", ["-1", "x", "1.5", "²", "9" * 30])
async def test_offset_is_a_number_of_bytes(local, visitor, offset: str) -> None:
    async with visitor.session.get(
        local.url + endpoints.DECISIONS, params={"offset": offset}, headers=visitor.headers
    ) as response:
        assert response.status == 400
        assert "is not a number of bytes" in msgspec.msgpack.decode(await response.read())["message"]


async def test_full_disk_is_507_and_other_failures_500(local, visitor) -> None:
    """``/dev/full`` refuses each write with ENOSPC, as a full disk does."""
    local.paths.decisions.symlink_to("/dev/full")
    with pytest.raises(
        ErrorAnswer, match=r"no-space: .*No space left on device; free space on the run's volume"
    ) as refused:
        await post(visitor, 0, b"{}\n")
    assert refused.value.status == 507
    local.paths.decisions.unlink()
    local.paths.decisions.mkdir()
    with pytest.raises(ErrorAnswer, match=r"decisions\.jsonl: Is a directory") as refused:
        await post(visitor, 0, b"{}\n")
    assert refused.value.status == 500
    async with aclosing(CoordinatorClient(local.url, "secret")) as client:
        with pytest.raises(CoordinatorUnreachable, match=r"HTTP 500$"):
            await client.decisions(0)
    local.paths.decisions.rmdir()
    await post(visitor, 0, b"{}\n")
    assert local.paths.decisions.read_bytes() == b"{}\n"


async def test_decision_log_waits_longer_than_a_status(local, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer comes after the limit of a status."""
    real = DecisionLog.read

    def slow(log: DecisionLog, offset: int = 0) -> tuple[bytes, int]:
        time.sleep(1.5)
        return real(log, offset)

    monkeypatch.setattr(DecisionLog, "read", slow)
    async with aclosing(CoordinatorClient(local.url, "secret", timeout_seconds=1.0)) as client:
        assert (await client.decisions(0)).size == 0


def test_pages_are_bounded_and_appends_read_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "decisions.jsonl"
    line = b"x" * 1_999 + b"\n"
    path.write_bytes(line * 50_000)
    log, size = DecisionLog(path), 50_000 * 2_000
    taken: list[int] = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: (taken.append(count), real(fd, count, at))[1])
    log.append(size, line)
    assert sum(taken) <= 1
    log.append(size, line)
    assert sum(taken) <= 2 + len(line)
    with pytest.raises(decisions.StaleOffset):
        log.append(size - 2_000, line)
    taken.clear()
    pages, offset = 0, 0
    while offset < log.read(offset)[1]:
        page, total = log.read(offset)
        assert (len(page), total) == (min(PAGE_BYTES, total - offset), size + 2_000)
        pages, offset = pages + 1, offset + len(page)
    assert (pages, offset) == (96, size + 2_000)
    assert max(taken) == PAGE_BYTES


@pytest.mark.parametrize("torn", [1, 70_000, 200_000])
def test_partial_last_line_is_dropped(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"{}\n" + b"x" * torn)
    log = DecisionLog(path)
    assert log.read() == (b"{}\n", 3)
    with pytest.raises(decisions.StaleOffset, match="has 3 bytes"):
        log.append(3 + torn, b"[]\n")
    log.append(3, b"[]\n")
    assert path.read_bytes() == b"{}\n[]\n"
    path.write_bytes(b"x" * torn)
    assert log.read() == (b"", 0)


async def test_line_length_is_limited(local, visitor) -> None:
    await post(visitor, 0, b"x" * (MAX_LINE_BYTES - 1) + b"\n")
    for line, status in ((b"x" * MAX_LINE_BYTES + b"\n", 400), (b"x" * (MAX_LINE_BYTES + 1024) + b"\n", 413)):
        with pytest.raises(ErrorAnswer) as refused:
            await post(visitor, MAX_LINE_BYTES, line)
        assert refused.value.status == status
    assert local.paths.decisions.stat().st_size == MAX_LINE_BYTES


async def test_partial_line_is_cut_off_after_a_restart(tmp_path: Path, serving_on) -> None:
    async with serving_on(tmp_path) as first, aiohttp.ClientSession() as session:
        await post(Client(session, first.url), 0, b"{}\n")
    with first.paths.decisions.open("ab") as file:
        file.write(b'{"torn')
    async with serving_on(tmp_path) as again, aiohttp.ClientSession() as session:
        await post(Client(session, again.url), 3, b"[]\n")
    assert again.paths.decisions.read_bytes() == b"{}\n[]\n"


@pytest.mark.parametrize("line", [b"", b"\n\n", b"{}", b"{}\n{}\n", b"{}\n{}"])
def test_decision_is_one_line(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(ValueError, match="one line of at most"):
        DecisionLog(tmp_path / "decisions.jsonl").append(0, line)


def test_line_is_on_disk_before_the_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    log = DecisionLog(tmp_path / "decisions.jsonl")
    log.append(0, b"{}\n")
    assert synced[0] == 3
    assert len(synced) == 2, "and the directory"
    log.append(3, b"[]\n")
    assert synced[2:] == [6]


@contextmanager
def little_space() -> Iterator[None]:
    """Files can grow to 10 bytes and no further; pytest's own output too, which may be a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_leaves_the_log_whole(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    with little_space():
        log.append(0, b"12345\n")
        with pytest.raises(OSError, match="File too large"):
            log.append(6, b"123456789\n")
    assert (tmp_path / "decisions.jsonl").read_bytes() == b"12345\n"


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([b"a\n", b"bb\n"]), st.booleans()), max_size=12))
@settings(max_examples=40, deadline=None)
def test_two_writers_keep_acknowledged_lines_once(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[int, bytes, bool]]
) -> None:
    """Each writer continues from what it read last; a lost answer is repeated."""
    log = DecisionLog(tmp_path_factory.mktemp("log") / "decisions.jsonl")
    known, acknowledged = [b"", b""], b""
    for who, line, lost in turns:
        try:
            for _ in range(1 + lost):
                log.append(len(known[who]), line)
        except decisions.StaleOffset:
            known[who] = log.read()[0]
            continue
        known[who] += line
        acknowledged = log.read()[0]
        assert acknowledged.startswith(known[who]) or acknowledged.endswith(line)
    assert log.read()[0] == acknowledged
