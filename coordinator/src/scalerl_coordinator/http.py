"""Checks every request (token, wire version, size of the body), and answers errors with a :class:`wire.Problem`.

401 unauthorized    426 wire-version    404 unknown-member    413 too-large    408 slow
400 bad-request     409 superseded and every other refusal    503 busy         507 no-space
415 encoded: bodies must not be compressed
500 failed: the coordinator cannot continue and exits
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from scalerl_api import wire
from scalerl_coordinator.core import Refusal
from scalerl_coordinator.journal import JournalFailed, JournalRefused
from scalerl_coordinator.membership import UnknownMember
from scalerl_coordinator.metrics import Metrics

SMALL_BODY_BYTES = 2**20
_IN_FLIGHT_BYTES = 2**29
"""Limit of the request bodies in memory; above it, clients get 503 and retry."""
_BODY_SECONDS = 30.0
_MIN_BYTES_PER_SECOND = 2**19

Handler = Callable[[Any], Awaitable[wire.Struct | bytes]]
WebHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def runner(app: web.Application, shutdown_seconds: float) -> web.AppRunner:
    """The aiohttp runner of ``app``. It does not decompress bodies: a few compressed KB can be gigabytes, and aiohttp would
    decompress them before the token and the limits are checked.
    """
    # ``handler_cancellation``: a client that disconnects cancels its long poll.
    return web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=shutdown_seconds,
        auto_decompress=False,
    )


class ErrorResponse(Exception):
    """A response with a status other than 2xx."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = error


@dataclass(frozen=True, slots=True)
class Post:
    """An endpoint that takes a struct."""

    path: str
    kind: type[Any]
    """The struct in the request's body."""
    handler: Handler
    limit: int = SMALL_BODY_BYTES
    """Most bytes of a body."""


class RequestGuard:
    """Converts handlers of structs to aiohttp handlers that check each request. One per server."""

    def __init__(self, token: str, metrics: Metrics) -> None:
        self._token = f"Bearer {token}".encode()
        self._metrics = metrics
        self._in_flight_bytes = 0

    def endpoint(self, post: Post) -> WebHandler:
        """An aiohttp handler that decodes the body and encodes the reply. A reply of type bytes is sent as it is."""
        decode = msgspec.msgpack.Decoder(post.kind).decode

        async def answer(request: web.Request) -> web.Response:
            body = await self._body(request, post.limit)
            try:
                self._metrics.received_bytes.inc(len(body))
                reply = await post.handler(decode(body))
            finally:
                self._in_flight_bytes -= len(body)
            return respond(reply if isinstance(reply, bytes) else msgspec.msgpack.encode(reply))

        return self.guarded(post.path, answer)

    def guarded(self, path: str, answer: Callable[[web.Request], Awaitable[web.Response]]) -> WebHandler:
        """An aiohttp handler that checks token and wire version, calls ``answer``, and converts its errors."""

        async def guarded(request: web.Request) -> web.Response:
            begin = time.perf_counter()
            try:
                self._check_headers(request)
                response = await answer(request)
            except ErrorResponse as problem:
                response = _problem(problem.status, problem.error, str(problem))
            except msgspec.DecodeError as problem:
                response = _problem(400, "bad-request", str(problem))
            except UnknownMember as problem:
                response = _problem(404, "unknown-member", str(problem))
            except Refusal as problem:
                status = 400 if problem.error in ("bad-request", "bad-snapshot") else 409
                response = _problem(status, problem.error, str(problem))
            except JournalRefused as problem:
                response = _problem(507, "no-space", f"{problem}; nothing was accepted, try again later")
            except JournalFailed as problem:
                response = _problem(500, "failed", f"{problem}; the coordinator exits")
            self._metrics.requests.labels(path, str(response.status)).inc()
            self._metrics.request_seconds.labels(path).observe(time.perf_counter() - begin)
            return response

        return guarded

    def _check_headers(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._token):
            raise ErrorResponse(401, "unauthorized", "the run's bearer token is missing or wrong")
        version = request.headers.get(wire.WIRE_HEADER)
        if version != str(wire.WIRE_VERSION):
            raise ErrorResponse(
                426,
                "wire-version",
                f"the request has wire version {version or 'none'}, the coordinator {wire.WIRE_VERSION}; "
                f"update the older one",
            )
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise ErrorResponse(415, "encoded", f"send the body without the encoding {encoding!r}")

    async def _body(self, request: web.Request, limit: int) -> bytes:
        """The request's body, counted as in flight; the caller subtracts it."""
        length = request.content_length
        if length is None or length > limit:
            raise ErrorResponse(
                413, "too-large", f"the body has {length} bytes, the limit is {limit}; send less"
            )
        if self._in_flight_bytes + length > _IN_FLIGHT_BYTES and self._in_flight_bytes:
            raise ErrorResponse(
                503, "busy", f"{self._in_flight_bytes} bytes of requests are in flight; try again shortly"
            )
        self._in_flight_bytes += length
        chunks: list[bytes] = []
        received = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS + length / _MIN_BYTES_PER_SECOND):
                async for chunk in request.content.iter_any():
                    received += len(chunk)
                    chunks.append(chunk)
        except TimeoutError:
            raise ErrorResponse(408, "slow", f"{received} of {length} bytes arrived in time") from None
        finally:
            if received != length:
                self._in_flight_bytes -= length
        if received != length:
            raise ErrorResponse(400, "bad-request", f"{received} bytes arrived, Content-Length is {length}")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def respond(body: bytes) -> web.Response:
    """A 200 response with a MessagePack body."""
    return web.Response(body=body, content_type=wire.CONTENT_TYPE)


def _problem(status: int, error: str, message: str) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.msgpack.encode(wire.Problem(error=error, message=message)),
        content_type=wire.CONTENT_TYPE,
    )
