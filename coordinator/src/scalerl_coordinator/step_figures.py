"""Sums over the groups of a closed step, and the figures of metrics.jsonl by them."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from scalerl_api.metrics_fields import SOLVED_AT_TURNS
from scalerl_coordinator.accepted_group import Accepted
from scalerl_coordinator.slots import staleness

Row = dict[str, int | float]
"""A line of metrics.jsonl. The type includes ``int`` so that a count decoded from a snapshot stays an int."""

Number = TypeVar("Number", int, float)


class StepSums(msgspec.Struct, array_like=True):
    """Sums over one closed step."""

    groups: int = 0
    filtered_groups: int = 0
    rollouts: int = 0
    trained_rollouts: int = 0
    work_tokens: int = 0
    truncated: int = 0
    score_sum: float = 0.0
    staleness_tokens: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    grading_errors: int = 0
    given_up_groups: int = 0
    """The part of ``filtered_groups`` that was given up."""
    graded: int = 0
    """Number of rollouts with a score, over which ``score_sum`` sums."""
    masked_tokens: int = 0
    parts: dict[str, tuple[float, int]] = {}
    """For each part of the verdicts, by name: the sum, and the number of rollouts that have it."""
    low: float = 1.0
    """Lowest score."""
    high: float = 0.0
    """Highest score."""
    unusable_tokens: int = 0
    """Tokens without a finite log-probability."""
    lengths: list[int] = []
    """Tokens of each completion."""
    right_tokens: int = 0
    """Tokens of completions that score at least 0.5."""
    right: int = 0
    """Number of these completions."""
    graded_tokens: int = 0
    """Tokens of completions with a score."""
    graded_groups: int = 0
    """Groups with a score."""
    unsolved_groups: int = 0
    """The part of them in which each score is 0."""
    solved_groups: int = 0
    """The part of them in which each score is 1."""
    looped: tuple[int, int] = (0, 0)
    """Completions that end in a loop, and those of which it is known."""
    unanswered: tuple[int, int] = (0, 0)
    """Completions without an answer, and those of which it is known."""
    distinct: tuple[float, int] = (0.0, 0)
    """Sum of the parts of the groups' completions that are distinct, and the groups of which it is known."""
    turns: tuple[int, int] = (0, 0)
    """Replies of episodes, and the episodes."""
    solved_at: list[int] = []
    """Graded episodes that score 1, by their last turn, as in :data:`~scalerl_api.metrics_fields.SOLVED_AT_TURNS`; empty without any."""
    graded_episodes: int = 0
    message_tokens: tuple[int, int] = (0, 0)
    """Tokens of environments, and all tokens of their episodes."""
    episode_seconds: tuple[float, float] = (0.0, 0.0)
    """Seconds in requests, and in steps."""

    @property
    def part_means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in sorted(self.parts.items()) if count}


