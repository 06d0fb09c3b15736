"""The coordinator on the network: aiohttp in front of :class:`~.core.Core`, the journal behind it.

A request goes body → struct → core → journal → answer. Between core and journal nothing awaits, so the order of the
journal is the order of the decisions; and the answer waits until the journal has everything decided so far. Long
polls sleep on an event that the core's ``wake`` sets, never on a timer of their own.

    401 unauthorized    426 wire-version    404 unknown-member    413 too-large    408 slow
    400 bad-request     409 superseded and every other refusal    503 busy         507 no-space
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from scalerl_api import endpoints, wire
from scalerl_coordinator import records as r
from scalerl_coordinator.clock import LogicalClock
from scalerl_coordinator.core import TRAINER, WORK, Core, Refusal
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.journal import Journal, JournalRefused
from scalerl_coordinator.membership import UnknownMember
from scalerl_coordinator.metrics import Metrics
from scalerl_coordinator.rollouts import Rollouts
from scalerl_coordinator.status import view
from scalerl_coordinator.store import load_state, new_member_id
from scalerl_coordinator.training import ShardPlan, Training, fill_shard
from scalerl_tasks import PromptSource

log = logging.getLogger(__name__)

SMALL_BODY_BYTES = 2**20
PUSH_BODY_BYTES = 2**26
HELLO_BODY_BYTES = 2**29
_IN_FLIGHT_BYTES = 2**29
"""Bodies of pushes held at once; above it, actors are told to come back."""
_LONGEST_POLL_SECONDS = 60.0
_BODY_SECONDS = 30.0
_SLOWEST_BYTES_PER_SECOND = 2**19
_TICK_SECONDS = 0.25
_ROTATE_AT_CHECKPOINT_BYTES = 2**20

T = TypeVar("T")
Reply = wire.Struct | bytes
Handler = Callable[[Any], Awaitable[Reply]]


class _Answer(Exception):
    """An answer that is not 2xx."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = error


