"""Figures of the steps of runs by task of a mix, and of the turns of their episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from scalerl_analysis import formatting
from scalerl_analysis.table import Column, Table
from scalerl_api.metrics_fields import SOLVED_AT_TURNS, by_task
from scalerl_api.wire import MAIN_TASK

_ENDS: Final = 10
"""The first and the last rewards are over the first and the last 1/``_ENDS`` of the steps."""

Rows = Sequence[dict[str, float]]
"""Figures of each step."""
Steps = Sequence[dict[str, dict[str, float]]]
"""Figures of each step by task."""


def task_table(runs: Sequence[tuple[str, Rows]]) -> Table:
    """A row for each run and task of a mix, over all steps."""
    columns = [
        Column("run", "run", varied=True),
        Column("task", "task"),
        Column("groups", "groups"),
        Column("share", "share", formatting.percent),
        Column("filtered", "filtered"),
        Column("rollouts"),
        Column("first", "reward, first", formatting.known),
        Column("last", "reward, last", formatting.known),
        Column("mean_tokens", "tokens", "{:.1f}".format),
        Column("truncated_fraction", "truncated", formatting.percent),
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
