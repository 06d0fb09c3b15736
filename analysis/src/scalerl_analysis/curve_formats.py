"""Reads files with the numbers of a run into a table: CSV, JSON logs, and console logs of verl."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scalerl_analysis.problem import AnalysisProblem

MAX_BYTES: Final = 256 * 2**20
"""Limit on the size of a file: the cells of a larger one could fill a laptop's memory, and a curve has far fewer points."""
_MAX_CHARACTERS: Final = 2**17
"""Limit on the size of a cell."""
_QUOTED: Final = re.compile(r'"(?:[^"]|"")*"')
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")
"""Colours that Ray writes around the name of a worker."""
_CONSOLE: Final = re.compile(r"(?:^|\s)step:(\d+) - (\S+:.*)$", flags=re.M)
"""A line of verl's console logger, after the prefix of Ray."""
_NUMPY: Final = re.compile(r"^np\.\w+\((.*)\)$")


@dataclass(frozen=True)
class FileTable:
    """Cells by column; a cell is empty where a row has no value."""

    path: Path
    header: list[str]
    """Column names as in the file; a name may occur twice."""
    columns: list[list[str]]
    """Cells (n,) of each column, in the order of the header."""
    lines: list[int]
    """(n,) position of each row in the file, in units of ``counted``."""
    head_line: int = 0
    """Line of the header; 0 if the file has none."""
    counted: str = "line"
    """Unit of ``lines``: line or entry."""

    def where(self, row: int) -> str:
        """File and line of a row, for messages."""
        return f"{self.path}, {self.counted} {self.lines[row]}"

    @property
    def top(self) -> str:
        """File and line of the header, for messages."""
        return f"{self.path}, line {self.head_line}" if self.head_line else str(self.path)

    def names(self, wanted: str) -> list[str]:
        """Header entries that equal ``wanted``; if there are none, those that do without regard to case."""
        exact = [name for name in self.header if name == wanted]
        return exact or [name for name in self.header if name.lower() == wanted.lower()]

    def name(self, wanted: str) -> str | None:
        """The header entry for ``wanted``; None if there is none.

        Raises:
            AnalysisProblem: there are several.
        """
        found = self.names(wanted)
        if len(found) > 1:
            raise AnalysisProblem(f"{self.top}: column {wanted} occurs {len(found)} times; keep one")
        return found[0] if found else None

    def cells(self, wanted: str) -> list[str] | None:
        """The cells of a column, (n,); None if there is none."""
        found = self.name(wanted)
        return None if found is None else self.columns[self.header.index(found)]

    def take(self, rows: list[int]) -> FileTable:
        columns = [[column[i] for i in rows] for column in self.columns]
        lines = [self.lines[i] for i in rows]
        return FileTable(self.path, self.header, columns, lines, self.head_line, self.counted)


def read_table(path: Path) -> FileTable:
    """Read a file in any of the formats of this module.

    Raises:
        AnalysisProblem: the file is missing, too large, not text, in another format, or has no rows.
    """
    text = _text(path)
    if text.lstrip()[:1] in ("{", "["):
        table = _from_json(path, text)
        if table is not None:
            return table
    if _CONSOLE.search(text):
        return _from_rows(path, _console(text))
    return _from_csv(path, text)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise AnalysisProblem(
                f"{path}: larger than {MAX_BYTES // 2**20} MiB; export only the columns of the curve"
            )
        raw = path.read_bytes()
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise AnalysisProblem(f"{path}: {error.strerror}; give a CSV file or a run's directory") from error
    except UnicodeDecodeError as error:
        raise AnalysisProblem(
            f"{path}: not a text file in UTF-8 ({error.reason}); {_encoding(raw)}"
        ) from error


