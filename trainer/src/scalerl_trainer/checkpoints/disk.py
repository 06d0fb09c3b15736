"""The volume of the checkpoints: the system calls of a checkpoint, and what decides whether a failed write may succeed now."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scalerl_trainer.fence import DAMAGED

_CHUNK_BYTES = 4 << 20
_MIN_GROWTH_BYTES = 1 << 20
"""Growth of the free space that is worth another attempt; less comes and goes with logs."""


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise OSError if the volume with ``folder`` has not enough free space for ``what``, which is about to be read to it."""
    stat = os.statvfs(folder)
    free_bytes = stat.f_bavail * stat.f_frsize
    if needed_bytes > free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{what} needs {needed_bytes:,} bytes and {free_bytes:,} are free: remove what is not needed there "
            f"({DAMAGED}* in checkpoints, other runs), or enlarge the volume",
            str(folder),
        )


class Disk:
    """The system calls of a checkpoint, so that tests can make each of them fail."""

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def sync(self, path: Path) -> None:
        flush(path)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path)

    def sha256(self, path: Path, progress: Callable[[int], None] | None = None) -> str:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            buffer = bytearray(_CHUNK_BYTES)
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                if progress is not None:
                    progress(count)
        return digest.hexdigest()


@dataclass(frozen=True)
class VolumeState:
    """What of a volume decides whether a failed write may succeed now."""

    free_bytes: int
    read_only: bool

    def better_than(self, before: VolumeState) -> bool:
        """Whether space came, or the volume became writable."""
        grown = self.free_bytes - before.free_bytes >= _MIN_GROWTH_BYTES
        return grown or (before.read_only and not self.read_only)
