"""The client of the coordinator's HTTP interface that runtimes have.

What answers is controlled by users who may create pods in the run's namespace, so answers are bounded (:mod:`scalerl_api.http_answers`,
:func:`decode_status`), and errors quote nothing of them but known constants.
"""

from __future__ import annotations

import asyncio
import functools
import math
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec

from scalerl_api import endpoints
from scalerl_api.http_answers import MAX_ERROR_BYTES, BadAnswer, decode_msgpack
from scalerl_api.http_client import Unanswered, exchange, wire_headers
from scalerl_api.wire import (
    WIRE_VERSION,
    Ack,
    DecisionLine,
    DecisionLines,
    EvaluationPoint,
    Problem,
    Status,
    Stop,
)

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

DECISIONS_SECONDS: Final = 30.0
"""Timeout of one line or page of the decision log, which waits for a disk."""

MAX_DECISIONS_BYTES: Final = 8 * 2**20
"""Limit of a page of the decision log."""

RECEIVE_BYTES: Final = 8 * 1024
"""Size of the receive buffer, of which Linux makes twice as much."""
MAX_INTERIM: Final = 10

UPGRADE_REQUIRED: Final = 426
_QUOTED: Final = frozenset(
    {"bad-request", "failed", "no-space", "not-ready", "superseded", "unauthorized", "wire-version"}
)
"""Values of ``Problem.error`` that a message may have."""
MAX_STATUS_BYTES: Final = 8 * 2**20
SMALL_BYTES: Final = 64 * 1024
"""Up to this size, an answer is decoded at once, on the event loop: about 150 points, 0.2 ms."""
MAX_POINTS: Final = 4096
"""Maximum number of points of a curve; of a longer one, the newest are kept. Each takes about 600 bytes of memory, twice while the
next status is decoded."""
MAX_POINT_VALUES: Final = 25_000
"""Maximum number of pass@k values and parts of verdicts in all points of a curve; as :data:`MAX_POINTS`."""
MAX_SENT_POINTS: Final = 40_000
"""Maximum number of points in an answer: more do not fit into :data:`MAX_STATUS_BYTES`, as a point has at least 210 bytes."""
DROPPED_TOGETHER: Final = 256
"""The oldest points are left out by multiples of this number, so that the others keep their places from one status to the next."""
MAX_POINT_BYTES: Final = 16 * 1024
"""Maximum size of a point without its rewards by label."""
MAX_OTHER_BYTES: Final = 256 * 1024
"""Maximum size of a status without its points."""
MAX_TEXT: Final = 2048
"""Longer texts are truncated, in characters."""

_Fields = Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=200)]
_Points = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_SENT_POINTS)]


class CoordinatorUnreachable(Exception):
    """No usable response; a later request may succeed."""


class CoordinatorRefused(Exception):
    """The coordinator refused the request, and will refuse it again."""


class StaleOffset(CoordinatorRefused):
    """The decision log does not end at the given offset."""


class CoordinatorClient:
    """Client of one coordinator; it connects at the first request. Every request raises CoordinatorUnreachable or CoordinatorRefused.

    Args:
        timeout_seconds: of one request; those to the decision log have ``DECISIONS_SECONDS``.
    """

    def __init__(self, url: str, token: str, *, timeout_seconds: float = 5.0) -> None:
        self._url = url
        self._headers = wire_headers(token)
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Closes the connections; a later request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def status(self) -> Status:
        """``GET /v1/status``."""
        return await self._call("GET", endpoints.STATUS, None, decode_status, MAX_STATUS_BYTES)

    async def stop(self, reason: str) -> None:
        """``POST /v1/stop``: the stop request; an empty reason cancels it."""
        await self._call("POST", endpoints.STOP, Stop(reason=reason), _ack)

    async def decisions(self, offset: int) -> DecisionLines:
        """``GET /v1/decisions``: a page of ``decisions.jsonl`` from byte ``offset``."""
        path = f"{endpoints.DECISIONS}?offset={offset}"
        return await self._call("GET", path, None, _lines, MAX_DECISIONS_BYTES, DECISIONS_SECONDS)

    async def record_decision(self, offset: int, line: bytes) -> None:
        """``POST /v1/decisions``: writes a line, which is on the run's volume when this returns."""
        message = DecisionLine(offset=offset, line=line)
        await self._call("POST", endpoints.DECISIONS, message, _ack, MAX_ERROR_BYTES, DECISIONS_SECONDS)

    async def _call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        decode: Callable[[bytes], T],
        limit: int = MAX_ERROR_BYTES,
        timeout_seconds: float | None = None,
    ) -> T:
        """``limit``: of the answer, in bytes; ``decode`` raises BadAnswer."""
        import aiohttp  # takes half a second, by which the first child of a local run would start later

        timeout = aiohttp.ClientTimeout(total=timeout_seconds or self._timeout_seconds)
        call, data = f"{method} {path}", None if body is None else msgspec.msgpack.encode(body)
        try:
            code, content = await exchange(
                self._opened(), method, self._url + path, timeout, limit, data=data, chunked=False
            )
            if code == 200:
                # Decoding a large answer is a loop in Python, between whose iterations the event loop runs.
                return (
                    await asyncio.to_thread(decode, content)
                    if len(content) > SMALL_BYTES
                    else decode(content)
                )
        except (Unanswered, BadAnswer) as error:
            raise CoordinatorUnreachable(f"{call}: {error}") from error
        problem = f"{call}: HTTP {code}{_problem(content)}"
        if code == UPGRADE_REQUIRED:
            problem += f": it does not accept wire version {WIRE_VERSION}"
        if code >= 500 or code < 300:
            raise CoordinatorUnreachable(problem)
        raise (StaleOffset if code == 409 else CoordinatorRefused)(problem)

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(socket_factory=_socket),
                response_class=_answer_class(),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


