"""The coordinator's HTTP server: aiohttp in front of :class:`~.core.Core` and the journal.

A request passes through body → struct → core → journal → response. The handler does not await between core and journal,
so records are journaled in the order of the decisions, and it awaits the journal right after its decision, before any
other work. Long polls wait for events that the core's ``wake`` sets, not for a timer.

A change that cannot be written to disk is rolled back, and its requests get 507. Any other failure (a damaged journal,
unreadable prompts, an exception inside a decision) sets :attr:`Server.failure`: the process ends with that exception and
writes nothing of its state in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from aiohttp import web

from scalerl_api import endpoints, wire
from scalerl_coordinator.core import TRAINER, WORK, Core, Refusal
from scalerl_coordinator.decisions import MAX_LINE_BYTES
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.generator_requests import GeneratorRequests
from scalerl_coordinator.http import ErrorResponse, RequestGuard, respond
from scalerl_coordinator.journal import Journal, JournalRefused
from scalerl_coordinator.journaled_core import JournaledCore
from scalerl_coordinator.membership import new_member_id
from scalerl_coordinator.metrics import Metrics
from scalerl_coordinator.recording import Recording
from scalerl_coordinator.response_store import PastGroup, ResponseStore, past_responses
from scalerl_coordinator.rollout_record import RolloutRecord
from scalerl_coordinator.run_file_writer import RunFileWriter
from scalerl_coordinator.run_status import build_status
from scalerl_coordinator.shards import StepGroups, fill_shard
from scalerl_coordinator.trace import Trace
from scalerl_coordinator.trainer_requests import TrainerRequests
from scalerl_processes.waiting import cancel
from scalerl_tasks import PromptError, PromptSource, TaskError

log = logging.getLogger(__name__)

SMALL_BODY_BYTES = 2**20
PUSH_BODY_BYTES = 2**26
"""Limit of a push. It is higher if the run's lengths allow a larger group."""
STEP_BODY_BYTES = 2**26
"""Limit of a step's report, which has about 40 bytes for each recorded rollout."""
HELLO_BODY_BYTES = 2**29
"""Limit of a trainer's hello, which may carry a checkpoint's snapshot."""
_TICK_SECONDS = 0.25
_LOOKUPS = 4
"""Concurrent reads of past responses, each of up to ``wire.MAX_RESPONSES_BYTES``."""

T = TypeVar("T")


