"""Disks that fail."""

from __future__ import annotations

import errno
import os

from scalerl_coordinator.disk import Disk


class FullDisk(Disk):
    """Takes ``room`` more bytes, then is full; a write may be cut short, as a real one is."""

    room = 10**9
    cut_and_synced = False
    """Whether the last file that was cut was synced before anything else was written."""

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._cut, self.cut_and_synced = fd, False

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.cut_and_synced |= fd == self._cut
        self._cut = -1

    _cut = -1

    def write(self, fd: int, data) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = super().write(fd, data[: self.room])
        self.room -= count
        return count


class ReadOnlyDisk(Disk):
    """A volume that the kernel has turned read-only: nothing can be written, and nothing cut off either."""

    read_only = False

    def _check(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def write(self, fd: int, data) -> int:
        if self.read_only and len(data) > 20:
            super().write(fd, data[:20])  # the part that went through before
        self._check()
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._check()
        super().sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._check()
        super().truncate(fd, size)
