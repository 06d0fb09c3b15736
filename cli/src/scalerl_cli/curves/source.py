"""A curve file as the commands use it: read, checked, each complaint with its line."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from scalerl_cli.curves.problem import CurveProblem
from scalerl_curvefit import Curve, InputError, RewardRangeError, Segment
from scalerl_curvefit.curve import FloatArray

RUN_UNIT: Final = "completion tokens"
"""What a run's own ``curve.csv`` counts compute in."""
RUN_COLUMNS: Final = frozenset({"version", "wall_seconds", "device_seconds", "mean_tokens"})
"""Columns by which a run's own file is known."""
SECONDS_PER_HOUR: Final = 3600.0
SEPARATORS: Final = {";": "semicolons", "\t": "tabs"}
"""Of files that call themselves CSV and are not."""


@dataclass(frozen=True, eq=False)
class CurveFile:
    """A curve and what its file says beside it.

    curve: all points. segment: the last stretch of one recipe and one evaluation version, which is
    what gets fitted. first_line: where it begins in the file. segments: how many there are.
    mixed: rows left out, of evaluations during which the weights changed: they lie on no one point of
    the curve, and the autoscaler leaves them out too.
    unit: of compute; empty if nothing says so. named_unit: whether anything does.
    device_hours, wall_hours: used up to each point, (n,). truncation: share of completions cut off at the
    length limit, (n + mixed,): of every row, as the autoscaler looks at the newest whatever it is of.
    None where the file does not have them.
    """

    path: Path
    curve: Curve
    segment: Segment
    segments: int
    first_line: int
    mixed: int
    unit: str
    named_unit: bool
    truncation: FloatArray | None
    device_hours: FloatArray | None
    wall_hours: FloatArray | None