class _RawPush(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A :class:`wire.Push` whose groups stay encoded, since these bytes are journaled."""

    member_id: str
    groups: list[msgspec.Raw]


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
        self._prompts = {
            (task, split): prompts
            for split, sources in ((wire.Split.TRAIN, train), (wire.Split.HELD_OUT, held_out))
            for task, prompts in enumerate(sources)
        }
        self._generators = GeneratorRequests(core)
        self._trainer = TrainerRequests(core)
        self._trackers = trackers
        self._history = history
        # A separate pool: reads of the store must not occupy the default pool, which leases and shards need.
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="history-lookup")
        self._metrics = Metrics(
            lambda: msgspec.structs.replace(build_status(core), trackers=trackers()),
            journal.counters,
            refusing=lambda: journal.refusing is not None,
            staleness_bound=core.settings.identity.max_staleness_steps,
            closed_slots=core.closed_slots,
            partial_bytes=lambda: self._generators.partial_bytes,
            history=history.counters if history is not None else None,
        )
        self._trace = make_trace(self._metrics.lost_trace_lines.inc) if make_trace is not None else None
        self._record = make_record(self._metrics.lost_rollouts.inc) if make_record is not None else None
        self._guard = RequestGuard(token, self._metrics)
        self._journaled = JournaledCore(core, journal, self._trace, lambda: self._step_groups.clear())
        self._step_groups = StepGroups(journal, self._journaled.fail)
        self._recording = None if self._record is None else Recording(core, self._record, self._step_groups)
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
        self._lookups.shutdown(wait=False, cancel_futures=True)
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
                self._trainer.tick(now)
                self._generators.tick(now)
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

    def _task_done(self, task: asyncio.Task[None]) -> None:
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            self._journaled.fail(problem)

    # --- actors ---------------------------------------------------------------------------------

    async def _register(self, request: wire.Register) -> wire.Registered:
        member_id = new_member_id(request.name)
        return await self._journaled.decided(lambda now: self._generators.register(request, member_id, now))

    async def _heartbeat(self, request: wire.Heartbeat) -> wire.Ack:
        if self._journal.refusing is not None:
            self._core.membership.get(request.member_id, self._journaled.now())
            return wire.Ack()
        self._journaled.decide(lambda now: self._generators.heartbeat(request, now))
        return wire.Ack()

    async def _lease(self, request: wire.LeaseRequest) -> wire.Leases:
        self._journaled.decide(lambda now: self._generators.receive_lease_request(request, now))
        issued: list[wire.Lease] = []

        def attempt(now: float) -> wire.Leases | None:
            leases = self._generators.offer(request.member_id, request.max_groups, now)
            issued.extend(leases.leases if leases is not None else ())
            return leases

        try:
            leases = await self._journaled.poll(WORK, request.wait_seconds, attempt)
            if leases is None or not leases.leases:
                return leases or wire.Leases(leases=[])
            # Off the event loop, since a generated task generates the prompt to compute its id.
            ids, failed = await asyncio.to_thread(self._prompt_ids, issued)
            if failed:
                await self._journaled.decided(lambda now: self._generators.give_up_prompts(failed, now))
        except TaskError as problem:
            raise self._journaled.fail(problem) from problem
        finally:
            # Also if the client has disconnected: heartbeats from now on reveal a response that did not arrive.
            self._core.book.mark_sent((lease.lease_id for lease in issued), self._journaled.now())
            self._generators.end_lease_request(request.member_id)
        return wire.Leases(leases=self._with_prompt_ids(issued, ids))

    def _prompt_ids(self, leases: list[wire.Lease]) -> tuple[list[str], dict[str, str]]:
        """The prompt id of each lease ("" if the prompt cannot be generated), and the failures' reasons by lease id."""
        ids, failed = [], {}
        for lease in leases:
            try:
                ids.append(self._prompts[lease.prompt.task, lease.split][lease.prompt.index].id)
            except PromptError as problem:
                ids.append("")
                failed[lease.lease_id] = str(problem)
        return ids, failed

    def _with_prompt_ids(self, leases: list[wire.Lease], ids: list[str]) -> list[wire.Lease]:
        """The leases to send: with their prompt ids, and without those that were closed while the prompts were read."""
        book, now = self._core.book, self._journaled.now()
        to_send = []
        for lease, prompt_id in zip(leases, ids, strict=True):
            remaining = book.remaining_seconds(lease.lease_id, now)
            if remaining is not None:
                book.set_prompt_id(lease.lease_id, prompt_id)
                to_send.append(
                    msgspec.structs.replace(lease, prompt_id=prompt_id, remaining_seconds=remaining)
                )
        return to_send

    async def _push(self, request: _RawPush) -> wire.PushReply:
        groups = []
        for index, raw in enumerate(request.groups):
            try:
                groups.append(_decode_group(raw))
            except msgspec.DecodeError as problem:
                raise ErrorResponse(
                    400, "bad-request", str(problem).replace("`$", f"`$.groups[{index}]")
                ) from None

        def push_all(now: float) -> list[tuple[wire.PushResult, str | None]]:
            self._core.membership.get(request.member_id, now)
            return [
                self._generators.push(request.member_id, group, bytes(raw), now)
                for group, raw in zip(groups, request.groups, strict=True)
            ]

        versions = {
            group.lease_id: lease.policy_version
            for group in groups
            if (lease := self._core.state.leases.get(group.lease_id)) is not None
        }
        answers = await self._journaled.decided(push_all)
        for group, raw, (result, _) in zip(groups, request.groups, answers, strict=True):
            if result is not wire.PushResult.ACCEPTED:
                continue
            if group.split is wire.Split.TRAIN:
                self._store_responses(group)
            if self._recording is not None and group.text is not None:
                self._recording.keep_content(group, raw, versions.get(group.lease_id, -1))
        return wire.PushReply(
            results=[result for result, _ in answers], reasons=[reason for _, reason in answers]
        )

    async def _release(self, request: wire.Release) -> wire.Ack:
        await self._journaled.decided(lambda now: self._generators.release(request, now))
        return wire.Ack()

    async def _keep_partials(self, request: wire.Partials) -> wire.PartialsReply:
        return self._journaled.decide(lambda now: self._generators.receive_partials(request, now))

    def _store_responses(self, group: wire.Group) -> None:
        """Store the responses of an accepted training group for drafts."""
        if self._history is None:
            return
        responses = past_responses(group.completions)
        digest = wire.prompt_digest(group.prompt_token_ids)
        drafted, accepted = group.drafted_tokens, group.accepted_tokens
        drafts = None if drafted is None or accepted is None else (drafted, accepted)
        self._history.put(PastGroup(group.prompt, digest, responses, drafts))

    async def _responses(self, request: wire.ResponsesRequest) -> bytes:
        """An encoded :class:`wire.Responses`, assembled from the responses as they are encoded on disk."""
        if request.prompt.split is not wire.Split.TRAIN:
            raise Refusal("bad-request", "responses of evaluations are not stored")
        blob = b""
        if self._history is not None:
            blob = await asyncio.get_running_loop().run_in_executor(
                self._lookups, self._history.lookup, request.prompt, request.digest
            )
        return msgspec.msgpack.encode({"responses": msgspec.Raw(blob) if blob else []})

    # --- trainer --------------------------------------------------------------------------------

    async def _hello(self, request: wire.TrainerHello) -> wire.TrainerWelcome:
        welcome = await self._journaled.decided(lambda now: self._trainer.hello(request, now))
        self._step_groups.clear()
        if self._record is not None:
            self._record.truncate(self._core.state.version)
        await self._files.write_rows(whole=True)
        await self._files.read_health()
        await self._files.write_curve()
        return welcome

    async def _next(self, request: wire.NextRequest) -> wire.Next:
        action = await self._journaled.poll(
            TRAINER, request.wait_seconds, lambda now: self._trainer.next(request, now)
        )
        action = action or wire.Next(
            action=wire.NextAction.WAIT, step=request.version, reason=self._core.end_reason
        )
        return msgspec.structs.replace(
            action,
            measured=self._trainer.evaluations.has_evaluation(request.version),
            points=len(self._core.curve),
        )

    async def _shard(self, request: wire.ShardRequest) -> bytes:
        if request.wait_seconds and self._journal.refusing is None:
            await self._journaled.poll(
                TRAINER, request.wait_seconds, lambda _: self._trainer.has_step(request)
            )
        if self._journal.refusing is None:
            plan = await self._journaled.decided(lambda _: self._trainer.plan_shard(request))
        else:  # the state is what the disk holds, and reading needs no space
            plan = self._trainer.plan_shard(request)
        groups = await self._step_groups.of_plan(plan)
        return await asyncio.to_thread(lambda: msgspec.msgpack.encode(fill_shard(plan, groups)))

    async def _step(self, report: wire.StepReport) -> wire.StepReported:
        row = await self._journaled.decided(lambda now: self._trainer.step(report, now))
        if row is not None:
            self._files.monitor.add(row)
            if self._recording is not None:
                await self._recording.add_step(report.step, report.sequences)
        self._step_groups.forget(report.step)
        await self._files.write_rows()
        return wire.StepReported(publish=self._trainer.permits.publishes(report.step + 1))

    async def _supervised(self, report: wire.SupervisedReport) -> wire.SupervisedReported:
        return await self._journaled.decided(lambda now: self._trainer.supervised(report, now))

    async def _publish_begin(self, request: wire.PublishBegin) -> wire.PublishPermit:
        permit = await self._journaled.poll(
            TRAINER, request.wait_seconds, lambda now: self._trainer.publish_begin(request, now)
        )
        return permit or wire.PublishPermit(ready=False, members=[])

    async def _publish_commit(self, request: wire.PublishCommit) -> wire.Ack:
        await self._journaled.decided(lambda now: self._trainer.publish_commit(request, now))
        return wire.Ack()

    async def _checkpoint_begin(self, request: wire.CheckpointBegin) -> wire.CheckpointSnapshot:
        return await self._journaled.decided(lambda now: self._trainer.checkpoint_begin(request, now))

    async def _checkpoint_commit(self, request: wire.CheckpointCommit) -> wire.Ack:
        # First write metrics.jsonl: the commit deletes these rows from the journal.
        if not await self._files.write_rows():
            raise ErrorResponse(
                507, "no-space", "metrics.jsonl cannot be written (see the log); try again later"
            )
        await self._journaled.decided(lambda now: self._trainer.checkpoint_commit(request, now))
        await self._files.write_curve()
        return wire.Ack()

    async def _checkpoint_failed(self, request: wire.CheckpointFailed) -> wire.Ack:
        self._trainer.checkpoint_failed(request)
        return wire.Ack()

    async def _keep_exports(self, report: wire.ExportsReport) -> wire.ExportsReported:
        self._trainer.check(report.incarnation)
        if report.exports is not None:
            await self._files.keep_exports(report.exports)
        return wire.ExportsReported(exports=self._files.exports)

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

    # --- files ----------------------------------------------------------------------------------

    def _write_trace(self) -> None:
        if self._trace is not None and self._trace.tick(self._journaled.now()):
            self._files.thread.submit(self._trace.write)

    # --- HTTP -----------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        app = web.Application()
        push_bytes = max(PUSH_BODY_BYTES, self._core.settings.max_group_bytes)
        for path, kind, limit, handler in (
            (endpoints.MEMBERS, wire.Register, SMALL_BODY_BYTES, self._register),
            (endpoints.HEARTBEAT, wire.Heartbeat, SMALL_BODY_BYTES, self._heartbeat),
            (endpoints.LEASE, wire.LeaseRequest, SMALL_BODY_BYTES, self._lease),
            (endpoints.GROUPS, _RawPush, push_bytes, self._push),
            (endpoints.RELEASE, wire.Release, SMALL_BODY_BYTES, self._release),
            (endpoints.PARTIALS, wire.Partials, push_bytes, self._keep_partials),
            (endpoints.RESPONSES, wire.ResponsesRequest, SMALL_BODY_BYTES, self._responses),
            (endpoints.TRAINER_HELLO, wire.TrainerHello, HELLO_BODY_BYTES, self._hello),
            (endpoints.TRAINER_NEXT, wire.NextRequest, SMALL_BODY_BYTES, self._next),
            (endpoints.TRAINER_SHARD, wire.ShardRequest, SMALL_BODY_BYTES, self._shard),
            (endpoints.TRAINER_STEP, wire.StepReport, STEP_BODY_BYTES, self._step),
            (endpoints.TRAINER_SUPERVISED, wire.SupervisedReport, SMALL_BODY_BYTES, self._supervised),
            (endpoints.PUBLISH_BEGIN, wire.PublishBegin, SMALL_BODY_BYTES, self._publish_begin),
            (endpoints.PUBLISH_COMMIT, wire.PublishCommit, SMALL_BODY_BYTES, self._publish_commit),
            (endpoints.CHECKPOINT_BEGIN, wire.CheckpointBegin, SMALL_BODY_BYTES, self._checkpoint_begin),
            (endpoints.CHECKPOINT_COMMIT, wire.CheckpointCommit, SMALL_BODY_BYTES, self._checkpoint_commit),
            (endpoints.CHECKPOINT_FAILED, wire.CheckpointFailed, SMALL_BODY_BYTES, self._checkpoint_failed),
            (endpoints.EXPORTS, wire.ExportsReport, SMALL_BODY_BYTES, self._keep_exports),
            (endpoints.STOP, wire.Stop, SMALL_BODY_BYTES, self._stop),
            (endpoints.DECISIONS, wire.DecisionLine, MAX_LINE_BYTES + 1024, self._record_decision),
        ):
            app.router.add_post(path, self._guard.endpoint(path, kind, limit, handler))
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


_decode_group = msgspec.msgpack.Decoder(wire.Group).decode
