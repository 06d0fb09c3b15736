"""Back-off, and the reason of an exchange without a usable answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from scalerl_api.http_client import Backoff, Unanswered, exchange, open_session


def test_backoff_doubles_up_to_its_limit() -> None:
    backoff = Backoff(1.0, 6.0)
    assert backoff.is_reset
    for longest in (1.0, 2.0, 4.0, 6.0, 6.0):
        assert longest / 2 <= backoff.next_seconds() <= longest
        assert not backoff.is_reset
    backoff.reset()
    assert backoff.next_seconds() <= 1.0


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """A server that answers anything with these bytes, and keeps the connection open if there are none."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            asyncio.IncompleteReadError
        ):  # a slow machine has sent nothing within the limit
            await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        if not answer:
            await reader.read()
        writer.close()
        ended.set()

    ended = asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.wait_for(ended.wait(), 120)


@pytest.mark.parametrize(
    ("answer", "reason", "is_slow"),
    [
        (b"", "no answer in 0.3 s", True),
        (b"HTTP/1.1 SECRET\r\n\r\n", "ClientResponseError", False),
        (b"HTTP/1.1 200 OK\r\nSECRET\r\n\r\n", "ClientResponseError", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nSECRETS..", "the answer has more than 8 bytes", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nSECRET", "ClientPayloadError", False),
    ],
)
async def test_exchange_names_the_failure_and_quotes_nothing(
    answer: bytes, reason: str, is_slow: bool
) -> None:
    timeout = aiohttp.ClientTimeout(total=120 if answer else 0.3)
    async with answering(answer) as url, open_session() as session:
        with pytest.raises(Unanswered) as failure:
            await exchange(session, "GET", url, timeout, 8)
    assert (str(failure.value), failure.value.is_slow) == (reason, is_slow)


async def test_exchange_bounds_an_error_by_its_own_limit() -> None:
    async with (
        answering(b"HTTP/1.1 404 no\r\ncontent-length: 9\r\n\r\nnot found") as url,
        open_session() as session,
    ):
        assert await exchange(session, "GET", url, aiohttp.ClientTimeout(total=120), 8) == (404, b"not found")
