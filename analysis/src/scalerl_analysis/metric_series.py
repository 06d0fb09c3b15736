"""The metrics of a run over its steps, from ``metrics.jsonl``."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from scalerl_analysis.appended import Appended
from scalerl_analysis.problem import AnalysisProblem
from scalerl_api.health import LAST, Steps, since

MAX_POINTS: Final = 2000
"""Points of a series that a browser gets."""


class MetricSeries:
    """Columns of numbers, a row for each step in order. A step that was trained again replaces the later ones."""

    def __init__(self, path: Path) -> None:
        self._lines = Appended(path)
        self.columns: dict[str, array[float]] = {}
        self.rows = 0
        self.revision = 0
        """Changes with the content."""
        self.unreadable = 0
        """Lines that are no rows, which are left out."""

    @classmethod
    def read(cls, path: str | Path) -> MetricSeries:
        """The series of a file that is read once; its last line may lack a newline.

        Raises:
            AnalysisProblem: the file cannot be read; one that does not exist is empty.
        """
        series = cls(Path(path))
        try:
            series.update()
        except OSError as error:
            raise AnalysisProblem(f"{path}: {error.strerror}") from error
        if (row := _row(series._lines.partial)) is not None:
            series._add(row)
        return series

    def update(self) -> None:
        for is_other, lines in self._lines.read():
            if is_other:
                self.columns, self.rows, self.unreadable = {}, 0, 0
            self.revision += is_other or bool(lines)
            for line in lines:
                if (row := _row(line)) is None:
                    self.unreadable += 1
                else:
                    self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        steps = self.columns.setdefault("step", array("d"))
        while steps and steps[-1] >= row["step"]:
            for column in self.columns.values():
                column.pop()
            self.rows -= 1
        for name, value in row.items():
            if isinstance(value, int | float):
                if name not in self.columns:
                    self.columns[name] = array("d", [math.nan]) * self.rows
                self.columns[name].append(value)
        self.rows += 1
        for column in self.columns.values():
            if len(column) < self.rows:
                column.append(math.nan)

    def column(self, name: str) -> Any:
        """(rows,) values, NaN where a row has none."""
        values = self.columns.get(name)
        return np.full(self.rows, math.nan) if values is None else np.array(values)

    def row(self, at: int) -> dict[str, float]:
        """The finite figures of a row."""
        return {name: column[at] for name, column in self.columns.items() if math.isfinite(column[at])}

    def dicts(self) -> list[dict[str, float]]:
        """All rows."""
        return [self.row(at) for at in range(self.rows)]

    def steps(self) -> Steps:
        """What the run's health is judged by."""
        first = range(LAST if self.rows >= 3 * LAST else 0)
        last = range(max(0, self.rows - LAST), self.rows)
        failing = self.column("step")[self.column("grading_errors") > 0]
        return Steps(
            [self.row(at) for at in first], [self.row(at) for at in last], since(failing.astype(int).tolist())
        )

    def points(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values, at most :data:`MAX_POINTS`: of each interval the smallest and the largest value, so that none is hidden."""
        x, y = self.column("step"), self.column(name)
        known = np.isfinite(y)
        return decimated(x[known], y[known])


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None if the line is none."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def decimated(x: Any, y: Any) -> tuple[list[float], list[float]]:
    """The points themselves, or of each of MAX_POINTS / 2 intervals the smallest and the largest, in their order.

    >>> decimated(np.arange(3), np.arange(3.0))
    ([0, 1, 2], [0.0, 1.0, 2.0])
    """
    if len(x) > MAX_POINTS:
        # The smallest values alone would hide peaks, the largest pauses.
        parts: Sequence[Any] = np.array_split(np.arange(len(x)), MAX_POINTS // 2)
        kept = [at for part in parts for at in sorted({part[np.argmin(y[part])], part[np.argmax(y[part])]})]
        x, y = x[kept], y[kept]
    return x.tolist(), y.tolist()
