"""What answers at a coordinator's address may be anything: a tenant controls it.

Each attack is served by another process, so that the memory and the delays measured are the client's.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import hostile_server
import msgspec
import pytest
from free_port import free_port
from hostile_server import ATTACKS, LEGIT_THOUGH_LARGE, MARK, REDIRECTS, SLOW, THE_NEWEST_POINTS, Hostile

from scalerl_api.http_answers import BadAnswer
from scalerl_lifecycle.coordinator_client import (
    DROPPED_TOGETHER,
    MAX_POINT_VALUES,
    MAX_POINTS,
    MAX_TEXT,
    CoordinatorClient,
    CoordinatorRefused,
    CoordinatorUnreachable,
    decode_status,
)

MAX_BYTES = 20 * 2**20
MAX_HELD_SECONDS = 1.0
"""Of processor time, for which the event loop is held: below .1 s on a fast machine (benchmarks/hostile_coordinators.py)."""
TIMEOUT_SECONDS = 3.0


def resident(name: str = "VmRSS") -> int:
    """Bytes of memory of this process; ``VmHWM``: the peak since :func:`reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@asynccontextmanager
async def held() -> AsyncIterator[list[float]]:
    """Seconds of processor time for which this event loop was held, during the block: other processes take none of it."""
    delays = [0.0]

    async def measure() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.01)
            delays.append(time.thread_time() - began)

    task = asyncio.create_task(measure())
    try:
        yield delays
        await asyncio.sleep(0.03)  # what holds it at the end counts too
    finally:
        task.cancel()


@asynccontextmanager
async def attacking(attack: str) -> AsyncIterator[str]:
    """The URL of another process that serves ``attack``."""
    port = free_port()
    command = [sys.executable, hostile_server.__file__, str(port), f"127.0.0.1={attack}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"serving\n"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("attack", [*ATTACKS, *SLOW, *REDIRECTS])
async def test_attack_costs_little_and_is_not_quoted(attack: str) -> None:
    ends = attack in SLOW or attack.startswith("endless")
    async with (
        attacking(attack) as url,
        aclosing(CoordinatorClient(url, "t", timeout_seconds=TIMEOUT_SECONDS if ends else 120.0)) as client,
    ):
        async with aclosing(CoordinatorClient("http://127.0.0.1:9", "t")) as other:
            with pytest.raises(CoordinatorUnreachable):  # which imports aiohttp
                await other.status()
        reset_peak()
        before, began = resident(), time.monotonic()
        async with held() as delays:
            with pytest.raises((CoordinatorUnreachable, CoordinatorRefused)) as refused:
                await client.status()
        assert MARK not in str(refused.value)
        assert len(str(refused.value)) < 200
        assert ("compressed" in str(refused.value)) == attack.startswith(("gzip", "deflate"))
        assert time.monotonic() - began < TIMEOUT_SECONDS + 60.0
        assert resident("VmHWM") - before < MAX_BYTES
        assert max(delays) < MAX_HELD_SECONDS


@pytest.mark.parametrize("attack", REDIRECTS)
async def test_redirect_is_not_followed(attack: str) -> None:
    other = Hostile("valid")
    async with (
        other.serving() as target,
        Hostile(attack, target + "/v1/status").serving() as url,
        aclosing(CoordinatorClient(url, "t", timeout_seconds=120.0)) as client,
    ):
        for call in (
            client.status(),
            client.stop("enough"),
            client.decisions(0),
            client.record_decision(0, b""),
        ):
            with pytest.raises(CoordinatorRefused, match=f"HTTP {REDIRECTS[attack]}"):
                await call
        assert other.requests == 0


@pytest.mark.parametrize("attack", LEGIT_THOUGH_LARGE)
async def test_large_status_is_read(attack: str) -> None:
    """Rewards by label make most of a status, and the operator uses none of them."""
    async with (
        Hostile(attack).serving() as url,
        aclosing(CoordinatorClient(url, "t", timeout_seconds=120.0)) as client,
    ):
        points = (await client.status()).points
    assert [point.version for point in points] == list(range(900)) if attack == "labels" else [1]
    assert not points[0].by_label


@pytest.mark.parametrize("attack", THE_NEWEST_POINTS)
async def test_of_too_many_points_the_newest_are_read_at_little_cost(attack: str) -> None:
    async with (
        attacking(attack) as url,
        aclosing(CoordinatorClient(url, "t", timeout_seconds=120.0)) as client,
    ):
        reset_peak()
        before = resident()
        async with held() as delays:
            points = (await client.status()).points
        assert resident("VmHWM") - before < MAX_BYTES
        assert max(delays) < MAX_HELD_SECONDS
    if attack == "many-values":
        assert [point.version for point in points] == list(range(1000 - MAX_POINT_VALUES // 1000, 1000))
    else:
        assert MAX_POINTS - DROPPED_TOGETHER < len(points) <= MAX_POINTS


async def test_long_curve_keeps_its_newest_points_in_place() -> None:
    parts = {f"part-{i}": 0.5 for i in range(15)}

    def curve(count: int) -> list[int]:
        points = [hostile_server.point(n, parts=parts) for n in range(count)]
        content = msgspec.msgpack.encode(hostile_server.status() | {"points": points})
        return [point.version for point in decode_status(content).points]

    most = MAX_POINT_VALUES // 15
    assert curve(most) == list(range(most))
    for count in (most + 1, most + DROPPED_TOGETHER):
        assert curve(count) == list(range(DROPPED_TOGETHER, count))
    assert curve(most + DROPPED_TOGETHER + 1)[0] == 2 * DROPPED_TOGETHER


@pytest.mark.parametrize(
    "field", ["step", "tokens_generated", "tokens_trained", "wall_seconds", "checkpoint_version"]
)
def test_negative_figures_are_refused(field: str) -> None:
    """The API server refuses them in the run's status, so that no status would be written."""
    content = hostile_server.status() | {field: -1}
    if field == "checkpoint_version":
        assert decode_status(msgspec.msgpack.encode(content)).checkpoint_version == -1
        content[field] = -2
    with pytest.raises(BadAnswer, match="negative"):
        decode_status(msgspec.msgpack.encode(content))


async def test_long_texts_of_a_valid_status_are_truncated() -> None:
    content = hostile_server.status() | {
        "waiting_for": "x" * 10_000,
        "trackers": [{"name": "wandb", "problem": "y" * 10_000}],
    }
    status = decode_status(msgspec.msgpack.encode(content))
    assert (len(status.waiting_for), len(status.trackers[0].problem)) == (MAX_TEXT, MAX_TEXT)
    assert status.trackers[0].name == "wandb"


async def test_cookies_are_not_kept() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            seen.append(head.lower())
            writer.write(b"HTTP/1.1 500 no\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aclosing(CoordinatorClient(f"http://127.0.0.1:{port}", "t")) as client:
        for _ in range(2):
            with pytest.raises(CoordinatorUnreachable):
                await client.status()
    assert len(seen) == 2
    assert not any(b"cookie" in head for head in seen)
    assert all(b"accept-encoding: identity" in head for head in seen)
