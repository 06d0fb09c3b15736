"""The run's ``decisions.jsonl``: the operator, or ``scalerl run``, sends each decision of its autoscaler as one line.

Blocking I/O: call from one thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from scalerl_coordinator.disk import size_of_whole_lines, sync

MAX_LINE_BYTES: Final = 2**23
PAGE_BYTES: Final = 2**20
"""Maximum size of one response; a log of 50,000 decisions has about 200 MB."""


class StaleOffset(Exception):
    """The log does not end where the client assumes; the client must read it again."""


class DecisionLog:
    """The file at ``path``. Reading takes the memory of a page, appending that of a line. Methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, offset: int = 0) -> tuple[bytes, int]:
        """Read at most ``PAGE_BYTES`` from ``offset`` on; returns them and the size of all whole lines of the log.

        A page may end within a line.

        Raises:
            StaleOffset: the log ends before ``offset``.
        """
        with self._opened(os.O_RDONLY) as fd:
            size = 0 if fd is None else size_of_whole_lines(fd)
            if offset > size:
                raise StaleOffset(f"the log of decisions has {size} bytes, not {offset}; read it again")
            return b"" if fd is None else os.pread(fd, min(PAGE_BYTES, size - offset), offset), size

    def append(self, offset: int, line: bytes) -> None:
        """Write ``line`` at ``offset``, the end of the log. It is on disk when this returns.

        Writing the same line at the same offset again (after a lost response) changes nothing.

        Raises:
            StaleOffset: the log does not end at ``offset``.
            ValueError: ``line`` is not one line.
        """
        if not line or line.find(b"\n") != len(line) - 1 or len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"a decision is one line of at most {MAX_LINE_BYTES} bytes that ends with a newline, not {len(line)} bytes"
            )
        with self._opened(os.O_RDWR | os.O_CREAT if offset == 0 else os.O_RDWR) as fd:
            size = 0 if fd is None else size_of_whole_lines(fd)
            if fd is not None and offset + len(line) == size and os.pread(fd, len(line), offset) == line:
                return
            if fd is None or offset != size:
                raise StaleOffset(f"the log of decisions has {size} bytes, not {offset}; read it again")
            try:
                if os.fstat(fd).st_size > offset:
                    os.ftruncate(fd, offset)  # remove a partial line, which was never acknowledged
                done = 0
                while done < len(line):
                    done += os.pwrite(fd, line[done:], offset + done)
                os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):  # the next append truncates the rest
                    os.ftruncate(fd, offset)
                raise
        if not offset:
            sync(self._path.parent)

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Iterator[int | None]:
        """A file descriptor, or None if the file does not exist."""
        try:
            fd = os.open(self._path, flags | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)
