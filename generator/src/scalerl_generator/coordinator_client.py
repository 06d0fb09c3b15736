"""The actor's client of the coordinator's HTTP API: one method per message. Each error implies what to do next.

::

    CoordinatorError
    ├── CoordinatorUnreachable  no usable answer (connection, timeout, 5xx): retry later
    ├── UnknownMember           the coordinator does not know this member id: register again
    └── Refused                 the request is refused, now and later (token, wire version, bad data)
"""

from __future__ import annotations

from typing import TypeVar

import aiohttp
import msgspec

from scalerl_api import endpoints
from scalerl_api.http_answers import BadAnswer, decode_msgpack
from scalerl_api.http_client import Unanswered, decode_problem, exchange, wire_headers
from scalerl_api.wire import (
    Ack,
    Group,
    Heartbeat,
    LeaseRequest,
    Leases,
    PartialGroup,
    Partials,
    PartialsReply,
    PastResponse,
    PromptRef,
    Push,
    PushReply,
    Register,
    Registered,
    Release,
    ReleaseCause,
    Responses,
    ResponsesRequest,
    Struct,
)

_CALL_SECONDS = 15.0
_POLL_MARGIN_SECONDS = 15.0
_PUSH_SECONDS = 60.0
_MAX_ANSWER_BYTES = 2**27
"""Twice the most that a lease carries of unfinished completions (``scalerl_coordinator.partials``)."""

Reply = TypeVar("Reply", bound=Struct)


class CoordinatorError(Exception):
    """Base of all errors of this module."""


class CoordinatorUnreachable(CoordinatorError):
    """The coordinator gave no usable response: it is restarting, unreachable or overloaded. It may have executed the request."""


class UnknownMember(CoordinatorError):
    """The coordinator does not know the member id of the call."""


class Refused(CoordinatorError):
    """The coordinator refused the request; a retry does not help."""

    def __init__(self, path: str, status: int, error: str, message: str) -> None:
        super().__init__(f"the coordinator refused {path} ({status} {error}): {message}")
        self.error = error
        self.permanent = path == endpoints.MEMBERS or status in (401, 403, 426)
        """Whether the same program with the same run file would be refused again."""


class CoordinatorClient:
    """Client of one actor. The caller opens the session (:func:`scalerl_api.http_client.open_session`) and closes it.

    Every method raises the subclasses of :class:`CoordinatorError`.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        self._session = session
        self._url = url
        self._headers = wire_headers(token)
        self._encoder = msgspec.msgpack.Encoder()

    async def register(self, registration: Register) -> Registered:
        return await self._call(endpoints.MEMBERS, registration, Registered, _CALL_SECONDS)

    async def heartbeat(self, heartbeat: Heartbeat) -> None:
        await self._call(endpoints.HEARTBEAT, heartbeat, Ack, _CALL_SECONDS)

    async def lease(self, request: LeaseRequest) -> Leases:
        return await self._call(endpoints.LEASE, request, Leases, request.wait_seconds + _POLL_MARGIN_SECONDS)

    async def push(self, member_id: str, groups: list[Group]) -> PushReply:
        return await self._call(
            endpoints.GROUPS, Push(member_id=member_id, groups=groups), PushReply, _PUSH_SECONDS
        )

    async def release(
        self,
        member_id: str,
        lease_ids: list[str],
        reason: str,
        cause: ReleaseCause = ReleaseCause.UNSERVED,
    ) -> None:
        message = Release(member_id=member_id, lease_ids=lease_ids, reason=reason, cause=cause)
        await self._call(endpoints.RELEASE, message, Ack, _CALL_SECONDS)

    async def report_partials(self, member_id: str, groups: list[PartialGroup]) -> PartialsReply:
        message = Partials(member_id=member_id, groups=groups)
        return await self._call(endpoints.PARTIALS, message, PartialsReply, _CALL_SECONDS)

    async def responses(self, prompt: PromptRef, digest: bytes) -> list[PastResponse]:
        """Past responses to a prompt; ``digest`` is that of its tokens (:func:`scalerl_api.wire.prompt_digest`)."""
        message = ResponsesRequest(prompt=prompt, digest=digest)
        return (await self._call(endpoints.RESPONSES, message, Responses, _CALL_SECONDS)).responses

    async def _call(self, path: str, message: Struct, reply: type[Reply], timeout_seconds: float) -> Reply:
        url, timeout = self._url + path, aiohttp.ClientTimeout(total=timeout_seconds)
        data = self._encoder.encode(message)
        try:
            status, body = await exchange(
                self._session, "POST", url, timeout, _MAX_ANSWER_BYTES, data=data, headers=self._headers
            )
        except Unanswered as error:
            raise CoordinatorUnreachable(f"{url}: {error}") from error
        if status == 200:
            try:
                return decode_msgpack(body, reply)
            except BadAnswer as error:
                raise Refused(path, 200, "undecodable", str(error)) from error
        problem = decode_problem(body)
        if status == 404 and problem.error == "unknown-member":
            raise UnknownMember(problem.message)
        if status >= 500 or status in (408, 429):
            raise CoordinatorUnreachable(f"{url}: {status} {problem.error}: {problem.message}")
        raise Refused(path, status, problem.error, problem.message)
