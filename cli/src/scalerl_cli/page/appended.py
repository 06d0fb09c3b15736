"""Reads the lines that were appended to a file since the last time."""

from __future__ import annotations

import os
from pathlib import Path


class Appended:
    """A file of lines that another process appends to. A file that was shortened or replaced is read again from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the lines begin anew, and the complete ones since the last call; none of a file that is not there."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                anew = status.st_ino != self._inode or status.st_size < self._offset
                self._inode, self._offset = status.st_ino, 0 if anew else self._offset
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            anew, self._inode, self._offset = self._inode != 0, 0, 0
            return anew, []
        end = content.rfind(b"\n") + 1  # the last line may be incomplete
        self._offset += end
        return anew, content[:end].splitlines()
