"""Reads the lines that were appended to a file since the last time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_BLOCK: Final = 2**22


class Appended:
    """A file of lines that another process appends to. A file that was shortened or replaced is read again from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def read(self) -> Iterator[tuple[bool, list[bytes]]]:
        """The complete lines since the last call, in blocks; the first says whether the lines begin anew."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            yield self._inode != 0, []
            self._inode = self._offset = 0
            return
        with file:
            status = os.fstat(file.fileno())
            anew = status.st_ino != self._inode or status.st_size < self._offset
            self._inode, self._offset = status.st_ino, 0 if anew else self._offset
            file.seek(self._offset)
            yield anew, []
            rest = b""
            while block := file.read(_BLOCK):
                block = rest + block
                end = block.rfind(b"\n") + 1
                rest = block[end:]  # of the last block: a line that may be incomplete
                self._offset += end
                yield False, block[:end].splitlines()
