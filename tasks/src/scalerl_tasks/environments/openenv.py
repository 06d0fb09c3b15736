"""The protocol of OpenEnv for one session: a WebSocket ``/ws`` that holds one environment, and ``GET /schema``.

::

    ── {"type": "reset", "data": {"seed": …}} ─▶      ◀─ {"type": "observation", "data": {"observation": {…}, "reward": …, "done": …}}
    ── {"type": "step", "data": {action}} ─────▶      ◀─ the same, or {"type": "error", "data": {"code": …, "message": …}}

Source: ``openenv/core/env_server/http_server.py`` and ``types.py`` of openenv 0.10.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from scalerl_api.built_in import DEFAULT_SESSIONS
from scalerl_api.http_client import Unanswered, exchange
from scalerl_processes.waiting import cancel
from scalerl_tasks.answers.extraction import after_thought
from scalerl_tasks.errors import VerifierError, did_you_mean
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import SCORE_RANGE

if TYPE_CHECKING:
    import aiohttp

TOKEN: Final = "ENVIRONMENT_TOKEN"
"""Environment variable with the token of the server."""
_MAX_ANSWER_BYTES: Final = 4 << 20
_OF_THE_SERVER: Final = {"FACTORY_ERROR": "cannot make an environment", "SESSION_ERROR": "ended a session"}
_OF_A_REQUEST: Final = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_MAX_ERRORS: Final = 4


@dataclass(frozen=True, slots=True)
class EnvironmentServer:
    """A server, and how replies and observations are exchanged with it."""

    url: str
    timeout_seconds: float = 10.0
    """Time limit of a reset or a step."""
    action: str | None = None
    """The field of the action that is the reply; None: see :meth:`Schema.of`."""
    message: str | None = None
    """The field of the observation that the model reads; None: see :meth:`Schema.of`."""
    total: bool = False
    """Whether the reward of an episode is the sum of its steps' rewards; otherwise, it is that of the last step."""
    range: tuple[float, float] = SCORE_RANGE
    """Lowest and highest reward of an episode."""
    sessions: int = DEFAULT_SESSIONS
    """Maximum concurrent sessions of a generator."""

    @property
    def where(self) -> str:
        """The server, for messages."""
        return f"the environment server {self.url}"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server, or one of its replicas, is reached."""

    url: str
    host: str = ""
    """The server's own name and port, if ``url`` has a number in their place."""

    @property
    def headers(self) -> dict[str, str]:
        return {"host": self.host} if self.host else {}


class Down(Exception):
    """The server answered nothing of use; the message says what."""


class Full(Down):
    """All sessions of the server are taken; ``taken``: how many, 0 if it does not say."""

    taken = 0


class Lost(Down):
    """The server closed the session."""


class Raised(Down):
    """The environment raised an exception."""


class Failed(VerifierError):
    """The episode has no result, also when it is played again."""


class Unfit(VerifierError):
    """``environment.parameters`` do not fit the server."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of actions and observations, of ``GET /schema``."""

    digest: bytes
    action: str | None
    """The field that is the reply as text; None: a reply is a JSON object."""
    message: str | None
    """The field that the model reads; None: the whole observation, as JSON."""
    fields: Sequence[str]
    """Fields of an action."""
    problem: str = ""
    """Why the parameters do not fit; empty if they do."""

    @classmethod
    def of(cls, content: bytes, server: EnvironmentServer) -> Schema:
        """Read a schema. By default, the reply is the only required field of an action, or its only field, and the model reads the
        only field of the observation that is a text.

        Raises:
            Down: it is no schema.
        """
        try:
            found = msgspec.json.decode(content, type=dict[str, dict[str, Any]])
            action, observation = found["action"], found["observation"]
            fields, seen = dict(action.get("properties", {})), dict(observation.get("properties", {}))
            required = [name for name in action.get("required", ()) if name != "metadata"]
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, ValueError):
            kind = "HTML" if content.lstrip().startswith(b"<") else "something else"
            raise Down(f"{server.where} answered {kind}, not a schema of OpenEnv, to /schema") from None
        for name in ("metadata", "reward", "done"):
            seen.pop(name, None)
        fields.pop("metadata", None)
        problems = [
            f"{server.where} has no field {field!r}{did_you_mean(field, known)}; correct environment.parameters.{name} (known: {', '.join(known)})"
            for name, field, known in (("action", server.action, fields), ("message", server.message, seen))
            if field is not None and field not in known
        ]
        candidates = required if len(required) == 1 else list(fields)
        texts = [name for name, value in seen.items() if dict(value).get("type") == "string"]
        return cls(
            hashlib.sha256(msgspec.json.encode([action, observation], order="sorted")).digest(),
            server.action or (candidates[0] if len(candidates) == 1 else None),
            server.message or (texts[0] if len(texts) == 1 else None),
            tuple(fields),
            "; ".join(problems),
        )

    def action_of(self, reply: str) -> dict[str, Any] | None:
        """The action of a reply, without its thought; None if the reply is not the JSON object that it has to be."""
        text = after_thought(reply).strip().encode("utf-8", "replace").decode()
        if self.action is not None:
            return {self.action: text}
        text = text.removeprefix("```json").removeprefix("```").removesuffix("```")
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return None

    def message_of(self, observation: Mapping[str, Any]) -> str:
        """What the model reads of an observation."""
        kept: Any = {name: value for name, value in observation.items() if name != "metadata"}
        if self.message is not None:
            kept = kept.get(self.message)
        return kept if isinstance(kept, str) else encoded(kept)


def reset_arguments(prompt: Prompt) -> dict[str, Any]:
    """The arguments of the reset for a prompt: its metadata, with the prompt, the answer, and a seed of its id."""
    seed = int.from_bytes(hashlib.sha256(prompt.id.encode("utf-8", "surrogatepass")).digest()[:4]) >> 1
    given = {"prompt": prompt.text, "answer": prompt.answer, "seed": seed, "episode_id": prompt.id}
    return {**given, **prompt.metadata}


def encoded(data: Any) -> str:
    """``data`` as JSON; what JSON has no type for becomes text.

    Raises:
        Failed: a text has a lone surrogate, or the data are nested too deeply.
    """
    try:
        return msgspec.json.encode(data, enc_hook=str).decode()
    except (UnicodeError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise Failed(f"the data of the episode cannot be written as JSON: {error}") from None


async def read_schema(http: aiohttp.ClientSession, server: EnvironmentServer, address: Address) -> Schema:
    """The schema of the server at an address.

    Raises:
        Down
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=server.timeout_seconds)
    try:
        status, content = await exchange(
            http, "GET", f"{address.url}/schema", timeout, _MAX_ANSWER_BYTES, headers=address.headers
        )
    except Unanswered as error:
        raise Down(f"{server.where} does not answer: {error}") from None
    if status != 200:
        raise Down(f"{server.where} answered /schema with status {status}{_advice(status)}")
    return Schema.of(content, server)


def _advice(status: int) -> str:
    return f"; its token is the variable {TOKEN}" if status in (401, 403) else ""


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
                    max_msg_size=_MAX_ANSWER_BYTES,
                    compress=0,
                )
        except TimeoutError:
            raise Down(f"{server.where} opened no session within {server.timeout_seconds:g} s") from None
        except aiohttp.WSServerHandshakeError as error:
            raise Down(
                f"{server.where} answered /ws with status {error.status}{_advice(error.status)}"
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
                    with contextlib.suppress(
                        ConnectionError, RuntimeError
                    ):  # what was answered before says why
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
                self._answers.put_nowait(Failed(f"{where} answered more than {_MAX_ANSWER_BYTES >> 20} MiB"))
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
