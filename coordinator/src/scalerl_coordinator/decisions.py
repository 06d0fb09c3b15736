"""``decisions.jsonl`` of a run on a cluster: the operator sends each decision of its autoscaler as one line.

On a laptop the operator writes the file itself, and nothing here touches it. Blocking I/O: call from one thread.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

MAX_LINE_BYTES: Final = 2**23


class Superseded(Exception):
    """The log does not end where the sender believes: it has to be read again."""


class DecisionLog:
    """The file at ``path``. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes:
        """The whole lines. A torn last line was never acknowledged, and is cut off."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self._path.open("r+b") as file:
                file.truncate(whole)
                os.fsync(file.fileno())
        return content[:whole]

    def append(self, offset: int, line: bytes) -> None:
        """Have ``line`` follow the first ``offset`` bytes; it is on disk when this returns.

        The same line at the same offset again (its answer was lost) changes nothing.

        Raises:
            Superseded: another line is there, or the log ends elsewhere.
            ValueError: not one line.
        """
        if not line or line.find(b"\n") != len(line) - 1 or len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"a decision is one line of at most {MAX_LINE_BYTES} bytes that ends with a newline, not {len(line)} bytes"
            )
        content = self.read()
        if offset < len(content) and content[offset:] == line:
            return
        if offset != len(content):
            raise Superseded(f"the log of decisions has {len(content)} bytes, not {offset}; read it again")
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            data = memoryview(line)
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):  # what is left is torn: the next read cuts it off
                os.ftruncate(fd, offset)
            raise
        finally:
            os.close(fd)
        if not offset:
            self._sync_directory()

    def _sync_directory(self) -> None:
        fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
