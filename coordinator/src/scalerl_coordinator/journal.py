"""The journal on disk: append, group commit, snapshots, recovery, and what happens when the disk is full.

One worker thread writes; the event loop appends and awaits. Everything appended while a sync is under way
goes to disk with the next one (group commit), and :meth:`Journal.durable` returns when it is there.

When a write or sync fails, nothing of the failed batch was promised to anyone: the file is cut back to what is on
disk, everyone who waits is refused, ``on_refusal`` lets the owner take the state back to the journal's, and the
journal refuses until a new segment could be opened and written. A file whose sync failed is never synced again:
the kernel may have dropped its pages (so a new segment, not a second try).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scalerl_coordinator import frames
from scalerl_coordinator.frames import Buffer, CorruptJournal

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 2**20
_HEADROOM_BYTES = 2**20
"""A journal that refused accepts again once this much could be written."""
_PROBE_SECONDS = 1.0


class JournalRefused(Exception):
    """Not written, nothing has changed; the disk's error is the cause."""


class JournalLocked(Exception):
    """Another coordinator works on this directory."""


class Location(msgspec.Struct, frozen=True, array_like=True):
    """Where a blob's frame stands."""

    segment: int
    offset: int
    length: int


class _Snapshot(msgspec.Struct, frozen=True):
    state: bytes
    blobs: dict[str, Location]


class Disk:
    """The system calls that can fail for want of space; a test's disk can be full at any byte."""

    def write(self, fd: int, data: Buffer) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


@dataclass(slots=True)
class _Batch:
    """What goes to disk with one sync."""

    segment: int
    parts: list[Buffer] = field(default_factory=list)
    size: int = 0
    """Bytes in ``parts``."""
    end: int = 0
    """Of the segment, once it is written."""
    position: int = 0
    """Of the last record in it."""
    rotation: tuple[bytes, frozenset[int]] | None = None
    """After it: snapshot to write, segments that still hold wanted blobs."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One record found at recovery."""

    header: memoryview
    location: Location
    has_blob: bool


@dataclass(slots=True)
class JournalFigures:
    """For the metrics."""

    syncs: int = 0
    sync_seconds: float = 0.0
    bytes_written: int = 0
    refusals: int = 0
    rotations: int = 0


