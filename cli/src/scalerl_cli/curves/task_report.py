"""The tasks of mixes in ``scalerl report``: groups, rewards and lengths of each in training, from ``metrics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scalerl_api.paths import RunPaths
from scalerl_api.task_figures import by_task
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


def _of_run(name: str, directory: Path) -> list[TaskRow]:
    path = RunPaths(directory).metrics
    try:
        steps = [by_task(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError) as error:
        raise CurveProblem(f"{path}: {error}") from error
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
