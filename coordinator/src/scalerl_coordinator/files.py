"""The two files a person looks at: ``metrics.jsonl``, one line a trained step, and ``curve.csv``, one row a point.

Both follow from the journal, which is ahead of them at most by what a crash or a full disk cut off;
:meth:`RunFiles.write_rows` closes the gap. Blocking I/O: call from one thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from scalerl_api.curve import curve_csv
from scalerl_api.exports import Exports, read_exports
from scalerl_api.paths import RunPaths
from scalerl_api.wire import EvaluationPoint
from scalerl_coordinator.accounting import Row


class RunFiles:
    """Writes both files of one run."""

    def __init__(self, paths: RunPaths) -> None:
        self._metrics = paths.metrics
        self._curve = paths.curve
        self._exports = paths.exports
        self._present: set[int] | None = None
        """Steps of the rows last written, if that went well and nobody has doubts."""

    def exports(self) -> Exports | None:
        """What the trainer has exported."""
        return read_exports(self._exports)

    def write_rows(self, rows: Mapping[int, Row], version: int, *, whole: bool = False) -> None:
        """Make metrics.jsonl hold a line for each of ``rows`` (by step), which end below ``version``.

        Ordinarily that appends the last one. The first time, after a write that failed, and with ``whole``, the file
        is put right by :meth:`repair`.

        Raises:
            OSError: the file is as it was, or lacks lines; the next call knows.
        """
        present, self._present = self._present, None
        if present is None or whole:
            self.repair(rows, version)
        else:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.writelines(_line(rows[step]) for step in sorted(rows.keys() - present))
        self._present = set(rows)

    def repair(self, rows: Mapping[int, Row], version: int) -> None:
        """Make metrics.jsonl hold the steps below ``version`` and no others: after a crash, or a step back.

        Lines of other steps and torn ones go; those of ``rows`` are added or put in place of what is there. A file
        that is right already is left alone.
        """
        try:
            text = self._metrics.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            text = ""
        kept: dict[int, str] = {}
        for line in text.splitlines(keepends=True):
            step = _step_of(line)
            if step is not None and step < version:
                kept[step] = line
        kept |= {step: _line(row) for step, row in rows.items() if step < version}
        right = "".join(kept[step] for step in sorted(kept))
        if right != text or not self._metrics.exists():
            _write_whole(self._metrics, right)

    def write_curve(self, points: Sequence[EvaluationPoint]) -> None:
        """All points, by version; the file is replaced as a whole."""
        _write_whole(self._curve, curve_csv(points))


def _line(row: Row) -> str:
    return json.dumps(dict(row), allow_nan=False) + "\n"


def _step_of(line: str) -> int | None:
    """The step of a whole line; None for a torn or foreign one."""
    if not line.endswith("\n"):
        return None
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
