"""Training in ``scalerl report``, from ``metrics.jsonl``: groups, rewards and lengths of the tasks of mixes, and the turns of episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scalerl_api.paths import RunPaths
from scalerl_api.task_figures import SOLVED_AT_TURNS, by_task
from scalerl_api.wire import MAIN_TASK
from scalerl_cli.curves import formatting
from scalerl_cli.curves.problem import CurveProblem

_ENDS: Final = 10
"""The first and the last rewards are over the first and the last 1/``_ENDS`` of the steps."""


@dataclass(frozen=True)
class TaskRow:
    """A task of a run over all its steps."""

    run: str
    task: str
    groups: int
    """Number of groups."""
    share: float
    """Share in the groups of the run."""
    filtered: int
    """Number of filtered groups."""
    rollouts: int
    """Number of completions."""
    first: float | None
    """Mean score of the completions in the first tenth of the steps; None if none was graded."""
    last: float | None
    """Mean score of the completions in the last tenth of the steps; None if none was graded."""
    mean_tokens: float
    """Mean tokens of a completion."""
    truncated_fraction: float
    """Share of the completions cut off at the length limit."""


def task_rows(runs: Sequence[tuple[str, Path]]) -> list[TaskRow]:
    """The rows of each run with a mix, by run and task.

    Raises:
        CurveProblem: a ``metrics.jsonl`` cannot be read.
    """
    return [row for name, directory in runs for row in _of_run(name, directory)]


def _lines(directory: Path) -> list[dict[str, float]]:
    path = RunPaths(directory).metrics
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CurveProblem(f"{path}: {error}") from error
    if not all(isinstance(line, dict) for line in found):
        raise CurveProblem(f"{path}: a line is no JSON object")
    return found


def _of_run(name: str, directory: Path) -> list[TaskRow]:
    steps = [by_task(line) for line in _lines(directory)]
    tasks = list(dict.fromkeys(task for step in steps for task in step))
    tenth = max(1, len(steps) // _ENDS)
    groups = {task: _sum(steps, task, "groups") for task in tasks}
    every = sum(groups.values())
    return [
        TaskRow(
            *(name, task, int(groups[task]), groups[task] / max(1, every)),
            *(int(_sum(steps, task, "filtered_groups")), int(rollouts := _sum(steps, task, "rollouts"))),
            *(_reward(steps[:tenth], task), _reward(steps[-tenth:], task)),
            _sum(steps, task, "completion_tokens") / max(1, rollouts),
            sum(of[task]["truncated_fraction"] * of[task]["rollouts"] for of in steps if task in of)
            / max(1, rollouts),
        )
        for task in tasks
    ]


def _sum(steps: list[dict[str, dict[str, float]]], task: str, figure: str) -> float:
    return sum(of.get(task, {}).get(figure, 0) for of in steps)


def _reward(steps: list[dict[str, dict[str, float]]], task: str) -> float | None:
    graded = [of[task] for of in steps if "reward" in of.get(task, {})]
    rollouts = sum(one["rollouts"] for one in graded)
    return sum(one["reward"] * one["rollouts"] for one in graded) / rollouts if rollouts else None


def task_table(rows: Sequence[TaskRow]) -> list[list[str]]:
    """The header and a line per row, without the run if there is only one."""
    return formatting.tabulated(
        rows,
        [
            ("run", lambda row: row.run) if len({row.run for row in rows}) > 1 else None,
            ("task", lambda row: row.task),
            ("groups", lambda row: str(row.groups)),
            ("share", lambda row: f"{row.share:.1%}"),
            ("filtered", lambda row: str(row.filtered)),
            ("reward, first", lambda row: formatting.known(row.first)),
            ("reward, last", lambda row: formatting.known(row.last)),
            ("tokens", lambda row: f"{row.mean_tokens:.1f}"),
            ("truncated", lambda row: f"{row.truncated_fraction:.1%}"),
        ],
    )


@dataclass(frozen=True)
class TurnRow:
    """The episodes of a task in a tenth of a run's steps. Means and shares are over the episodes; None if there is nothing."""

    run: str
    task: str
    steps: str
    """``first`` or ``last``."""
    turns: float | None
    """Mean replies."""
    solved: tuple[float | None, ...]
    """Share that scores 1 with the first reply, the second, …; the last of them is for all later ones."""
    malformed: float | None
    """Share of the calls of tools that could not be made."""
    environment_tokens: float | None
    """Share of the tokens that the environment wrote."""
    environment_seconds: float | None
    """Share of the time in its steps."""


def turn_rows(runs: Sequence[tuple[str, Path]]) -> list[TurnRow]:
    """Two rows for each run and task with an environment.

    Raises:
        CurveProblem: a ``metrics.jsonl`` cannot be read.
    """
    rows = []
    for name, directory in runs:
        steps = [by_task(line) or {MAIN_TASK: line} for line in _lines(directory)]
        tenth = max(1, len(steps) // _ENDS)
        tasks = dict.fromkeys(task for step in steps for task, of in step.items() if "episode_turns" in of)
        rows += [
            _turn_row(name, task, *part)
            for task in tasks
            for part in (("first", steps[:tenth]), ("last", steps[-tenth:]))
        ]
    return rows


def _turn_row(run: str, task: str, which: str, steps: Sequence[dict[str, dict[str, float]]]) -> TurnRow:
    def mean(figure: str) -> float | None:
        found = [of[task] for of in steps if figure in of.get(task, {})]
        rollouts = sum(one["rollouts"] for one in found)
        return sum(one[figure] * one["rollouts"] for one in found) / rollouts if rollouts else None

    return TurnRow(
        *(run, task, which, mean("episode_turns")),
        tuple(mean(f"solved_at_turn_{at}") for at in range(1, SOLVED_AT_TURNS + 1)),
        *(
            mean(f"{name}_fraction")
            for name in ("malformed_calls", "environment_tokens", "environment_seconds")
        ),
    )


def turn_table(rows: Sequence[TurnRow]) -> list[list[str]]:
    """The header and a line per row, without the run if there is only one."""
    return formatting.tabulated(
        rows,
        [
            ("run", lambda row: row.run) if len({row.run for row in rows}) > 1 else None,
            ("task", lambda row: row.task),
            ("steps", lambda row: f"{row.steps} tenth"),
            ("turns", lambda row: formatting.known(row.turns)),
            *(_solved_column(at) for at in range(SOLVED_AT_TURNS)),
            ("malformed", lambda row: formatting.known(row.malformed)),
            ("environment, tokens", lambda row: formatting.known(row.environment_tokens)),
            ("environment, time", lambda row: formatting.known(row.environment_seconds)),
        ],
    )


def _solved_column(at: int) -> tuple[str, Callable[[TurnRow], str]]:
    name = f"solved at {at + 1}" + ("+" if at + 1 == SOLVED_AT_TURNS else "")
    return name, lambda row: formatting.known(row.solved[at])


def turn_csv(row: TurnRow) -> dict[str, object]:
    """The row by column."""
    solved = {f"solved_at_turn_{at}": value for at, value in enumerate(row.solved, 1)}
    return {name: value for name, value in vars(row).items() if name != "solved"} | solved
