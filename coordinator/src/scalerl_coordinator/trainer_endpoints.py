"""The endpoints of the trainer: reads the groups of its shards, and writes the run's files of its steps.

The decisions are those of :mod:`.trainer_requests`.
"""

from __future__ import annotations

import asyncio

import msgspec

from scalerl_api import endpoints, wire
from scalerl_coordinator.core import TRAINER, Core
from scalerl_coordinator.http import ErrorResponse, Post
from scalerl_coordinator.journaled_core import JournaledCore
from scalerl_coordinator.recording import Recording
from scalerl_coordinator.run_file_writer import RunFileWriter
from scalerl_coordinator.shards import StepGroups, fill_shard
from scalerl_coordinator.trainer_requests import TrainerRequests

STEP_BODY_BYTES = 2**26
"""Limit of a step's report, which has about 40 bytes for each recorded rollout."""
HELLO_BODY_BYTES = 2**29
"""Limit of a trainer's hello, which may carry a checkpoint's snapshot."""


class TrainerEndpoints:
    """What the trainer may post.

    Args:
        recording: record of rollouts, or None.
    """

    def __init__(
        self,
        core: Core,
        journaled: JournaledCore,
        requests: TrainerRequests,
        files: RunFileWriter,
        step_groups: StepGroups,
        recording: Recording | None,
    ) -> None:
        self._core, self._journaled, self._requests = core, journaled, requests
        self._files, self._step_groups, self._recording = files, step_groups, recording
        self.posts = (
            Post(endpoints.TRAINER_HELLO, wire.TrainerHello, self._hello, HELLO_BODY_BYTES),
            Post(endpoints.TRAINER_NEXT, wire.NextRequest, self._next),
            Post(endpoints.TRAINER_SHARD, wire.ShardRequest, self._shard),
            Post(endpoints.TRAINER_STEP, wire.StepReport, self._step, STEP_BODY_BYTES),
            Post(endpoints.TRAINER_SUPERVISED, wire.SupervisedReport, self._supervised),
            Post(endpoints.PUBLISH_BEGIN, wire.PublishBegin, self._publish_begin),
            Post(endpoints.PUBLISH_COMMIT, wire.PublishCommit, self._publish_commit),
            Post(endpoints.CHECKPOINT_BEGIN, wire.CheckpointBegin, self._checkpoint_begin),
            Post(endpoints.CHECKPOINT_COMMIT, wire.CheckpointCommit, self._checkpoint_commit),
            Post(endpoints.CHECKPOINT_FAILED, wire.CheckpointFailed, self._checkpoint_failed),
            Post(endpoints.EXPORTS, wire.ExportsReport, self._keep_exports),
        )

    async def _hello(self, request: wire.TrainerHello) -> wire.TrainerWelcome:
        welcome = await self._journaled.decided(lambda now: self._requests.hello(request, now))
        self._step_groups.clear()
        if self._recording is not None:
            self._recording.truncate()
        await self._files.write_rows(whole=True)
        await self._files.read_health()
        await self._files.write_curve()
        return welcome

    async def _next(self, request: wire.NextRequest) -> wire.Next:
        action = await self._journaled.poll(
            TRAINER, request.wait_seconds, lambda now: self._requests.next(request, now)
        )
        action = action or wire.Next(
            action=wire.NextAction.WAIT, step=request.version, reason=self._core.end_reason
        )
        return msgspec.structs.replace(
            action,
            measured=self._requests.evaluations.has_evaluation(request.version),
            points=len(self._core.curve),
        )

    async def _shard(self, request: wire.ShardRequest) -> bytes:
        if request.wait_seconds and not self._journaled.refusing:
            await self._journaled.poll(
                TRAINER, request.wait_seconds, lambda _: self._requests.has_step(request)
            )
        if not self._journaled.refusing:
            plan = await self._journaled.decided(lambda _: self._requests.plan_shard(request))
        else:  # the state is what the disk holds, and reading needs no space
            plan = self._requests.plan_shard(request)
        groups = await self._step_groups.of_plan(plan)
        return await asyncio.to_thread(lambda: msgspec.msgpack.encode(fill_shard(plan, groups)))

    async def _step(self, report: wire.StepReport) -> wire.StepReported:
        row = await self._journaled.decided(lambda now: self._requests.step(report, now))
        if row is not None:
            self._files.monitor.add(row)
            if self._recording is not None:
                await self._recording.add_step(report.step, report.sequences)
        self._step_groups.forget(report.step)
        await self._files.write_rows()
        return wire.StepReported(publish=self._requests.permits.publishes(report.step + 1))

    async def _supervised(self, report: wire.SupervisedReport) -> wire.SupervisedReported:
        return await self._journaled.decided(lambda now: self._requests.supervised(report, now))

    async def _publish_begin(self, request: wire.PublishBegin) -> wire.PublishPermit:
        permit = await self._journaled.poll(
            TRAINER, request.wait_seconds, lambda now: self._requests.publish_begin(request, now)
        )
        return permit or wire.PublishPermit(ready=False, members=[])

    async def _publish_commit(self, request: wire.PublishCommit) -> wire.Ack:
        await self._journaled.decided(lambda now: self._requests.publish_commit(request, now))
        return wire.Ack()

    async def _checkpoint_begin(self, request: wire.CheckpointBegin) -> wire.CheckpointSnapshot:
        return await self._journaled.decided(lambda now: self._requests.checkpoint_begin(request, now))

    async def _checkpoint_commit(self, request: wire.CheckpointCommit) -> wire.Ack:
        # First write metrics.jsonl: the commit deletes these rows from the journal.
        if not await self._files.write_rows():
            raise ErrorResponse(
                507, "no-space", "metrics.jsonl cannot be written (see the log); try again later"
            )
        await self._journaled.decided(lambda now: self._requests.checkpoint_commit(request, now))
        await self._files.write_curve()
        return wire.Ack()

    async def _checkpoint_failed(self, request: wire.CheckpointFailed) -> wire.Ack:
        self._requests.checkpoint_failed(request)
        return wire.Ack()

    async def _keep_exports(self, report: wire.ExportsReport) -> wire.ExportsReported:
        self._requests.check(report.incarnation)
        if report.exports is not None:
            await self._files.keep_exports(report.exports)
        return wire.ExportsReported(exports=self._files.exports)
