"""Client of the vLLM server's HTTP API: token ids in, token ids and log-probabilities out. No other module calls it.

:mod:`.vllm_replies` lists the errors, which are subclasses of :class:`~scalerl_generator.vllm_replies.VllmError`.
Every call has a timeout. A client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from scalerl_api.answers import IDENTITY, MAX_ERROR_BYTES, BadAnswer, read_answer
from scalerl_api.http_client import Unanswered, exchange, open_session, timeout_reason
from scalerl_api.wire import GroupJoin, WeightReceive, WeightReceived
from scalerl_generator.adapter_versions import PUBLISHED, AdapterVersion, AdapterVersions
from scalerl_generator.draft_protocol import DraftReport, DraftTally, PastResponses, request_id
from scalerl_generator.vllm_replies import (
    CachePressure,
    FetchContinues,
    FetchReport,
    FetchStalled,
    Part,
    PublishReport,
    Sampled,
    ServerDown,
    ServerRefused,
    Span,
    StreamedAnswer,
    UpdateFailed,
    VllmError,
    read_cache_pressure,
    read_completions,
    read_draft_report,
    read_draft_tally,
    read_error,
    read_fetch,
    read_join_problem,
    read_prompt_logprobs,
    read_report,
    read_weight_version,
)

_CONTROL_SECONDS = 30.0
_MARGIN_SECONDS = 15.0
"""The client's timeout is this much longer than the worker's, so that the worker's error arrives."""