class Journal:
    """One directory, one owner (held by a lock file).

    Life: construct → :meth:`recover` → :meth:`start` → appends → :meth:`close`.

    Raises:
        JournalLocked: another process has it.
    """

    def __init__(
        self, directory: Path, *, disk: Disk | None = None, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.directory = directory
        self.figures = JournalFigures()
        self.on_refusal: Callable[[], None] = lambda: None
        self._disk = disk or Disk()
        self._segment_bytes = segment_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise JournalLocked(
                f"{directory}: another coordinator works on this run; stop it first"
            ) from None
        self._blobs: dict[str, Location] = {}
        self._segment = 0
        self._fd = -1
        self._written = 0  # bytes of the present segment: appended to it,
        self._acknowledged = 0  # and known to be on disk
        self._open_number = self._synced = 0  # the worker's own: the segment it has open, bytes synced there
        self._position = self._durable = 0
        self._pending: deque[_Batch] = deque()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._wake = asyncio.Event()
        self._error: OSError | None = None
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._owner: asyncio.Task[None] | None = None
        self._index_lock = threading.Lock()

    # --- recovery -------------------------------------------------------------------------------

    def recover(self) -> tuple[bytes | None, Iterator[Replayed]]:
        """The newest snapshot's state, and the records after it in order. Exhaust the iterator before :meth:`start`.

        The blob index is rebuilt on the way: the owner names each blob with :meth:`index` and ends with
        :meth:`retain`.

        Raises:
            CorruptJournal: while iterating, too.
        """
        snapshots, segments = self._numbered("snapshot"), self._numbered("segment")
        state: bytes | None = None
        first = 1
        self._blobs = {}
        if snapshots:
            first = snapshots[-1]
            path = self._path("snapshot", first)
            try:
                snapshot = msgspec.msgpack.decode(
                    frames.decode_snapshot(path.read_bytes(), str(path)), type=_Snapshot
                )
            except msgspec.DecodeError as error:
                raise CorruptJournal(str(path), 0, f"the snapshot does not fit: {error}") from error
            state, self._blobs = snapshot.state, dict(snapshot.blobs)
        live = [n for n in segments if n >= first]
        for number, following in itertools.pairwise(live):
            if following != number + 1:
                raise CorruptJournal(str(self._path("segment", number + 1)), 0, "the segment is missing")
        if live[:1] != [first] and (snapshots or segments):
            raise CorruptJournal(str(self._path("segment", first)), 0, "the segment is missing")
        return state, self._replay(live, live[-1] if live else first)

    def _replay(self, live: list[int], newest: int) -> Iterator[Replayed]:
        end = 0
        for number in live:
            path = self._path("segment", number)
            data = memoryview(path.read_bytes())
            end = frames.SEGMENT_HEADER.size if len(data) >= frames.SEGMENT_HEADER.size else 0
            for frame in frames.read_segment(data, str(path), number, last=number == live[-1]):
                end = frame.end
                yield Replayed(
                    frame.header, Location(number, frame.offset, end - frame.offset), len(frame.blob) > 0
                )
        self._segment = self._open_number = newest
        self._written = self._acknowledged = self._synced = end

    def index(self, key: str, location: Location) -> None:
        """Recovery: the blob of the record just replayed is known as ``key``."""
        self._blobs[key] = location

    def retain(self, keys: Iterable[str]) -> None:
        """Recovery: only these blobs are wanted; all must be there."""
        wanted = set(keys)
        missing = wanted - self._blobs.keys()
        if missing:
            raise CorruptJournal(
                str(self.directory), 0, f"the groups of {len(missing)} leases are not in any segment"
            )
        blobs = {key: at for key, at in self._blobs.items() if key in wanted}
        for segment in sorted({at.segment for at in blobs.values()}):
            path = self._path("segment", segment)
            if not path.exists():
                raise CorruptJournal(str(path), 0, "the segment is missing, and groups of it are wanted")
        self._blobs = blobs

    # --- appending ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Cut a torn tail off, open the segment for appending, start the writer."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._open_tail)
        self._owner = loop.create_task(self._commit_forever(), name="journal")

    @property
    def refusing(self) -> OSError | None:
        """The disk's error while nothing can be written; else None."""
        return self._error

    @property
    def segment_size(self) -> int:
        """Bytes in the present segment, appended ones included."""
        return self._written

    @property
    def wants_rotation(self) -> bool:
        return self._written >= self._segment_bytes

    def check(self) -> None:
        """Raises JournalRefused while nothing can be written; call before changing any state."""
        if self._error is not None:
            raise JournalRefused(f"{self.directory}: {self._error.strerror}") from self._error

    def append(self, header: bytes, key: str | None = None, blob: Buffer = b"") -> None:
        """Queue one record, and the blob that goes with it under ``key``. :meth:`check` came before."""
        batch = self._open_batch()
        length = frames.frame_bytes(header, blob)
        if key is not None:
            with self._index_lock:
                self._blobs[key] = Location(self._segment, self._written, length)
        batch.parts.extend(frames.encode_frame(header, blob, self._acknowledged))
        batch.size += length
        self._written += length
        self._position += 1
        batch.end, batch.position = self._written, self._position
        self._wake.set()

    def forget(self, keys: Iterable[str]) -> None:
        """These blobs are not wanted any more; their segments go at a later rotation."""
        with self._index_lock:
            for key in keys:
                self._blobs.pop(key, None)

    def rotate(self, state: bytes) -> None:
        """Begin a new segment, with a snapshot of the state as of the last appended record before it.

        A snapshot that cannot be written is logged and left out: recovery then replays more.
        """
        if self._error is not None:
            return
        with self._index_lock:
            blobs = dict(self._blobs)
        snapshot = msgspec.msgpack.encode(_Snapshot(state, blobs))
        batch = self._open_batch()
        batch.rotation = (snapshot, frozenset(at.segment for at in blobs.values()))
        batch.position = self._position
        self._segment += 1
        self._written = self._acknowledged = frames.SEGMENT_HEADER.size
        self._wake.set()

    async def durable(self) -> None:
        """Returns when everything appended before this call is on disk.

        Raises:
            JournalRefused: it is not, and never will be: the state has gone back to what is.
        """
        self.check()
        position = self._position
        if position <= self._durable:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiters.append((position, future))
        await future

    async def close(self) -> None:
        """Write what is queued, stop the writer, let go of the directory."""
        self._closing = True
        self._wake.set()
        if self._owner is not None:
            await self._owner
        self._thread.shutdown(wait=True)
        if self._fd >= 0:
            os.close(self._fd)
        os.close(self._lock)

    # --- reading blobs (any thread) -------------------------------------------------------------

    def read(self, keys: Iterable[str]) -> list[bytes]:
        """The blobs of ``keys``, checked against their checksums. Blocks on the disk: call from a thread.

        Raises:
            KeyError: a key is forgotten or was never there.
            CorruptJournal: a blob is damaged.
        """
        with self._index_lock:
            locations = [self._blobs[key] for key in keys]
        files: dict[int, int] = {}
        try:
            blobs = []
            for at in locations:
                path = self._path("segment", at.segment)
                if at.segment not in files:
                    files[at.segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                data = os.pread(files[at.segment], at.length, at.offset)
                blobs.append(bytes(frames.read_frame(data, str(path), at.offset).blob))
            return blobs
        finally:
            for fd in files.values():
                os.close(fd)

    # --- the writer -----------------------------------------------------------------------------

    def _open_batch(self) -> _Batch:
        if not self._pending or self._pending[-1].rotation is not None:
            self._pending.append(_Batch(self._segment))
        return self._pending[-1]

    async def _commit_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._pending:
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
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

    def _write(self, batch: _Batch) -> None:
        """Worker thread: one batch to disk, all of it or OSError."""
        if batch.parts:
            started = time.perf_counter()
            data = memoryview(b"".join(batch.parts))
            while data:
                data = data[self._disk.write(self._fd, data) :]
            self._disk.sync(self._fd)
            self._synced += batch.size
            self.figures.syncs += 1
            self.figures.sync_seconds += time.perf_counter() - started
            self.figures.bytes_written += batch.size
        if batch.rotation is not None:
            self._rotate_files(*batch.rotation)

    def _rotate_files(self, snapshot: bytes, wanted: frozenset[int]) -> None:
        number = self._open_number + 1
        self._create_segment(number)
        self.figures.rotations += 1
        try:
            self._write_snapshot(number, snapshot)
        except OSError as error:
            log.warning("snapshot %d not written (%s); the journal before it stays", number, error.strerror)
            return
        for kind in ("snapshot", "segment"):
            for old in self._numbered(kind):
                if old < number and (kind == "snapshot" or old not in wanted):
                    self._path(kind, old).unlink(missing_ok=True)

    def _write_snapshot(self, number: int, payload: bytes) -> None:
        path = self._path("snapshot", number)
        aside = path.with_suffix(".tmp")
        try:
            self._write_file(aside, frames.encode_snapshot(payload))
            aside.rename(path)
            self._sync_directory()
        except OSError:
            aside.unlink(missing_ok=True)
            raise

    def _write_file(self, path: Path, payload: Buffer) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            data = memoryview(payload)
            while data:
                data = data[self._disk.write(fd, data) :]
            self._disk.sync(fd)
        finally:
            os.close(fd)

    def _open_tail(self) -> None:
        """Worker thread, once: continue the last segment, or begin the first."""
        for path in self.directory.glob("*.tmp"):
            path.unlink()
        if self._synced == 0:
            self._create_segment(self._segment)
        else:
            self._fd = os.open(self._path("segment", self._segment), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.ftruncate(self._fd, self._synced)
            self._disk.sync(self._fd)
        self._written = self._acknowledged = self._synced

    def _create_segment(self, number: int) -> None:
        """Worker thread: a new segment, empty but for its header, on disk; it becomes the open one."""
        path = self._path("segment", number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            header = frames.segment_header(number)
            if self._disk.write(fd, header) != len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._disk.sync(fd)
            self._sync_directory()
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._open_number, self._synced = fd, number, len(header)

    def _sync_directory(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # --- refusing -------------------------------------------------------------------------------

    async def _refuse(self, error: OSError) -> None:
        """Nothing of the failed batch, or after it, was promised: undo it all, then wait for space."""
        log.error("the journal cannot be written: %s; refusing until it can", error.strerror)
        self._error = error
        self.figures.refusals += 1
        self._pending.clear()
        refused = JournalRefused(f"{self.directory}: {error.strerror}")
        waiters, self._waiters = self._waiters, deque()
        loop = asyncio.get_running_loop()
        while not self._closing:
            try:
                await loop.run_in_executor(self._thread, self._cut_tail)
                break
            except OSError as problem:
                log.error("the journal's torn tail cannot be cut off: %s", problem.strerror)
                await asyncio.sleep(_PROBE_SECONDS)
        self._durable = self._position
        if not self._closing:
            self.on_refusal()
        for _, future in waiters:
            if not future.done():
                future.set_exception(refused)
        while not self._closing:
            try:
                await loop.run_in_executor(self._thread, self._reopen)
            except OSError:
                await asyncio.sleep(_PROBE_SECONDS)
                continue
            self._segment, self._error = self._open_number, None
            self._written = self._acknowledged = self._synced
            log.info("the journal can be written again, in segment %d", self._segment)
            return

    def _cut_tail(self) -> None:
        os.ftruncate(self._fd, self._synced)

    def _reopen(self) -> None:
        """Worker thread: a new segment with room to write, or OSError and everything as before."""
        probe = self.directory / "room.tmp"
        try:
            self._write_file(probe, bytes(_HEADROOM_BYTES))
        finally:
            probe.unlink(missing_ok=True)
        self._create_segment(self._open_number + 1)

    # --- names ----------------------------------------------------------------------------------

    def _path(self, kind: str, number: int) -> Path:
        return self.directory / f"{kind}-{number:08d}"

    def _numbered(self, kind: str) -> list[int]:
        names = (path.name.removeprefix(f"{kind}-") for path in self.directory.glob(f"{kind}-*"))
        return sorted(int(name) for name in names if name.isdigit())