def figures(sums: StepSums) -> Row:
    """The figures of :data:`scalerl_api.metrics_fields.TASK_FIGURES`, for a line of metrics.jsonl."""
    wrong = sums.graded - sums.right
    made, malformed = (sums.parts.get(name, (0.0, 0))[0] for name in ("calls", "malformed"))
    parts = {
        "reward": (sums.score_sum, sums.graded),
        "right_completion_tokens": (sums.right_tokens, sums.right),
        "wrong_completion_tokens": (sums.graded_tokens - sums.right_tokens, wrong),
        "unsolved_groups_fraction": (sums.unsolved_groups, sums.graded_groups),
        "solved_groups_fraction": (sums.solved_groups, sums.graded_groups),
        "looped_fraction": sums.looped,
        "unanswered_fraction": sums.unanswered,
        "distinct_fraction": sums.distinct,
        "episode_turns": sums.turns,
        **{
            f"solved_at_turn_{at}": (count, sums.graded_episodes)
            for at, count in enumerate(sums.solved_at, 1)
        },
        "malformed_calls_fraction": (malformed, made + malformed),
        "environment_tokens_fraction": sums.message_tokens,
        "environment_seconds_fraction": (sums.episode_seconds[1], sum(sums.episode_seconds)),
    }
    ordered = sorted(sums.lengths)
    return {
        **{name: total / count for name, (total, count) in parts.items() if count},
        **({"completion_tokens_p90": ordered[(9 * len(ordered) - 1) // 10]} if ordered else {}),
        "groups": sums.groups,
        "filtered_groups": sums.filtered_groups,
        "given_up_groups": sums.given_up_groups,
        "rollouts": sums.rollouts,
        "completion_tokens": sums.work_tokens,
        "mean_completion_tokens": sums.work_tokens / max(1, sums.rollouts),
        "truncated_fraction": sums.truncated / max(1, sums.rollouts),
        "grading_errors": sums.grading_errors,
    }


def sum_step(step: int, groups: list[Accepted]) -> StepSums:
    """Sums over the groups of the closed step ``step``. Staleness is that of the trained tokens."""
    sums = StepSums()
    for group in groups:
        tokens = sum(group.lengths)
        sums.groups += 1
        sums.rollouts += group.rollouts
        sums.work_tokens += tokens
        sums.truncated += group.truncated
        sums.lengths += group.lengths
        scores = group.graded(group.scores)
        sums.score_sum += sum(scores)
        sums.graded += len(scores)
        sums.low = min([sums.low, *scores])
        sums.high = max([sums.high, *scores])
        for length, score in zip(group.graded(group.lengths), scores, strict=True):
            sums.graded_tokens += length
            sums.right_tokens += length * (score >= 0.5)
            sums.right += score >= 0.5
        sums.graded_groups += bool(scores)
        sums.unsolved_groups += bool(scores) and max(scores) <= 0.0
        sums.solved_groups += bool(scores) and min(scores) >= 1.0
        sums.unusable_tokens += group.unusable_tokens
        sums.looped = _added(sums.looped, group.looped, group.rollouts, group.looped >= 0)
        sums.unanswered = _added(sums.unanswered, group.unanswered, len(scores), group.unanswered >= 0)
        sums.distinct = _added(sums.distinct, group.distinct / max(1, group.rollouts), 1, group.distinct > 0)
        for name, values in group.parts.items():
            total, count = sums.parts.get(name, (0.0, 0))
            sums.parts[name] = total + sum(group.graded(values)), count + len(scores)
        if group.episode_seconds is not None:
            _add_episodes(sums, group, group.episode_seconds)
        sums.grading_errors += group.grading_errors
        sums.masked_tokens += sum(group.masked_tokens)
        sums.given_up_groups += bool(group.given_up)
        if group.filtered:
            sums.filtered_groups += 1
            continue
        sums.trained_rollouts += group.rollouts
        trained = sum(group.trained_tokens)
        sums.staleness_tokens += trained
        # The sum keeps its sign: tokens newer than a step that is trained again count as negative.
        sums.staleness_sum += step * trained - group.version_tokens
        sums.staleness_max = max(sums.staleness_max, staleness(step, group.oldest_version))
    return sums


def _add_episodes(sums: StepSums, group: Accepted, seconds: tuple[float, float]) -> None:
    turns = group.turns or [1] * group.rollouts
    sums.turns = sums.turns[0] + sum(turns), sums.turns[1] + len(turns)
    solved = sums.solved_at or [0] * SOLVED_AT_TURNS
    for at, (number, score) in enumerate(zip(turns, group.scores, strict=True)):
        if at not in group.ungraded:
            sums.graded_episodes += 1
            solved[min(number, SOLVED_AT_TURNS) - 1] += score >= 1.0
    sums.solved_at = solved
    tokens, every = sums.message_tokens
    sums.message_tokens = tokens + group.message_tokens, every + sum(group.lengths)
    sums.episode_seconds = sums.episode_seconds[0] + seconds[0], sums.episode_seconds[1] + seconds[1]


def _added(sums: tuple[Number, int], value: Number, count: int, known: bool) -> tuple[Number, int]:
    return (sums[0] + value, sums[1] + count) if known else sums
