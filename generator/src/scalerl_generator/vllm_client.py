"""Client of the vLLM server's HTTP API: token ids in, token ids and log-probabilities out. What a weight update calls is in
:class:`.update_client.WeightUpdateClient`.

:mod:`.vllm_replies` lists the errors, which are subclasses of :class:`~scalerl_generator.vllm_replies.VllmError`.
Every call has a timeout. A client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from scalerl_api.http_answers import IDENTITY, MAX_ERROR_BYTES, BadAnswer, read_body
from scalerl_api.http_client import Unanswered, exchange, open_session, timeout_reason
from scalerl_generator.drafts.draft_protocol import (
    DraftReport,
    DraftTally,
    PastResponses,
    read_draft_report,
    read_draft_tally,
    request_id,
)
from scalerl_generator.vllm_replies import (
    Part,
    Sampled,
    ServerDown,
    ServerRefused,
    Span,
    StreamedAnswer,
    VllmError,
    read_completions,
    read_error,
    read_prompt_logprobs,
    read_weight_version,
)
from scalerl_generator.weights.adapters_in_flight import AdapterVersion, AdapterVersions

CONTROL_SECONDS = 30.0
"""Timeout of a request that changes or reads the server, and generates nothing."""
_MAX_ANSWER_BYTES = 2**29
"""Of an answer that is not streamed: those of a group have some 100 bytes a token."""

_GENERATE = "/inference/v1/generate"
_KEEP_ALIVE_SECONDS = 30.0
"""Shorter than the server's, so that the client closes idle connections, not the server."""

UNSTREAMED_TOKENS = 64
"""Completions of at most this many tokens are not streamed. Longer ones are streamed in parts of at least this many, because
each part takes time of the server."""
_MAX_PARTS = 64
"""Maximum number of parts of a streamed completion."""

_ENCODE = msgspec.json.Encoder().encode

Result = TypeVar("Result")
_Part = TypeVar("_Part", bound=Part)


