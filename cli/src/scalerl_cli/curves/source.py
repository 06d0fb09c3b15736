"""A curve file as the commands use it: read, checked, each complaint with its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from scalerl_cli.curves.columns import Columns, choose
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.tables import Table, is_number, number, read_table
from scalerl_curvefit import Curve, InputError, RewardRangeError, Segment
from scalerl_curvefit.curve import FloatArray

RUN_UNIT: Final = "completion tokens"
"""What a run's own ``curve.csv`` counts compute in."""
RUN_COLUMNS: Final = frozenset({"version", "wall_seconds", "device_seconds", "mean_tokens"})
"""Columns by which a run's own file is known."""
SECONDS_PER_HOUR: Final = 3600.0
THOUSANDS: Final = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?$")
_PASS_AT: Final = re.compile(r"pass_at_(\d+)")
STEPS: Final = re.compile(r"(^|[/_ ])step$", flags=re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class CurveFile:
    """A curve and what its file says beside it.

    curve: all points. segment: the last stretch of one recipe and one evaluation version, which is
    what gets fitted. first_line: where it begins in the file. segments: how many there are.
    mixed: rows left out, of evaluations during which the weights changed: they lie on no one point of
    the curve, and the autoscaler leaves them out too.
    x, y: the columns that were read; named: whether they are others than compute and reward.
    skipped: rows left out, with an empty cell in one of them.
    unit: of compute; empty if nothing says so. named_unit: whether anything does.
    device_hours, wall_hours: used up to each point, (n,). version: weight version of each point, (n,). truncation: share of completions cut off at the
    length limit, (n + mixed,): of every row, as the autoscaler looks at the newest whatever it is of.
    None where the file does not have them.
    """

    path: Path
    curve: Curve
    segment: Segment
    segments: int
    first_line: int
    mixed: int
    x: str
    y: str
    named: bool
    skipped: int
    unit: str
    named_unit: bool
    truncation: FloatArray | None
    device_hours: FloatArray | None
    wall_hours: FloatArray | None
    version: FloatArray | None = None


def read_curve(
    path: Path,
    scale: tuple[float, float] = (0.0, 1.0),
    unit: str | None = None,
    device_hours_column: str | None = None,
    columns: Columns | None = None,
) -> CurveFile:
    """Read ``path``, or ``curve.csv`` in it where it is a directory.

    Raises:
        CurveProblem: missing, not CSV, no such column, or a row that cannot be (its line is named).
    """
    if path.is_dir():
        path = path / "curve.csv"
    chosen = choose(read_table(path), columns or Columns())
    every = chosen.table
    table, mixed = _whole(every)
    compute, reward = numbers(table, chosen.x), numbers(table, chosen.y)
    samples = _samples(table, columns.samples if columns else None)
    pass_at = _PASS_AT.fullmatch(chosen.y)
    if pass_at and samples is not None and not (columns and columns.samples):
        samples = samples // int(pass_at[1])  # so many tries, each of K completions
    labels = {name: table.cells(name) for name in ("eval_version", "recipe")}

    def head(n: int) -> Curve:
        kept = {name: None if label is None else label[:n] for name, label in labels.items()}
        return Curve(compute[:n], reward[:n], None if samples is None else samples[:n], scale=scale, **kept)

    curve = _checked(table, head, chosen.y, reward, scale)
    segments = curve.segments()
    last = segments[-1]
    device_hours = (
        _so_far(table, device_hours_column)
        if device_hours_column is not None
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
        x=chosen.x,
        y=chosen.y,
        named=chosen.named,
        skipped=chosen.skipped,
        unit=unit or (RUN_UNIT if own else _unit(chosen.x)),
        named_unit=bool(unit or own or _unit(chosen.x)),
        truncation=_rates(every, "truncated_fraction"),
        device_hours=device_hours,
        wall_hours=_seconds(table, "wall_seconds"),
        version=numbers(table, "version") if own else None,
    )


def _unit(x: str) -> str:
    """What a column of compute is counted in, by its name."""
    return "" if x.lower() == "compute" else "steps" if STEPS.search(x) else x


def numbers(table: Table, name: str) -> FloatArray:
    """A column as (n,) numbers; NaN and infinity pass here, so that the curve refuses them.

    Raises:
        CurveProblem: no such column, or a cell that is no number.
    """
    cells = table.cells(name)
    if cells is None:
        raise CurveProblem(f"{table.path}: no column {name!r}; there are {', '.join(table.header)}")
    try:
        return np.array([number(cell) for cell in cells])
    except ValueError:
        bad = next(i for i, cell in enumerate(cells) if not is_number(cell))
        what = f"{cells[bad]!r} is not a number" if cells[bad] else "empty"
        raise CurveProblem(f"{table.where(bad)}, column {name}: {what}; {_mended(cells[bad])}") from None


def _mended(cell: str) -> str:
    """What to do about a cell that is no number."""
    if cell.endswith("%") and is_number(cell[:-1]):
        return "write it without the percent sign, and give --scale=0,100"
    if THOUSANDS.match(cell):
        return "write numbers without thousands separators"
    if is_number(cell.replace(",", ".")):
        return "write decimals with a point"
    return "mend the cell or drop the row"


def _so_far(table: Table, name: str, per_hour: float = 1.0) -> FloatArray:
    """A column of hours used so far: finite, not negative, never going back."""
    hours = numbers(table, name)
    bad = ~np.isfinite(hours) | (hours < 0)
    bad[1:] |= ~bad[1:] & ~bad[:-1] & (np.diff(hours) < 0)
    if bad.any():
        i = int(np.argmax(bad))
        raise CurveProblem(
            f"{table.where(i)}, column {name}: {hours[i]:g} cannot be what was used so far; "
            "it must be finite and never go back: mend the column or rename it"
        )
    return hours / per_hour


def _seconds(table: Table, name: str) -> FloatArray | None:
    """A column of seconds used so far, as hours; None if there is none."""
    return _so_far(table, name, SECONDS_PER_HOUR) if table.names(name) else None


def _whole(table: Table) -> tuple[Table, int]:
    """The rows of evaluations of one weight version each, and how many others there were."""
    cells = table.cells("mixed_versions")
    if cells is None:
        return table, 0
    for i, cell in enumerate(cells):
        if cell.lower() not in ("true", "false"):
            raise CurveProblem(
                f"{table.where(i)}, column mixed_versions: {cell!r} is neither true nor false; mend the cell"
            )
    kept = [i for i, cell in enumerate(cells) if cell.lower() == "false"]
    if not kept:
        raise CurveProblem(
            f"{table.path}: during each of the {len(cells)} evaluations the weights changed (mixed_versions); "
            "wait for one of a single version"
        )
    return table.take(kept), len(cells) - len(kept)


def _samples(table: Table, wanted: str | None) -> FloatArray | None:
    """Samples behind each point, (n,): of the column, or one count for all; None if nothing says so."""
    name = wanted or "samples"
    if not table.names(name):
        if wanted is None:
            return None
        if wanted.isdecimal():
            return np.full(len(table.lines), float(wanted))
    counts = numbers(table, name)
    bad = np.isfinite(counts) & (counts != np.floor(counts))
    if bad.any():
        i = int(np.argmax(bad))
        raise CurveProblem(
            f"{table.where(i)}, column {name}: {counts[i]:g} is no count; "
            "give whole numbers, or leave the column out"
        )
    return counts


def _rates(table: Table, name: str) -> FloatArray | None:
    if not table.names(name):
        return None
    rates = numbers(table, name)
    bad = ~((rates >= 0) & (rates <= 1))
    if bad.any():
        i = int(np.argmax(bad))
        raise CurveProblem(
            f"{table.where(i)}, column {name}: {rates[i]:g}; rates lie between 0 and 1: "
            "mend the column or rename it"
        )
    return rates


def _checked(
    table: Table,
    head: Callable[[int], Curve],
    y: str,
    reward: FloatArray,
    scale: tuple[float, float],
) -> Curve:
    """The curve; of what it refuses, the first line that it refuses.

    Every check of a curve looks at a point or at neighbours, so a prefix is refused exactly if the
    first bad point is in it.
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
        hint = "for percent: --scale=0,100" if percent else "for ±1: --scale=-1,1"
        raise CurveProblem(
            f"{where}, column {y}: {reward[bad - 1]:g} is outside [{low:g}, {high:g}]; if rewards are counted "
            f"otherwise, give their range with --scale=LOW,HIGH ({hint})"
        ) from None
    except InputError as error:
        raise CurveProblem(f"{where}: {error}") from error