@dataclass(frozen=True)
class _Table:
    """Cells by column, with the line of each row."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]

    def numbers(self, name: str) -> FloatArray:
        """A column as (n,) numbers; NaN and infinity pass here, so that the curve refuses them."""
        cells = self.columns[name]
        try:
            return np.array([_read(cell) for cell in cells])
        except ValueError:
            bad = next(i for i, cell in enumerate(cells) if not _is_number(cell))
            what = f"{cells[bad]!r} is not a number" if cells[bad] else "empty"
            raise CurveProblem(
                f"{self.path}, line {self.lines[bad]}, column {name}: {what}; mend the cell or drop the row"
            ) from None

    def so_far(self, name: str, per_hour: float = 1.0) -> FloatArray | None:
        """A column of hours used so far: finite, not negative, never going back."""
        if name not in self.columns:
            return None
        hours = self.numbers(name)
        bad = ~np.isfinite(hours) | (hours < 0)
        bad[1:] |= ~bad[1:] & ~bad[:-1] & (np.diff(hours) < 0)
        if bad.any():
            i = int(np.argmax(bad))
            raise CurveProblem(
                f"{self.path}, line {self.lines[i]}, column {name}: {hours[i]:g} cannot be what was used so far; "
                "it must be finite and never go back: mend the column or rename it"
            )
        return hours / per_hour


def read_curve(
    path: Path,
    scale: tuple[float, float] = (0.0, 1.0),
    unit: str | None = None,
    device_hours_column: str | None = None,
) -> CurveFile:
    """Read ``path``, or ``curve.csv`` in it where it is a directory.

    Raises:
        CurveProblem: missing, not CSV, no such column, or a row that cannot be (its line is named).
    """
    if path.is_dir():
        path = path / "curve.csv"
    every = _table(path)
    table, mixed = _whole(every)
    compute, reward = table.numbers("compute"), table.numbers("reward")
    samples = _counts(table, "samples")
    labels = {name: table.columns.get(name) for name in ("eval_version", "recipe")}

    def head(n: int) -> Curve:
        kept = {name: None if label is None else label[:n] for name, label in labels.items()}
        return Curve(compute[:n], reward[:n], None if samples is None else samples[:n], scale=scale, **kept)

    curve = _checked(table, head, len(table.lines), reward, scale)
    segments = curve.segments()
    last = segments[-1]
    truncation = _rates(every, "truncated_fraction")
    if device_hours_column is not None:
        table_has(table, device_hours_column)
        device_hours = table.so_far(device_hours_column)
    else:
        device_hours = table.so_far("device_seconds", SECONDS_PER_HOUR)
    own = table.columns.keys() >= RUN_COLUMNS
    return CurveFile(
        path=path,
        curve=curve,
        segment=last,
        segments=len(segments),
        first_line=table.lines[len(curve) - len(last.curve)],
        mixed=mixed,
        unit=unit or (RUN_UNIT if own else ""),
        named_unit=bool(unit) or own,
        truncation=truncation,
        device_hours=device_hours,
        wall_hours=table.so_far("wall_seconds", SECONDS_PER_HOUR),
    )


def table_has(table: _Table, name: str) -> None:
    """Raise CurveProblem unless there is a column ``name``."""
    if name not in table.columns:
        raise CurveProblem(
            f"{table.path}: no column {name!r}; the first line names {', '.join(table.columns)}"
        )


def _whole(table: _Table) -> tuple[_Table, int]:
    """The rows of evaluations of one weight version each, and how many others there were."""
    cells = table.columns.get("mixed_versions")
    if cells is None:
        return table, 0
    for cell, line in zip(cells, table.lines, strict=True):
        if cell.lower() not in ("true", "false"):
            raise CurveProblem(
                f"{table.path}, line {line}, column mixed_versions: {cell!r} is neither true nor false; mend the cell"
            )
    kept = [i for i, cell in enumerate(cells) if cell.lower() == "false"]
    if not kept:
        raise CurveProblem(
            f"{table.path}: during each of the {len(cells)} evaluations the weights changed (mixed_versions); "
            "wait for one of a single version"
        )
    columns = {name: [column[i] for i in kept] for name, column in table.columns.items()}
    return _Table(table.path, columns, [table.lines[i] for i in kept]), len(cells) - len(kept)


def _counts(table: _Table, name: str) -> FloatArray | None:
    if name not in table.columns:
        return None
    counts = table.numbers(name)
    bad = np.isfinite(counts) & (counts != np.floor(counts))
    if bad.any():
        i = int(np.argmax(bad))
        raise CurveProblem(
            f"{table.path}, line {table.lines[i]}, column {name}: {counts[i]:g} is no count; "
            "give whole numbers, or leave the column out"
        )
    return counts


def _rates(table: _Table, name: str) -> FloatArray | None:
    if name not in table.columns:
        return None
    rates = table.numbers(name)
    bad = ~((rates >= 0) & (rates <= 1))
    if bad.any():
        i = int(np.argmax(bad))
        raise CurveProblem(
            f"{table.path}, line {table.lines[i]}, column {name}: {rates[i]:g}; rates lie between 0 and 1: "
            "mend the column or rename it"
        )
    return rates


def _table(path: Path) -> _Table:
    lines: list[int] = []
    rows: list[list[str]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            for row in reader:
                cells = [cell.strip() for cell in row]
                if any(cells):
                    rows.append(cells)
                    lines.append(reader.line_num)
    except OSError as error:
        raise CurveProblem(f"{path}: {error.strerror}; give a CSV file or a run's directory") from error
    except UnicodeDecodeError as error:
        raise CurveProblem(f"{path}: not a text file in UTF-8 ({error.reason}); save it as CSV") from error
    except csv.Error as error:
        raise CurveProblem(f"{path}, line {reader.line_num}: not CSV: {error}") from error
    if not rows:
        raise CurveProblem(f"{path}: empty; its first line names the columns: compute,reward[,samples]")
    header = [name.lower() for name in rows[0]]
    _check_header(path, lines[0], header, rows[0])
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(header):
            raise CurveProblem(
                f"{path}, line {line}: {len(row)} cells where the first line names {len(header)} columns; "
                "separate cells by commas, and write numbers without thousands separators"
            )
    columns = {name: [row[i] for row in rows[1:]] for i, name in enumerate(header)}
    table = _Table(path, columns, lines[1:])
    if not table.lines:
        raise CurveProblem(f"{path}: no point below the first line; wait for the first evaluations")
    return table


def _check_header(path: Path, line: int, header: Sequence[str], shown: Sequence[str]) -> None:
    missing = [name for name in ("compute", "reward") if name not in header]
    other = next((name for mark, name in SEPARATORS.items() if mark in "".join(shown)), None)
    if missing and other is not None:
        raise CurveProblem(
            f"{path}, line {line}: cells are separated by {other} in {','.join(shown)[:80]!r}; separate them by commas "
            "(compute,reward[,samples]), and write decimals with a point"
        )
    if missing:
        raise CurveProblem(
            f"{path}, line {line}: no column {' and no column '.join(missing)} in {','.join(shown)[:80]!r}; "
            "the first line names the columns, separated by commas: compute,reward[,samples]"
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise CurveProblem(f"{path}, line {line}: column {twice[0]} stands twice; keep one")


def _checked(
    table: _Table,
    head: Callable[[int], Curve],
    n: int,
    reward: FloatArray,
    scale: tuple[float, float],
) -> Curve:
    """The curve; of what it refuses, the first line that it refuses.

    Every check of a curve looks at a point or at neighbours, so a prefix is refused exactly if the
    first bad point is in it.
    """
    try:
        return head(n)
    except InputError:
        good, bad = 0, n
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            head(middle)
            good = middle
        except InputError:
            bad = middle
    where = f"{table.path}, line {table.lines[bad - 1]}"
    try:
        return head(bad)
    except RewardRangeError:
        low, high = scale
        percent = scale == (0.0, 1.0) and reward.min() >= 0.0 and 2.0 < reward.max() <= 100.0
        hint = "for percent: --scale=0,100" if percent else "for ±1: --scale=-1,1"
        raise CurveProblem(
            f"{where}, column reward: {reward[bad - 1]:g} is outside [{low:g}, {high:g}]; if rewards are counted "
            f"otherwise, give their range with --scale=LOW,HIGH ({hint})"
        ) from None
    except InputError as error:
        raise CurveProblem(f"{where}: {error}") from error


def _read(cell: str) -> float:
    """As ``float``, which would take 1_000 too."""
    if "_" in cell:
        raise ValueError(cell)
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        _read(cell)
    except ValueError:
        return False
    return True
