"""``scalerl report``: rewards of runs by label of the prompts (such as difficulty or context) and by task of a mix, and changes
of their responses between epochs.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scalerl_api.curve import LABEL_COLUMNS, label_order
from scalerl_api.paths import RunPaths
from scalerl_cli import exits
from scalerl_cli.curves import formatting
from scalerl_cli.curves.history_report import EpochRow, epoch_csv, epoch_rows, epoch_table
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.task_report import TaskRow, task_csv, task_rows, task_table
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


def run_report(arguments: argparse.Namespace) -> int:
    """Print the tables and write the files of :func:`write_report`; returns the exit code."""
    runs = named_runs(arguments.runs)
    tasks, epochs = task_rows(runs), epoch_rows(runs)
    # Tasks and epochs are reported even if the prompts have no labels.
    unlabelled = bool(tasks or epochs) and not any(
        RunPaths(directory).labels.exists() for _, directory in runs
    )
    rows = [] if unlabelled else report_rows(runs, arguments.set, arguments.label)
    folder: Path = arguments.to or (runs[0][1] if len(runs) == 1 else Path("report"))
    written = write_report(rows, folder, tasks, epochs)
    for lines in _tables(rows, tasks, epochs):
        for line in formatting.table(lines, indent=""):
            say(line)
        say()
    say(f"written: {', '.join(map(str, written))}")
    return exits.DONE


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
    ks = sorted({k for row in rows for k in row.cell.pass_at})
    sets, names = len({row.key[0] for row in rows}) > 1, len({row.name for row in rows}) > 1
    seeds = any(row.runs > 1 for row in rows)
    head = [*(["set"] if sets else []), "label", "value", *(["run"] if names else [])]
    head += [
        *(["runs"] if seeds else []),
        "prompts",
        "reward, first",
        "reward, last",
        *(f"pass@{k}" for k in ks),
    ]
    lines = [head]
    for row in rows:
        of, label, value = row.key
        cell = row.cell
        lines.append(
            [
                *([of] if sets else []),
                *(label, value),
                *([row.name] if names else []),
                *([str(row.runs)] if seeds else []),
                *(str(cell.prompts), formatting.reward(cell.first, 3), formatting.reward(cell.last, 3)),
                *(formatting.reward(cell.pass_at[k], 3) if k in cell.pass_at else "" for k in ks),
            ]
        )
    return lines


def _tables(
    rows: Sequence[Row], tasks: Sequence[TaskRow], epochs: Sequence[EpochRow]
) -> list[list[list[str]]]:
    """The tables that have rows."""
    return [
        *([table(rows)] if rows else []),
        *([task_table(tasks)] if tasks else []),
        *([epoch_table(epochs)] if epochs else []),
    ]


def write_report(
    rows: Sequence[Row], folder: Path, tasks: Sequence[TaskRow] = (), epochs: Sequence[EpochRow] = ()
) -> list[Path]:
    """Write ``report.md`` into ``folder``, which is created, and the files of the non-empty tables; returns their paths.

    Rows: ``report.csv`` and ``.png``. Tasks of a mix: ``report-tasks.csv``. Epochs: ``report-history.csv`` and ``.png``.

    Raises:
        CurveProblem: a file cannot be written.
    """
    from scalerl_cli.curves.history_picture import draw_epochs
    from scalerl_cli.curves.label_picture import draw_labels

    tables = _tables(rows, tasks, epochs)
    texts = {"report.md": "\n".join("\n".join(_markdown(lines)) + "\n" for lines in tables)}
    texts |= {"report.csv": _csv(rows)} if rows else {}
    texts |= {"report-tasks.csv": task_csv(tasks)} if tasks else {}
    texts |= {"report-history.csv": epoch_csv(epochs)} if epochs else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            replace_text(folder / name, text)
    except OSError as error:
        raise CurveProblem(f"{folder}: {error.strerror}") from error
    written = [folder / name for name in texts]
    if rows:
        draw_labels(rows, folder / "report.png")
        written.append(folder / "report.png")
    if epochs:
        draw_epochs(epochs, folder / "report-history.png")
        written.append(folder / "report-history.png")
    return written


def _markdown(lines: list[list[str]]) -> Iterator[str]:
    head, *body = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    for line in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(line)} |"


def _csv(rows: Sequence[Row]) -> str:
    ks = sorted({k for row in rows for k in row.cell.pass_at})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ("set", "label", "value", "run", "runs", "prompts", "first_reward", "last_reward")
    writer.writerow((*head, *(f"{PASS_AT}{k}" for k in ks)))
    for row in rows:
        cell = row.cell
        rewards = (repr(cell.first), repr(cell.last))
        pass_at = (repr(cell.pass_at[k]) if k in cell.pass_at else "" for k in ks)
        writer.writerow((*row.key, row.name, row.runs, cell.prompts, *rewards, *pass_at))
    return text.getvalue()
