"""The only caller of the vLLM server's HTTP API: token ids in, token ids and log-probabilities out.

Errors::

    VllmError
    ├── ServerDown         no connection, or no answer in time
    ├── ServerRefused      an answer that is not 200: ``status`` and ``message``
    ├── GenerationFailed   an answer that cannot be trained on (aborted, or not finite)
    └── UpdateFailed       weights were not taken; ``torn`` says what the server holds now

Every call has a timeout. The client holds one connection pool and belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from scalerl_api.wire import GroupJoin, WeightReceive, WeightReceived

UNVERSIONED = -1
"""Version of the weights a server has started with, before any update told it a number."""

_CONTROL_SECONDS = 30.0
_MARGIN_SECONDS = 15.0
"""How much longer than the worker's own deadline the client waits for the worker's verdict."""

_GENERATE = "/inference/v1/generate"
_KEEP_ALIVE_SECONDS = 30.0
"""Shorter than the server's, so that it is always the client that closes an idle connection."""

_CLAMPED = -9999.0
"""vLLM writes this for a log-probability that is missing, minus infinity or NaN."""


class VllmError(Exception):
    """Base of what a :class:`VllmClient` raises."""


class ServerDown(VllmError):
    """No connection, a connection that broke, or no answer within the timeout."""


class ServerRefused(VllmError):
    """The server answered, but not with 200."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"{path}: HTTP {status}: {message}")
        self.status = status
        self.message = message


class GenerationFailed(VllmError):
    """The server answered with completions that must not be trained on."""


class UpdateFailed(VllmError):
    """An update of weights did not succeed.

    ``torn``: layers of both versions are mixed and the server stays paused; only a successful update
    mends it. Otherwise the weights of before are whole.
    """

    def __init__(self, message: str, *, torn: bool) -> None:
        super().__init__(
            f"{message}; the server holds {'a mixture of versions' if torn else 'its old weights'}"
        )
        self.torn = torn


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of a completion were sampled under weights ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion.

    ``token_ids`` ends with the stop token if there was one. ``logprobs`` are natural logarithms under the
    distribution sampled from, that is after temperature and truncation: at ``top_p=1`` and ``top_k=0``,
    ``log_softmax(logits / temperature)``.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    weight_versions: tuple[Span, ...]
    finish_reason: Literal["stop", "length"]


class _SpanReply(msgspec.Struct):
    version: str
    start: int
    end: int


class _LogprobReply(msgspec.Struct):
    logprob: float


class _LogprobsReply(msgspec.Struct):
    content: list[_LogprobReply]


class _ChoiceReply(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _LogprobsReply | None = None
    weight_versions: list[_SpanReply] | None = None


class _GenerateReply(msgspec.Struct):
    choices: list[_ChoiceReply]
    prompt_logprobs: list[dict[str, _LogprobReply] | None] | None = None


class _VersionReply(msgspec.Struct):
    weight_version: str


class _ErrorDetail(msgspec.Struct):
    message: str


class _ErrorReply(msgspec.Struct):
    error: _ErrorDetail


class PublishReport(msgspec.Struct, frozen=True):
    """What a worker says of its last update (``scalerl_generator.vllm_worker.PublishReport``)."""

    state: Literal["whole", "torn"]
    version: int | None
    tensors: int
    buckets: int
    bytes: int
    transfer_seconds: float
    verify_seconds: float
    load_seconds: float
    finish_seconds: float


class _RpcReply(msgspec.Struct):
    results: list[PublishReport]


_DECODE_GENERATE = msgspec.json.Decoder(_GenerateReply).decode
_ENCODE = msgspec.json.Encoder().encode


def _version(label: str) -> int:
    return UNVERSIONED if label == "default" else int(label)


def _sampled(choice: _ChoiceReply) -> Sampled:
    if choice.finish_reason not in ("stop", "length"):
        raise GenerationFailed(f"completion {choice.index} finished by {choice.finish_reason!r}")
    token_ids = np.array(choice.token_ids, dtype=np.int32)
    content = choice.logprobs.content if choice.logprobs is not None else []
    if len(content) != len(token_ids):
        raise GenerationFailed(
            f"completion {choice.index}: {len(token_ids)} tokens, {len(content)} log-probabilities"
        )
    logprobs = np.fromiter((entry.logprob for entry in content), dtype=np.float32, count=len(content))
    if len(logprobs) and not logprobs.min() > _CLAMPED:
        raise GenerationFailed(f"completion {choice.index}: a sampled token has no finite log-probability")
    spans = tuple(Span(_version(s.version), s.start, s.end) for s in choice.weight_versions or ())
    return Sampled(token_ids, logprobs, spans, choice.finish_reason)  # type: ignore[arg-type]  # checked above


class VllmClient:
    """Async client of one server.

    Args:
        base_url: such as ``http://127.0.0.1:8000``.
        token: what the server was started with (``SCALERL_VLLM_TOKEN``).

    Use as an async context manager, or call :meth:`close`.
    """

    def __init__(self, base_url: str, token: str) -> None:
        self._base = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._pooled: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; requests in flight fail with :class:`ServerDown`."""
        sessions, self._pooled, self._fresh = (self._pooled, self._fresh), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    async def health(self, timeout_seconds: float = 5.0) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            await self._call("GET", "/health", None, timeout_seconds)
        except VllmError:
            return False
        return True

    async def wait_until_ready(self, timeout_seconds: float) -> None:
        """Return once :meth:`health` is true.

        Raises:
            ServerDown: not within ``timeout_seconds``.
        """
        deadline = time.monotonic() + timeout_seconds
        while not await self.health():
            if time.monotonic() > deadline:
                raise ServerDown(f"{self._base} was not ready in {timeout_seconds:g} s")
            await asyncio.sleep(0.2)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        cache_salt: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> list[Sampled]:
        """Sample ``n`` completions of one prompt.

        Args:
            stop_token_ids: generation ends with the first of these; it is the last of ``token_ids``. The
                model's own end-of-sequence token ends it too.
            cache_salt: cached prefixes are shared among equal salts only. Put the weight version in it:
                an update of the weights does not drop what older ones have cached.

        Raises:
            ServerDown, ServerRefused, GenerationFailed
        """
        params: dict[str, Any] = {
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "logprobs": 0,  # the sampled token's, and no alternatives
            "stop_token_ids": list(stop_token_ids),
            "detokenize": False,
        }
        if seed is not None:
            params["seed"] = seed
        reply = await self._generate(prompt_token_ids, params, cache_salt, timeout_seconds)
        if len(reply.choices) != n:
            raise GenerationFailed(f"asked for {n} completions, got {len(reply.choices)}")
        return [_sampled(choice) for choice in sorted(reply.choices, key=lambda choice: choice.index)]

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, cache_salt: str | None = None, timeout_seconds: float = 60.0
    ) -> NDArray[np.float32]:
        """Score a sequence under the current weights at temperature 1.

        Returns:
            Shape ``[len(token_ids) - 1]``: entry ``i`` is the log-probability of ``token_ids[i + 1]`` after
            ``token_ids[: i + 1]``. Always computed, never read from a cache.
        """
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        reply = await self._generate(token_ids, params, cache_salt, timeout_seconds)
        rows = reply.prompt_logprobs
        if rows is None or len(rows) != len(token_ids):
            raise GenerationFailed(f"asked to score {len(token_ids)} tokens, got {rows and len(rows)} rows")
        scores = [row[str(token)].logprob for token, row in zip(token_ids[1:], rows[1:], strict=True) if row]
        logprobs = np.array(scores, dtype=np.float32)
        if len(logprobs) != len(token_ids) - 1 or not np.isfinite(logprobs).all():
            raise GenerationFailed("a prompt token has no finite log-probability")
        return logprobs

    async def pause(self) -> None:
        """Freeze generation between two tokens; requests in flight keep their KV cache and wait.

        ``clear_cache=false`` is what keeps it: without, vLLM drops every cache also in mode ``keep``, and
        what is in flight is computed again from its first token, under the weights it resumes with.
        """
        await self._call("POST", "/pause?mode=keep&clear_cache=false", {}, _CONTROL_SECONDS)

    async def resume(self) -> None:
        """Let frozen requests go on, under the weights the server holds now."""
        await self._call("POST", "/resume", {}, _CONTROL_SECONDS)

    async def weight_version(self) -> int:
        """Version of the last finished update, or :data:`UNVERSIONED`."""
        body = await self._call("GET", "/weight_info", None, _CONTROL_SECONDS)
        return _version(msgspec.json.decode(body, type=_VersionReply).weight_version)

    async def set_weight_version(self, version: int) -> None:
        """Say which version the weights loaded from disk are."""
        await self._call("POST", "/update_weight_version", {"new_version": str(version)}, _CONTROL_SECONDS)

    async def publish_report(self) -> PublishReport:
        """The last update as the slowest worker saw it; ``torn`` if any worker is."""
        body = await self._call(
            "POST", "/collective_rpc", {"method": "scalerl_publish_report"}, _CONTROL_SECONDS
        )
        reports = msgspec.json.decode(body, type=_RpcReply).results
        return max(reports, key=lambda r: (r.state == "torn", r.transfer_seconds + r.load_seconds))

    async def init_group(self, join: GroupJoin) -> None:
        """Join a process group, leaving any other.

        Raises:
            ServerRefused: the group did not form within ``join.timeout_seconds``.
        """
        body = {"init_info": msgspec.to_builtins(join)}
        await self._call("POST", "/init_weight_transfer_engine", body, join.timeout_seconds + _MARGIN_SECONDS)

    async def shutdown_group(self) -> None:
        """Leave the process group, if in one."""
        await self._call("POST", "/shutdown_weight_transfer_engine", {}, _CONTROL_SECONDS)

    async def update_weights(self, receive: WeightReceive) -> PublishReport:
        """Take one version over the group. Call between :meth:`pause` and :meth:`resume`.

        Raises:
            UpdateFailed: not taken. The server has left the group and can join another.
            ServerDown: the server is gone or stuck; its state is unknown.
        """
        info = msgspec.to_builtins(receive)
        seconds = receive.timeout_seconds + _MARGIN_SECONDS
        try:
            try:
                await self._call("POST", "/start_weight_update", {}, _CONTROL_SECONDS)
            except ServerRefused as error:
                if "already active" not in error.message:
                    raise
                await self._abandon(receive)  # left behind by a client that died
                await self._call("POST", "/start_weight_update", {}, _CONTROL_SECONDS)
            await self._call("POST", "/update_weights", {"update_info": info}, seconds)
            finish = {"weight_version": str(receive.version)}
            await self._call("POST", "/finish_weight_update", finish, _CONTROL_SECONDS)
        except ServerRefused as error:
            report = await self.publish_report()
            raise UpdateFailed(error.message, torn=report.state == "torn") from error
        return await self.publish_report()

    async def receive(self, receive: WeightReceive) -> WeightReceived:
        """Pause, take one version over the group, resume. Returns the seconds of each phase.

        After a failure the server is resumed only if it still holds its old weights whole.

        Raises:
            UpdateFailed, ServerDown: as :meth:`update_weights`.
        """
        started = time.perf_counter()
        await self.pause()
        paused = time.perf_counter()
        try:
            report = await self.update_weights(receive)
        except UpdateFailed as error:
            if not error.torn:
                await self.resume()
            raise
        updated = time.perf_counter()
        await self.resume()
        return WeightReceived(
            version=receive.version,
            pause_seconds=paused - started,
            transfer_seconds=report.transfer_seconds,
            load_seconds=report.verify_seconds + report.load_seconds + report.finish_seconds,
            resume_seconds=time.perf_counter() - updated,
        )

    async def _abandon(self, receive: WeightReceive) -> None:
        """End an update nobody sends: the worker refuses it, which is how it leaves the update."""
        info = {"epoch": receive.epoch, "version": receive.version, "abort": True}
        try:
            await self._call("POST", "/update_weights", {"update_info": info}, _CONTROL_SECONDS)
        except ServerRefused as error:
            if "aborted by the client" not in error.message:
                raise

    async def _generate(
        self, token_ids: Sequence[int], params: dict[str, Any], cache_salt: str | None, timeout_seconds: float
    ) -> _GenerateReply:
        body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": params}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        return _DECODE_GENERATE(await self._call("POST", _GENERATE, body, timeout_seconds))

    def _session_for(self, path: str) -> aiohttp.ClientSession:
        """Generation shares a pool; all else gets a connection of its own.

        The server closes a connection after an internal error, and control requests are made right after
        one: on a pooled connection they would race with that close.
        """
        if path == _GENERATE:
            if self._pooled is None:
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
                self._pooled = aiohttp.ClientSession(connector=connector, headers=self._headers)
            return self._pooled
        if self._fresh is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._fresh = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._fresh

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_seconds: float
    ) -> bytes:
        session = self._session_for(path)
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=min(5.0, timeout_seconds))
        data = None if body is None else _ENCODE(body)
        try:
            async with session.request(method, self._base + path, data=data, timeout=timeout) as response:
                content = await response.read()
                status = response.status
        except TimeoutError as error:
            raise ServerDown(f"{self._base}{path}: no answer in {timeout_seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise ServerDown(f"{self._base}{path}: {error}") from error
        if status != 200:
            raise ServerRefused(path, status, _error_message(content))
        return content


def _error_message(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=_ErrorReply).error.message
    except msgspec.DecodeError:
        return content[:500].decode(errors="replace")
