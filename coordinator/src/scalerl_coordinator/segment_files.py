"""Writes the journal's segments and snapshots. Blocking I/O: the journal calls it from one thread."""

from __future__ import annotations

import errno
import logging
import os

from scalerl_coordinator import frames
from scalerl_coordinator.disk import Disk, sync
from scalerl_coordinator.fence import Fence
from scalerl_coordinator.frames import Buffer
from scalerl_coordinator.recovery import Layout

log = logging.getLogger(__name__)

_HEADROOM_BYTES = 2**20
"""After a failed write, this many bytes must be writable before the journal accepts records again."""


class SegmentFiles:
    """The files of one journal, of which one segment is open for writing.

    After a failed write, only :meth:`reopen` and :meth:`close` may be called until :meth:`reopen` has succeeded.

    Args:
        fence: checked before each change of a file is relied on; None without other coordinators.
    """

    def __init__(self, layout: Layout, disk: Disk, fence: Fence | None) -> None:
        self._layout, self._disk, self._fence = layout, disk, fence
        self._fd = -1
        self.number = 0
        """The open segment; 0 before :meth:`open_tail`."""
        self.synced = 0
        """Bytes of the open segment that are on disk."""

    @property
    def synced_end(self) -> tuple[int, int] | None:
        """The open segment and its synced bytes; None before a segment was opened."""
        return (self.number, self.synced) if self._fd >= 0 else None

    def check(self) -> None:
        """Raises :class:`.AttemptSuperseded` if another coordinator has taken the journal over."""
        if self._fence is not None:
            self._fence.check()

    def open_tail(self, number: int, end: int) -> None:
        """Continue segment ``number`` after its ``end`` valid bytes, or create it if it has none. Raises OSError; may be retried."""
        self.check()
        for path in self._layout.directory.glob("*.tmp"):
            path.unlink()
        if end == 0:
            self._create_segment(number)
            return
        if self._fd < 0:  # else an earlier attempt failed after this
            path = self._layout.path("segment", number)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.number, self.synced = number, end
        self._truncate_and_sync()

    def append(self, frames_of_batch: list[Buffer]) -> int:
        """Append frames to the open segment and sync it. Returns their bytes. Raises OSError."""
        data = b"".join(frames_of_batch)
        self._disk.write_all(self._fd, data)
        self._disk.sync(self._fd)
        self.check()
        self.synced += len(data)
        return len(data)

    def rotate(self, snapshot: bytes, segments_with_blobs: frozenset[int]) -> None:
        """Create the next segment, write its snapshot, and delete the files that both replace.

        If the snapshot cannot be written, that is logged, and the older files stay. Raises OSError without a new segment.
        """
        self.check()
        number = self.number + 1
        self._create_segment(number)
        try:
            self._write_snapshot(number, snapshot)
        except OSError as error:
            log.warning("cannot write snapshot %d (%s); keeping the older segments", number, error.strerror)
            return
        for kind in ("snapshot", "segment"):
            for old in self._layout.numbered(kind):
                if old < number and (kind == "snapshot" or old not in segments_with_blobs):
                    self._layout.path(kind, old).unlink(missing_ok=True)

    def reopen(self) -> None:
        """Truncate the partial tail, and open a new segment if there is space. Raises OSError; may be retried."""
        self.check()
        # Without this sync, the new segment could reach the disk before the truncation does.
        self._truncate_and_sync()
        probe = self._layout.directory / "room.tmp"
        try:
            self._disk.write_synced(probe, bytes(_HEADROOM_BYTES), 0o600)
        finally:
            probe.unlink(missing_ok=True)
        self._create_segment(self.number + 1)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _write_snapshot(self, number: int, payload: bytes) -> None:
        path = self._layout.path("snapshot", number)
        staging = path.with_suffix(".tmp")
        try:
            self._disk.write_synced(staging, frames.encode_snapshot(payload), 0o600)
            staging.rename(path)
            sync(self._layout.directory)
        except OSError:
            staging.unlink(missing_ok=True)
            raise

    def _create_segment(self, number: int) -> None:
        """Create a segment with only its header, sync it, and make it the open one."""
        path = self._layout.path("segment", number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            header = frames.segment_header(number)
            if self._disk.write(fd, header) != len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._disk.sync(fd)
            sync(self._layout.directory)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.number, self.synced = fd, number, len(header)

    def _truncate_and_sync(self) -> None:
        self._disk.truncate(self._fd, self.synced)
        self._disk.sync(self._fd)