class _RawPush(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """:class:`wire.Push` with its groups left as they came: those bytes go to the journal."""

    member_id: str
    groups: list[msgspec.Raw]


class Server:
    """One run's coordinator; ``app`` serves it between :meth:`start` and :meth:`close`."""

    def __init__(
        self,
        core: Core,
        journal: Journal,
        files: RunFiles,
        token: str,
        train: PromptSource,
        held_out: PromptSource,
    ) -> None:
        self._core = core
        self._journal = journal
        self._files = files
        self._token = f"Bearer {token}".encode()
        self._prompts = {wire.Split.TRAIN: train, wire.Split.HELD_OUT: held_out}
        self._clock = LogicalClock(time.monotonic() - core.meter.last)
        self._rollouts = Rollouts(core)
        self._training = Training(core)
        self._metrics = Metrics(lambda: view(core), journal.figures)
        self._events = {WORK: asyncio.Event(), TRAINER: asyncio.Event()}
        self._in_flight_bytes = 0
        self._step_groups: tuple[int, str, list[wire.Group]] | None = None
        self._step_lock = asyncio.Lock()
        self._files_lock = asyncio.Lock()
        self._points_written: list[wire.EvaluationPoint] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._closing = False
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the coordinator cannot go on; whoever runs the server ends the process with it."""
        self.app = self._application()
        journal.on_refusal = self._go_back

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring the files up to the state; begin to keep time. The journal is started."""
        self._flush()
        await self._journal.durable()
        await self._write_files(repair=True)
        self._ticker = asyncio.create_task(self._keep_time(), name="coordinator-tick")
        self._ticker.add_done_callback(self._ticker_done)

    def stop_polls(self) -> None:
        """Answer every long poll now, with nothing."""
        self._closing = True
        for event in self._events.values():
            event.set()

    async def close(self) -> None:
        """Journal what is left, with a snapshot; stop."""
        self.stop_polls()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._journal.refusing is None:
            self._core.flush_usage(self._now())
            self._flush()
            self._journal.rotate(self._core.state.encode())
        await self._journal.close()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = self._now()
            if self._journal.refusing is None:
                self._core.tick(now)
                self._training.tick(now)
                self._flush()
                await self._write_files()

    def _ticker_done(self, ticker: asyncio.Task[None]) -> None:
        if not ticker.cancelled() and ticker.exception() is not None and not self.failure.done():
            self.failure.set_exception(ticker.exception() or RuntimeError("the ticker ended"))

    def _now(self) -> float:
        # While nothing can be journaled nothing is delivered either: nobody's time runs.
        return self._clock.read(time.monotonic(), awake=self._journal.refusing is None)

    # --- state and journal ----------------------------------------------------------------------

    def _flush(self) -> None:
        """Queue what was decided for the journal, and wake who has a reason to look again."""
        core, journal = self._core, self._journal
        checkpoint = False
        for record, blob in core.outbox:
            key = record.lease_id if isinstance(record, r.GroupAccepted) else None
            journal.append(r.encode(record), key, blob)
            checkpoint |= isinstance(record, r.CheckpointCommitted)
        core.outbox.clear()
        if core.forgotten:
            journal.forget(core.forgotten)
            core.forgotten.clear()
        if journal.wants_rotation or (checkpoint and journal.segment_size > _ROTATE_AT_CHECKPOINT_BYTES):
            journal.rotate(core.state.encode())
        for topic in core.wake:
            self._events[topic].set()
            self._events[topic] = asyncio.Event()
        core.wake.clear()

    def _decide(self, decision: Callable[[float], T]) -> T:
        """Run one decision of the core; its records are in the journal's queue when this returns."""
        self._journal.check()
        try:
            return decision(self._now())
        finally:
            self._flush()

    def _go_back(self) -> None:
        """The disk took no more: the state returns to what the journal holds."""
        try:
            state = load_state(self._journal)
        except CorruptJournal as problem:
            if not self.failure.done():
                self.failure.set_exception(problem)
            return
        self._core.rebase(state, self._now())
        self._step_groups = None

    async def _poll(self, topic: str, wait_seconds: float, attempt: Callable[[float], T | None]) -> T | None:
        """``attempt`` at once and at every event of ``topic``, until it gives something or time is over."""
        if not (math.isfinite(wait_seconds) and wait_seconds >= 0):
            raise Refusal("bad-request", f"wait_seconds is {wait_seconds}, must be a number of seconds")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_seconds, _LONGEST_POLL_SECONDS)
        while True:
            event = self._events[topic]
            result = self._decide(attempt)
            if result is not None or self._closing or loop.time() >= deadline:
                return result
            try:
                async with asyncio.timeout_at(deadline):
                    await event.wait()
            except TimeoutError:
                return None

    # --- actors ---------------------------------------------------------------------------------

    async def _register(self, request: wire.Register) -> wire.Registered:
        return self._decide(lambda now: self._rollouts.register(request, new_member_id(request.name), now))

    async def _heartbeat(self, request: wire.Heartbeat) -> wire.Ack:
        if self._journal.refusing is not None:
            self._core.membership.get(request.member_id, self._now())
            return wire.Ack()
        self._decide(lambda now: self._rollouts.heartbeat(request, now))
        return wire.Ack()

    async def _lease(self, request: wire.LeaseRequest) -> wire.Leases:
        self._decide(lambda now: self._rollouts.arrive(request, now))
        leases = await self._poll(
            WORK,
            request.wait_seconds,
            lambda now: self._rollouts.offer(request.member_id, request.max_groups, now),
        )
        if leases is None or not leases.leases:
            return leases or wire.Leases(leases=[])
        # Generated tasks make a prompt to know its id: not on the event loop.
        ids = await asyncio.to_thread(
            lambda: [self._prompts[lease.split][lease.prompt_index].id for lease in leases.leases]
        )
        for lease, prompt_id in zip(leases.leases, ids, strict=True):
            self._core.book.set_prompt_id(lease.lease_id, prompt_id)
        return wire.Leases(
            leases=[
                msgspec.structs.replace(lease, prompt_id=prompt_id)
                for lease, prompt_id in zip(leases.leases, ids, strict=True)
            ]
        )

    async def _push(self, request: _RawPush) -> wire.PushReply:
        groups = []
        for index, raw in enumerate(request.groups):
            try:
                groups.append(_decode_group(raw))
            except msgspec.DecodeError as problem:
                raise _Answer(400, "bad-request", str(problem).replace("`$", f"`$.groups[{index}]")) from None

        def take(now: float) -> list[tuple[wire.PushResult, str | None]]:
            self._core.membership.get(request.member_id, now)
            return [
                self._rollouts.push(request.member_id, group, bytes(raw), now)
                for group, raw in zip(groups, request.groups, strict=True)
            ]

        verdicts = self._decide(take)
        return wire.PushReply(results=[v for v, _ in verdicts], reasons=[reason for _, reason in verdicts])

    async def _release(self, request: wire.Release) -> wire.Ack:
        self._decide(lambda now: self._rollouts.release(request, now))
        return wire.Ack()

    # --- trainer --------------------------------------------------------------------------------

    async def _hello(self, request: wire.TrainerHello) -> wire.TrainerWelcome:
        welcome = self._decide(lambda now: self._training.hello(request, now))
        await self._journal.durable()
        self._step_groups = None
        await self._write_files(repair=True)
        return welcome

    async def _next(self, request: wire.NextRequest) -> wire.Next:
        found = await self._poll(TRAINER, request.wait_seconds, lambda now: self._training.next(request, now))
        return found or wire.Next(action=wire.NextAction.WAIT, step=request.version)

    async def _shard(self, request: wire.ShardRequest) -> bytes:
        plan = self._decide(lambda _: self._training.plan_shard(request))
        groups = await self._groups_of(plan)
        return await asyncio.to_thread(lambda: msgspec.msgpack.encode(fill_shard(plan, groups)))

    async def _groups_of(self, plan: ShardPlan) -> list[wire.Group]:
        """The groups of a step, read once for all ranks; kept until its report."""
        async with self._step_lock:
            cached = self._step_groups
            if cached is None or cached[:2] != (plan.step, plan.lease_ids[0]):
                self._step_groups = None
                await self._journal.durable()
                groups = await asyncio.to_thread(self._read_groups, plan.lease_ids)
                self._step_groups = cached = (plan.step, plan.lease_ids[0], groups)
            return cached[2]

    def _read_groups(self, lease_ids: list[str]) -> list[wire.Group]:
        return [_decode_group(blob) for blob in self._journal.read(lease_ids)]

    async def _step(self, report: wire.StepReport) -> wire.Ack:
        row = self._decide(lambda now: self._training.step(report, now))
        await self._journal.durable()
        self._step_groups = None
        if row is not None:
            async with self._files_lock:
                await self._on_files(lambda: self._files.append(row))
        return wire.Ack()

    async def _publish_begin(self, request: wire.PublishBegin) -> wire.PublishPermit:
        permit = await self._poll(
            TRAINER, request.wait_seconds, lambda now: self._training.publish_begin(request, now)
        )
        return permit or wire.PublishPermit(ready=False, members=[])

    async def _publish_commit(self, request: wire.PublishCommit) -> wire.Ack:
        self._decide(lambda now: self._training.publish_commit(request, now))
        return wire.Ack()

    async def _checkpoint_begin(self, request: wire.CheckpointBegin) -> wire.CheckpointSnapshot:
        return self._decide(lambda now: self._training.checkpoint_begin(request, now))

    async def _checkpoint_commit(self, request: wire.CheckpointCommit) -> wire.Ack:
        # What the journal forgets now, metrics.jsonl has to have.
        await self._write_files(repair=True)
        self._decide(lambda now: self._training.checkpoint_commit(request, now))
        return wire.Ack()

    # --- anyone ---------------------------------------------------------------------------------

    async def _stop(self, request: wire.Stop) -> wire.Ack:
        self._decide(lambda now: self._core.stop(request.reason, now))
        return wire.Ack()

    async def _status(self, request: web.Request) -> web.Response:
        return _response(msgspec.msgpack.encode(view(self._core)))

    async def _ready(self, request: web.Request) -> web.Response:
        if self._closing or self._journal.refusing is not None:
            return web.Response(status=503, text="the journal cannot be written\n")
        return web.Response(text="ready\n")

    # --- files ----------------------------------------------------------------------------------

    async def _write_files(self, *, repair: bool = False) -> None:
        state = self._core.state
        points = list(state.points)
        if not repair and points == self._points_written:
            return
        async with self._files_lock:
            if repair:
                rows, version = dict(state.rows), state.version
                await self._on_files(lambda: self._files.repair(rows, version))
            if await self._on_files(lambda: self._files.write_curve(points)):
                self._points_written = points

    async def _on_files(self, write: Callable[[], None]) -> bool:
        """Files for people do not hold up the run: the journal has it all, and repairs them later."""
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            log.error("metrics.jsonl or curve.csv not written: %s", error)
            return False
        return True

    # --- HTTP -----------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        app = web.Application()
        for path, kind, limit, handler in (
            (endpoints.MEMBERS, wire.Register, SMALL_BODY_BYTES, self._register),
            (endpoints.HEARTBEAT, wire.Heartbeat, SMALL_BODY_BYTES, self._heartbeat),
            (endpoints.LEASE, wire.LeaseRequest, SMALL_BODY_BYTES, self._lease),
            (endpoints.GROUPS, _RawPush, PUSH_BODY_BYTES, self._push),
            (endpoints.RELEASE, wire.Release, SMALL_BODY_BYTES, self._release),
            (endpoints.TRAINER_HELLO, wire.TrainerHello, HELLO_BODY_BYTES, self._hello),
            (endpoints.TRAINER_NEXT, wire.NextRequest, SMALL_BODY_BYTES, self._next),
            (endpoints.TRAINER_SHARD, wire.ShardRequest, SMALL_BODY_BYTES, self._shard),
            (endpoints.TRAINER_STEP, wire.StepReport, SMALL_BODY_BYTES, self._step),
            (endpoints.PUBLISH_BEGIN, wire.PublishBegin, SMALL_BODY_BYTES, self._publish_begin),
            (endpoints.PUBLISH_COMMIT, wire.PublishCommit, SMALL_BODY_BYTES, self._publish_commit),
            (endpoints.CHECKPOINT_BEGIN, wire.CheckpointBegin, SMALL_BODY_BYTES, self._checkpoint_begin),
            (endpoints.CHECKPOINT_COMMIT, wire.CheckpointCommit, SMALL_BODY_BYTES, self._checkpoint_commit),
            (endpoints.STOP, wire.Stop, SMALL_BODY_BYTES, self._stop),
        ):
            app.router.add_post(path, self._endpoint(path, kind, limit, handler))
        app.router.add_get(endpoints.STATUS, self._guarded(endpoints.STATUS, self._status))
        app.router.add_get(endpoints.HEALTH, _health)
        app.router.add_get(endpoints.READY, self._ready)
        app.router.add_get(endpoints.METRICS, self._metrics_text)
        return app

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")

    def _endpoint(
        self, path: str, kind: type[Any], limit: int, handler: Handler
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        decode = msgspec.msgpack.Decoder(kind).decode

        async def answer(request: web.Request) -> web.Response:
            body = await self._body(request, limit)
            try:
                self._metrics.received_bytes.inc(len(body))
                message = decode(body)
                reply = await handler(message)
            finally:
                self._in_flight_bytes -= len(body)
            if path != endpoints.HEARTBEAT:
                # Nothing leaves before everything it rests upon is on disk; that somebody lives rests upon nothing.
                await self._journal.durable()
            return _response(reply if isinstance(reply, bytes) else msgspec.msgpack.encode(reply))

        return self._guarded(path, answer)

    def _guarded(
        self, path: str, answer: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """``answer`` behind the token and the wire version, its errors as :class:`wire.Problem`."""

        async def guarded(request: web.Request) -> web.Response:
            try:
                self._check_headers(request)
                response = await answer(request)
            except _Answer as problem:
                response = _problem(problem.status, problem.error, str(problem))
            except msgspec.DecodeError as problem:
                response = _problem(400, "bad-request", str(problem))
            except UnknownMember as problem:
                response = _problem(404, "unknown-member", str(problem))
            except Refusal as problem:
                status = 400 if problem.error in ("bad-request", "bad-snapshot") else 409
                response = _problem(status, problem.error, str(problem))
            except JournalRefused as problem:
                response = _problem(507, "no-space", f"{problem}; nothing was taken in, try again later")
            except KeyError as problem:
                # The step was forgotten while its groups were being read.
                response = _problem(409, "not-ready", f"group {problem} is forgotten")
            self._metrics.requests.labels(path, str(response.status)).inc()
            return response

        return guarded

    def _check_headers(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._token):
            raise _Answer(401, "unauthorized", "the run's bearer token is missing or wrong")
        version = request.headers.get(wire.WIRE_HEADER)
        if version != str(wire.WIRE_VERSION):
            raise _Answer(
                426,
                "wire-version",
                f"you speak wire version {version or 'none'}, the coordinator {wire.WIRE_VERSION}; "
                f"update the older one",
            )

    async def _body(self, request: web.Request, limit: int) -> bytes:
        """The request's body, counted as in flight; the caller takes it off the count."""
        length = request.content_length
        if length is None or length > limit:
            raise _Answer(
                413, "too-large", f"the body has {length} bytes, at most {limit} are taken; send less"
            )
        if self._in_flight_bytes + length > _IN_FLIGHT_BYTES and self._in_flight_bytes:
            raise _Answer(503, "busy", f"{self._in_flight_bytes} bytes are being taken in; try again shortly")
        self._in_flight_bytes += length
        chunks: list[bytes] = []
        received = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS + length / _SLOWEST_BYTES_PER_SECOND):
                async for chunk in request.content.iter_any():
                    received += len(chunk)
                    chunks.append(chunk)
        except TimeoutError:
            raise _Answer(408, "slow", f"{received} of {length} bytes came in time") from None
        finally:
            if received != length:
                self._in_flight_bytes -= length
        if received != length:
            raise _Answer(400, "bad-request", f"{received} bytes came, {length} were announced")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


_decode_group = msgspec.msgpack.Decoder(wire.Group).decode


def _response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=wire.CONTENT_TYPE)


def _problem(status: int, error: str, message: str) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.msgpack.encode(wire.Problem(error=error, message=message)),
        content_type=wire.CONTENT_TYPE,
    )


async def _health(request: web.Request) -> web.Response:
    return web.Response(text="alive\n")
