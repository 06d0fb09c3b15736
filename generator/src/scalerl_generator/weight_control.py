"""The actor's HTTP API: weight updates for the trainer, probes and metrics for anyone.

Only the actor calls the vLLM server's development endpoints, on loopback; the trainer calls the actor, with the run's
token. One update at a time: a request during another waits for it within its own timeout (after a trainer restart in the
middle of a publish, the server is busy until the old broadcast times out), and is refused after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
from aiohttp import web

from scalerl_api import endpoints
from scalerl_api.wire import (
    CONTENT_TYPE,
    WIRE_HEADER,
    WIRE_VERSION,
    Ack,
    GroupJoin,
    Probe,
    Probed,
    Problem,
    Struct,
    WeightReceive,
    WeightReceived,
)
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_client import VllmClient, gather_all
from scalerl_generator.vllm_replies import UpdateFailed, VllmError

logger = logging.getLogger("scalerl.actor.control")

_PROBE_SECONDS = 60.0
_MAX_BODY_BYTES = 256 << 20
_INT32_BYTES = 4

Message = TypeVar("Message", bound=Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ControlProblem(Exception):
    """An answer that is not 200, as a :class:`~scalerl_api.wire.Problem`."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status, self.error = status, error


class WeightControl:
    """The three weight endpoints."""

    def __init__(
        self, server: VllmClient, state: ServerState, busy: BusyClock, metrics: ActorMetrics
    ) -> None:
        self._server, self._state, self._busy, self._metrics = server, state, busy, metrics
        self._lock = asyncio.Lock()
        self._epoch: int | None = None

    async def join(self, request: GroupJoin) -> Ack:
        """Make the server join a new process group.

        Raises:
            ControlProblem: ``not-ready``, ``busy`` or ``join-failed``.
        """
        started = time.monotonic()
        async with self._exclusive(request.timeout_seconds):
            self._epoch = None
            left = max(1.0, request.timeout_seconds - (time.monotonic() - started))
            try:
                await self._server.init_group(msgspec.structs.replace(request, timeout_seconds=left))
            except VllmError as error:
                raise ControlProblem(
                    502, "join-failed", f"group of epoch {request.epoch}: {error}"
                ) from error
            self._epoch = request.epoch
            logger.info("joined group %d as rank %d of %d", request.epoch, request.rank, request.world_size)
        return Ack()

    async def receive(self, request: WeightReceive) -> WeightReceived:
        """Make the server receive a version while its requests in flight wait.

        Raises:
            ControlProblem: ``not-ready``, ``busy``, ``wrong-epoch`` or ``update-failed``.
        """
        async with self._exclusive(request.timeout_seconds):
            if self._epoch != request.epoch:
                raise ControlProblem(
                    409,
                    "wrong-epoch",
                    f"in the group of epoch {self._epoch}, not {request.epoch}: join first",
                )
            self._state.begin_update()
            self._busy.pause()
            return await self._receive(request)

    async def _receive(self, request: WeightReceive) -> WeightReceived:
        started = time.monotonic()
        try:
            received = await self._server.receive(request)
        except BaseException as error:  # after a bug or a cancellation too, the update must end
            whole = isinstance(error, UpdateFailed) and not error.partial
            self._epoch = None
            self._metrics.update_failures.inc()
            if whole:
                self._busy.unpause()
            logger.error("version %d not received: %s: %s", request.version, type(error).__name__, error)
            self._state.fail_update(weights_whole=whole)
            if not isinstance(error, VllmError):
                raise
            raise ControlProblem(502, "update-failed", f"version {request.version}: {error}") from error
        self._busy.unpause()
        self._state.complete_update(request.version)
        for phase in ("pause", "transfer", "load", "resume"):
            self._metrics.update_seconds.labels(phase).observe(getattr(received, f"{phase}_seconds"))
        logger.info("version %d received in %.3f s", request.version, time.monotonic() - started)
        return received

    async def probe(self, request: Probe) -> Probed:
        """Score sequences under the weights held now, at temperature 1.

        Raises:
            ControlProblem: ``not-ready``, ``busy``, ``wrong-version``, ``malformed`` or ``probe-failed``.
        """
        if len(request.sequences) != len(request.prompt_tokens):
            raise ControlProblem(400, "malformed", "sequences and prompt_tokens differ in number")
        sequences: list[list[int]] = []
        for i, (data, start) in enumerate(zip(request.sequences, request.prompt_tokens, strict=True)):
            if len(data) % _INT32_BYTES or not 0 < start < len(data) // _INT32_BYTES:
                raise ControlProblem(
                    400, "malformed", f"sequence {i}: no completion after {start} prompt tokens"
                )
            sequences.append(np.frombuffer(data, dtype="<i4").tolist())
        async with self._exclusive(_PROBE_SECONDS):
            if not self._state.is_serving or self._state.version != request.version:
                raise ControlProblem(
                    409, "wrong-version", f"holds {self._state.version}, not {request.version}"
                )
            try:
                scores = await gather_all(
                    self._server.prompt_logprobs(ids, timeout_seconds=_PROBE_SECONDS) for ids in sequences
                )
            except VllmError as error:
                raise ControlProblem(502, "probe-failed", str(error)) from error
        logprobs = [
            score[start - 1 :].astype("<f4").tobytes()
            for score, start in zip(scores, request.prompt_tokens, strict=True)
        ]
        return Probed(version=request.version, logprobs=logprobs)

    @contextlib.asynccontextmanager
    async def _exclusive(self, timeout_seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._lock.acquire()
        except TimeoutError:
            message = f"another weight request is still in progress after {timeout_seconds:g} s"
            raise ControlProblem(409, "busy", message) from None
        try:
            if not self._state.up:
                raise ControlProblem(503, "not-ready", "the vLLM server does not answer")
            yield
        finally:
            self._lock.release()


def control_app(
    control: WeightControl, metrics: ActorMetrics, token: str, is_ready: Callable[[], str | None]
) -> web.Application:
    """The actor's HTTP application.

    Args:
        token: the bearer token that ``/v1/`` requests need.
        is_ready: returns why the actor accepts no work, or None if it does.
    """

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        reason = is_ready()
        return (
            web.Response(text="ready\n") if reason is None else web.Response(status=503, text=reason + "\n")
        )

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application(middlewares=[_guard(token)], client_max_size=_MAX_BODY_BYTES)
    app.router.add_get(endpoints.HEALTH, health)
    app.router.add_get(endpoints.READY, ready)
    app.router.add_get(endpoints.METRICS, exposition)
    app.router.add_post(endpoints.WEIGHTS_JOIN, _handler(GroupJoin, control.join))
    app.router.add_post(endpoints.WEIGHTS_RECEIVE, _handler(WeightReceive, control.receive))
    app.router.add_post(endpoints.WEIGHTS_PROBE, _handler(Probe, control.probe))
    return app


def control_runner(app: web.Application) -> web.AppRunner:
    """The aiohttp runner of ``app``. It decompresses no body: a few compressed KB can be gigabytes, and aiohttp would
    decompress them before the token is checked.
    """
    return web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)


def _handler(kind: type[Message], answer: Callable[[Message], Awaitable[Struct]]) -> Handler:
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    async def handle(request: web.Request) -> web.Response:
        try:
            message = decoder.decode(await request.read())
        except msgspec.DecodeError as error:
            raise ControlProblem(400, "malformed", f"not a {kind.__name__}: {error}") from error
        return _response(200, await answer(message))

    return handle


def _guard(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.startswith("/v1/"):
            return await handler(request)
        try:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not secrets.compare_digest(given, expected):
                raise ControlProblem(401, "unauthorized", "the run's token is missing or wrong")
            version = request.headers.get(WIRE_HEADER, "none")
            if version != str(WIRE_VERSION):
                raise ControlProblem(
                    426, "wire-version", f"the request has wire version {version}, the actor {WIRE_VERSION}"
                )
            encoding = request.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise ControlProblem(415, "encoded", f"send the body without the encoding {encoding!r}")
            return await handler(request)
        except ControlProblem as problem:
            return _response(problem.status, Problem(error=problem.error, message=str(problem)))

    return guard


def _response(status: int, body: Struct) -> web.Response:
    return web.Response(status=status, body=msgspec.msgpack.encode(body), content_type=CONTENT_TYPE)
