"""The journal on disk: append, group commit, snapshots, and recovery from a full or read-only disk.

The event loop appends and awaits; one worker thread writes. Records appended during a sync are written with the next one
(group commit). :meth:`Journal.durable` returns once they are on disk.

When a write or sync fails, no record of the failed batch was acknowledged. All waiters get :class:`JournalRefused`,
``on_refusal`` lets the owner return its state to what is on disk, and the journal refuses records until it has truncated
the partial tail and written a new segment. It needs a new segment because a file whose sync failed must not be synced
again: the kernel may have dropped its dirty pages. Any other failure ends the writer, and ``on_failure`` reports it.

On a cluster, nothing is acknowledged once another coordinator has taken the journal over (:mod:`.fence`).

:mod:`.segment_files` has the files; :mod:`.recovery` reads them, at start and for a roll-back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scalerl_coordinator import frames
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.fence import Fence
from scalerl_coordinator.frames import Buffer
from scalerl_coordinator.recovery import BlobIndex, Layout, Location, Recovery, Snapshot
from scalerl_coordinator.segment_files import SegmentFiles

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 2**20
_RETRY_SECONDS = 1.0
_CHECK_SECONDS = 2.0
"""Between two checks of the fence while there is nothing to write: a coordinator that was replaced does not answer for longer."""


class JournalRefused(Exception):
    """The record was not written and nothing changed. ``__cause__`` is the disk's error."""


class JournalFailed(Exception):
    """The writer has ended and writes nothing more. ``__cause__`` is its exception."""


class JournalLocked(Exception):
    """Another coordinator uses this directory."""


@dataclass(slots=True)
class _Batch:
    """Records that are written with one sync."""

    segment: int
    parts: list[Buffer] = field(default_factory=list)
    end: int = 0
    """End of the batch in its segment, in bytes."""
    position: int = 0
    """Number of its last record, counted from the process's start."""
    rotation: tuple[bytes, frozenset[int]] | None = None
    """If a new segment follows the batch: the snapshot to write, and the segments to keep because they hold needed blobs."""


@dataclass(slots=True)
class JournalCounters:
    """Counters since the process began, for the metrics."""

    syncs: int = 0
    sync_seconds: float = 0.0
    bytes_written: int = 0
    refusals: int = 0
    rotations: int = 0


