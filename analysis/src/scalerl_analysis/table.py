"""Tables: columns with their formats and rows of values, as text, Markdown, CSV and JSON values."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: of its values in the rows, in CSV and in JSON.
        heading: in text and Markdown; None: it is not shown there.
        shown: text of a value.
        exported: value in CSV and JSON; one with ``median``, ``low`` and ``high`` is three columns of a CSV.
        interval: whether its values have a median and bounds.
        varied: not shown where all rows have the same value.
        complete: not shown where a row has no value.
    """

    name: str
    heading: str | None = None
    shown: Callable[[Any], str] = str
    exported: Callable[[Any], Any] = _same
    interval: bool = False
    varied: bool = False
    complete: bool = False


@dataclass(frozen=True)
class Table:
    """Rows by name of the column. None is a value that is not known."""

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    unknown: str = ""
    """Text of None."""

    def cells(self) -> list[list[str]]:
        """The headings, and the texts of each row."""
        shown = [column for column in self.columns if self._is_shown(column)]
        head = [str(column.heading) for column in shown]
        return [head, *([self._text(row[column.name], column) for column in shown] for row in self.rows)]

    def _text(self, value: Any, column: Column) -> str:
        return self.unknown if value is None else column.shown(value)

    def _is_shown(self, column: Column) -> bool:
        values = [row[column.name] for row in self.rows]
        hidden = (column.varied and len(set(values)) < 2) or (column.complete and None in values)
        return column.heading is not None and not hidden

    def lines(self, indent: str = "") -> list[str]:
        """Lines with aligned columns."""
        return aligned(self.cells(), indent)

    def markdown(self) -> list[str]:
        """Lines in Markdown."""
        head, *body = ([cell.replace("|", "\\|") for cell in row] for row in self.cells())
        return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]

    def objects(self) -> list[dict[str, Any]]:
        """A JSON object for each row; an interval is one with ``median``, ``low`` and ``high``."""
        return [{column.name: self._json(row, column) for column in self.columns} for row in self.rows]

    def csv(self) -> str:
        """CSV with all digits and all columns."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            name
            for column in self.columns
            for name in (column.name, *((f"{column.name}_low", f"{column.name}_high") * column.interval))
        )
        for row in self.rows:
            cells: list[Any] = []
            for column in self.columns:
                value = self._exported(row, column)
                cells += [getattr(value, "median", value)]
                cells += [getattr(value, end, None) for end in ("low", "high") if column.interval]
            writer.writerow(cells)
        return text.getvalue()

    def _json(self, row: Mapping[str, Any], column: Column) -> Any:
        value = self._exported(row, column)
        return interval_json(value) if hasattr(value, "median") else value

    @staticmethod
    def _exported(row: Mapping[str, Any], column: Column) -> Any:
        value = row[column.name]
        return None if value is None else column.exported(value)


def interval_json(interval: Any) -> dict[str, float]:
    """Median and bounds of an interval."""
    return {end: getattr(interval, end) for end in ("median", "low", "high")}


def aligned(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines with aligned columns.

    >>> aligned([["a", "b"], ["long", "c"]])
    ['  a     b', '  long  c']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
