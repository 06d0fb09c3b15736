"""``scalerl report``: rewards of runs by label of the prompts (such as difficulty or context) and by task of a mix, turns of episodes,
and changes of the responses between epochs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from scalerl_api.paths import RunPaths
from scalerl_api.task_figures import SOLVED_AT_TURNS, by_task
from scalerl_api.wire import MAIN_TASK
from scalerl_cli.curves import formatting
from scalerl_cli.curves.history_report import epoch_table
from scalerl_cli.curves.label_report import label_table
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo, replace_text
from scalerl_cli.page.series import Series, warn_of_unreadable
from scalerl_cli.table import Column, Table

_ENDS: Final = 10
"""The first and the last rewards are over the first and the last 1/``_ENDS`` of the steps."""

Rows = Sequence[dict[str, float]]
"""Figures of each step."""
Steps = Sequence[dict[str, dict[str, float]]]
"""Figures of each step by task."""


@dataclass(frozen=True)
class Part:
    """A table of the report; the part is left out if it has no rows."""

    name: str
    """Of its files."""
    table: Table
    draw: Callable[[Path], None] | None = None


def run_report(arguments: argparse.Namespace) -> int:
    """Print the tables, and write ``report.md`` and the files of each part; returns the exit code.

    By label: ``report.csv`` and ``.png``. Tasks of a mix: ``report-tasks.csv``. Turns of episodes: ``report-turns.csv``.
    Epochs: ``report-history.csv``.
    """
    from scalerl_cli.curves.pictures import draw_labels

    runs = named_runs(arguments.runs)
    steps = [(name, _rows(directory)) for name, directory in runs]
    tables = {"tasks": task_table(steps), "turns": turn_table(steps), "history": epoch_table(runs)}
    parts = [Part(f"report-{name}", table) for name, table in tables.items() if table.rows]
    # These are reported even if the prompts have no labels.
    if not parts or any(RunPaths(directory).labels.exists() for _, directory in runs):
        table = label_table(runs, arguments.set, arguments.label)
        parts.insert(0, Part("report", table, partial(draw_labels, table.rows)))
    folder: Path = arguments.to or (runs[0][1] if len(runs) == 1 else Path("report"))
    written = _write(parts, folder)
    for part in parts:
        for line in part.table.lines():
            echo(line)
        echo()
    echo(f"written: {', '.join(map(str, written))}")
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


def _rows(directory: Path) -> list[dict[str, float]]:
    """The figures of each step of a run."""
    path = RunPaths(directory).metrics
    try:
        series = Series.read(path)
    except OSError as error:
        raise CurveProblem(f"{path}: {error.strerror}") from error
    warn_of_unreadable(series, path)
    return [series.row(at) for at in range(series.rows)]


def task_table(runs: Sequence[tuple[str, Rows]]) -> Table:
    """A row for each run and task of a mix, over all steps."""
    percent = "{:.1%}".format
    columns = [
        Column("run", "run", varied=True),
        Column("task", "task"),
        Column("groups", "groups"),
        Column("share", "share", percent),
        Column("filtered", "filtered"),
        Column("rollouts"),
        Column("first", "reward, first", formatting.known),
        Column("last", "reward, last", formatting.known),
        Column("mean_tokens", "tokens", "{:.1f}".format),
        Column("truncated_fraction", "truncated", percent),
    ]
    return Table(columns, [row for name, rows in runs for row in _task_rows(name, [*map(by_task, rows)])])


def _task_rows(run: str, steps: Steps) -> list[dict[str, Any]]:
    tasks = list(dict.fromkeys(task for step in steps for task in step))
    tenth = max(1, len(steps) // _ENDS)
    every = sum(_sum(steps, task, "groups") for task in tasks)
    return [
        {
            "run": run,
            "task": task,
            "groups": (groups := _sum(steps, task, "groups")),
            "share": groups / max(1, every),
            "filtered": _sum(steps, task, "filtered_groups"),
            "rollouts": (rollouts := _sum(steps, task, "rollouts")),
            "first": _mean(steps[:tenth], task, "reward"),
            "last": _mean(steps[-tenth:], task, "reward"),
            "mean_tokens": _sum(steps, task, "completion_tokens") / max(1, rollouts),
            "truncated_fraction": _mean(steps, task, "truncated_fraction"),
        }
        for task in tasks
    ]


def turn_table(runs: Sequence[tuple[str, Rows]]) -> Table:
    """Two rows for each run and task with an environment: its episodes in the first and the last tenth of the steps."""
    turns = range(1, SOLVED_AT_TURNS + 1)
    figures = {
        "turns": "episode_turns",
        **{f"solved_at_turn_{at}": f"solved_at_turn_{at}" for at in turns},
        "malformed": "malformed_calls_fraction",
        "environment_tokens": "environment_tokens_fraction",
        "environment_seconds": "environment_seconds_fraction",
    }
    headings = [
        "turns",
        *(f"solved at {at}{'+' * (at == SOLVED_AT_TURNS)}" for at in turns),
        *("malformed", "environment, tokens", "environment, time"),
    ]
    columns = [
        Column("run", "run", varied=True),
        Column("task", "task"),
        Column("steps", "steps", "{} tenth".format),
        *(Column(name, heading, formatting.known) for name, heading in zip(figures, headings, strict=True)),
    ]
    found = []
    for run, rows in runs:
        steps = [by_task(row) or {MAIN_TASK: row} for row in rows]
        tenth = max(1, len(steps) // _ENDS)
        tasks = dict.fromkeys(task for step in steps for task, of in step.items() if "episode_turns" in of)
        found += [
            {"run": run, "task": task, "steps": which}
            | {name: _mean(part, task, figure) for name, figure in figures.items()}
            for task in tasks
            for which, part in (("first", steps[:tenth]), ("last", steps[-tenth:]))
        ]
    return Table(columns, found)


def _sum(steps: Steps, task: str, figure: str) -> int:
    return int(sum(of.get(task, {}).get(figure, 0) for of in steps))


def _mean(steps: Steps, task: str, figure: str) -> float | None:
    """Mean over the completions of the steps that have the figure; None without any."""
    found = [of[task] for of in steps if figure in of.get(task, {})]
    rollouts = sum(one["rollouts"] for one in found)
    return sum(one[figure] * one["rollouts"] for one in found) / rollouts if rollouts else None


def _write(parts: Sequence[Part], folder: Path) -> list[Path]:
    """Write the files into ``folder``, which is created; returns their paths."""
    texts = {"report.md": "\n".join("\n".join(part.table.markdown()) + "\n" for part in parts)}
    texts |= {f"{part.name}.csv": part.table.csv() for part in parts}
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
