"""Writes and loads the checkpoints of all ranks, in the files of :mod:`.volume`.

``start`` copies the current state to the host while training waits. On each rank, a thread then writes, flushes and hashes the
rank's files in the staging folder while training continues, and ``finish`` commits the checkpoint once all ranks are done
(docs/adr/0025-checkpoints-on-a-thread.md). A failure on any rank fails the checkpoint on all ranks; training continues, and the
previous checkpoint stays the last one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_api.object_store import StoreError
from scalerl_trainer.checkpoints.object_store import PrefixTaken, lower_priority, read_with_retries
from scalerl_trainer.checkpoints.random_state import (
    RandomStateError,
    load_random_state,
    random_state,
    save_random_state,
)
from scalerl_trainer.checkpoints.upload import Uploader
from scalerl_trainer.checkpoints.volume import (
    STAGE,
    CheckpointError,
    CheckpointStore,
    FileRecord,
    Manifest,
    StagedCheckpoint,
    VolumeState,
)
from scalerl_trainer.engine import Engine, EngineState
from scalerl_trainer.errors import AttemptSuperseded, Stopped, TrainerError
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


class NoUsableCheckpoint(TrainerError):
    """Checkpoints exist, but none can be loaded; a restart does not help."""


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


@dataclass(frozen=True)
class _Remote:
    """The checkpoints in the object store, or why they are not known."""

    steps: list[int] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class _Fetch:
    """A checkpoint that is read from the object store."""

    manifest: Manifest | None = None
    directory: str = ""


@dataclass(frozen=True)
class _Outcome:
    """What a rank's part of a task came to."""

    ended: bool = False
    failure: str = ""
    """One of ``_FAILURES``, ``damaged``, or empty."""
    message: str = ""


_FAILURES: dict[str, type[Exception]] = {
    "superseded": AttemptSuperseded,
    "taken": PrefixTaken,
    "disk": CheckpointError,
    "store": StoreError,
}
"""Errors of a task that are raised on all ranks; the first counts."""