async def gather_all(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all calls concurrently; returns their results in order. The first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first  # outside the handler, so that its ``__context__`` is not the exception group


def _generate_body(
    token_ids: Sequence[int], params: dict[str, Any], cache_salt: str | None, prompt_key: str | None = None
) -> dict[str, Any]:
    body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": params}
    if prompt_key is not None:
        body["request_id"] = request_id(prompt_key)
    return body if cache_salt is None else body | {"cache_salt": cache_salt}


def _sampling(n: int, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """vLLM's sampling parameters.

    They have no seed: the result depends on the timing of weight updates in any case, vLLM samples seeded sequences one by
    one, and its CPU engine crashes when it discards a seeded request's draw ("CPU Generator does not use offset", 0.32).
    """
    return {
        "n": n,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "logprobs": 0,  # only the sampled token's
        "stop_token_ids": list(stop_token_ids),
        "detokenize": False,
    }


def _of_version(part: _Part, own: AdapterVersion | None) -> _Part:
    """``part`` with the version of its request's own adapters; vLLM's is that of the last update when a token was sampled."""
    if own is None or not isinstance(part, Sampled) or not part.weight_versions:
        return part
    end = max(span.end for span in part.weight_versions)
    return replace(part, weight_versions=(Span(own.version, 0, end),))


class VllmClient:
    """Async client of one server.

    Args:
        base_url: such as ``http://127.0.0.1:8000``.
        token: the server's token (``SCALERL_VLLM_TOKEN``).
        connect_seconds: timeout of a connection.
        own_adapters: whether each request samples with the adapters that are the newest when it is sent, until it ends
            (:mod:`.adapters_in_flight`). The server needs ``--lora-versions``.
        routed_experts: whether the server reports the experts of tokens (``--routed-experts``).

    Use as an async context manager, or call :meth:`close`.
    """

    def __init__(
        self,
        base_url: str,
        token: str,
        connect_seconds: float = 5.0,
        *,
        own_adapters: bool = False,
        routed_experts: bool = False,
    ) -> None:
        self.adapters = AdapterVersions() if own_adapters else None
        """Those that requests in flight sample with, where each has its own."""
        self.routed_experts = routed_experts
        self.record_problem_logged = False
        """Whether the log has that an answer lacked experts."""
        self._base, self._connect_seconds = base_url.rstrip("/"), connect_seconds
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            **IDENTITY,
        }
        self._pooled: aiohttp.ClientSession | None = None
        self._unpooled: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; requests in flight fail with :class:`ServerDown`."""
        sessions, self._pooled, self._unpooled = (self._pooled, self._unpooled), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    async def health(self, timeout_seconds: float = 5.0) -> bool:
        """Whether the server answers and its engine is alive."""
        try:
            await self.call("GET", "/health", None, timeout_seconds)
        except VllmError:
            return False
        return True

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        prompt_key: str | None = None,
        routed_from: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> list[Sampled]:
        """Sample ``n`` completions of one prompt, without streaming.

        Args:
            stop_token_ids: a completion ends with the first of these, which is the last of its ``token_ids``. The model's own
                end-of-sequence token ends it as well.
            cache_salt: vLLM shares cached prefixes only among equal salts. Use a new one for every installation of weights,
                because an update does not drop the KV that older weights cached.
            prompt_key: 16 hexadecimal digits that identify the original prompt, also if ``prompt_token_ids`` includes tokens
                of a completion. The server drafts from earlier responses to the same prompt (:mod:`.drafter`).
            routed_from: first position of the prompt whose experts the response has, of a server that reports them; None for none
                of the prompt.
            timeout_seconds: for the whole response.

        Raises:
            ServerDown, ServerRefused, BadReply, GenerationFailed
        """
        params = _sampling(n, max_tokens, temperature, stop_token_ids)
        params |= self._routed_from(prompt_token_ids, routed_from)
        body = _generate_body(prompt_token_ids, params, cache_salt, prompt_key)
        with self._own_adapters(body) as own:
            reply = await self.call("POST", _GENERATE, body, timeout_seconds)
        return [_of_version(one, own) for one in read_completions(reply, n)]

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        *,
        n: int,
        max_tokens: int,
        on_part: Callable[[int, Part], None],
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        prompt_key: str | None = None,
        routed_from: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Sample ``n`` completions of one prompt, streamed in parts. Other arguments and errors are those of :meth:`generate`.

        Args:
            on_part: called with a completion's index and its new tokens: the first token, then every 64th of ``max_tokens``
                (at least :data:`UNSTREAMED_TOKENS`), and the rest as a :class:`Sampled`. Parts received before a failure are
                valid. An exception that it raises ends the request.
            timeout_seconds: between two parts.
        """
        interval = max(UNSTREAMED_TOKENS, max_tokens // _MAX_PARTS)
        params = _sampling(n, max_tokens, temperature, stop_token_ids) | {"stream_interval": interval}
        params |= self._routed_from(prompt_token_ids, routed_from)
        body = _generate_body(prompt_token_ids, params, cache_salt, prompt_key) | {"stream": True}
        with self._own_adapters(body) as own:

            def add(index: int, part: Part) -> None:
                on_part(index, _of_version(part, own))

            timeout = aiohttp.ClientTimeout(
                sock_connect=min(self._connect_seconds, timeout_seconds), sock_read=timeout_seconds
            )
            await self._stream(body, n, timeout, add)

    async def _stream(
        self,
        body: dict[str, Any],
        n: int,
        timeout: aiohttp.ClientTimeout,
        on_part: Callable[[int, Part], None],
    ) -> None:
        answer = StreamedAnswer(_GENERATE, n)
        url = self._base + _GENERATE
        problem = "the response is incomplete"
        cause: Exception | None = None
        try:
            async with self._session_for(_GENERATE).post(
                url, data=_ENCODE(body), timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    error_body = bytes(await read_body(response, MAX_ERROR_BYTES))
                    raise ServerRefused(_GENERATE, response.status, read_error(error_body))
                async for content in response.content.iter_any():
                    for index, part in answer.feed(content):
                        on_part(index, part)
        except TimeoutError as error:
            problem, cause = timeout_reason(error, timeout), error
        except (BadAnswer, aiohttp.ClientError) as error:
            problem, cause = str(error), error
        if answer.unfinished:  # if all completions have arrived, an error of the connection does not matter
            raise ServerDown(f"{url}: {problem}") from cause

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, cache_salt: str | None = None, timeout_seconds: float = 60.0
    ) -> NDArray[np.float32]:
        """Score a sequence under the current weights at temperature 1.

        Returns:
            Shape ``[len(token_ids) - 1]``: entry ``i`` is the log-probability of ``token_ids[i + 1]`` after
            ``token_ids[: i + 1]``. vLLM always computes them; it does not use its prefix cache.

        Raises:
            ServerDown, ServerRefused, BadReply, GenerationFailed
        """
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        params |= self._routed_from(token_ids, None)
        body = _generate_body(token_ids, params, cache_salt)
        with self._own_adapters(body):
            reply = await self.call("POST", _GENERATE, body, timeout_seconds)
        return read_prompt_logprobs(reply, token_ids)

    def _routed_from(self, prompt: Sequence[int], start: int | None) -> dict[str, int]:
        """vLLM's sampling parameter for ``routed_from``."""
        if not self.routed_experts:
            return {}
        return {"routed_experts_prompt_start": len(prompt) if start is None else start}

    async def weight_version(self) -> int:
        """Version of the server's weights; ``UNVERSIONED`` before its first update."""
        return read_weight_version(await self.call("GET", "/weight_info", None, CONTROL_SECONDS))

    async def pause(self) -> None:
        """Pause generation between two tokens; requests in flight keep their KV cache and wait.

        ``clear_cache=false`` is needed: without it vLLM drops every cache even in mode ``keep``, and recomputes requests in
        flight from their first token, under the new weights.
        """
        await self.call("POST", "/pause?mode=keep&clear_cache=false", {}, CONTROL_SECONDS)

    async def resume(self) -> None:
        """Resume paused requests under the server's current weights."""
        await self.call("POST", "/resume", {}, CONTROL_SECONDS)

    async def remember(self, past: PastResponses) -> None:
        """Send past responses to a prompt to the server, which drafts from them."""
        encoded = base64.b64encode(msgspec.msgpack.encode(past)).decode()
        body = {"method": "scalerl_remember", "args": [encoded]}
        await self.call("POST", "/collective_rpc", body, CONTROL_SECONDS)

    async def take_draft_tally(self, prompt_key: str) -> DraftTally:
        """Drafted and accepted tokens of a prompt's requests since the last call."""
        body = {"method": "scalerl_take_draft_tally", "args": [prompt_key]}
        return read_draft_tally(await self.call("POST", "/collective_rpc", body, CONTROL_SECONDS))

    async def draft_report(self) -> DraftReport:
        """Statistics of the server's drafts since its start."""
        body = await self.call("POST", "/collective_rpc", {"method": "scalerl_draft_report"}, CONTROL_SECONDS)
        return read_draft_report(body)

    @contextlib.contextmanager
    def _own_adapters(self, body: dict[str, Any]) -> Iterator[AdapterVersion | None]:
        """While the request of ``body`` is in flight, which is given the newest adapters."""
        if self.adapters is None:
            yield None
            return
        with self.adapters.request() as own:
            if own is not None:
                body["model"] = own.name
            yield own

    def _session_for(self, path: str) -> aiohttp.ClientSession:
        """The pooled session for generation, or the one that opens a connection for each request, for all other paths.

        The server closes a connection after an internal error. Control requests often follow right after one, and on a pooled
        connection they would race with that close.
        """
        if path == _GENERATE:
            if self._pooled is None:
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
                self._pooled = open_session(self._headers, connector)
            return self._pooled
        if self._unpooled is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._unpooled = open_session(self._headers, connector)
        return self._unpooled

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_seconds: float
    ) -> bytes:
        """The answer to a request. Raises ServerDown, ServerRefused."""
        session = self._session_for(path)
        timeout = aiohttp.ClientTimeout(
            total=timeout_seconds, sock_connect=min(self._connect_seconds, timeout_seconds)
        )
        data = None if body is None else _ENCODE(body)
        try:
            status, content = await exchange(
                session, method, self._base + path, timeout, _MAX_ANSWER_BYTES, data=data
            )
        except Unanswered as error:
            raise ServerDown(f"{self._base}{path}: {error}") from error
        if status != 200:
            raise ServerRefused(path, status, read_error(content))
        return content