def _encoding(raw: bytes) -> str:
    """What to do about bytes that are not UTF-8."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "it is in UTF-16: save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
    if b"\0" not in raw[:4096]:
        return "if it is in Latin-1 or Windows-1252, save it as UTF-8 (iconv -f WINDOWS-1252 -t UTF-8)"
    return "save it as CSV"


def _from_json(path: Path, text: str) -> FileTable | None:
    """``trainer_state.json``, a list of its entries, or one object per line; None if the text is not JSON."""
    try:
        whole = json.loads(text)
    except RecursionError as error:
        raise AnalysisProblem(f"{path}: JSON nested too deeply to be a log") from error
    except ValueError:
        return _from_json_lines(path, text)
    entries = whole.get("log_history", _of_columns(whole)) if isinstance(whole, dict) else whole
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise AnalysisProblem(f"{path}: JSON, but not a list of log entries such as log_history has")
    return _from_rows(path, ((i, _flat(entry)) for i, entry in enumerate(entries, start=1)), "entry")


def _of_columns(whole: dict[str, Any]) -> list[Any]:
    """Entries of an object with a list of equal length a column, or an object with the same keys, as pandas writes; else the object."""
    every = list(whole.values())
    if all(isinstance(column, dict) for column in every) and len({tuple(column) for column in every}) == 1:
        every = [list(column.values()) for column in every]
    lists = all(isinstance(column, list) for column in every) and len({len(column) for column in every}) == 1
    return [dict(zip(whole, row, strict=True)) for row in zip(*every, strict=True)] if lists else [whole]


def _from_json_lines(path: Path, text: str) -> FileTable | None:
    rows: list[tuple[int, dict[str, str]]] = []
    # Not splitlines: JSON strings may contain other line separators, and progress bars write a carriage return alone.
    every = text.split("\n")
    for line, row in enumerate(every, start=1):
        if row.strip():
            try:
                entry = json.loads(row)
            except ValueError as error:
                if not rows:
                    return None
                if line == len(
                    every
                ):  # still being written: an entry without cells, counted among those skipped
                    rows.append((line, {}))
                    break
                raise AnalysisProblem(f"{path}, line {line}: not JSON: {error}; delete the line") from error
            if not isinstance(entry, dict):
                raise AnalysisProblem(f"{path}, line {line}: not a JSON object; delete the line")
            rows.append((line, _flat(entry)))
    return _from_rows(path, iter(rows))


def _flat(entry: dict[str, Any]) -> dict[str, str]:
    """Numbers and strings of an entry; in verl's JSON lines the metrics are under ``data``. Those of other objects in it are
    named by both names, with a point between."""
    inner = entry.get("data")
    if isinstance(inner, dict):
        entry = {**entry, **inner}
    nested = {name: value for name, value in entry.items() if name != "data" and isinstance(value, dict)}
    entry = {f"{name}.{key}": value for name, inner in nested.items() for key, value in inner.items()} | entry
    return {
        name: "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in entry.items()
        if value is None or isinstance(value, (bool, int, float, str))
    }


def _console(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of lines such as ``step:4 - critic/score/mean:0.2 - …``, with their line numbers."""
    for number, line in enumerate(text.split("\n"), start=1):
        found = _CONSOLE.search(_ESCAPES.sub("", line))
        if found:
            row = {"step": found[1]}
            for part in found[2].split(" - "):
                name, _, value = part.rpartition(":")
                if name:
                    # Ray may append a note that the line was repeated.
                    value = (value.split() or [""])[0]
                    row[name.strip()] = _NUMPY.sub(r"\1", value)
            yield number, row


def _from_rows(path: Path, rows: Iterator[tuple[int, dict[str, str]]], counted: str = "line") -> FileTable:
    """The table with a column for each name that occurs."""
    columns: dict[str, list[str]] = {}
    lines: list[int] = []
    for line, row in rows:
        for name in row:
            columns.setdefault(name, [""] * len(lines))
        for name, cells in columns.items():
            cells.append(row.get(name, ""))
        lines.append(line)
    if not lines:
        raise AnalysisProblem(f"{path}: no log entry in it; wait for the first evaluations")
    header = [name.replace("\n", " ") for name in columns]
    return FileTable(path, header, list(columns.values()), lines, counted=counted)


def _from_csv(path: Path, text: str) -> FileTable:
    lines: list[int] = []
    rows: list[list[str]] = []
    csv.field_size_limit(_MAX_CHARACTERS)  # of the process; a reader of data sets sets another
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text))
    try:
        for row in reader:
            # Messages have one line, so names must not have several.
            cells = [cell.strip().replace("\n", " ").replace("\r", " ") for cell in row]
            if any(cells):
                rows.append(cells)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise AnalysisProblem(f"{path}, line {reader.line_num}: not CSV: {error}") from error
    if not rows:
        raise AnalysisProblem(f"{path}: empty; its first line names the columns: compute,reward[,samples]")
    header = rows[0]
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(header):
            raise AnalysisProblem(
                f"{path}, line {line}: {len(row)} cells where the first line names {len(header)} columns; "
                "separate cells by commas, and write numbers without thousands separators"
            )
    columns = [list(column) for column in zip(*rows[1:], strict=True)] or [[] for _ in header]
    return FileTable(path, header, columns, lines[1:], head_line=lines[0])


def _delimiter(text: str) -> str:
    """The most frequent delimiter in the header, outside quotes."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    bare = _QUOTED.sub("", first)
    return max((",", ";", "\t"), key=bare.count)


def number(cell: str) -> float:
    """Parse a number like ``float``, but refuse underscores such as in 1_000.

    Raises:
        ValueError: the cell is not a number.
    """
    if "_" in cell:
        raise ValueError(cell)
    return float(cell)


def is_number(cell: str) -> bool:
    """Whether ``number`` can parse the cell. NaN and infinity are numbers here; ``Curve`` refuses them."""
    try:
        number(cell)
    except ValueError:
        return False
    return True
