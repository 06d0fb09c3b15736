"""Reads new rows of ``metrics.jsonl`` and ``curve.csv``, and detects rows that were removed or changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from scalerl_api.curve import curve_figures
from scalerl_coordinator.rollout_record import RecordPart, replaced_by
from scalerl_coordinator.step_figures import Row
from scalerl_coordinator.tracking.sink import HELD_OUT


class MetricsTail:
    """Reads lines appended to ``metrics.jsonl``.

    If the file was replaced, after a crash or a return to a checkpoint, it is read from the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rewind()

    def rewind(self) -> None:
        """Read from the start next time."""
        self._inode = -1
        self._offset = 0
        self._last_line = b""
        """The line that ends at the offset, compared because a replaced file can have the same, reused, inode number."""
        self._digests: dict[int, int] = {}
        """Hash of each step's line that was read."""

    def read(self, limit: int = 256) -> list[tuple[int, Row]] | None:
        """Up to ``limit`` new steps and their rows, ascending.

        Returns None if a step that was read is missing or changed, because the trainer returned to a checkpoint.

        Raises:
            OSError: the file exists and cannot be read.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            found = os.fstat(file.fileno())
            file.seek(self._offset - len(self._last_line))
            if found.st_ino != self._inode or file.read(len(self._last_line)) != self._last_line:
                file.seek(0)
                now = {step: hash(line) for line, step, _ in _rows(file)}
                if any(now.get(step) != digest for step, digest in self._digests.items()):
                    return None
                self._inode, self._offset, self._last_line = found.st_ino, 0, b""
            file.seek(self._offset)
            new = []
            for line, step, row in _rows(file):
                self._offset, self._last_line = self._offset + len(line), line
                if step >= 0 and step not in self._digests:
                    self._digests[step] = hash(line)
                    new.append((step, row))
                if len(new) == limit:
                    break
            return new


class CurveTail:
    """Reads new evaluations from ``curve.csv``, which is replaced as a whole at each evaluation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rewind()

    def rewind(self) -> None:
        """Read from the start next time."""
        self._stat: tuple[int, int, int] | None = None
        self._read: dict[int, Row] = {}

    def read(self) -> list[tuple[int, Row]] | None:
        """New versions and their columns, named ``held_out/COLUMN``, ascending.

        Returns None if a version that was read is missing or changed, or a new version is older than one that was read.

        Raises:
            OSError: the file exists and cannot be read.
            ValueError: the file is not a curve.
        """
        try:
            file = self._path.open(encoding="utf-8", newline="")
        except FileNotFoundError:
            return []
        with file:
            found = os.fstat(file.fileno())
            stat = (found.st_ino, found.st_mtime_ns, found.st_size)
            if stat == self._stat:
                return []
            figures = curve_figures(file.read())
        now = {int(row["version"]): {HELD_OUT + n: v for n, v in row.items()} for row in figures}
        new = sorted(now.keys() - self._read.keys())
        if any(now.get(version) != row for version, row in self._read.items()) or (
            new and self._read and new[0] < max(self._read)
        ):
            return None
        self._stat, self._read = stat, now
        return [(version, now[version]) for version in new]


SAMPLE_ROWS: Final = 64
"""Rollouts of an evaluation that a tracker gets."""
SAMPLE_COLUMNS: Final = (
    *("step", "task", "prompt_id", "sample", "prompt", "completion", "reference"),
    *("reward", "tokens", "finish_reason", "error"),
)
_SAMPLE_CHARACTERS: Final = 4000


def sample_of_evaluation(directory: Path, version: int) -> list[dict[str, Any]]:
    """Up to :data:`SAMPLE_ROWS` recorded rollouts of an evaluation, evenly spaced over its prompts; texts are cut. Empty while none are
    recorded, or a file is being replaced."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [*SAMPLE_COLUMNS, "prompt_index"]
    tables: dict[str, pa.Table] = {}
    replaced: list[str] = []
    for path in sorted(directory.glob("held_out-*.parquet")):
        part = RecordPart.parse(path)  # None: not a file of the record
        if part is not None and part.first <= version <= part.last:
            try:
                replaced += replaced_by(path)
                tables[path.name] = pq.read_table(path, columns=columns, filters=[("step", "==", version)])
            except (OSError, pa.ArrowException):
                return []
    # While files are merged, the sources and the file that replaces them are there.
    kept = [table for name, table in tables.items() if name not in replaced]
    found = (
        pa.concat_tables(kept).sort_by([(n, "ascending") for n in ("task", "prompt_index", "sample")])
        if kept
        else None
    )
    if not found:
        return []
    rows = min(SAMPLE_ROWS, found.num_rows)
    chosen = (
        found.take([at * found.num_rows // rows for at in range(rows)]).select(SAMPLE_COLUMNS).to_pylist()
    )
    return [
        {name: value[:_SAMPLE_CHARACTERS] if isinstance(value, str) else value for name, value in row.items()}
        for row in chosen
    ]


def _rows(file: BinaryIO) -> Iterator[tuple[bytes, int, Row]]:
    """Complete lines with their steps and rows.

    The step is -1 for a line without one, which the coordinator repairs before it appends the next line.
    """
    for line in file:
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError):
            row, step = {}, -1
        yield line, step, row
