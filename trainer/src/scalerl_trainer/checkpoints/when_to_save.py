"""Rank 0's part of checkpoints: when one is started, committed, tried again and copied, and what the coordinator knows of it.

A checkpoint that fails during training is tried again when the volume has more space, at the latest when the next one is due.
At the end of training, rank 0 keeps the weights in memory until they are saved (:meth:`RunCheckpoints.save_last`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from scalerl_api import wire
from scalerl_api.load import SpecError
from scalerl_api.spec import ScaleRLRun
from scalerl_trainer.checkpoints.write import FailedSave, held_by
from scalerl_trainer.coordinator_client import CoordinatorUnreachable
from scalerl_trainer.worker import Command, Worker

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""Rank 0 syncs with the other ranks this often while it waits."""
UPLOAD_SECONDS = 1800.0
"""Time to finish the upload of the last checkpoint at the end of the run."""
STOPPED_UPLOAD_SECONDS = 150.0
"""The same once the trainer is asked to stop, within the 300 s of grace of its pod."""


class RunCheckpoints:
    """Rank 0's checkpoints, and its syncs with the other ranks, which finish them. All of rank 0 that waits syncs by
    :meth:`sync_and_check_stop`, every :data:`POLL_SECONDS`, also without a checkpoint: a sync says whether one is on disk.

    Args:
        load_run: reads the present run file.
        own_directory: see :class:`.leader.Leader`.
    """

    def __init__(self, worker: Worker, load_run: Callable[[], ScaleRLRun], own_directory: bool) -> None:
        self._worker = worker
        self._coordinator = worker.coordinator
        self._load_run = load_run
        self._scaling_mode = worker.spec.autoscaling.mode
        self._own_directory = own_directory
        self.seconds = 0.0
        """Of this thread, since the last report of a step."""
        self.failures = 0
        self.saved_first: Callable[[], None] | None = None
        """Called once the first checkpoint is on disk."""
        self._failed: FailedSave | None = None
        """The last attempt to write a checkpoint, if it failed."""
        self._holding = False
        """Training has ended, and the last version is in no checkpoint yet."""
        self._uncommitted: tuple[int, list[int]] | None = None
        """Step and kept steps of a checkpoint that is on disk and not acknowledged by the coordinator."""
        self._copied = -1
        """With ``own_directory``, the newest copy that was reported to the coordinator, or may have been."""
        self._coordinator.while_full = self._sync_while_full

    def sync_and_check_stop(self) -> bool:
        """Sync with all ranks, finish a flushed checkpoint; returns whether any rank is to stop."""
        self._worker.send(Command.SYNC)
        stop, flushed = self._worker.sync()
        if flushed:
            self.finish_checkpoint()
        self._commit()
        return stop

    def _sync_while_full(self) -> None:
        """Sync during a call that waits for the coordinator's volume, or the other ranks' collective would time out."""
        self._worker.send(Command.SYNC)
        stop, _ = self._worker.sync()
        if stop:  # ends the retries of the call, as a signal to this rank does
            self._worker.stop.set()

    def uploads(self) -> wire.Uploads | None:
        """The state of the copies in the object store; None without one."""
        uploader = self._worker.checkpointer.uploader
        return None if uploader is None else wire.Uploads(version=uploader.uploaded, problem=uploader.problem)

    def save_at_end(self) -> None:
        """Start a checkpoint while the run is ending, unless an attempt to save this version has just failed."""
        failed = self._failed
        if failed is None or failed.step != self._worker.version or self.may_retry():
            self.save()

    def save_last(self) -> str:
        """Save the last version. If that fails, keep the weights in memory and retry until it succeeds or SIGTERM
        arrives, which leaves one more attempt. Returns what is lost, empty if nothing is.

        Raises:
            CoordinatorUnreachable: the checkpoint is on disk, but the coordinator does not acknowledge it.
        """
        worker, stop = self._worker, False
        while True:
            self.save()
            self.finish_checkpoint()
            if worker.checkpointer.last_step == worker.version:
                self._holding = False
                self._commit(retry=True)
                return ""
            assert self._failed is not None
            if stop:
                saved = worker.checkpointer.committed_step
                lost = "all updates are" if saved is None else f"all updates since version {saved} are"
                return f"version {worker.version} could not be saved, {lost} lost: {self._failed.reason}"
            if not self._holding:
                self._holding = True
                log.error(
                    "training has stopped, and version %d is in no checkpoint. The weights stay in memory, and the trainer tries "
                    "again: free space on the volume %s, or end the trainer to give them up. %s",
                    *(worker.version, worker.checkpointer.root, held_by(worker.ranks.world)),
                )
            stop = self._wait_to_retry()

    def _wait_to_retry(self) -> bool:
        """Wait until the next attempt to save the last version; returns whether it is the last one."""
        assert self._failed is not None
        reported, timings = -math.inf, self._worker.checkpointer.timings
        while not self.may_retry():
            if self.sync_and_check_stop():
                time.sleep(timings.last_retry)
                return True
            if time.monotonic() - reported >= timings.retry:  # the coordinator may have restarted
                reported = time.monotonic()
                self._report_failure()
            self._worker.stop.wait(POLL_SECONDS)
        return self.sync_and_check_stop()

    def may_retry(self) -> bool:
        """Whether the last checkpoint failed and another attempt may succeed."""
        if self._failed is None:
            return False
        checkpointer = self._worker.checkpointer
        return self._failed.may_retry(checkpointer.volume(), checkpointer.timings)

    def save(self) -> None:
        """Start a checkpoint of the current version, unless there is one. A failure is counted, not raised."""
        worker = self._worker
        self.finish_checkpoint()
        if worker.checkpointer.last_step == worker.version:
            return
        begin = time.perf_counter()
        try:
            snapshot_reply = self._coordinator.checkpoint_begin(worker.version, retry=not self._holding)
        except CoordinatorUnreachable as error:
            self._save_failed(str(error))
            return
        self._worker.send(Command.SAVE)
        # Only autoscaling returns a run to its best checkpoint; without it, do not keep one.
        best = -1 if self._read_scaling_mode() == "Off" else snapshot_reply.best_version
        problem = worker.checkpointer.start(worker.version, snapshot_reply.snapshot, best)
        self.seconds += time.perf_counter() - begin
        if problem is not None:
            self._save_failed(problem)

    def _read_scaling_mode(self) -> str:
        """``spec.autoscaling.mode``, read again from the run file because an edit of it restarts no process."""
        try:
            self._scaling_mode = self._load_run().spec.autoscaling.mode
        except SpecError as error:
            log.warning(
                "cannot read the run file, keeping spec.autoscaling.mode %s: %s", self._scaling_mode, error
            )
        return self._scaling_mode

    def finish_upload(self) -> str:
        """Wait until the newest checkpoint is in the object store, for :data:`UPLOAD_SECONDS`, or :data:`STOPPED_UPLOAD_SECONDS`
        after a signal; with ``own_directory`` until the signal. The exporter has its own time after that.

        Returns what is lost with this pod, empty if nothing is.
        """
        worker, uploader = self._worker, self._worker.checkpointer.uploader
        if uploader is None:
            return ""
        retry_seconds = worker.checkpointer.timings.retry
        deadline = math.inf if self._own_directory else time.monotonic() + UPLOAD_SECONDS
        reported = time.monotonic()
        while uploader.busy and time.monotonic() < deadline:
            if self.sync_and_check_stop():
                deadline = min(deadline, time.monotonic() + STOPPED_UPLOAD_SECONDS)
            if self._own_directory and uploader.problem and time.monotonic() - reported >= retry_seconds:
                reported, self._holding = time.monotonic(), True
                self._failed = FailedSave(worker.version, uploader.problem, worker.checkpointer.volume())
                self._report_failure()
            time.sleep(0.2)
        self._holding = False
        self._commit(retry=True)
        saved = worker.checkpointer.committed_step
        if saved is not None and saved != uploader.uploaded:
            log.error(
                "checkpoint %d is on the volume only, the newest complete copy is %d: %s",
                *(saved, uploader.uploaded, uploader.problem or "its copy did not finish in time"),
            )
        try:  # what the coordinator's status says of the copies stays after this process
            self._coordinator.next(worker.version, 0.0, self.uploads())
        except CoordinatorUnreachable as error:
            log.warning("cannot report the last copy of a checkpoint: %s", error)
        if not self._own_directory or saved is None or saved == uploader.uploaded:
            return ""
        return f"checkpoint {saved} could not be copied, all updates since version {max(uploader.uploaded, 0)} are lost: {uploader.problem}"

    def finish_checkpoint(self) -> None:
        """Finish the pending checkpoint, if there is one."""
        worker = self._worker
        if not worker.checkpointer.pending:
            return
        begin = time.perf_counter()
        self._worker.send(Command.COMMIT_CHECKPOINT)
        saved = worker.checkpointer.finish()
        self.seconds += time.perf_counter() - begin
        if saved.error is not None:
            self._save_failed(saved.error, saved.step)
            return
        worker.metrics.checkpoints.labels("ok").inc()
        worker.metrics.checkpoint_step.set(saved.step)
        self._failed = None
        if self.saved_first is not None:
            self.saved_first()
            self.saved_first = None
        log.info("checkpoint %d is on disk (kept: %s)", saved.step, saved.kept_steps)
        if not self._own_directory:
            self._uncommitted = (saved.step, saved.kept_steps)
        self._commit()

    def _commit(self, *, retry: bool = False) -> None:
        """Report the newest checkpoint on disk to the coordinator, unless the coordinator has acknowledged it.

        The coordinator refuses while it cannot write its own files. Training continues then, and the next call retries.

        Args:
            retry: retry before this returns, and raise ``CoordinatorUnreachable`` after that; for the process's last call.
        """
        uploader = self._worker.checkpointer.uploader
        if self._own_directory and uploader is not None and uploader.uploaded > self._copied:
            self._copied = uploader.uploaded
            self._uncommitted = (uploader.uploaded, uploader.kept)
        if self._uncommitted is None:
            return
        step, kept_steps = self._uncommitted
        try:
            self._coordinator.checkpoint_commit(step, kept_steps, retry=retry)
        except CoordinatorUnreachable as error:
            if retry:
                raise
            log.warning(
                "checkpoint %d is on disk, but the coordinator did not acknowledge it: %s", step, error
            )
            return
        self._uncommitted = None

    def _save_failed(self, reason: str, step: int | None = None) -> None:
        """Count and report a failed checkpoint of ``step``; None for the current version."""
        step = self._worker.version if step is None else step
        self.failures += 1
        self._worker.metrics.checkpoints.labels("failed").inc()
        log.error("the checkpoint of version %d failed, keeping the last one: %s", step, reason)
        self._failed = FailedSave(step, reason, self._worker.checkpointer.volume())
        self._report_failure()

    def _report_failure(self) -> None:
        """Report the failed checkpoint to the coordinator, which shows it; best effort."""
        assert self._failed is not None
        try:
            self._coordinator.checkpoint_failed(
                self._worker.version, self._failed.reason, holding=self._holding
            )
        except CoordinatorUnreachable as error:
            log.warning("cannot report the failed checkpoint: %s", error)
