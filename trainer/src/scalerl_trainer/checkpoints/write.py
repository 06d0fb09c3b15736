"""Writes the checkpoints of all ranks, in the files of :mod:`.volume`.

``start`` takes what changes before the next update, and begins to copy the rest to the host, for which only that update waits. On each
rank, a thread then writes, flushes and hashes the rank's files in the staging folder while training continues, and ``finish`` commits
the checkpoint once all ranks are done (docs/adr/0025-checkpoints-on-a-thread.md). A failure on any rank fails the checkpoint on all ranks; training continues, and the
previous checkpoint stays the last one.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_trainer.checkpoints.disk import VolumeState
from scalerl_trainer.checkpoints.manifest import CheckpointError, FileRecord
from scalerl_trainer.checkpoints.object_store import lower_priority
from scalerl_trainer.checkpoints.random_state import (
    random_state,
    save_random_state,
)
from scalerl_trainer.checkpoints.upload import Uploader
from scalerl_trainer.checkpoints.volume import STAGE, CheckpointStore, StagedCheckpoint
from scalerl_trainer.engine import Engine, EngineState
from scalerl_trainer.errors import TrainerError
from scalerl_trainer.ranks import Ranks

log = logging.getLogger(__name__)

IDLE_TIMEOUT_SHARE = 0.5
"""A write that makes no progress for this fraction of the timeout of the ranks' collectives has failed. One that makes progress
has no limit."""


@dataclass(frozen=True)
class Timings:
    """Times of the writing of checkpoints, in seconds.

    Attributes:
        retry: between two attempts.
        blind_retry: the same, while the volume has no more space than after the last attempt: it may have a quota that does not
            show, and each attempt fills it for all that write to it.
        last_retry: pause before the last attempt of a trainer that received SIGTERM.
        exchange: between two exchanges of the ranks' states while they wait for a checkpoint, written or read from the object
            store.
    """

    retry: float = 30.0
    blind_retry: float = 120.0
    last_retry: float = 3.0
    exchange: float = 1.0


TIMINGS = Timings()


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    staged: StagedCheckpoint
    snapshot: bytes
    """The coordinator's state."""
    best: int
    """Best version so far, whose checkpoint is kept."""
    stage: bytes | None
    """The state of mid-training."""
    records: list[FileRecord] = field(default_factory=list)
    """Sizes and hashes of the files that this rank wrote."""
    error: str | None = None
    thread: threading.Thread | None = None
    last_progress: float = field(default_factory=time.monotonic)
    """When bytes were last written or hashed, of ``time.monotonic()``."""
    abandoned: bool = False
    """The write has failed, and the thread is to end."""

    def progress(self, count: int) -> None:
        """Note that ``count`` bytes are done. Raises ``CheckpointError`` once the write is abandoned."""
        if count:
            self.last_progress = time.monotonic()
        if self.abandoned:
            raise CheckpointError("abandoned")

    @property
    def is_written(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()

    def hangs(self, idle_seconds: float) -> bool:
        """Whether the write has made no progress for ``idle_seconds``."""
        return not self.is_written and time.monotonic() - self.last_progress > idle_seconds


@dataclass(frozen=True)
class FailedSave:
    """A failed attempt to write a checkpoint."""

    step: int
    reason: str
    volume: VolumeState
    """The volume after the attempt."""
    time: float = field(default_factory=time.monotonic)
    """Of ``time.monotonic()``."""

    def may_retry(self, volume: VolumeState, timings: Timings) -> bool:
        """Whether another attempt may succeed on ``volume``, its present state."""
        waited = time.monotonic() - self.time
        return waited >= (timings.retry if volume.better_than(self.volume) else timings.blind_retry)


@dataclass(frozen=True)
class _Begun:
    """The staging folder, or the error."""

    directory: str = ""
    error: str = ""


@dataclass(frozen=True)
class SaveResult:
    """A committed checkpoint and the kept steps, or the error."""

    step: int
    kept_steps: list[int]
    error: str | None = None


class Checkpointer:
    """Writes the checkpoints of one run, one at a time. Every method is a collective, except where noted.

    Args:
        uploader: copies each checkpoint to an object store.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: Ranks,
        engine: Engine,
        uploader: Uploader | None = None,
        timings: Timings = TIMINGS,
    ) -> None:
        self.timings = timings
        self.uploader = uploader
        self._store, self._ranks, self._engine = store, ranks, engine
        settings = engine.settings
        self._shape = {
            "ranks": str(ranks.world),
            "engine": settings.engine,
            "zeroStage": str(settings.zero_stage),
            "dtype": settings.dtype,
        }
        self._idle_seconds = IDLE_TIMEOUT_SHARE * ranks.timeout_seconds
        self._pending: _Pending | None = None
        self._writer: threading.Thread | None = None
        """The thread of the last write."""
        self.last_step: int | None = None
        """The newest step that is committed or pending."""
        self.committed_step: int | None = None
        """The newest committed step, or the loaded one."""

    def continue_from(self, step: int | None) -> None:
        """Set the step of the loaded checkpoint; None without one. Not a collective."""
        self.last_step = self.committed_step = step

    @property
    def pending(self) -> bool:
        return self._pending is not None

    @property
    def flushed(self) -> bool:
        """Not a collective: whether ``finish`` need not wait for this rank: its files of the pending checkpoint are written, flushed
        and hashed, or the write hangs, which fails it."""
        pending = self._pending
        return pending is not None and (pending.is_written or pending.hangs(self._idle_seconds))

    def start(
        self, step: int, snapshot: bytes | None, best: int = -1, stage: bytes | None = None
    ) -> str | None:
        """Start to copy the state of ``step``, and to write it to the staging folder; returns None or the error.

        Args:
            snapshot, best: see :meth:`CheckpointStore.commit`; used on rank 0 only.
            stage: the state of mid-training, if any; used on rank 0 only.
        """
        assert self._pending is None, "at most one checkpoint is being written"
        begun_at = self._ranks.broadcast(self._begin(step) if self._ranks.is_leader else None, _Begun)
        if begun_at.error:
            return begun_at.error
        pending = _Pending(StagedCheckpoint(step, Path(begun_at.directory)), snapshot or b"", best, stage)
        failure = ""
        try:
            if self._writer is not None and self._writer.is_alive():  # it reads the copies of the last state
                raise CheckpointError("the write before this one still hangs")
            pending.thread = self._writer = threading.Thread(
                target=self._write,
                args=(pending, self._engine.copy_state(), random_state()),
                name="checkpoint",
                daemon=True,
            )
        except (RuntimeError, MemoryError, TrainerError) as problem:
            failure = f"rank {self._ranks.rank}: {type(problem).__name__}: {problem}"
        failures = [f for f in self._ranks.all_gather(failure, str) if f]
        if failures:
            if self._ranks.is_leader:
                self._store.discard(pending.staged)
            return failures[0]
        assert pending.thread is not None
        pending.thread.start()
        self._pending = pending
        self.last_step = step
        return None

    def finish(self) -> SaveResult:
        """Wait for the pending checkpoint to be written on all ranks, and commit it."""
        pending, self._pending = self._pending, None
        assert pending is not None
        self._wait(pending)
        results = self._ranks.all_gather((pending.records, pending.error or ""), tuple[list[FileRecord], str])
        saved = self._ranks.broadcast(
            self._commit(pending, results) if self._ranks.is_leader else None, SaveResult
        )
        if saved.error is not None:
            self.last_step = None
        else:
            self.committed_step = saved.step
            if self.uploader is not None:
                self.uploader.offer(saved.step, pending.best)
        return saved

    def _wait(self, pending: _Pending) -> None:
        """Wait until all ranks have written, or one has failed or makes no progress."""
        assert pending.thread is not None
        while True:
            pending.thread.join(min(self.timings.exchange, self._idle_seconds / 4))
            if pending.hangs(self._idle_seconds):
                pending.error = (
                    f"rank {self._ranks.rank}: the write made no progress for {self._idle_seconds:g} s"
                )
            states = self._ranks.all_gather((pending.is_written, bool(pending.error)), tuple[bool, bool])
            if any(failed for _, failed in states):
                pending.abandoned = True
                return
            if all(written for written, _ in states):
                return

    def _begin(self, step: int) -> _Begun:
        try:
            # No checkpoint is pending here: what could not be removed before must not keep the volume full.
            self._store.remove_staged()
            return _Begun(str(self._store.stage(step).directory))
        except OSError as error:
            return _Begun(error=str(error) or type(error).__name__)

    def _write(self, pending: _Pending, state: EngineState, random: bytes) -> None:
        """Write this rank's files; on a thread."""
        lower_priority()
        directory, rank = pending.staged.directory, self._ranks.rank
        try:
            files = state.write(directory, pending.progress)
            files.append(save_random_state(directory, rank, random))
            if pending.stage is not None and self._ranks.is_leader:
                files.append(directory / STAGE)
                files[-1].write_bytes(pending.stage)
            pending.records = self._store.flush_and_hash(pending.staged, files, pending.progress)
        except Exception as error:  # after any failure, the files may not be on disk
            pending.error = pending.error or f"rank {rank}: {type(error).__name__}: {error}"

    def _commit(self, pending: _Pending, results: list[tuple[list[FileRecord], str]]) -> SaveResult:
        step = pending.staged.step
        error = next((e for _, e in results if e), None)
        if error is not None:
            with suppress(OSError):
                self._store.check()  # a later attempt has taken the staging folder
        else:
            try:
                records = [record for records, _ in results for record in records]
                kept = self._store.commit(
                    pending.staged,
                    pending.snapshot,
                    records,
                    self._shape,
                    best=pending.best,
                    uploading=None if self.uploader is None else self.uploader.uploading,
                )
                return SaveResult(step, kept)
            except (OSError, CheckpointError) as problem:
                error = f"{type(problem).__name__}: {problem}"
        self._store.discard(pending.staged)
        return SaveResult(step, [], error)

    @property
    def root(self) -> Path:
        """The folder of the checkpoints."""
        return self._store.root

    def volume(self) -> VolumeState:
        """The state of the checkpoints' volume. Not a collective."""
        return self._store.volume()


def held_by(world: int) -> str:
    """What keeps unsaved weights, for the message of a hold.

    >>> held_by(2)
    'Each of the 2 ranks has a part of them: if one is lost (its process, its node), all updates since the last checkpoint are'
    """
    ranks = f"Each of the {world} ranks has a part of them: if one" if world > 1 else "If its process"
    return f"{ranks} is lost{' (its process, its node)' if world > 1 else ''}, all updates since the last checkpoint are"
