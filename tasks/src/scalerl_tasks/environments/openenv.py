"""The protocol of OpenEnv for one session: a WebSocket ``/ws`` that holds one environment, and ``GET /schema``.

::

    ── {"type": "reset", "data": {"seed": …}} ─▶      ◀─ {"type": "observation", "data": {"observation": {…}, "reward": …, "done": …}}
    ── {"type": "step", "data": {action}} ─────▶      ◀─ the same, or {"type": "error", "data": {"code": …, "message": …}}

Source: ``openenv/core/env_server/http_server.py`` and ``types.py`` of openenv 0.10.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from scalerl_processes.waiting import cancel
from scalerl_tasks.prompts import Prompt

if TYPE_CHECKING:
    import aiohttp
from scalerl_tasks.environments.openenv_schema import Schema, encoded, reset_arguments
from scalerl_tasks.environments.server_settings import (
    MAX_ANSWER_BYTES,
    Address,
    Down,
    EnvironmentServer,
    Failed,
    Full,
    Lost,
    Raised,
    advice,
)

_OF_THE_SERVER: Final = {"FACTORY_ERROR": "cannot make an environment", "SESSION_ERROR": "ended a session"}
_OF_A_REQUEST: Final = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_MAX_ERRORS: Final = 4


class _Data(msgspec.Struct):
    """The data of an observation; ``code``, ``message`` and ``errors`` are those of an error."""

    observation: dict[str, Any] | None = None
    reward: float | bool | None = None
    done: bool = False
    code: str = ""
    message: str = ""
    errors: list[dict[str, Any]] = []
    active_sessions: int = 0


class _Answer(msgspec.Struct):
    type: str
    data: _Data


@dataclass(frozen=True, slots=True)
class Observed:
    """What the server said to a reply."""

    message: str
    done: bool = False
    reward: float | None = None
    """None: it gave none."""
    invalid: bool = False
    """Whether the reply was no action."""


class Session:
    """An environment on the server; one episode after the other."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        server: EnvironmentServer,
        schema: Schema,
        address: Address,
    ) -> None:
        self._socket, self._server, self._schema = socket, server, schema
        self.address = address
        self._answers: asyncio.Queue[str | Exception] = asyncio.Queue()
        # Pings of the server are answered while a message is awaited: also between two steps.
        self._reader = asyncio.create_task(self._read(), name="environment-session")
        self.key = b""
        """The episode that the session is in, for its owner."""
        self.rewards: list[float] = []
        """The rewards of the steps of its episode."""

    @classmethod
    async def open(
        cls, http: aiohttp.ClientSession, server: EnvironmentServer, schema: Schema, address: Address
    ) -> Session:
        """Connect.

        Raises:
            Down
        """
        import aiohttp

        try:
            async with asyncio.timeout(server.timeout_seconds):
                socket = await http.ws_connect(
                    f"{address.url}/ws",
                    headers=address.headers,
                    max_msg_size=MAX_ANSWER_BYTES,
                    compress=0,
                )
        except TimeoutError:
            raise Down(f"{server.where} opened no session within {server.timeout_seconds:g} s") from None
        except aiohttp.WSServerHandshakeError as error:
            raise Down(
                f"{server.where} answered /ws with status {error.status}{advice(error.status)}"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = str(error) if isinstance(error, aiohttp.ClientConnectorError) else type(error).__name__
            raise Down(f"{server.where} does not answer: {reason}") from None
        return cls(socket, server, schema, address)

    @property
    def is_closed(self) -> bool:
        return self._reader.done()

    async def close(self) -> None:
        """Close the connection. The server ends the environment."""
        import aiohttp

        await cancel(self._reader)
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._socket.close()

    async def reset(self, prompt: Prompt) -> None:
        """Begin the episode of a prompt.

        A server ignores those of the :func:`reset_arguments` that its environment does not have.

        Raises:
            Down, Failed
        """
        self.rewards = []
        data = await self._ask("reset", reset_arguments(prompt))
        if data.code:
            raise Failed(f"{self._server.where} refused the arguments of its reset: {_errors(data)}")
        if data.done:
            raise Failed(f"{self._server.where} ended the episode at its reset, before a reply")

    async def step(self, reply: str) -> Observed:
        """The answer to a reply. One that is no action changes nothing, and is answered with the reason.

        Raises:
            Down, Failed
        """
        action = self._schema.action_of(reply)
        if action is None:
            fields = ", ".join(self._schema.fields)
            return Observed(f"Reply with one JSON object with the fields {fields}.", invalid=True)
        data = await self._ask("step", action)
        if data.code:
            return Observed(f"That is no valid action: {_errors(data)}.", invalid=True)
        reward = None if data.reward is None else float(data.reward)
        if reward is not None:
            self.rewards.append(reward)
        return Observed(self._schema.message_of(data.observation or {}), data.done, reward)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> _Data:
        """The data of an observation, or of a refusal of ``data``, with its ``code``."""
        where, seconds = self._server.where, self._server.timeout_seconds
        body = encoded({"type": kind, "data": data})
        unasked = not self._answers.empty()
        try:
            async with asyncio.timeout(seconds):
                if not unasked:
                    # What was answered before says why.
                    with contextlib.suppress(ConnectionError, RuntimeError):
                        await self._socket.send_str(body)
                content = await self._answers.get()
        except TimeoutError:
            raise Down(
                f"{where} did not answer a {kind} within {seconds:g} s (environment.turnTimeoutSeconds)"
            ) from None
        if isinstance(content, Exception):
            raise content
        answer = self._decoded(kind, content)
        # Without a request, a server says why it ends the session; anything else would shift all later answers.
        if unasked and (answer.type != "error" or answer.data.code in _OF_A_REQUEST):
            raise Lost(f"{where} sent a message that answers nothing")
        if answer.type == "observation" and answer.data.observation is not None:
            answer.data.code = ""
            return answer.data
        if answer.type != "error":
            raise Down(f"{where} answered a {kind} with something else than an observation")
        return self._refused(kind, answer.data)

    def _decoded(self, kind: str, content: str) -> _Answer:
        try:
            return msgspec.json.decode(content, type=_Answer)
        except (msgspec.MsgspecError, UnicodeError):
            raise Down(
                f"{self._server.where} answered a {kind} with something else than OpenEnv's messages"
            ) from None
        except RecursionError:
            raise Failed(
                f"{self._server.where} answered a {kind} with JSON that is nested too deeply"
            ) from None

    def _refused(self, kind: str, data: _Data) -> _Data:
        """The data of an error that is one of the request."""
        where, code = self._server.where, data.code
        if code == "CAPACITY_REACHED":
            full = Full(
                f"{where} has no free session; raise its max_concurrent_envs, or lower parameters.sessions"
            )
            full.taken = data.active_sessions
            raise full
        if code == "VALIDATION_ERROR":
            return data
        if code == "EXECUTION_ERROR":
            raise Raised(f"{where} failed in a {kind}; see its log")
        raise Down(f"{where} {_OF_THE_SERVER.get(code, f'failed in a {kind}')}; see its log")

    async def _read(self) -> None:
        import aiohttp

        while True:
            got = await self._socket.receive()
            if got.type is aiohttp.WSMsgType.TEXT:
                self._answers.put_nowait(got.data)
                continue
            where = self._server.where
            if self._socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                self._answers.put_nowait(Failed(f"{where} answered more than {MAX_ANSWER_BYTES >> 20} MiB"))
            self._answers.put_nowait(Lost(f"{where} closed a session"))
            return


def _errors(data: _Data) -> str:
    """The errors of a refusal, with their fields."""
    found = [
        f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}"
        for one in data.errors[:_MAX_ERRORS]
        if isinstance(one.get("loc", ()), list | tuple)
    ]
    return "; ".join(found) or data.message