@functools.cache
def _answer_class() -> type[aiohttp.ClientResponse]:
    """An answer with at most ``MAX_INTERIM`` interim responses (``100 Continue``) before it; aiohttp reads any number."""
    import aiohttp

    class Answer(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            protocol, left = connection.protocol, MAX_INTERIM
            read = protocol.read

            async def counted() -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise aiohttp.ClientPayloadError("too many interim responses")
                return await read()

            protocol.read = counted
            try:
                return await super().start(connection)
            finally:
                del protocol.read

    return Answer


def _socket(address: Any) -> socket.socket:
    """A socket with a small buffer. aiohttp parses what is received at once in one go: of 256 KiB of interim responses (``100
    Continue``), without a limit of their number, it would hold the event loop for half a second."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    return made


def _ack(content: bytes) -> Ack:
    return decode_msgpack(content, Ack)


def _lines(content: bytes) -> DecisionLines:
    return decode_msgpack(content, DecisionLines)


def _problem(content: bytes) -> str:
    """The error's constant, if it is a known one."""
    try:
        error = decode_msgpack(content, Problem).error
    except BadAnswer:
        return ""
    return f" {error}" if error in _QUOTED else ""


def decode_status(content: bytes | bytearray) -> Status:
    """The status, with texts of at most ``MAX_TEXT`` characters.

    A few bytes of MessagePack become hundreds of bytes of Python objects. A small answer is decoded at once; a large one field by
    field, without what the runtimes do not use (the curves of other evaluation sets, rewards by label).

    Raises:
        BadAnswer: it is none, or exceeds a limit of this module.
    """
    status = decode_msgpack(content, Status) if len(content) <= SMALL_BYTES else _decode_large(content)
    return _bounded(status)


def _decode_large(content: bytes | bytearray) -> Status:
    fields = _as(content, _Fields, "the answer is not a Status")
    points = _as(
        fields.pop("points", msgspec.Raw(b"\x90")),
        _Points,
        f"the status has more than {MAX_SENT_POINTS} points, or none",
    )
    fields.pop("set_points", None)
    if sum(len(memoryview(value)) for value in fields.values()) > MAX_OTHER_BYTES:
        raise BadAnswer(f"the status has more than {MAX_OTHER_BYTES} bytes besides its points")
    status = decode_msgpack(msgspec.msgpack.encode({**fields, "points": []}), Status)
    curve: list[EvaluationPoint] = []
    values = 0
    for raw in reversed(points[-MAX_POINTS:]):
        point = _as(raw, _Fields, "a point of the status is not an EvaluationPoint")
        point.pop("by_label", None)
        encoded = msgspec.msgpack.encode(point)
        if len(encoded) > MAX_POINT_BYTES:
            raise BadAnswer(f"a point of the status has more than {MAX_POINT_BYTES} bytes")
        decoded = decode_msgpack(encoded, EvaluationPoint)
        values += len(decoded.pass_at) + len(decoded.parts)
        if values > MAX_POINT_VALUES:
            break
        curve.append(decoded)
    curve.reverse()
    rest = -(len(points) - len(curve)) % DROPPED_TOGETHER
    return msgspec.structs.replace(status, points=curve[rest:] if rest < len(curve) else curve)


def _as(content: bytes | bytearray | msgspec.Raw, kind: Any, problem: str) -> Any:
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(problem) from error


def _bounded(status: Status) -> Status:
    """Truncates texts, and refuses figures that no run has, which the API server would refuse in the run's status."""
    figures = (
        *(status.wall_seconds, status.device_seconds, status.compute_tokens, status.waiting_seconds),
        *(status.inherited_seconds, status.inherited_device_seconds),
    )
    counts = (
        *(status.step, status.tokens_generated, status.tokens_trained),
        *(status.checkpoint_version + 1, status.forked_step + 1),
    )
    if not all(math.isfinite(figure) for figure in figures) or any(count >= 2**63 for count in counts):
        raise BadAnswer("the status has figures that are not finite, or do not fit into 64 bits")
    if min(*figures, *counts) < 0:  # without a checkpoint, its version is -1
        raise BadAnswer("the status has negative figures")
    long = {
        name: value[:MAX_TEXT]
        for name in Status.__struct_fields__
        if isinstance(value := getattr(status, name), str) and len(value) > MAX_TEXT
    }
    trackers = status.trackers
    if any(len(tracker.problem) + len(tracker.name) > MAX_TEXT for tracker in trackers):
        trackers = [
            msgspec.structs.replace(t, name=t.name[:64], problem=t.problem[:MAX_TEXT]) for t in trackers
        ]
    return msgspec.structs.replace(status, **long, trackers=trackers) if long or trackers else status
