"""``scalerl report``: rewards of runs by label of the prompts (such as difficulty or context) and by task of a mix, and changes
of their responses between epochs.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from scalerl_api.curve import LABEL_COLUMNS, label_order
from scalerl_api.paths import RunPaths
from scalerl_cli.curves import formatting
from scalerl_cli.curves.history_report import epoch_csv, epoch_rows, epoch_table
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.task_report import task_rows, task_table, turn_csv, turn_rows, turn_table
from scalerl_cli.exits import DONE
from scalerl_cli.output import replace_text, say

Key = tuple[str, str, str]
"""Evaluation set, label, value."""
PASS_AT: Final = "pass_at_"


@dataclass(frozen=True)
class Cell:
    """Results for the prompts with one value of a label."""

    prompts: int
    """Number of prompts."""
    first: float
    """Mean reward in the oldest evaluation."""
    last: float
    """Mean reward in the newest evaluation."""
    pass_at: dict[int, float]
    """pass@k in the newest evaluation, by k."""


@dataclass(frozen=True)
class Row:
    """One value of a label for the runs of one name."""

    key: Key
    name: str
    runs: int
    """Number of runs."""
    cell: Cell
    """Mean over the runs."""


@dataclass(frozen=True)
class Part:
    """A table of the report."""

    name: str
    """Of its files."""
    table: list[list[str]]
    rows: Sequence[Mapping[str, object]]
    """With all digits, for the CSV; the part is left out if there are none."""
    draw: Callable[[Path], None] | None = None


def run_report(arguments: argparse.Namespace) -> int:
    """Print the tables, and write ``report.md`` and the files of each part; returns the exit code.

    By label: ``report.csv`` and ``.png``. Tasks of a mix: ``report-tasks.csv``. Turns of episodes: ``report-turns.csv``. Epochs: ``report-history.csv``.
    """
    from scalerl_cli.curves.report_picture import draw_labels

    runs = named_runs(arguments.runs)
    tasks, turns, epochs = task_rows(runs), turn_rows(runs), epoch_rows(runs)
    # Tasks, turns and epochs are reported even if the prompts have no labels.
    unlabelled = bool(tasks or turns or epochs) and not any(
        RunPaths(directory).labels.exists() for _, directory in runs
    )
    rows = [] if unlabelled else report_rows(runs, arguments.set, arguments.label)
    parts = [
        Part("report", table(rows), [_csv_row(row, rows) for row in rows], partial(draw_labels, rows)),
        Part("report-tasks", task_table(tasks), [vars(row) for row in tasks]),
        Part("report-turns", turn_table(turns), [*map(turn_csv, turns)]),
        Part("report-history", epoch_table(epochs), [*map(epoch_csv, epochs)]),
    ]
    parts = [part for part in parts if part.rows]
    folder: Path = arguments.to or (runs[0][1] if len(runs) == 1 else Path("report"))
    written = _write(parts, folder)
    for part in parts:
        for line in formatting.table(part.table, indent=""):
            say(line)
        say()
    say(f"written: {', '.join(map(str, written))}")
    return DONE


def named_runs(words: Sequence[str]) -> list[tuple[str, Path]]:
    """Names and run directories of arguments ``DIR`` and ``NAME=DIR``.

    >>> named_runs(["runs/a", "blend=runs/b"])
    [('a', PosixPath('runs/a')), ('blend', PosixPath('runs/b'))]
    """
    pairs = [
        word.partition("=")
        if "=" in word and not Path(word).is_dir()
        else (Path(word).resolve().name, "=", word)
        for word in words
    ]
    return [(name, Path(directory)) for name, _, directory in pairs]


def read_labels(directory: Path) -> dict[Key, Cell]:
    """The results by label in ``labels.csv`` of a run.

    Raises:
        CurveProblem: the file is missing or cannot be read.
    """
    path = RunPaths(directory).labels
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
    except FileNotFoundError:
        raise CurveProblem(
            f"{path}: no such file; it is written with the first evaluation of prompts that have labels: give a run "
            "directory, or the lines of task.jsonl a difficulty"
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CurveProblem(f"{path}: {error}") from error
    cells: dict[Key, tuple[int, Cell]] = {}
    for number, row in enumerate(rows, 2):
        try:
            version, reward = int(row["version"]), float(row["reward"])
            key = (row["set"], row["label"], row["value"])
            pass_at = {
                int(name.removeprefix(PASS_AT)): float(text)
                for name, text in row.items()
                if name.removeprefix(PASS_AT).isdecimal() and name.startswith(PASS_AT) and text
            }
            prompts = int(row["prompts"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CurveProblem(
                f"{path}, line {number}: no row of {', '.join(LABEL_COLUMNS)} ({error!r})"
            ) from error
        # The rows of a set are in the order of versions, so the first one of a key is the oldest evaluation.
        first = cells[key][1].first if key in cells else reward
        cells[key] = version, Cell(prompts, first, reward, pass_at)
    newest: dict[str, int] = {}
    for (of, _, _), (version, _) in cells.items():
        newest[of] = max(version, newest.get(of, 0))
    # A value without a row in the newest evaluation belongs to an earlier content of the set.
    return {key: cell for key, (version, cell) in cells.items() if version == newest[key[0]]}


def report_rows(
    runs: Sequence[tuple[str, Path]], wanted_set: str | None = None, wanted_label: str | None = None
) -> list[Row]:
    """Rows sorted by set, label, value and name; runs of the same name are averaged.

    Raises:
        CurveProblem: a run has no results by label, no run has the set or label, or runs of one name have different prompts.
    """
    by_name: dict[str, list[tuple[Path, dict[Key, Cell]]]] = {}
    for name, directory in runs:
        by_name.setdefault(name, []).append((directory, read_labels(directory)))
    every = {key for members in by_name.values() for _, cells in members for key in cells}
    keys = {
        key
        for key in every
        if (wanted_set is None or key[0] == wanted_set) and (wanted_label is None or key[1] == wanted_label)
    }
    if not keys:
        there = ", ".join(sorted({f"set {key[0]}, label {key[1]}" for key in every})) or "nothing"
        raise CurveProblem(f"no run has the wanted set and label: there is {there}")
    rows = []
    for key in sorted(keys, key=lambda key: (key[0], label_order(key[1], key[2]))):
        for name, members in by_name.items():
            cells = [(directory, cells[key]) for directory, cells in members if key in cells]
            if len({cell.prompts for _, cell in cells}) > 1:
                raise CurveProblem(
                    f"{name}: {' and '.join(str(directory) for directory, _ in cells)} were evaluated on different prompts "
                    f"of {key[1]} {key[2]}: give them different names"
                )
            if cells:
                rows.append(Row(key, name, len(cells), _mean([cell for _, cell in cells])))
    return rows


def _mean(cells: list[Cell]) -> Cell:
    n = len(cells)
    ks = set.intersection(*(set(cell.pass_at) for cell in cells))
    return Cell(
        cells[0].prompts,
        sum(cell.first for cell in cells) / n,
        sum(cell.last for cell in cells) / n,
        {k: sum(cell.pass_at[k] for cell in cells) / n for k in sorted(ks)},
    )


def table(rows: Sequence[Row]) -> list[list[str]]:
    """The header and a line per row, without the set, the run or the number of runs where all rows have the same."""
    return formatting.tabulated(
        rows,
        [
            ("set", lambda row: row.key[0]) if len({row.key[0] for row in rows}) > 1 else None,
            ("label", lambda row: row.key[1]),
            ("value", lambda row: row.key[2]),
            ("run", lambda row: row.name) if len({row.name for row in rows}) > 1 else None,
            ("runs", lambda row: str(row.runs)) if any(row.runs > 1 for row in rows) else None,
            ("prompts", lambda row: str(row.cell.prompts)),
            ("reward, first", lambda row: formatting.known(row.cell.first)),
            ("reward, last", lambda row: formatting.known(row.cell.last)),
            *((f"pass@{k}", partial(_passed, k)) for k in _ks(rows)),
        ],
    )


def _ks(rows: Sequence[Row]) -> list[int]:
    return sorted({k for row in rows for k in row.cell.pass_at})


def _passed(k: int, row: Row) -> str:
    return formatting.known(row.cell.pass_at.get(k))


def _csv_row(row: Row, rows: Sequence[Row]) -> dict[str, object]:
    of, label, value = row.key
    return {
        "set": of,
        "label": label,
        "value": value,
        "run": row.name,
        "runs": row.runs,
        "prompts": row.cell.prompts,
        "first_reward": row.cell.first,
        "last_reward": row.cell.last,
    } | {f"{PASS_AT}{k}": row.cell.pass_at.get(k) for k in _ks(rows)}


def _write(parts: Sequence[Part], folder: Path) -> list[Path]:
    """Write the files into ``folder``, which is created; returns their paths."""
    texts = {"report.md": "\n".join("\n".join(formatting.markdown(part.table)) + "\n" for part in parts)}
    texts |= {f"{part.name}.csv": formatting.as_csv(part.rows) for part in parts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            replace_text(folder / name, text)
    except OSError as error:
        raise CurveProblem(f"{folder}: {error.strerror}") from error
    pictures = []
    for part in parts:
        if part.draw is not None:
            pictures.append(folder / f"{part.name}.png")
            part.draw(pictures[-1])
    return [*(folder / name for name in texts), *pictures]
