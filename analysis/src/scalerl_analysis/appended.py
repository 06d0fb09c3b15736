"""Reads the lines that were appended to a file since the last time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_BLOCK: Final = 2**22
_TAIL: Final = 4096


class Appended:
    """A file of lines that another process appends to. A file that was shortened or replaced is read again from its start, also
    if it has grown beyond its former size since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0
        self._tail = b""
        """Bytes before the offset."""
        self.partial = b""
        """What follows the last newline: a line that is being written, or that lacks its newline."""

    def read(self) -> Iterator[tuple[bool, list[bytes]]]:
        """The complete lines since the last call, in blocks; the first says whether the file is another or was rewritten."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            yield self._inode != 0, []
            self._inode, self._offset, self.partial = 0, 0, b""
            return
        with file:
            status = os.fstat(file.fileno())
            file.seek(max(0, self._offset - len(self._tail)))
            is_other = status.st_ino != self._inode or file.read(len(self._tail)) != self._tail
            if is_other:
                self._inode, self._offset, self._tail = status.st_ino, 0, b""
            file.seek(self._offset)
            yield is_other, []
            self.partial = b""
            while block := file.read(_BLOCK):
                block = self.partial + block
                end = block.rfind(b"\n") + 1
                self.partial = block[end:]
                self._offset += end
                self._tail = (self._tail + block[:end])[-_TAIL:] if end < _TAIL else block[end - _TAIL : end]
                yield False, block[:end].splitlines()
