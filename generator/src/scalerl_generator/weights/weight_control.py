"""Executes the trainer's requests for weight updates (:mod:`.actor_api`) on the vLLM server.

Only the actor calls the vLLM server's development endpoints, on loopback; the trainer calls the actor, with the run's
token. There is one update at a time: a request during another update waits for it, up to its own timeout, and then fails
as ``busy``. That happens when the trainer restarts during a publish: the server is busy until the old broadcast times out.
Only a join does not wait for an unfinished join, which it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np

from scalerl_api.wire import Ack, GroupJoin, Probe, Probed, WeightReceive, WeightReceived
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_client import VllmClient, gather_all
from scalerl_generator.vllm_replies import VllmError
from scalerl_generator.weights.update_client import WeightUpdateClient
from scalerl_generator.weights.update_reports import (
    FetchContinues,
    FetchReport,
    FetchStalled,
    FetchUnreachable,
    UpdateFailed,
)

logger = logging.getLogger("scalerl.actor.control")

_PROBE_SECONDS = 60.0
_INT32_BYTES = 4


class ControlProblem(Exception):
    """An error response with a :class:`~scalerl_api.wire.Problem`."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status, self.error = status, error


class WeightControl:
    """The actor's three weight endpoints."""

    def __init__(
        self, server: VllmClient, state: ServerState, busy: BusyClock, metrics: ActorMetrics
    ) -> None:
        self._server, self._state, self._busy, self._metrics = server, state, busy, metrics
        self._weights = WeightUpdateClient(server)
        self._lock = asyncio.Lock()
        self._joins = 0
        """Number of requests to join so far."""
        self._joining: asyncio.Future[None] | None = None
        """The server's join in progress."""
        self._epoch: int | None = None

    async def join(self, request: GroupJoin) -> Ack:
        """Make the server join a new process group, which ends an unfinished join of another one.

        Raises:
            ControlProblem: ``not-ready``, ``busy`` or ``join-failed``.
        """
        started = time.monotonic()
        self._joins += 1
        join = self._joins
        if self._joining is not None:
            self._joining.cancel()
        async with self._exclusive(request.timeout_seconds):
            self._epoch = None
            left = max(1.0, request.timeout_seconds - (time.monotonic() - started))
            self._joining = asyncio.ensure_future(
                self._weights.init_group(msgspec.structs.replace(request, timeout_seconds=left))
            )
            if join != self._joins:
                self._joining.cancel()
            try:
                await self._joining
            except asyncio.CancelledError:
                if join == self._joins:  # the request itself is cancelled
                    raise
                message = f"group of epoch {request.epoch}: the request of another join has ended this one"
                raise ControlProblem(409, "join-failed", message) from None
            except VllmError as error:
                raise ControlProblem(
                    502, "join-failed", f"group of epoch {request.epoch}: {error}"
                ) from error
            finally:
                self._joining = None
            self._epoch = request.epoch
            logger.info("joined group %d as rank %d of %d", request.epoch, request.rank, request.world_size)
        return Ack()

    async def receive(self, request: WeightReceive) -> WeightReceived:
        """Make the server receive one version. Its requests in flight are paused meanwhile and keep their KV cache.

        Raises:
            ControlProblem: ``not-ready``, ``busy``, ``wrong-epoch``, ``fetch-failed``, ``fetch-stalled``, ``fetch-unreachable``,
                ``fetch-continues`` or ``update-failed``.
        """
        async with self._exclusive(request.timeout_seconds):
            fetched, started = None, time.monotonic()
            if request.files is not None:
                fetched = await self._fetch(request)
                left = max(1.0, request.timeout_seconds - (time.monotonic() - started))
                request = msgspec.structs.replace(request, timeout_seconds=left)
            elif self._epoch != request.epoch:
                raise ControlProblem(
                    409,
                    "wrong-epoch",
                    f"in the group of epoch {self._epoch}, not {request.epoch}: join first",
                )
            self._state.begin_update()
            self._busy.pause()
            return await self._install(request, fetched)

    async def _fetch(self, request: WeightReceive) -> FetchReport:
        """Make the server read the version's files, while it generates."""
        try:
            return await self._weights.fetch(request)
        except VllmError as error:
            logger.error("version %d not read: %s", request.version, error)
            self._metrics.update_failures.inc()
            codes: dict[type[VllmError], str] = {
                FetchContinues: "fetch-continues",
                FetchStalled: "fetch-stalled",
                FetchUnreachable: "fetch-unreachable",
            }
            code = codes.get(type(error), "fetch-failed")
            raise ControlProblem(502, code, f"version {request.version}: {error}") from error

    async def _install(self, request: WeightReceive, fetched: FetchReport | None) -> WeightReceived:
        started = time.monotonic()
        try:
            received = await self._weights.install(request, fetched)
        except BaseException as error:  # the update must end after any exception, a cancellation included
            old_weights_whole = isinstance(error, UpdateFailed) and not error.partial
            self._epoch = None
            self._metrics.update_failures.inc()
            if old_weights_whole:
                self._busy.unpause()
            logger.error("version %d not received: %s: %s", request.version, type(error).__name__, error)
            self._state.fail_update(weights_whole=old_weights_whole)
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
        """Score sequences under the server's current weights, at temperature 1.

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
        """Serialize weight requests. Raises ControlProblem ``busy`` or ``not-ready``."""
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
