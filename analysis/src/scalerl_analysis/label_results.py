"""Rewards by label of the prompts, from ``labels.csv``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from scalerl_analysis import formatting
from scalerl_analysis.problem import AnalysisProblem
from scalerl_analysis.table import Column, Table
from scalerl_api.curve import LABEL_COLUMNS, PASS_AT, label_order
from scalerl_api.paths import RunPaths

Key = tuple[str, str, str]
"""Evaluation set, label, value."""
Cell = dict[str, float]
"""Of one key: ``prompts``, ``first_reward`` and ``last_reward`` of the oldest and the newest evaluation, and ``pass_at_K`` of the
newest."""


def label_table(
    runs: Sequence[tuple[str, str | Path]], wanted_set: str | None = None, wanted_label: str | None = None
) -> Table:
    """Rows sorted by set, label, value and name; runs of the same name are averaged.

    Raises:
        AnalysisProblem: a run has no results by label, no run has the set or label, or runs of one name have different prompts.
    """
    by_name: dict[str, list[tuple[Path, dict[Key, Cell]]]] = {}
    for name, directory in runs:
        by_name.setdefault(name, []).append((Path(directory), read_labels(Path(directory))))
    every = {key for members in by_name.values() for _, cells in members for key in cells}
    keys = {key for key in every if wanted_set in (None, key[0]) and wanted_label in (None, key[1])}
    if not keys:
        there = ", ".join(sorted({f"set {key[0]}, label {key[1]}" for key in every})) or "nothing"
        raise AnalysisProblem(f"no run has the wanted set and label: there is {there}")
    rows = []
    for key in sorted(keys, key=lambda key: (key[0], label_order(key[1], key[2]))):
        for name, members in by_name.items():
            cells = {directory: cells[key] for directory, cells in members if key in cells}
            if len({cell["prompts"] for cell in cells.values()}) > 1:
                raise AnalysisProblem(
                    f"{name}: {' and '.join(map(str, cells))} were evaluated on different prompts of {key[1]} {key[2]}: "
                    "give them different names"
                )
            if cells:
                found = {"set": key[0], "label": key[1], "value": key[2], "run": name, "runs": len(cells)}
                rows.append(found | _means(list(cells.values())))
    passed = sorted(
        {name for row in rows for name in row if PASS_AT.fullmatch(name)}, key=lambda name: int(name[8:])
    )
    columns = [
        Column("set", "set", varied=True),
        Column("label", "label"),
        Column("value", "value"),
        Column("run", "run", varied=True),
        Column("runs", "runs", varied=True),
        Column("prompts", "prompts"),
        Column("first_reward", "reward, first", formatting.known),
        Column("last_reward", "reward, last", formatting.known),
        *(Column(name, f"pass@{name[8:]}", formatting.known) for name in passed),
    ]
    return Table(columns, [dict.fromkeys(passed) | row for row in rows])


def _means(cells: Sequence[Cell]) -> Cell:
    """Means of the figures that all have."""
    known = [name for name in cells[0] if all(name in cell for cell in cells)]
    return {name: fmean(cell[name] for cell in cells) for name in known} | {"prompts": cells[0]["prompts"]}


def read_labels(directory: Path) -> dict[Key, Cell]:
    """The results by label in ``labels.csv`` of a run.

    Raises:
        AnalysisProblem: the file is missing or cannot be read.
    """
    path = RunPaths(directory).labels
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
    except FileNotFoundError:
        raise AnalysisProblem(
            f"{path}: no such file; a run writes it with the first evaluation of prompts that have labels: give the lines "
            "of task.jsonl a difficulty, or task.dataset columns.labels"
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise AnalysisProblem(f"{path}: {error}") from error
    cells: dict[Key, tuple[int, Cell]] = {}
    for number, row in enumerate(rows, 2):
        try:
            version, reward = int(row["version"]), float(row["reward"])
            key = (row["set"], row["label"], row["value"])
            # The rows of a set are in the order of versions, so the first one of a key is the oldest evaluation.
            first = cells[key][1]["first_reward"] if key in cells else reward
            cell = {"prompts": int(row["prompts"]), "first_reward": first, "last_reward": reward}
            passed = {name: float(text) for name, text in row.items() if PASS_AT.fullmatch(name) and text}
            cells[key] = version, cell | passed
        except (KeyError, TypeError, ValueError) as error:
            raise AnalysisProblem(
                f"{path}, line {number}: no row of {', '.join(LABEL_COLUMNS)} ({error!r})"
            ) from error
    newest: dict[str, int] = {}
    for (of, _, _), (version, _) in cells.items():
        newest[of] = max(version, newest.get(of, 0))
    # A value without a row in the newest evaluation belongs to an earlier content of the set.
    return {key: cell for key, (version, cell) in cells.items() if version == newest[key[0]]}