_FIRST_JOIN_POLL_SECONDS = 0.02
_LAST_JOIN_POLL_SECONDS = 0.25
"""Each poll takes a part of a step of the server."""

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
            (:mod:`.adapter_versions`). The server needs ``--lora-versions``.
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
        self._adapters = AdapterVersions() if own_adapters else None
        self.routed_experts = routed_experts
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
            await self._call("GET", "/health", None, timeout_seconds)
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
            reply = await self._call("POST", _GENERATE, body, timeout_seconds)
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
                    error_body = bytes(await read_answer(response, MAX_ERROR_BYTES))
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
            reply = await self._call("POST", _GENERATE, body, timeout_seconds)
        return read_prompt_logprobs(reply, token_ids)

    def _routed_from(self, prompt: Sequence[int], start: int | None) -> dict[str, int]:
        """vLLM's sampling parameter for ``routed_from``."""
        if not self.routed_experts:
            return {}
        return {"routed_experts_prompt_start": len(prompt) if start is None else start}

    async def weight_version(self) -> int:
        """Version of the server's weights; ``UNVERSIONED`` before its first update."""
        return read_weight_version(await self._call("GET", "/weight_info", None, _CONTROL_SECONDS))

    async def pause(self) -> None:
        """Pause generation between two tokens; requests in flight keep their KV cache and wait.

        ``clear_cache=false`` is needed: without it vLLM drops every cache even in mode ``keep``, and recomputes requests in
        flight from their first token, under the new weights.
        """
        await self._call("POST", "/pause?mode=keep&clear_cache=false", {}, _CONTROL_SECONDS)

    async def resume(self) -> None:
        """Resume paused requests under the server's current weights."""
        await self._call("POST", "/resume", {}, _CONTROL_SECONDS)

    async def publish_report(self) -> PublishReport:
        """Report of the last update, combined over the workers (:func:`~.vllm_replies.read_report`)."""
        body = await self._call(
            "POST", "/collective_rpc", {"method": "scalerl_publish_report"}, _CONTROL_SECONDS
        )
        return read_report(body)

    async def cache_pressure(self) -> CachePressure:
        """How full the KV cache is. Needs a server with ``--stats``."""
        return read_cache_pressure(await self._call("GET", "/metrics", None, _CONTROL_SECONDS))

    async def remember(self, past: PastResponses) -> None:
        """Send past responses to a prompt to the server, which drafts from them."""
        encoded = base64.b64encode(msgspec.msgpack.encode(past)).decode()
        body = {"method": "scalerl_remember", "args": [encoded]}
        await self._call("POST", "/collective_rpc", body, _CONTROL_SECONDS)

    async def take_draft_tally(self, prompt_key: str) -> DraftTally:
        """Drafted and accepted tokens of a prompt's requests since the last call."""
        body = {"method": "scalerl_take_draft_tally", "args": [prompt_key]}
        return read_draft_tally(await self._call("POST", "/collective_rpc", body, _CONTROL_SECONDS))

    async def draft_report(self) -> DraftReport:
        """Statistics of the server's drafts since its start."""
        body = await self._call(
            "POST", "/collective_rpc", {"method": "scalerl_draft_report"}, _CONTROL_SECONDS
        )
        return read_draft_report(body)

    async def init_group(self, join: GroupJoin) -> None:
        """Join a process group, after leaving the current one. The server generates meanwhile.

        Raises:
            ServerRefused: the group did not form within ``join.timeout_seconds``.
        """
        path, body = "/init_weight_transfer_engine", {"init_info": msgspec.to_builtins(join)}
        deadline = time.monotonic() + join.timeout_seconds + _MARGIN_SECONDS
        await self._call("POST", path, body, _CONTROL_SECONDS)
        poll = {"method": "scalerl_join_problem", "args": [str(join.epoch)]}
        interval = _FIRST_JOIN_POLL_SECONDS
        while True:
            await asyncio.sleep(interval)  # a group opens in milliseconds if all members are there
            interval = min(2 * interval, _LAST_JOIN_POLL_SECONDS)
            problem = read_join_problem(await self._call("POST", "/collective_rpc", poll, _CONTROL_SECONDS))
            if problem is None and time.monotonic() > deadline:
                problem = f"the group of epoch {join.epoch} is still opening"
            if problem:
                raise ServerRefused(path, 500, problem)
            if problem is not None:
                return

    async def fetch(self, receive: WeightReceive) -> FetchReport:
        """Read one version from files into the server's memory. The server generates meanwhile.

        Raises:
            FetchContinues: it was not read within ``receive.timeout_seconds``.
            FetchStalled: the same, and nothing was read.
            ServerRefused: it cannot be read.
        """
        path, deadline = "/collective_rpc", time.monotonic() + receive.timeout_seconds
        encoded = base64.b64encode(msgspec.msgpack.encode(receive)).decode()
        await self._call("POST", path, {"method": "scalerl_fetch", "args": [encoded]}, _CONTROL_SECONDS)
        poll = {"method": "scalerl_fetched", "args": [str(receive.version)]}
        interval, first = _FIRST_JOIN_POLL_SECONDS, None
        while True:
            await asyncio.sleep(interval)
            interval = min(2 * interval, _LAST_JOIN_POLL_SECONDS)
            report = read_fetch(await self._call("POST", path, poll, _CONTROL_SECONDS))
            if report.problem == "":
                return report
            first = report if first is None else first
            if report.problem is None and time.monotonic() > deadline:
                late = f"not read after {receive.timeout_seconds:g} s"
                if report.bytes == first.bytes:
                    of = "object store" if receive.files is not None and receive.files.to else "volume"
                    raise FetchStalled(path, 500, f"{late}, and nothing of it was: the {of} does not answer")
                raise FetchContinues(path, 500, f"{late}; the server continues to read it")
            if report.problem:
                raise ServerRefused(path, 500, report.problem)

    async def update_weights(self, receive: WeightReceive, path: str = "") -> PublishReport:
        """Receive one version over the group, or load it from the memory at ``path`` into which it was fetched.

        Call between :meth:`pause` and :meth:`resume`.

        Raises:
            UpdateFailed: the version is not installed. The server has left the group and can join another.
            ServerDown, BadReply: the server does not answer or answers wrongly; which weights it holds is unknown.
        """
        info = msgspec.to_builtins(receive) | {"path": path}
        adapters = None
        if self._adapters is not None:
            adapters = self._adapters.next(receive.version)
            info |= {"adapters": adapters.name, "needed_adapters": self._adapters.needed()}
        seconds = receive.timeout_seconds + _MARGIN_SECONDS
        try:
            if (await self.publish_report()).active:  # a client that died left it open
                await self._abandon(receive)
            await self._call("POST", "/start_weight_update", {}, _CONTROL_SECONDS)
            await self._call("POST", "/update_weights", {"update_info": info}, seconds)
            report = await self.publish_report()
            if adapters is not None and not report.error:
                body = {"lora_name": adapters.name, "lora_path": PUBLISHED}
                await self._call("POST", "/v1/load_lora_adapter", body, _CONTROL_SECONDS)
            finish = {} if report.error else {"weight_version": str(receive.version)}
            await self._call("POST", "/finish_weight_update", finish, _CONTROL_SECONDS)
        except ServerRefused as error:
            report = await self.publish_report()
            if adapters is not None and report.active:  # they arrived, and vLLM refused them
                await self._abandon(receive)
            raise UpdateFailed(error.message, partial=report.state == "partial") from error
        if report.error:
            raise UpdateFailed(report.error, partial=report.state == "partial")
        if self._adapters is not None and adapters is not None:
            self._adapters.installed(adapters)
            await self._unload(self._adapters)
        return await self.publish_report()

    async def receive(self, receive: WeightReceive, fetched: FetchReport | None = None) -> WeightReceived:
        """Pause, receive one version over the group, or load one that was fetched, resume. Returns the duration of each phase.

        After a failure, the server is resumed only if its old weights are complete.

        Raises:
            UpdateFailed, ServerDown, BadReply: as :meth:`update_weights`.
        """
        fetched = fetched or FetchReport()
        started = time.perf_counter()
        await self.pause()
        paused = time.perf_counter()
        try:
            report = await self.update_weights(receive, fetched.path)
        except UpdateFailed as error:
            if not error.partial:
                await self.resume()
            raise
        updated = time.perf_counter()
        await self.resume()
        return WeightReceived(
            version=receive.version,
            pause_seconds=paused - started,
            transfer_seconds=fetched.seconds + report.transfer_seconds,
            load_seconds=report.verify_seconds + report.load_seconds + report.finish_seconds,
            resume_seconds=time.perf_counter() - updated,
        )

    async def _unload(self, adapters: AdapterVersions) -> None:
        """Have the server forget names that no request will have: it would keep each until its end."""
        while adapters.dropped:
            with contextlib.suppress(ServerRefused):  # a server that was restarted does not know it
                body = {"lora_name": adapters.dropped[-1]}
                await self._call("POST", "/v1/unload_lora_adapter", body, _CONTROL_SECONDS)
            adapters.dropped.pop()

    async def _abandon(self, receive: WeightReceive) -> None:
        """Abort an update that was started and will not be sent; the worker reports it as failed."""
        info = {"epoch": receive.epoch, "version": receive.version, "abort": True}
        await self._call("POST", "/update_weights", {"update_info": info}, _CONTROL_SECONDS)
        await self._call("POST", "/finish_weight_update", {}, _CONTROL_SECONDS)

    @contextlib.contextmanager
    def _own_adapters(self, body: dict[str, Any]) -> Iterator[AdapterVersion | None]:
        """While the request of ``body`` is in flight, which is given the newest adapters."""
        if self._adapters is None:
            yield None
            return
        with self._adapters.request() as own:
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

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_seconds: float
    ) -> bytes:
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
