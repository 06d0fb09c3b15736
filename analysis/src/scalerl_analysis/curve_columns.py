"""Selects the columns of the curve in a table: by the options, by the project's own names, or the only series of an export."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from scalerl_analysis.curve_formats import FileTable, is_number, number
from scalerl_analysis.problem import AnalysisProblem

COMPANION: Final = re.compile(r"__(MIN|MAX)$")
"""Columns with the band of a series, which a W&B chart exports too."""
OF_RUN: Final = " - "
"""Separator of run and metric in the column names of a W&B chart."""
TENSORBOARD: Final = ["wall time", "step", "value"]
KEYS: Final = ("key", "tag")
"""Column with the name of the metric in a tall table of MLflow or TensorBoard."""
RUNS: Final = ("run_id", "run_uuid", "run")
MAX_SHOWN: Final = 30
"""Limit on the columns that a message lists."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The options that select and scale the columns of a file; None if not given."""

    x: str | None = None
    """Column of the compute."""
    y: str | None = None
    """Column or metric of the reward."""
    samples: str | None = None
    """Column of the samples per evaluation, or one number for all points."""
    resumed: str | None = None
    """``KeepLast``: where compute goes back, the rows that it goes back over are left out."""
    scale: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest possible reward."""
    unit: str | None = None
    """Unit of compute; None if not given."""
    device_hours: str | None = None
    """Column of the cumulative device-hours; None for that of a run."""


@dataclass(frozen=True)
class Chosen:
    """The selected columns, and the rows with a point of the curve."""

    table: FileTable
    """The table without the rows that are empty in x or y."""
    x: str
    """Name of the compute column."""
    y: str
    """Name of the reward column."""
    named: bool
    """Whether the columns have other names than compute and reward."""
    skipped: int
    """Number of rows left out because x or y is empty."""
    replaced: int
    """Number of rows left out because a resumed run passed their compute again."""


def choose(table: FileTable, wanted: Columns) -> Chosen:
    """Select the columns of the curve, and the rows that have both.

    Raises:
        AnalysisProblem: a column is missing or ambiguous, or no row has both; the message lists the columns.
    """
    if not table.lines:
        _pair(table, wanted)
        raise AnalysisProblem(f"{table.path}: no point below the first line; wait for the first evaluations")
    table, wanted = _one_series(table, wanted)
    x, y = _pair(table, wanted)
    if x == y:
        raise AnalysisProblem(f"{table.path}: `x` and `y` both name the column {x}; name two")
    pairs = zip(table.cells(x) or [], table.cells(y) or [], strict=True)
    kept = [i for i, pair in enumerate(pairs) if all(pair)]
    if not kept:
        raise AnalysisProblem(f"{table.path}: no row has both {x} and {y}{_named_by(table.header)}")
    named = (x.lower(), y.lower()) != ("compute", "reward")
    last = _last_pass(kept, table.cells(x) or []) if wanted.resumed else kept
    return Chosen(table.take(last), x, y, named, len(table.lines) - len(kept), len(kept) - len(last))


def _last_pass(rows: list[int], cells: list[str]) -> list[int]:
    """The rows without those whose compute a later row is at or before. Cells that are no numbers stay, to be reported."""
    kept: list[int] = []
    for row in rows:
        while is_number(cells[row]) and kept and is_number(cells[kept[-1]]):
            if number(cells[kept[-1]]) < number(cells[row]):
                break
            kept.pop()
        kept.append(row)
    return kept


def _pair(table: FileTable, wanted: Columns) -> tuple[str, str]:
    """Names of the columns x and y."""
    x = None if wanted.x is None else _named(table, wanted.x, "x")
    y = None if wanted.y is None else _named(table, wanted.y, "y")
    x = x or table.name("compute")
    y = y or table.name("reward")
    # Only the format of an export determines its axis, and whether it has one series.
    axis, series = _export(table)
    if x is None and (y is None or wanted.y is not None):
        x = axis
    if y is None and x is not None and x == axis and len(series) == 1:
        y = series[0]
    if x is not None and y is not None:
        return x, y
    missing = " and ".join(f"no column {name}" for name, of in (("compute", x), ("reward", y)) if of is None)
    first = f" in {','.join(table.header)[:80]!r}" if table.head_line else ""
    message = f"{table.top}: {missing}{first}"
    if all(is_number(name) for name in table.header):
        raise AnalysisProblem(f"{message}; the first line names the columns: compute,reward[,samples]")
    raise AnalysisProblem(f"{message}{_named_by(table.header)}")


def _export(table: FileTable) -> tuple[str | None, list[str]]:
    """Axis and series of a TensorBoard download or a W&B chart; (None, []) for any other table."""
    if [name.lower() for name in table.header] == TENSORBOARD:
        return table.header[1], [table.header[2]]
    series = [name for name in table.header[1:] if OF_RUN in name and not COMPANION.search(name)]
    if not series or not table.header[0] or OF_RUN in table.header[0]:
        return None, []
    # A chart over another axis than the step exports the step as a series.
    return table.header[0], [name for name in series if not name.endswith(f"{OF_RUN}_step")]


def _one_series(table: FileTable, wanted: Columns) -> tuple[FileTable, Columns]:
    """Reduce a tall table (one value per row) to the rows of one metric, with a column of its name; return others unchanged.

    With several runs, a metric is named ``run - metric``, as in a W&B chart.
    """
    key = next((name for name in KEYS if table.names(name)), None)
    if key is None or not table.names("value") or not table.names("step"):
        return table, wanted
    runs = next((cells for name in RUNS if (cells := table.cells(name))), [""] * len(table.lines))
    several = len(set(runs)) > 1
    rows: dict[str, list[int]] = {}
    for i, (run, metric) in enumerate(zip(runs, table.cells(key) or [], strict=True)):
        rows.setdefault(f"{run}{OF_RUN}{metric}" if several else metric, []).append(i)
    values = table.cells("value") or []
    series = {name: [values[i] for i in at] for name, at in rows.items()}
    if wanted.y is not None:
        name = _match(list(series), wanted.y, f"{table.path}: `y` {wanted.y}", _named_by(list(series)))
    elif len(series) == 1:
        name = next(iter(series))
    else:
        raise AnalysisProblem(f"{table.path}: {len(series)} metrics in one column{_named_by(list(series))}")
    taken = table.take(rows[name])
    columns = [*taken.columns, series[name]]
    one = FileTable(table.path, [*table.header, name], columns, taken.lines, table.head_line, table.counted)
    return one, replace(wanted, x=wanted.x or one.names("step")[0], y=name)


def _named(table: FileTable, wanted: str, parameter: str) -> str:
    found = table.name(wanted)
    if found is not None:
        return found
    series = [name for name in table.header if not COMPANION.search(name)]
    return _match(series, wanted, f"{table.top}: `{parameter}` {wanted}", _named_by(table.header))


def _match(names: Sequence[str], wanted: str, prefix: str, tail: str) -> str:
    """The name that equals ``wanted``, or, in a chart, the only name whose metric is ``wanted``."""
    found = [name for name in names if name == wanted] or [
        name for name in names if name.endswith(OF_RUN + wanted)
    ]
    if len(found) > 1:
        raise AnalysisProblem(f"{prefix}: {len(found)} runs have it; name one: {_listed(found)}")
    if not found:
        raise AnalysisProblem(f"{prefix}: no such column{tail}")
    return found[0]


def _named_by(names: Sequence[str]) -> str:
    """The end of a message: the columns or metrics that there are."""
    return f"; name the columns by `x` and `y`; there are {_listed([name for name in names if name])}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more
