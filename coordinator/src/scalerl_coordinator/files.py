"""Writes the files for users: ``metrics.jsonl`` with a line per trained step, and ``curve.csv``, the curves of other
evaluation sets and ``labels.csv`` with a row per point.

They are derived from the journal. After a crash or with a full disk they may lack rows, which
:meth:`RunFiles.write_rows` adds. Blocking I/O: call from one thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from scalerl_api.curve import curve_csv, labels_csv
from scalerl_api.exports import EXPORTS_FILE, Exports, read_exports
from scalerl_api.health import LAST, LONG, rows_of
from scalerl_api.paths import RunPaths
from scalerl_api.wire import EvaluationPoint
from scalerl_coordinator.decisions import DecisionLog
from scalerl_coordinator.disk import replace
from scalerl_coordinator.step_figures import Row


class RunFiles:
    """Writes the files of one run.

    Args:
        staging: folder for files that are not complete, the journal's: a coordinator that was replaced cannot rename a file from
            there, since the next one has removed it. None: beside the file.
    """

    def __init__(self, paths: RunPaths, staging: Path | None = None) -> None:
        self._metrics = paths.metrics
        self._paths = paths
        self._exports, self._staging = paths.exports, staging
        self.decisions = DecisionLog(paths.decisions)
        self._present: set[int] | None = None
        """Steps of the rows in the last write; None if the contents of the file are uncertain."""

    def health_rows(self) -> list[Row]:
        """The rows of metrics.jsonl by which the run's health is judged, of its first and last steps. Raises OSError."""
        lines = self._metrics.read_bytes().splitlines() if self._metrics.exists() else []
        return rows_of(lines if len(lines) <= 2 * LONG else lines[:LAST] + lines[-LONG:])

    def exports(self) -> Exports | None:
        """The trainer's exported models."""
        return read_exports(self._exports)

    def keep_exports(self, exports: Exports) -> None:
        """Keep the exported models of a trainer that has a directory of its own. Raises OSError."""
        self._exports.mkdir(parents=True, exist_ok=True)
        self._write_whole(self._exports / EXPORTS_FILE, msgspec.json.encode(exports).decode())

    def write_rows(self, rows: Mapping[int, Row], version: int, *, whole: bool = False) -> None:
        """Write a line for each of ``rows`` (by step) to metrics.jsonl; all steps are below ``version``.

        Usually that appends the last row. The first time, after a failed write, and with ``whole``, :meth:`repair` runs.

        Raises:
            OSError: the file may lack lines; the next call repairs it.
        """
        present, self._present = self._present, None
        if present is None or whole:
            self.repair(rows, version)
        else:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.writelines(_line(rows[step]) for step in sorted(rows.keys() - present))
        self._present = set(rows)

    def repair(self, rows: Mapping[int, Row], version: int) -> None:
        """Make metrics.jsonl have the steps below ``version`` and no others, after a crash or a return to a checkpoint.

        Removes other steps and partial lines, and adds or replaces those of ``rows``. Does not write the file if it is correct.
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
        correct = "".join(kept[step] for step in sorted(kept))
        if correct != text or not self._metrics.exists():
            self._write_whole(self._metrics, correct)

    def write_curves(self, points: Sequence[EvaluationPoint], forecast_task: int) -> None:
        """Replace the curve file of each evaluation set, and ``labels.csv`` with the breakdown of all sets.

        ``curve.csv`` is the curve that the forecast follows; the files of other sets have the set's name.
        """
        others: dict[str, list[EvaluationPoint]] = {}
        for point in points:
            if point.task != forecast_task:
                others.setdefault(point.set_name, []).append(point)
        followed = [point for point in points if point.task == forecast_task]
        self._write_whole(self._paths.curve, curve_csv(followed))
        for name in {point.set_name for point in followed}:
            # Written while the forecast followed another set.
            self._paths.set_curve(name).unlink(missing_ok=True)
        for name, curve in others.items():
            self._write_whole(self._paths.set_curve(name), curve_csv(curve))
        if any(point.by_label for point in points):
            self._write_whole(self._paths.labels, labels_csv(points))

    def _write_whole(self, path: Path, text: str) -> None:
        replace(path, text, (self._staging or path.parent) / f"{path.name}.tmp")


def _line(row: Row) -> str:
    return json.dumps(dict(row), allow_nan=False) + "\n"


def _step_of(line: str) -> int | None:
    """The step of a complete line; None for a partial or foreign one."""
    if not line.endswith("\n"):
        return None
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
