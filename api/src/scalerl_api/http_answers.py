"""Limits of the answers that a client accepts over HTTP: their encoding, bytes and seconds. No I/O: the client reads, in chunks.

Every client of the project follows no redirect, accepts no compressed answer (a few KB can be gigabytes), and reads through
:class:`Body`. Messages about an answer that is refused as a whole have nothing of it: they are shown in conditions, and anyone who
controls a server would otherwise choose what the client reads and prints.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final, Protocol, TypeVar

import msgspec

T = TypeVar("T")

IDENTITY: Final = {"accept-encoding": "identity"}
"""Headers of every request: the answer must not be compressed."""
MAX_ERROR_BYTES: Final = 64 * 1024
"""Limit of an answer that has an error or an acknowledgement."""


class BadAnswer(Exception):
    """The answer is refused: too large, too slow, compressed, or not of the expected type. The message quotes nothing of it."""


class Body:
    """Collects a body of at most ``limit`` bytes.

    Args:
        headers: of the answer, case-insensitive.
        deadline: time (monotonic) by which the body is complete, checked at each chunk; None: the client has its own.

    Raises:
        BadAnswer: the answer is compressed or too large, or the deadline has passed.
    """

    def __init__(self, headers: Mapping[str, str], limit: int, deadline: float | None = None) -> None:
        self._limit, self._deadline = limit, deadline
        self.content = bytearray()
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise BadAnswer("the answer is compressed, although the request excludes it")
        length = headers.get("content-length", "")
        if length.isascii() and length.isdecimal() and (len(length) > 18 or int(length) > limit):
            raise self._too_large()

    def feed(self, chunk: bytes) -> None:
        if len(self.content) + len(chunk) > self._limit:
            raise self._too_large()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise BadAnswer("the answer was not complete in time")
        self.content += chunk

    def read(self, chunks: Iterable[bytes]) -> bytearray:
        """The whole body, from a blocking client."""
        for chunk in chunks:
            self.feed(chunk)
        return self.content

    def _too_large(self) -> BadAnswer:
        return BadAnswer(f"the answer has more than {self._limit} bytes")


class _Stream(Protocol):
    def iter_any(self) -> AsyncIterator[bytes]: ...


class _Answer(Protocol):
    """An answer of aiohttp whose session has ``auto_decompress=False``."""

    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content(self) -> _Stream: ...


async def read_body(answer: _Answer, limit: int, *, chunked: bool = True) -> bytearray:
    """The body of an answer of aiohttp, at most ``limit`` bytes. The client's total timeout applies. Raises BadAnswer.

    Args:
        chunked: accept an answer without a length. Parsing chunks of a byte each takes all of a processor until the timeout.
    """
    body = Body(answer.headers, limit)
    if not chunked and "content-length" not in answer.headers:
        raise BadAnswer("the answer has no content-length")
    async for chunk in answer.content.iter_any():
        body.feed(chunk)
    return body.content


def decode_msgpack(content: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """``content`` as ``kind``. Raises BadAnswer, also for nesting that exceeds the interpreter's recursion limit.

    >>> decode_msgpack(b"\\x91" * 1_000_000, dict)
    Traceback (most recent call last):
    scalerl_api.http_answers.BadAnswer: the answer is not a dict
    """
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        # Its message may have text of the answer: an unknown field, an enum's value.
        raise BadAnswer(f"the answer is not {_a(kind)}") from error


def decode_json(content: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """As :func:`decode_msgpack`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"the answer is not {_a(kind)}") from error


def _a(kind: object) -> str:
    name = getattr(kind, "__name__", str(kind))
    return f"{'an' if name[:1] in 'AEIO' else 'a'} {name}"
