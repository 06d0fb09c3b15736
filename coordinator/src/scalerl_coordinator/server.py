"""The coordinator's HTTP server: aiohttp in front of :class:`~.core.Core` and the journal.

A request passes through body → struct → core → journal → response. The handler does not await between core and journal,
so records are journaled in the order of the decisions, and it awaits the journal right after its decision, before any
other work. Long polls wait for events that the core's ``wake`` sets, not for a timer. Handlers are in
:mod:`.generator_endpoints` and :mod:`.trainer_endpoints`; those of the operator and of probes are here.

A change that cannot be written to disk is rolled back, and its requests get 507. Any other failure (a damaged journal,
unreadable prompts, an exception inside a decision) sets :attr:`Server.failure`: the process ends with that exception and
writes nothing of its state in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from scalerl_api import endpoints, wire
from scalerl_coordinator.core import Core
from scalerl_coordinator.decisions import MAX_LINE_BYTES
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.generator_endpoints import GeneratorEndpoints
from scalerl_coordinator.generator_requests import GeneratorRequests
from scalerl_coordinator.http import ErrorResponse, Post, RequestGuard, respond
from scalerl_coordinator.journal import Journal, JournalRefused
from scalerl_coordinator.journaled_core import JournaledCore
from scalerl_coordinator.metrics import Metrics
from scalerl_coordinator.recording import Recording
from scalerl_coordinator.response_store import ResponseStore
from scalerl_coordinator.rollout_record import RolloutRecord
from scalerl_coordinator.run_file_writer import RunFileWriter
from scalerl_coordinator.run_status import build_status
from scalerl_coordinator.shards import StepGroups
from scalerl_coordinator.trace import Trace
from scalerl_coordinator.trainer_endpoints import TrainerEndpoints
from scalerl_coordinator.trainer_requests import TrainerRequests
from scalerl_processes.waiting import cancel
from scalerl_tasks import PromptSource

_TICK_SECONDS = 0.25


class Server:
    """The HTTP server of one run; ``app`` serves between :meth:`start` and :meth:`close`.

    Args:
        token: bearer token that requests must have.
        train: training prompts, by task.
        held_out: prompts of the evaluation sets, by task.
        trackers: returns the state of the experiment trackers, for the status.
        history: store of past responses, or None. The server starts and closes it.
        make_trace: makes the run's trace, given a function that counts lost lines; None for no trace.
        make_record: makes the record of rollouts likewise. The server starts and closes it.
        exports_seconds: maximum age of the exports in the status while the run trains. Once it has finished, every tick reads them.
    """

    def __init__(
        self,
        core: Core,
        journal: Journal,
        files: RunFiles,
        token: str,
        train: Sequence[PromptSource],
        held_out: Sequence[PromptSource],
        trackers: Callable[[], list[wire.Tracker]] = list,
        history: ResponseStore | None = None,
        make_trace: Callable[[Callable[[int], None]], Trace] | None = None,
        make_record: Callable[[Callable[[int], None]], RolloutRecord] | None = None,
        exports_seconds: float = 5.0,
    ) -> None:
        self._core, self._exports_seconds = core, exports_seconds
        self._journal = journal
        self._files = RunFileWriter(core, files)
        self._decisions = files.decisions
        self._generator_requests = GeneratorRequests(core)
        self._trainer_requests = TrainerRequests(core)
        self._trackers = trackers
        self._history = history
        self._metrics = Metrics(
            lambda: msgspec.structs.replace(build_status(core), trackers=trackers()),
            journal.counters,
            refusing=lambda: journal.refusing is not None,
            staleness_bound=core.settings.identity.max_staleness_steps,
            closed_slots=core.closed_slots,
            partial_bytes=lambda: self._generator_requests.partial_bytes,
            history=history.counters if history is not None else None,
        )
        self._trace = make_trace(self._metrics.lost_trace_lines.inc) if make_trace is not None else None
        self._record = make_record(self._metrics.lost_rollouts.inc) if make_record is not None else None
        self._guard = RequestGuard(token, self._metrics)
        self._journaled = JournaledCore(core, journal, self._trace, lambda: self._step_groups.clear())
        self._step_groups = StepGroups(journal, self._journaled.fail)
        self._recording = None if self._record is None else Recording(core, self._record, self._step_groups)
        prompts = {wire.Split.TRAIN: train, wire.Split.HELD_OUT: held_out}
        self._generator_endpoints = GeneratorEndpoints(
            *(core, self._journaled, self._generator_requests, prompts, history, self._recording)
        )
        self._trainer_endpoints = TrainerEndpoints(
            *(core, self._journaled, self._trainer_requests, self._files, self._step_groups, self._recording)
        )
        self._exports_read: asyncio.Task[None] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.failure = self._journaled.failure
        """Set when the coordinator cannot continue; the caller ends the process with it."""
        self.app = self._application()
        self.stop_polls = self._journaled.stop_polls

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Write the files from the state and start the ticks. Start the journal first.

        While the disk cannot be written, the server starts and refuses requests, and this start is journaled later.
        """
        if self._journal.refusing is None:
            self._journaled.flush()
            with contextlib.suppress(JournalRefused):
                await self._journal.durable()
        if self._history is not None:
            self._history.start()
        if self._record is not None and self._recording is not None:
            self._record.start()
            await self._recording.add_journaled()
        await self._files.write_rows(whole=True)
        await self._files.read_health()
        await self._files.write_curve()
        await self._files.read_exports()
        self._ticker = asyncio.create_task(self._keep_time(), name="coordinator-tick")
        self._ticker.add_done_callback(self._task_done)

    async def close(self) -> None:
        """Stop the ticks. Journal what remains and a snapshot, unless the server failed or the disk cannot be written."""
        self.stop_polls()
        await cancel(*(task for task in (self._ticker, self._exports_read) if task is not None))
        if self._journal.refusing is None and not self.failure.done():
            self._core.flush_usage(self._journaled.now())
            self._journaled.flush()
            self._journal.rotate(self._core.state.encode())
            await self._files.write_rows()
            await self._files.write_curve()
            self._write_trace()
        self._generator_endpoints.close()
        if self._history is not None:
            await asyncio.to_thread(self._history.close)
        if self._record is not None:
            await asyncio.to_thread(self._record.close)
        await self._journal.close()
        self._files.thread.shutdown(wait=True)

    async def _keep_time(self) -> None:
        last_exports = time.monotonic()
        while not self.failure.done():
            await asyncio.sleep(_TICK_SECONDS)
            now = self._journaled.now()
            if self._journal.refusing is None and not self.failure.done():
                self._core.tick(now)
                self._generator_requests.tick(now)
                self._trainer_requests.tick(now)
                self._journaled.flush()
                await self._files.write_curve()
                self._write_trace()
                if self._record is not None:
                    self._record.end_evaluations(self._core.state.evaluations)
            due = self._core.finished or time.monotonic() - last_exports >= self._exports_seconds
            # In a separate task: a slow disk must not delay the ticks.
            if due and (self._exports_read is None or self._exports_read.done()):
                last_exports = time.monotonic()
                self._exports_read = asyncio.create_task(
                    self._files.read_exports(), name="coordinator-exports"
                )
                self._exports_read.add_done_callback(self._task_done)

    def _write_trace(self) -> None:
        if self._trace is not None and self._trace.tick(self._journaled.now()):
            self._files.thread.submit(self._trace.write)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            self._journaled.fail(problem)

    # --- operator, probes -----------------------------------------------------------------------

    async def _stop(self, request: wire.Stop) -> wire.Ack:
        await self._journaled.decided(lambda now: self._core.stop(request.reason, now))
        return wire.Ack()

    async def _record_decision(self, request: wire.DecisionLine) -> wire.Ack:
        decisions = self._decisions
        await self._files.on_decision_log(lambda: decisions.append(request.offset, request.line))
        return wire.Ack()

    async def _decision_lines(self, request: web.Request) -> web.Response:
        offset = request.query.get("offset", "0")
        if not (offset.isascii() and offset.isdecimal() and len(offset) < 19):
            raise ErrorResponse(400, "bad-request", f"offset={offset[:40]!r} is not a number of bytes")
        content, size = await self._files.on_decision_log(lambda: self._decisions.read(int(offset)))
        return respond(msgspec.msgpack.encode(wire.DecisionLines(content=content, size=size)))

    async def _status(self, request: web.Request) -> web.Response:
        # The exports are those that a tick read last: a slow disk must not delay the status.
        status, error = (
            msgspec.structs.replace(
                build_status(self._core),
                exports=self._files.exports,
                trackers=self._trackers(),
                health_problem=self._files.monitor.problem,
            ),
            self._journal.refusing,
        )
        if error is not None:
            status = msgspec.structs.replace(status, journal_error=error.strerror or str(error))
        return respond(msgspec.msgpack.encode(status))

    async def _health(self, request: web.Request) -> web.Response:
        if self.failure.done():
            return web.Response(status=503, text="the coordinator has failed and exits\n")
        return web.Response(text="alive\n")

    async def _ready(self, request: web.Request) -> web.Response:
        if self._journaled.closing or self._journal.refusing is not None:
            return web.Response(status=503, text="the journal cannot be written\n")
        return web.Response(text="ready\n")

    # --- HTTP -----------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        app = web.Application()
        posts = [
            *self._generator_endpoints.posts,
            *self._trainer_endpoints.posts,
            Post(endpoints.STOP, wire.Stop, self._stop),
            Post(endpoints.DECISIONS, wire.DecisionLine, self._record_decision, MAX_LINE_BYTES + 1024),
        ]
        for post in posts:
            app.router.add_post(post.path, self._guard.endpoint(post))
        app.router.add_get(endpoints.STATUS, self._guard.guarded(endpoints.STATUS, self._status))
        app.router.add_get(
            endpoints.DECISIONS, self._guard.guarded(endpoints.DECISIONS, self._decision_lines)
        )
        app.router.add_get(endpoints.HEALTH, self._health)
        app.router.add_get(endpoints.READY, self._ready)
        app.router.add_get(endpoints.METRICS, self._metrics_text)
        return app

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")
