"""A server whose answers attack the client, by name of the attack. As a program it serves the attacks, each on its own address:

python hostile_server.py PORT ADDRESS=ATTACK ...
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import msgspec

MARK: Final = "password-of-another-service"
"""Text in every answer, which no message of a client may have."""
_ZEROS: Final = gzip.compress(bytes(10_000_000))


def status() -> dict[str, Any]:
    """A valid status of a coordinator, without points."""
    counts = (
        "acknowledged",
        "trained",
        "filtered",
        "queued",
        "leased",
        "late",
        "stale",
        "invalid",
        "duplicate",
    )
    return {
        "phase": "running",
        "waiting_for": "",
        "step": 3,
        "published_version": 3,
        "stop_reason": "",
        "counts": dict.fromkeys((*counts, "expired_leases"), 0),
        "members": [],
        "points": [],
        "last_step_stats": {},
        "wall_seconds": 1.0,
        "device_seconds": 1.0,
        "tokens_generated": 1,
        "tokens_trained": 1,
        "generator_busy_fraction": 0.5,
        "trainer_busy_fraction": 0.5,
        "max_staleness_steps": 1,
        "mean_staleness_steps": 0.5,
    }


def point(version: int, **more: Any) -> dict[str, Any]:
    """A valid point of a curve."""
    figures = ("standard_error", "truncated_fraction", "mean_tokens", "wall_seconds", "device_seconds")
    return {
        "version": version,
        "work_tokens": 1000 * version,
        "reward": 0.5,
        "samples": 4,
        "prompts": 4,
        "set_digest": MARK[:8],
        "mixed_versions": False,
        **dict.fromkeys(figures, 0.1),
        **more,
    }


def _answer(content: bytes, code: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {code}", f"content-length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + content


def _status_of(**fields: Any) -> bytes:
    return _answer(msgspec.msgpack.encode(status() | fields))


def _raw_status(name: str, value: bytes) -> bytes:
    """A status in which ``value``, already encoded, replaces a field."""
    return _answer(msgspec.msgpack.encode(status() | {name: msgspec.Raw(value)}))


def _points(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + msgspec.msgpack.encode(point(1)) * count


def _many_values() -> bytes:
    pass_at = [[1, 0, 0, 0]] * 1000
    return _status_of(points=[point(n, pass_at=pass_at) for n in range(1000)])


def _labels() -> bytes:
    label = ["a", "b", 0, 1, [[1, 0, 0, 0]] * 16]
    return _status_of(points=[point(n, by_label=[label] * 80) for n in range(900)])


def _gzip(encoding: str) -> Callable[[], Iterator[bytes]]:
    def chunks() -> Iterator[bytes]:
        yield f"HTTP/1.1 200 OK\r\ncontent-encoding: {encoding}\r\ncontent-length: {60 * len(_ZEROS)}\r\n\r\n".encode()
        for _ in range(60):
            yield _ZEROS

    return chunks


def _endless(head: bytes, chunk: bytes) -> Callable[[], Iterator[bytes]]:
    def chunks() -> Iterator[bytes]:
        yield head
        while True:
            yield chunk

    return chunks


_CHUNKED: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_BODY: Final = (MARK * 4096).encode()[:65536]

ATTACKS: Final[dict[str, Callable[[], bytes | Iterator[bytes]]]] = {
    "gzip": _gzip("gzip"),
    "gzip-upper": _gzip("GZIP"),
    "gzip-twice": _gzip("gzip, gzip"),
    "deflate": _gzip("deflate"),
    "endless": _endless(_CHUNKED, b"10000\r\n" + _BODY + b"\r\n"),
    "endless-tiny-chunks": _endless(_CHUNKED, b"1\r\nx\r\n" * 4096),
    "endless-without-length": _endless(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", _BODY),
    "announced": _endless(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n", _BODY),
    "endless-headers": _endless(b"HTTP/1.1 200 OK\r\n", f"x-some: {MARK}\r\n".encode() * 100),
    "endless-header": _endless(b"HTTP/1.1 200 OK\r\nx-some: ", _BODY),
    "endless-interim": _endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "endless-trailers": _endless(_CHUNKED + b"0\r\n", f"x-some: {MARK}\r\n".encode() * 100),
    "million-points": lambda: _raw_status("points", b"\xdd" + (10**6).to_bytes(4, "big") + b"\x80" * 10**6),
    "claimed-points": lambda: _raw_status("points", b"\xdd\xff\xff\xff\xff\x80"),
    "50000-points": lambda: _raw_status("points", b"\xdd" + (50_000).to_bytes(4, "big") + b"\x80" * 50_000),
    "many-statistics": lambda: _status_of(last_step_stats={f"{n:x}": 0 for n in range(400_000)}),
    "many-members": lambda: _raw_status(
        "members",
        b"\xdd"
        + (60_000).to_bytes(4, "big")
        + msgspec.msgpack.encode({"member_id": "a", "name": "b", "control_url": "c", "weight_version": 1})
        * 60_000,
    ),
    "long-text": lambda: _status_of(waiting_for=(MARK + "🙂") * 100_000),
    "deep": lambda: _answer(b"\x91" * 2_000_000 + b"\xc0"),
    "deep-field": lambda: _raw_status("zz", b"\x91" * 2_000_000 + b"\xc0"),
    "deep-small": lambda: _raw_status("zz", b"\x91" * 20_000 + b"\xc0"),
    "unknown-field": lambda: _status_of(**{MARK: 1}),
    "unknown-phase": lambda: _status_of(phase=MARK),
    "not-finite": lambda: _status_of(wall_seconds=float("inf")),
    "huge-number": lambda: _status_of(tokens_trained=2**64 - 1),
    "text": lambda: _answer(MARK.encode()),
    "error-text": lambda: _answer(MARK.encode(), f"403 {MARK}"),
    "error-problem": lambda: _answer(msgspec.msgpack.encode({"error": MARK, "message": MARK}), f"401 {MARK}"),
    "server-error": lambda: _answer(msgspec.msgpack.encode({"error": MARK, "message": MARK}), f"500 {MARK}"),
    "endless-error": _endless(_CHUNKED.replace(b"200 OK", b"401 no"), b"10000\r\n" + _BODY + b"\r\n"),
    "other-versions": lambda: _answer(MARK.encode(), f"426 {MARK}"),
    "not-http": lambda: f"SSH-2.0-{MARK}\r\n\r\n".encode(),
    "bad-header": lambda: f"HTTP/1.1 200 OK\r\n{MARK}\0: {MARK}\r\n\r\n".encode(),
    "bad-length": lambda: f"HTTP/1.1 200 OK\r\ncontent-length: {MARK}\r\n\r\n".encode(),
    "bad-chunk": lambda: _CHUNKED + f"{MARK}\r\n{MARK}".encode(),
    "cut-off": lambda: _answer(bytes(1000) + MARK.encode())[:-10],
}
"""What is written to a client after its request: bytes, or an iterator that may be endless."""
LEGIT_THOUGH_LARGE: Final = {"labels": _labels, "valid": lambda: _status_of(points=[point(1)])}
THE_NEWEST_POINTS: Final = {
    "20000-points": lambda: _raw_status("points", _points(20_000)),
    "many-values": _many_values,
}
"""Curves of which the newest points are kept."""
SLOW: Final = {"slow": _answer(bytes(5000)), "slow-headers": _answer(bytes(10), "200 OK", "x: " + "y" * 5000)}
"""Written a byte every 20 ms."""
REDIRECTS: Final = {"redirect-301": 301, "redirect-302": 302, "redirect-307": 307, "redirect-308": 308}


class Hostile:
    """Serves one attack. target: of redirects. requests: the requests so far."""

    def __init__(self, attack: str, target: str = "http://127.0.0.1:9/") -> None:
        self.attack, self.target, self.requests = attack, target, 0
        self._connections: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Its URL."""
        server = await asyncio.start_server(self._serve, host, port)
        try:
            yield f"http://{host}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for connection in list(self._connections):
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await self._answer_requests(reader, writer)
        finally:
            self._connections.discard(connection)
            writer.transport.abort()

    async def _answer_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            async for chunk in self._chunks():
                writer.write(chunk)
                await writer.drain()
            if self.attack in ("not-http", "cut-off", "bad-chunk"):
                writer.close()
                await writer.wait_closed()
                return

    async def _chunks(self) -> AsyncIterator[bytes]:
        if self.attack in SLOW:
            for byte in SLOW[self.attack]:
                yield bytes([byte])
                await asyncio.sleep(0.02)
        elif (code := REDIRECTS.get(self.attack)) is not None:
            yield _answer(MARK.encode(), f"{code} moved", f"location: {self.target}")
        else:
            made = {**ATTACKS, **LEGIT_THOUGH_LARGE, **THE_NEWEST_POINTS}[self.attack]()
            for chunk in [made] if isinstance(made, bytes) else made:
                yield chunk


async def main(port: int, places: list[str]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for place in places:
            address, attack = place.split("=")
            await stack.enter_async_context(Hostile(attack).serving(address, port))
        print("serving", flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
