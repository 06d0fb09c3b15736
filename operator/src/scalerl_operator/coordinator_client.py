"""The operator's client of the coordinator's HTTP interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from scalerl_api import endpoints
from scalerl_api.wire import (
    CONTENT_TYPE,
    WIRE_HEADER,
    WIRE_VERSION,
    Ack,
    DecisionLine,
    DecisionLines,
    Problem,
    Status,
    Stop,
)

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

DECISIONS_SECONDS: Final = 30.0
"""Timeout of one line or page of the decision log, which waits for a disk."""

UPGRADE_REQUIRED: Final = 426
READABLE_VERSIONS: Final = tuple(range(WIRE_VERSION, 0, -1))
"""Wire versions that this client can use: each version only added fields with defaults. A run keeps its images when the operator
is upgraded, so its coordinator may use an earlier version."""


class CoordinatorUnreachable(Exception):
    """No usable response; a later request may succeed."""


class CoordinatorRefused(Exception):
    """The coordinator refused the request, and will refuse it again."""


class EndpointMissing(CoordinatorRefused):
    """The coordinator's release does not have the endpoint."""


class OffsetSuperseded(CoordinatorRefused):
    """The decision log does not end at the given offset."""


class CoordinatorClient:
    """Client of one coordinator; it connects at the first request. Every request raises CoordinatorUnreachable or CoordinatorRefused.

    timeout_seconds: of one request; those to the decision log have ``DECISIONS_SECONDS``.
    """

    def __init__(self, url: str, token: str, *, timeout_seconds: float = 5.0) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {token}", "content-type": CONTENT_TYPE}
        self._version = WIRE_VERSION
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Closes the connections; a later request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def status(self) -> Status:
        """``GET /v1/status``."""
        return await self._call("GET", endpoints.STATUS, None, Status)

    async def stop(self, reason: str) -> None:
        """``POST /v1/stop``: the stop request; an empty reason cancels it."""
        await self._call("POST", endpoints.STOP, Stop(reason=reason), Ack)

    async def decisions(self, offset: int) -> DecisionLines:
        """``GET /v1/decisions``: a page of ``decisions.jsonl`` from byte ``offset``."""
        path = f"{endpoints.DECISIONS}?offset={offset}"
        return await self._call("GET", path, None, DecisionLines, DECISIONS_SECONDS)

    async def record_decision(self, offset: int, line: bytes) -> None:
        """``POST /v1/decisions``: writes a line, which is on the run's volume when this returns."""
        await self._call(
            "POST", endpoints.DECISIONS, DecisionLine(offset=offset, line=line), Ack, DECISIONS_SECONDS
        )

    async def _call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        answer: type[T],
        timeout_seconds: float | None = None,
    ) -> T:
        import aiohttp  # takes half a second, by which the first child of a local run would start later

        self._session = self._session or aiohttp.ClientSession(headers=self._headers)
        data = None if body is None else msgspec.msgpack.encode(body)
        seconds = timeout_seconds or self._timeout_seconds
        timeout = aiohttp.ClientTimeout(total=seconds)
        for version in (self._version, *(v for v in READABLE_VERSIONS if v != self._version)):
            try:
                async with self._session.request(
                    method, self._url + path, data=data, headers={WIRE_HEADER: str(version)}, timeout=timeout
                ) as response:
                    content, code = await response.read(), response.status
            except TimeoutError as error:
                raise CoordinatorUnreachable(f"{method} {path}: no answer in {seconds:g} s") from error
            except (aiohttp.ClientError, OSError) as error:
                raise CoordinatorUnreachable(f"{method} {path}: {type(error).__name__}: {error}") from error
            if code != UPGRADE_REQUIRED:
                self._version = version
                break
        if code >= 500:
            raise CoordinatorUnreachable(f"{method} {path}: HTTP {code}: {_problem(content)}")
        if code >= 300:
            refusal = {404: EndpointMissing, 409: OffsetSuperseded}.get(code, CoordinatorRefused)
            raise refusal(f"{method} {path}: HTTP {code}: {_problem(content)}")
        try:
            return msgspec.msgpack.decode(content, type=answer)
        except msgspec.DecodeError as error:
            raise CoordinatorUnreachable(f"{method} {path}: not a {answer.__name__}: {error}") from error


def _problem(content: bytes) -> str:
    try:
        return msgspec.msgpack.decode(content, type=Problem).message
    except msgspec.DecodeError:
        return content[:200].decode(errors="replace")
