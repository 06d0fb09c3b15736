"""The run's volume: the system calls that can fail for lack of space, files that are replaced whole, and files of lines.

Why there is no database: ``docs/adr/0032-files-not-a-database.md``. Blocking I/O; functions and methods raise OSError.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from scalerl_coordinator.frames import Buffer

_RESERVE_BYTES: Final = 2**30
"""Free space that optional files must leave for the journal and the checkpoints, capped at a 20th of the volume."""
_BLOCK_BYTES: Final = 2**16


class Disk:
    """The system calls that can fail for lack of space, so that tests can replace them."""

    def write(self, fd: int, data: Buffer) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def free(self, directory: Path) -> tuple[int, int]:
        """Free and total bytes of the volume."""
        volume = os.statvfs(directory)
        return volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize

    def leaves_reserve(self, directory: Path, size: int) -> bool:
        """Whether writing ``size`` bytes of an optional file leaves enough space for the journal and the checkpoints."""
        free, total = self.free(directory)
        return free - size >= min(_RESERVE_BYTES, total // 20)

    def write_all(self, fd: int, data: Buffer) -> None:
        """Write all of ``data``; a failure may leave a part of it."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.write(fd, rest) :]

    def write_synced(self, path: Path, data: Buffer, mode: int = 0o666) -> None:
        """Write a file that nothing reads yet, to disk."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            self.write_all(fd, data)
            self.sync(fd)
        finally:
            os.close(fd)


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path: Path, text: str, staging: Path) -> None:
    """Replace the file at ``path`` with ``text``, whole or not at all, by way of ``staging`` on the same volume."""
    Disk().write_synced(staging, text.encode())
    staging.rename(path)


def size_of_whole_lines(fd: int) -> int:
    """Bytes of a file up to the end of its last complete line, which is searched from the end."""
    end = os.fstat(fd).st_size
    block = 1  # a file without a partial line ends with a newline
    while end > 0:
        start = max(0, end - block)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end, block = start, _BLOCK_BYTES
    return 0


class LineFile:
    """An optional file of lines that is appended to, by one thread. It leaves the reserve of the volume, and is not synced.

    A coordinator that was replaced may append late, within another's line: readers leave out lines that are none.
    """

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path = path
        self._disk = disk or Disk()
        self.continues = False
        """Whether the last call of :meth:`append` succeeded, so that the file ends with a complete line."""

    def append(self, lines: bytes) -> None:
        """Append complete lines, after the removal of one that a crash or a full disk left incomplete.

        Raises:
            OSError: the lines, or a part of them, are lost.
        """
        whole, self.continues = self.continues, False
        if not self._disk.leaves_reserve(self.path.parent, len(lines)):
            raise OSError(errno.ENOSPC, "the volume is nearly full")
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if not whole:
                self._disk.truncate(fd, size_of_whole_lines(fd))
            self._disk.write_all(fd, lines)
        finally:
            os.close(fd)
        self.continues = True