class Journal:
    """The journal in one directory, which a lock file, or the fence, reserves for one process.

    Life cycle: construct → :meth:`recover` → :meth:`start` → appends → :meth:`close`. Blobs are read through ``blobs``.

    Args:
        fence: checked after each group commit. None: there is a lock file, which a lost node would not release.

    Raises:
        JournalLocked: another process holds the lock.
    """

    def __init__(
        self,
        directory: Path,
        *,
        disk: Disk | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        fence: Fence | None = None,
    ) -> None:
        self.directory = directory
        self.counters = JournalCounters()
        self.on_refusal: Callable[[], None] = lambda: None
        self.on_failure: Callable[[BaseException], object] = lambda error: None
        self._segment_bytes = segment_bytes
        self._fence = fence
        self._lock = _lock(directory) if fence is None else -1
        self._layout = Layout(directory)
        self.blobs = BlobIndex(self._layout)
        # Only the worker thread uses it while the writer runs.
        self._files = SegmentFiles(self._layout, disk or Disk(), fence)
        self._recovery: Recovery | None = None
        self._segment = 1
        self.segment_size = 0
        """Bytes in the current segment, including those not written yet."""
        self._acknowledged = 0  # bytes of it that are on disk
        self._position = 0  # number of records appended
        self._durable = 0  # number of records on disk, or rolled back
        self._pending: deque[_Batch] = deque()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._wake = asyncio.Event()
        self.refusing: OSError | None = None
        """The disk's error while the journal cannot be written; else None."""
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._writer: asyncio.Task[None] | None = None

    # --- life cycle -----------------------------------------------------------------------------

    def recover(self) -> Recovery:
        """Read the journal: all of it before :meth:`start`; in ``on_refusal``, up to the last synced record.

        Raises:
            CorruptJournal, OSError: see :class:`~.recovery.Recovery`.
        """
        self._recovery = Recovery(self._layout, self.blobs, self._files.synced_end)
        return self._recovery

    async def start(self) -> None:
        """Truncate a partial tail, open the segment for appending, start the writer.

        On a disk that cannot be written, the journal refuses records until it can: see :attr:`refusing`.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._open_tail)
            self._continue_open_segment()
        except OSError as error:
            self._start_refusing(error)
        self._writer = loop.create_task(self._commit_forever(), name="journal")
        self._writer.add_done_callback(self._writer_done)

    async def close(self) -> None:
        """Write what is queued, stop the writer, release the directory."""
        self._closing = True
        self._wake.set()
        if self._writer is not None:
            # Ignores its exception, which ``on_failure`` has reported.
            await asyncio.gather(self._writer, return_exceptions=True)
        self._thread.shutdown(wait=True)
        self._files.close()
        if self._fence is None:
            os.close(self._lock)
        else:
            self._fence.end()

    # --- appending ------------------------------------------------------------------------------

    @property
    def wants_rotation(self) -> bool:
        return self.segment_size >= self._segment_bytes

    def check(self) -> None:
        """Check that the journal accepts records. Call it before changing any state.

        Raises:
            JournalRefused: the disk cannot be written at present.
            JournalFailed: the writer has ended.
        """
        if self._failure is not None:
            raise JournalFailed(
                f"{self.directory}: the writer has ended: {self._failure!r}"
            ) from self._failure
        if self.refusing is not None:
            raise JournalRefused(f"{self.directory}: {self.refusing.strerror}") from self.refusing

    def append(self, header: bytes, key: str | None = None, blob: Buffer = b"") -> None:
        """Queue one record, whose ``blob`` is stored under ``key``. Call :meth:`check` first."""
        batch = self._open_batch()
        length = frames.frame_bytes(header, blob)
        if key is not None:
            self.blobs.put(key, Location(self._segment, self.segment_size, length))
        batch.parts.extend(frames.encode_frame(header, blob, self._acknowledged))
        self.segment_size += length
        self._position += 1
        batch.end, batch.position = self.segment_size, self._position
        self._wake.set()

    def rotate(self, state: bytes) -> None:
        """Start a new segment with ``state``, a snapshot as of the last appended record.

        If the snapshot cannot be written, that is logged, and recovery replays older segments instead.
        """
        if self.refusing is not None:
            return
        blobs = self.blobs.copy()
        snapshot = msgspec.msgpack.encode(Snapshot(state, blobs))
        batch = self._open_batch()
        batch.rotation = (snapshot, frozenset(at.segment for at in blobs.values()))
        batch.position = self._position
        self._segment += 1
        self.segment_size = self._acknowledged = frames.SEGMENT_HEADER.size
        self._wake.set()

    async def durable(self) -> None:
        """Return when all records appended before this call are on disk.

        Await it right after the appends, so that no failed write and roll-back comes between.

        Raises:
            JournalRefused: the records were not written, and ``on_refusal`` has rolled the state back.
            JournalFailed: the writer has ended; the records may or may not be on disk.
        """
        self.check()
        position = self._position
        if position <= self._durable:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiters.append((position, future))
        await future

    # --- the writer -----------------------------------------------------------------------------

    def _open_batch(self) -> _Batch:
        if not self._pending or self._pending[-1].rotation is not None:
            self._pending.append(_Batch(self._segment))
        return self._pending[-1]

    async def _commit_forever(self) -> None:
        loop = asyncio.get_running_loop()
        if self.refusing is not None:
            await self._until_writable(self._open_tail)
        while True:
            if not self._pending:
                if self._closing:
                    return
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), None if self._fence is None else _CHECK_SECONDS)
                except TimeoutError:
                    with contextlib.suppress(OSError):
                        await loop.run_in_executor(self._thread, self._files.check)
                continue
            batch = self._pending.popleft()
            try:
                await loop.run_in_executor(self._thread, self._write, batch)
            except OSError as error:
                await self._refuse(error)
                continue
            self._durable = batch.position
            if batch.segment == self._segment and batch.parts:
                self._acknowledged = batch.end
            while self._waiters and self._waiters[0][0] <= self._durable:
                _, future = self._waiters.popleft()
                if not future.done():
                    future.set_result(None)

    def _writer_done(self, writer: asyncio.Task[None]) -> None:
        problem = asyncio.CancelledError("cancelled") if writer.cancelled() else writer.exception()
        if problem is None:
            return
        log.error("%s: the journal's writer has ended: %r", self.directory, problem)
        self._failure = problem
        self._fail_waiters(JournalFailed(f"{self.directory}: the writer has ended: {problem!r}"))
        self.on_failure(problem)

    def _fail_waiters(self, problem: Exception) -> None:
        waiters, self._waiters = self._waiters, deque()
        for _, future in waiters:
            if not future.done():
                future.set_exception(problem)

    def _write(self, batch: _Batch) -> None:
        """Worker thread: write one batch completely, or raise OSError."""
        if batch.parts:
            started = time.perf_counter()
            written = self._files.append(batch.parts)
            self.counters.syncs += 1
            self.counters.sync_seconds += time.perf_counter() - started
            self.counters.bytes_written += written
        if batch.rotation is not None:
            self._files.rotate(*batch.rotation)
            self.counters.rotations += 1

    def _open_tail(self) -> None:
        """Worker thread, at the start: continue the last segment, or create the first."""
        if self._recovery is None:
            raise AssertionError("call recover() before start()")
        self._files.open_tail(*self._recovery.tail)
        self._recovery = None

    def _continue_open_segment(self) -> None:
        self._segment = self._files.number
        self.segment_size = self._acknowledged = self._files.synced

    # --- failed writes --------------------------------------------------------------------------

    async def _refuse(self, error: OSError) -> None:
        """Roll back the failed batch and all later records, none of which was acknowledged; then retry until the disk is
        writable again."""
        self._start_refusing(error)
        self._pending.clear()
        self._durable = self._position
        self._fail_waiters(JournalRefused(f"{self.directory}: {error.strerror}"))
        if self._closing:
            return
        self.on_refusal()
        await self._until_writable(self._files.reopen)

    def _start_refusing(self, error: OSError) -> None:
        log.error("the journal cannot be written: %s; refusing requests until it can", error.strerror)
        self.refusing = error
        self.counters.refusals += 1

    async def _until_writable(self, open_segment: Callable[[], None]) -> None:
        """Call ``open_segment`` in the worker thread until it succeeds; then the journal accepts records."""
        loop = asyncio.get_running_loop()
        while not self._closing:
            try:
                await loop.run_in_executor(self._thread, open_segment)
            except OSError as problem:
                log.debug("the journal cannot be written yet: %s", problem.strerror)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self.refusing = None
            self._continue_open_segment()
            log.info("the journal can be written again, in segment %d", self._segment)
            return


def _lock(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    lock = _open_lock(directory / "lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise JournalLocked(f"{directory}: another coordinator serves this run; stop it first") from None
    return lock


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # also a file that cannot be written can be locked