class Checkpointer:
    """Checkpoints of one run. Every method is a collective, except where noted.

    Args:
        otherwise: what to do without a good copy of a damaged checkpoint, for the error message.
        uploader: copies each checkpoint to an object store, and has those that the volume has not.
        stopped: whether this rank is to stop, which ends the reading of a checkpoint from the store.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: Ranks,
        engine: Engine,
        otherwise: str = "start a new run",
        uploader: Uploader | None = None,
        stopped: Callable[[], bool] = lambda: False,
        timings: Timings = TIMINGS,
    ) -> None:
        self.timings = timings
        self._otherwise, self.uploader, self._stopped = otherwise, uploader, stopped
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

    @property
    def pending(self) -> bool:
        return self._pending is not None

    @property
    def flushed(self) -> bool:
        """Not a collective: whether ``finish`` need not wait for this rank: its files of the pending checkpoint are written, flushed
        and hashed, or the write hangs, which fails it."""
        pending = self._pending
        return pending is not None and (pending.is_written or pending.hangs(self._idle_seconds))

    # --- writing ------------------------------------------------------------------------------------------

    def start(
        self, step: int, snapshot: bytes | None, best: int = -1, stage: bytes | None = None
    ) -> str | None:
        """Copy the state of ``step``, and start to write it to the staging folder; returns None or the error.

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
        # No checkpoint is pending here: what could not be removed before must not keep the volume full.
        self._store.remove_staged()
        try:
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

    # --- reading ------------------------------------------------------------------------------------------

    def load(self) -> int | None:
        """Load the newest valid checkpoint, of the volume or the object store; returns its step, or None if the run never had a
        checkpoint.

        Raises:
            NoUsableCheckpoint: all checkpoints are damaged, including those quarantined by an earlier start (a run that had
                checkpoints never restarts from step 0 by itself), or the newest valid one does not fit this run.
            PrefixTaken: the object store has another run's checkpoints under the prefix.
            AttemptSuperseded: a later attempt has begun.
            StoreError: the object store cannot be read, and the volume has no valid checkpoint, or a damaged one that is newer.
            CheckpointError: a checkpoint of the object store cannot be written to the volume.
            Stopped: a rank is to stop.
        """
        if self._ranks.is_leader:
            self._store.remove_staged()
        steps = self._ranks.broadcast(self._store.steps() if self._ranks.is_leader else None, list[int])
        remote = self._remote_steps()
        for step in sorted({*steps, *remote.steps}, reverse=True):
            if (step in steps and self._is_valid(step)) or (
                step in remote.steps and self._fetch(step) and self._is_valid(step, copied=True)
            ):
                if remote.error:
                    self._check_none_newer(step, steps, remote.error)
                directory = self._store.directory(step)
                self._engine.load(directory)
                load_random_state(directory, self._ranks.rank)  # again: loading may have drawn numbers
                self.last_step = self.committed_step = step
                self._resumed(step, remote)
                return step
        if remote.error:
            raise StoreError(f"{self._store.root} has no valid checkpoint, and {remote.error}")
        quarantined = self._quarantined()
        if steps or quarantined or remote.steps:
            raise NoUsableCheckpoint(
                f"{self._store.root}: all checkpoints are damaged: {', '.join(quarantined) or sorted({*steps, *remote.steps})} (the "
                "log of the start that found it has the reasons). Restore a good copy as step-*, or "
                f"{self._otherwise}"
            )
        self._resumed(None, remote)
        return None

    def _check_none_newer(self, step: int, steps: list[int], error: str) -> None:
        """Raise ``StoreError`` if a checkpoint after ``step`` is damaged, of which the store, which failed with ``error``, may have a copy."""
        newer = {name: found for name, found in self._quarantined().items() if found > step}
        newer |= {
            f"step-{found:08d}": found for found in steps if found > step and found not in newer.values()
        }
        if newer:
            raise StoreError(
                f"checkpoint {max(newer.values())} in {self._store.root} is damaged, and the store, which may have a copy, cannot be read. "
                "The trainer continues from that copy once the store answers. To continue from checkpoint "
                f"{step} instead, and train the steps since again, remove {', '.join(newer)}. {error}"
            )

    def _quarantined(self) -> dict[str, int]:
        return self._ranks.broadcast(
            self._store.quarantined() if self._ranks.is_leader else None, dict[str, int]
        )

    def _is_valid(self, step: int, *, copied: bool = False) -> bool:
        """Whether a checkpoint on the volume is valid; one that is not is quarantined, or removed if the store has it."""
        errors = [e for e in self._ranks.all_gather(self._verify(step), str) if e]
        if errors and self._ranks.is_leader:
            if copied:
                log.error("checkpoint %d is damaged in its copy and is not used: %s", step, errors[0])
                self._store.remove(step)
            else:
                self._store.quarantine(step, errors[0])
        return not errors

    # --- the object store -----------------------------------------------------------------------------------

    def _resumed(self, step: int | None, remote: _Remote) -> None:
        if self.uploader is not None:
            self.uploader.resumed(step, remote.steps, opened=not remote.error)

    def _remote_steps(self) -> _Remote:
        """Claim the prefix, and list its checkpoints. Raises ``PrefixTaken``, ``Stopped``."""
        if self.uploader is None:
            return _Remote()
        copies, found = self.uploader.copies, [_Remote()]

        def list_steps() -> None:
            if self._ranks.is_leader:
                self._store.check()
                copies.claim()
                found[0] = _Remote(copies.steps())

        try:
            self._read_together(list_steps)
        except StoreError as error:
            log.error("continuing without the copies of checkpoints, if the volume has some: %s", error)
            return _Remote(error=str(error))
        return self._ranks.broadcast(found[0] if self._ranks.is_leader else None, _Remote)

    def _fetch(self, step: int) -> bool:
        """Read a checkpoint from the store, each rank its part, and put it on the volume; False, and nothing, if it is damaged.

        Raises:
            CheckpointError: the volume cannot be written, or has no space.
            StoreError: the store could not be read.
            Stopped
        """
        assert self.uploader is not None
        copies, begun = self.uploader.copies, [_Fetch()]

        def begin() -> None:
            if self._ranks.is_leader:
                manifest = copies.manifest(step)
                copies.fetch_warm_started(self._store.warm_started_weights)
                begun[0] = _Fetch(manifest, str(self._store.stage_copy(manifest).directory))

        log.info("reading checkpoint %d from %s", step, copies.to)
        damaged = self._read_together(begin)
        fetched = self._ranks.broadcast(begun[0] if self._ranks.is_leader else None, _Fetch)
        if fetched.manifest is not None:
            manifest, staged = fetched.manifest, StagedCheckpoint(step, Path(fetched.directory))
            records = manifest.files[self._ranks.rank :: self._ranks.world]

            def commit() -> None:
                if self._ranks.is_leader:
                    self._store.commit_copy(staged, manifest)

            try:
                damaged = self._read_together(lambda: copies.fetch(step, staged.directory, records))
                if not damaged:
                    self._read_together(commit)
            finally:
                if self._ranks.is_leader:  # after a commit it is gone
                    self._store.discard(staged)
        if damaged:
            log.error("checkpoint %d in %s is damaged and is not used: %s", step, copies.to, damaged)
            return False
        return True

    def _read_together(self, read: Callable[[], None]) -> str:
        """Call ``read`` on all ranks, with retries while the store fails; returns why the checkpoint is damaged.

        Raises:
            AttemptSuperseded, PrefixTaken, CheckpointError, StoreError: see ``_FAILURES``; on all ranks.
            Stopped
        """
        outcomes = self._together(lambda: read_with_retries(read, self._stopped))
        messages = {o.failure: o.message for o in reversed(outcomes)}
        for failure, error in _FAILURES.items():
            if failure in messages:
                raise error(messages[failure])
        return messages.get("damaged", "")

    def _together(self, task: Callable[[], None]) -> list[_Outcome]:
        """Call ``task`` on all ranks; returns their outcomes. It may take longer than the timeout of a collective.

        Raises:
            Stopped: a rank is to stop; its task is abandoned.
        """
        outcome = [_Outcome()]

        def guarded() -> None:
            lower_priority()
            try:
                task()
                outcome[0] = _Outcome(ended=True)
            except CheckpointError as error:
                outcome[0] = _Outcome(ended=True, failure="damaged", message=str(error) or "damaged")
            except Exception as error:
                kinds = (kind for kind, raised in _FAILURES.items() if isinstance(error, raised))
                failure = next(kinds, "disk" if isinstance(error, OSError) else "store")
                text = str(error) if isinstance(error, TrainerError | StoreError | OSError) else repr(error)
                outcome[0] = _Outcome(ended=True, failure=failure, message=text)

        thread = threading.Thread(target=guarded, name="read", daemon=True)
        thread.start()
        while True:
            thread.join(self.timings.exchange)
            states = self._ranks.all_gather((outcome[0], self._stopped()), tuple[_Outcome, bool])
            if all(o.ended for o, _ in states):
                return [o for o, _ in states]
            if any(stopped for _, stopped in states):
                raise Stopped("stopped while a checkpoint was read from the object store")

    def snapshot(self, step: int) -> bytes:
        """The coordinator's state of a loaded checkpoint. Not a collective."""
        return self._store.snapshot(step)

    def stage(self, step: int) -> bytes:
        """The state of mid-training in a loaded checkpoint. Not a collective."""
        return (self._store.directory(step) / STAGE).read_bytes()

    def _verify(self, step: int) -> str:
        """Why the checkpoint is damaged; empty if it is not. Restores this rank's random states, which shows that they are some."""
        try:
            manifest = self._store.manifest(step)
            self._store.verify(manifest, self._ranks.rank, self._ranks.world)
        except CheckpointError as error:
            return str(error) or "damaged"
        try:
            load_random_state(self._store.directory(step), self._ranks.rank)
        except RandomStateError as error:
            return f"rank {self._ranks.rank}: {error}"
        return ""


def held_by(world: int) -> str:
    """What keeps unsaved weights, for the message of a hold.

    >>> held_by(2)
    'Each of the 2 ranks has a part of them: if one is lost (its process, its node), all updates since the last checkpoint are'
    """
    ranks = f"Each of the {world} ranks has a part of them: if one" if world > 1 else "If its process"
    return f"{ranks} is lost{' (its process, its node)' if world > 1 else ''}, all updates since the last checkpoint are"
