"""The fields of an OpenEnv server's actions and observations: how replies become actions, and observations messages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from scalerl_api.http_client import Unanswered, exchange
from scalerl_tasks.answers.extraction import after_thought
from scalerl_tasks.errors import did_you_mean
from scalerl_tasks.prompts import Prompt

if TYPE_CHECKING:
    import aiohttp
from scalerl_tasks.environments.server_settings import (
    MAX_ANSWER_BYTES,
    Address,
    Down,
    EnvironmentServer,
    Failed,
    advice,
)


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of actions and observations, of ``GET /schema``."""

    digest: bytes
    action: str | None
    """The field that is the reply as text; None: a reply is a JSON object."""
    message: str | None
    """The field that the model reads; None: the whole observation, as JSON."""
    fields: Sequence[str]
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
            http, "GET", f"{address.url}/schema", timeout, MAX_ANSWER_BYTES, headers=address.headers
        )
    except Unanswered as error:
        raise Down(f"{server.where} does not answer: {error}") from None
    if status != 200:
        raise Down(f"{server.where} answered /schema with status {status}{advice(status)}")
    return Schema.of(content, server)
