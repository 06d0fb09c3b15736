"""Reads and checks curve files; error messages name the line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scalerl_analysis.curve_columns import Chosen, Columns, choose
from scalerl_analysis.curve_formats import FileTable, is_number, number, read_table
from scalerl_analysis.problem import AnalysisProblem
from scalerl_api.curve import PASS_AT
from scalerl_curvefit import Curve, InputError, RewardRangeError, Segment, UnsortedComputeError
from scalerl_curvefit.curve import FloatArray

RUN_UNIT: Final = "completion tokens"
"""Unit of compute in the ``curve.csv`` of a run."""
RUN_COLUMNS: Final = frozenset({"version", "wall_seconds", "device_seconds", "mean_tokens"})
"""Columns that identify the ``curve.csv`` of a run."""
SECONDS_PER_HOUR: Final = 3600.0
THOUSANDS: Final = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?$")
STEPS: Final = re.compile(r"(^|[/_ ])step$", flags=re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class CurveFile:
    """A curve with the other columns of its file, which are None where the file does not have them."""

    path: Path
    curve: Curve
    """All n points."""
    segment: Segment
    """The last segment of one recipe and one evaluation version, which is fitted."""
    segments: int
    """Number of segments."""
    first_line: int
    """Line of the file at which the last segment begins."""
    mixed: int
    """Number of evaluations left out because the weights changed during them, as in the autoscaler."""
    chosen: Chosen
    """The columns, and the rows with a point."""
    unit: str
    """Unit of compute; empty if unknown."""
    named_unit: bool
    """Whether the user, the kind of file or the column name determines the unit."""
    truncation: FloatArray | None
    """(n + mixed,) share of completions cut off at the length limit, in all rows: the autoscaler uses the newest one too."""
    device_hours: FloatArray | None
    """(n,) cumulative device-hours."""
    wall_hours: FloatArray | None
    """(n,) cumulative wall-clock hours."""
    version: FloatArray | None = None
    """(n,) weight versions."""


def read_curve(path: str | Path, columns: Columns | None = None) -> CurveFile:
    """Read the file ``path``, or ``curve.csv`` in the directory ``path`` of a run.

    Rewards become pass rates from 0 to 1, device time hours; compute keeps the unit of the file.

    Raises:
        AnalysisProblem: the file is missing or in no known format, a column is missing, or a row is invalid (with its line).
    """
    path = Path(path)
    if path.is_dir():
        path = path / "curve.csv"
    columns = columns or Columns()
    chosen = choose(read_table(path), columns)
    every = chosen.table
    table, mixed = _whole(every)
    compute, reward = numbers(table, chosen.x), numbers(table, chosen.y)
    samples = _samples(table, columns.samples)
    pass_at = PASS_AT.fullmatch(chosen.y)
    if pass_at and samples is not None and not columns.samples:
        samples = samples // int(pass_at[1])  # the number of tries, each of K completions
    labels = {name: table.cells(name) for name in ("eval_version", "recipe")}

    def head(n: int) -> Curve:
        kept = {name: None if label is None else label[:n] for name, label in labels.items()}
        return Curve(
            compute[:n], reward[:n], None if samples is None else samples[:n], scale=columns.scale, **kept
        )

    curve = _checked(table, head, chosen.y, reward, columns.scale)
    segments = curve.segments()
    last = segments[-1]
    device_hours = (
        _so_far(table, columns.device_hours)
        if columns.device_hours is not None
        else _seconds(table, "device_seconds")
    )
    own = not chosen.named and all(table.names(name) for name in RUN_COLUMNS)
    return CurveFile(
        path=path,
        curve=curve,
        segment=last,
        segments=len(segments),
        first_line=table.lines[len(curve) - len(last.curve)],
        mixed=mixed,
        chosen=chosen,
        unit=columns.unit or (RUN_UNIT if own else _unit(chosen.x)),
        named_unit=bool(columns.unit or own or _unit(chosen.x)),
        truncation=_rates(every, "truncated_fraction"),
        device_hours=device_hours,
        wall_hours=_seconds(table, "wall_seconds"),
        version=numbers(table, "version") if own else None,
    )


def _unit(x: str) -> str:
    """Unit of a compute column, from its name; empty if it gives none."""
    return "" if x.lower() == "compute" else "steps" if STEPS.search(x) else x


def numbers(table: FileTable, name: str) -> FloatArray:
    """A column as (n,) numbers. NaN and infinity are accepted here; ``Curve`` refuses them.

    Raises:
        AnalysisProblem: the column is missing, or a cell is not a number.
    """
    cells = table.cells(name)
    if cells is None:
        raise AnalysisProblem(f"{table.path}: no column {name!r}; there are {', '.join(table.header)}")
    try:
        return np.array([number(cell) for cell in cells])
    except ValueError:
        bad = next(i for i, cell in enumerate(cells) if not is_number(cell))
        what = f"{cells[bad]!r} is not a number" if cells[bad] else "empty"
        raise AnalysisProblem(
            f"{table.where(bad)}, column {name}: {what}; {_correction(cells[bad])}"
        ) from None


def _correction(cell: str) -> str:
    """Advice for a cell that is not a number."""
    if cell.endswith("%") and is_number(cell[:-1]):
        return "write it without the percent sign, and give `scale`=0,100"
    if THOUSANDS.match(cell):
        return "write numbers without thousands separators"
    if is_number(cell.replace(",", ".")):
        return "write decimals with a point"
    return "correct the cell or remove the row"


def _so_far(table: FileTable, name: str, per_hour: float = 1.0) -> FloatArray:
    """(n,) hours from a cumulative column, which must be finite, not negative and never decrease.

    Args:
        per_hour: units of the column in an hour.
    """
    hours = numbers(table, name)
    bad = ~np.isfinite(hours) | (hours < 0)
    bad[1:] |= ~bad[1:] & ~bad[:-1] & (np.diff(hours) < 0)
    _refuse(
        *(table, name, hours, bad),
        " is not a cumulative amount; the column must be finite, not negative and never decrease: correct or rename it",
    )
    return hours / per_hour


def _refuse(table: FileTable, name: str, values: FloatArray, bad: NDArray[np.bool_], what: str) -> None:
    """Raise AnalysisProblem with the first bad value (n,) of a column, if there is one."""
    if bad.any():
        row = int(np.argmax(bad))
        raise AnalysisProblem(f"{table.where(row)}, column {name}: {values[row]:g}{what}")


def _seconds(table: FileTable, name: str) -> FloatArray | None:
    """(n,) hours from a column of cumulative seconds; None without the column."""
    return _so_far(table, name, SECONDS_PER_HOUR) if table.names(name) else None


def _whole(table: FileTable) -> tuple[FileTable, int]:
    """The rows whose evaluation has a single weight version, and the number of others."""
    cells = table.cells("mixed_versions")
    if cells is None:
        return table, 0
    for i, cell in enumerate(cells):
        if cell.lower() not in ("true", "false"):
            raise AnalysisProblem(
                f"{table.where(i)}, column mixed_versions: {cell!r} is neither true nor false; correct the cell"
            )
    kept = [i for i, cell in enumerate(cells) if cell.lower() == "false"]
    if not kept:
        raise AnalysisProblem(
            f"{table.path}: the weights changed during each of the {len(cells)} evaluations (mixed_versions); "
            "wait for an evaluation of a single version"
        )
    return table.take(kept), len(cells) - len(kept)


def _samples(table: FileTable, wanted: str | None) -> FloatArray | None:
    """(n,) samples per point, from the column, or one number for all; None if neither is given."""
    name = wanted or "samples"
    if not table.names(name):
        if wanted is None:
            return None
        if wanted.isdecimal():
            return np.full(len(table.lines), float(wanted))
    counts = numbers(table, name)
    bad = np.isfinite(counts) & (counts != np.floor(counts))
    _refuse(table, name, counts, bad, " is not a count; give whole numbers, or leave the column out")
    return counts


def _rates(table: FileTable, name: str) -> FloatArray | None:
    if not table.names(name):
        return None
    rates = numbers(table, name)
    bad = ~((rates >= 0) & (rates <= 1))
    _refuse(table, name, rates, bad, "; rates lie between 0 and 1: correct or rename the column")
    return rates


def _checked(
    table: FileTable,
    head: Callable[[int], Curve],
    y: str,
    reward: FloatArray,
    scale: tuple[float, float],
) -> Curve:
    """The curve of all points; if ``Curve`` refuses them, the error names the first line with a bad point.

    Bisection over prefixes: all checks are of a point or of neighbours, so a prefix is refused if and only if it contains the
    first bad point.
    """
    try:
        return head(len(reward))
    except InputError:
        good, bad = 0, len(reward)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            head(middle)
            good = middle
        except InputError:
            bad = middle
    where = table.where(bad - 1)
    try:
        return head(bad)
    except RewardRangeError:
        low, high = scale
        percent = scale == (0.0, 1.0) and reward.min() >= 0.0 and 2.0 < reward.max() <= 100.0
        hint = "for percent: `scale`=0,100" if percent else "for ±1: `scale`=-1,1"
        raise AnalysisProblem(
            f"{where}, column {y}: {reward[bad - 1]:g} is outside [{low:g}, {high:g}]; if rewards have another "
            f"range, give it with `scale`=LOW,HIGH ({hint})"
        ) from None
    except UnsortedComputeError as error:
        raise AnalysisProblem(f"{where}: {error}, or give `resumed`=KeepLast") from error
    except InputError as error:
        raise AnalysisProblem(f"{where}: {error}") from error
