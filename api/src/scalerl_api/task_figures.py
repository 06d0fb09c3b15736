"""Figures of a step in the lines of ``metrics.jsonl``, and of each task of a mix: ``reward_task_NAME`` beside ``reward``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TASK_FIGURES: Final[Mapping[str, str]] = {
    "reward": "Mean score of the completions",
    "groups": "Groups",
    "filtered_groups": "Groups without a gradient",
    "given_up_groups": "Slots that were given up",
    "rollouts": "Completions",
    "completion_tokens": "Tokens of the completions",
    "mean_completion_tokens": "Mean tokens of a completion",
    "completion_tokens_p90": "90th percentile of the tokens of a completion",
    "right_completion_tokens": "Mean tokens of the completions that score at least 0.5",
    "wrong_completion_tokens": "Mean tokens of the completions that score less than 0.5",
    "unsolved_groups_fraction": "Part of the graded groups whose completions all score 0",
    "solved_groups_fraction": "Part of the graded groups whose completions all score 1",
    "truncated_fraction": "Part of the completions that were cut off at their maximum length",
    "looped_fraction": "Part of the completions that end in a loop: at least 4 copies, and 64 tokens, of a pattern of up to 512 tokens",
    "unanswered_fraction": "Part of the graded completions in which the verifier found no answer, right or wrong",
    "distinct_fraction": "Mean over the groups of the part of their completions that are distinct, token for token",
    "grading_errors": "Completions that could not be graded",
}
"""Figures of a step or of a task in it, with their descriptions. Means and parts over nothing are absent."""
_BETWEEN: Final = "_task_"


def task_key(figure: str, task: str) -> str:
    """Key of a task's figure in a line of ``metrics.jsonl``."""
    return f"{figure}{_BETWEEN}{task}"


def by_task(row: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The figures of each task in a line, by task; empty for a run with one.

    >>> by_task({"reward": 0.25, "reward_task_sums": 0.5, "groups_task_sums": 4})
    {'sums': {'reward': 0.5, 'groups': 4}}
    """
    found: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        figure, between, task = key.partition(_BETWEEN)
        if between and figure in TASK_FIGURES:
            found.setdefault(task, {})[figure] = value
    return found
