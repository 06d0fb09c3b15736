"""Follows ``metrics.jsonl``: what is new, and what was taken back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from scalerl_coordinator.accounting import Row


class MetricsTail:
    """Reads what was appended, and all of a file that was replaced: after a crash, or a step back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0
        self._digests: dict[int, int] = {}
        """Of the line of every step that was read."""

    def read(self, most: int = 256) -> list[tuple[int, Row]] | None:
        """Steps and their rows that came since the last call, ascending, ``most`` at a time; None: a step that was read
        is gone or has other figures now, because the trainer went back to a checkpoint. The call after that begins anew.

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                now = {step: hash(line) for line, step, _ in _rows(file)}
                self._inode, self._offset = found.st_ino, 0
                if any(now.get(step) != digest for step, digest in self._digests.items()):
                    self._digests = {}
                    return None
            file.seek(self._offset)
            new = []
            for line, step, row in _rows(file):
                self._offset += len(line)
                if step >= 0 and step not in self._digests:
                    self._digests[step] = hash(line)
                    new.append((step, row))
                if len(new) == most:
                    break
            return new


def _rows(file: BinaryIO) -> Iterator[tuple[bytes, int, Row]]:
    """Whole lines, with the step -1 where they hold none: the coordinator mends those before it appends again."""
    for line in file:
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError):
            row, step = {}, -1
        yield line, step, row
