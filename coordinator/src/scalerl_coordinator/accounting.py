"""Totals of a run: rollouts by outcome, sums over the trained lineage, and usage of time and devices.

They differ in what happens when the trainer returns to a checkpoint: :class:`RolloutCounts` moves rollouts between counts
and loses none, :class:`Lineage` is reset to its value at that version, :class:`Usage` never decreases.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from scalerl_api.mismatch import ALL, POSITIONS, SOURCES, key
from scalerl_api.task_figures import SOLVED_AT_TURNS
from scalerl_api.wire import PromptRef, trained_tokens
from scalerl_coordinator.slots import staleness

Row = dict[str, int | float]
"""A line of metrics.jsonl. The type includes ``int`` so that a count decoded from a snapshot stays an int."""


Number = TypeVar("Number", int, float)


class Accepted(msgspec.Struct, array_like=True):
    """The part of an accepted training group that the state keeps; its tokens stay in the journal.

    Fields without a comment are those of :class:`~.journal_records.GroupAccepted`.
    """

    lease_id: str
    prompt_tokens: int
    lengths: list[int]
    scores: list[float]
    truncated: int
    oldest_version: int
    version_tokens: int
    filtered: bool = False
    """Dropped by the zero-variance filter, which runs when the group's step closes."""
    grading_errors: int = 0
    ungraded: list[int] = []
    masked_tokens: list[int] = []
    given_up: str = ""
    """The :class:`~.journal_records.GiveUpReason` of a slot that was given up, which has no completions."""
    given_up_rollouts: int = 0
    """Number of completions that a given-up slot would have had."""
    rewards: list[float] = []
    """The reward of each completion in training."""
    parts: dict[str, list[float]] = {}
    unusable_tokens: int = 0
    looped: int = -1
    unanswered: int = -1
    distinct: int = 0
    turns: list[int] = []
    returns: list[list[float]] = []
    message_tokens: int = 0
    episode_seconds: tuple[float, float] | None = None
    equal_turns: bool = False

    @property
    def rollouts(self) -> int:
        return len(self.lengths)

    @property
    def graded_scores(self) -> list[float]:
        return [score for i, score in enumerate(self.scores) if i not in self.ungraded]

    @property
    def graded_lengths(self) -> list[int]:
        return [length for i, length in enumerate(self.lengths) if i not in self.ungraded]

    @property
    def graded_parts(self) -> dict[str, list[float]]:
        return {
            name: [value for i, value in enumerate(values) if i not in self.ungraded]
            for name, values in self.parts.items()
        }

    @property
    def graded_rewards(self) -> list[float]:
        return [reward for i, reward in enumerate(self.rewards) if i not in self.ungraded]

    @property
    def graded_returns(self) -> list[list[float]]:
        return [returns for i, returns in enumerate(self.returns) if i not in self.ungraded]

    @property
    def trained_tokens(self) -> list[int]:
        """Number of tokens of each completion that contribute to the gradient unless the group is filtered."""
        return trained_tokens(self.lengths, self.masked_tokens, self.ungraded)


class Try(msgspec.Struct, array_like=True, frozen=True):
    """A filtered group whose slot was refilled: issued again with another prompt."""

    prompt: PromptRef
    group: Accepted


class RolloutCounts(msgspec.Struct, array_like=True):
    """Training rollouts by outcome: ``acknowledged = trained + filtered + queued + skipped`` after every record."""

    acknowledged: int = 0
    trained: int = 0
    filtered: int = 0
    queued: int = 0
    late: int = 0
    stale: int = 0
    invalid: int = 0
    duplicate: int = 0
    expired_leases: int = 0
    held_out_invalid: int = 0
    """Evaluation rollouts that were rejected as invalid."""
    grading_errors: int = 0
    """Accepted rollouts, held-out ones included, for which the verifier failed."""
    given_up: int = 0
    """Rollouts that the given-up slots would have had; not part of any other count."""
    too_long: int = 0
    """The part of ``given_up`` whose prompt leaves no room for a completion."""
    ungraded: int = 0
    """The part of ``acknowledged`` that is not trained on because the verifier failed."""
    masked_tokens: int = 0
    """Masked tokens of acknowledged rollouts."""
    skipped: int = 0
    """Rollouts of steps whose update was not applied."""
    held_out_given_up: int = 0
    """Held-out rollouts that score 0 because they could not be generated."""
    timed_out_leases: int = 0
    """The part of ``expired_leases`` that passed its deadline."""
    refilled: int = 0
    """The part of ``filtered`` whose slots were issued again with another prompt."""


class Lineage(msgspec.Struct, array_like=True, frozen=True):
    """Sums over the steps trained on one lineage, from version 0 on."""

    work_tokens: int = 0
    """Completion tokens consumed, filtered groups included: the compute axis of the curve."""
    trained_tokens: int = 0
    """Tokens in the loss, as reported by the trainer."""
    staleness_tokens: int = 0
    """Completion tokens of trained (unfiltered) groups."""
    staleness_sum: int = 0
    """Sum of the staleness, in steps, of these tokens."""
    staleness_max: int = 0
    consecutive_skipped_steps: int = 0
    reference_tokens: int = 0
    """The part of ``work_tokens`` that a reference policy scored."""
    flat_steps: int = 0
    """Consecutive last steps that taught nothing: no completion scored above 0, or all groups were filtered. Steps without a
    score are passed over."""
    flat_low: float = 1.0
    """Lowest score of these steps."""
    flat_high: float = 0.0
    """Highest score of these steps."""
    recent_tokens: float = 0.0
    """Completion tokens of recent steps: the sum is halved before each step."""
    recent_unusable_tokens: float = 0.0
    """The part of ``recent_tokens`` without a finite log-probability."""

    @property
    def mean_staleness(self) -> float:
        return self.staleness_sum / self.staleness_tokens if self.staleness_tokens else 0.0


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
    """Graded episodes that score 1, by their last turn, as in :data:`~scalerl_api.task_figures.SOLVED_AT_TURNS`; empty without any."""
    graded_episodes: int = 0
    message_tokens: tuple[int, int] = (0, 0)
    """Tokens of environments, and all tokens of their episodes."""
    episode_seconds: tuple[float, float] = (0.0, 0.0)
    """Seconds in requests, and in steps."""

    @property
    def part_means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in sorted(self.parts.items()) if count}


def figures(sums: StepSums) -> Row:
    """The figures of :data:`scalerl_api.task_figures.TASK_FIGURES`, for a line of metrics.jsonl."""
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
        scores = group.graded_scores
        sums.score_sum += sum(scores)
        sums.graded += len(scores)
        sums.low = min([sums.low, *scores])
        sums.high = max([sums.high, *scores])
        for length, score in zip(group.graded_lengths, scores, strict=True):
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
        for name, values in group.graded_parts.items():
            total, count = sums.parts.get(name, (0.0, 0))
            sums.parts[name] = total + sum(values), count + len(values)
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


def extend(
    lineage: Lineage, sums: StepSums, trained_tokens: int, *, skipped: bool, reference: bool = False
) -> Lineage:
    """The lineage extended by one step. A skipped step consumes its tokens and trains on none."""
    reference_tokens = lineage.reference_tokens + sums.work_tokens * reference
    recent = _recent(lineage, sums)
    if skipped:
        return msgspec.structs.replace(
            lineage,
            work_tokens=lineage.work_tokens + sums.work_tokens,
            consecutive_skipped_steps=lineage.consecutive_skipped_steps + 1,
            reference_tokens=reference_tokens,
            **recent,
        )
    return Lineage(
        work_tokens=lineage.work_tokens + sums.work_tokens,
        trained_tokens=lineage.trained_tokens + trained_tokens,
        staleness_tokens=lineage.staleness_tokens + sums.staleness_tokens,
        staleness_sum=lineage.staleness_sum + max(0, sums.staleness_sum),
        staleness_max=max(lineage.staleness_max, sums.staleness_max),
        reference_tokens=reference_tokens,
        **recent,
    )


def _recent(lineage: Lineage, sums: StepSums) -> dict[str, Any]:
    """The fields of the lineage about its last steps, after one more."""
    recent: dict[str, Any] = {
        "recent_tokens": lineage.recent_tokens / 2 + sums.work_tokens,
        "recent_unusable_tokens": lineage.recent_unusable_tokens / 2 + sums.unusable_tokens,
    }
    if not sums.graded:
        names = ("flat_steps", "flat_low", "flat_high")
        return recent | {name: getattr(lineage, name) for name in names}
    if sums.high > 0 and sums.filtered_groups < sums.groups:
        return recent
    return recent | {
        "flat_steps": lineage.flat_steps + 1,
        "flat_low": min(lineage.flat_low, sums.low),
        "flat_high": max(lineage.flat_high, sums.high),
    }


class MismatchSums(msgspec.Struct, array_like=True):
    """One KL estimate between trainer and generators, summed over tokens: of the whole run, and of recent measurements.

    The recent sums are halved before each new measurement. An alert reads their quotient, which should react to a few
    measurements but not to a few tokens.
    """

    kl: float = 0.0
    tokens: float = 0.0
    recent_kl: float = 0.0
    recent_tokens: float = 0.0

    def add(self, kl: float, tokens: float) -> None:
        """Add a measurement: ``kl`` is the mean over ``tokens`` (> 0) tokens."""
        self.kl += kl * tokens
        self.tokens += tokens
        self.recent_kl = self.recent_kl / 2 + kl * tokens
        self.recent_tokens = self.recent_tokens / 2 + tokens


def add_mismatches(sums: dict[str, MismatchSums], stats: dict[str, float]) -> None:
    """Add the measurements in the ``stats`` of a step or a publish to ``sums``, by the key of the KL estimate."""
    for source in SOURCES:
        for positions in (ALL, *POSITIONS):
            name = key(source, "kl", positions)
            tokens = stats.get(key(source, "tokens", positions), 0.0)
            if name in stats and tokens > 0:
                sums.setdefault(name, MismatchSums()).add(stats[name], tokens)


class Usage(msgspec.Struct, array_like=True):
    """Usage since the first lease, and of mid-training, over all processes. Never decreases."""

    wall_seconds: float = 0.0
    device_seconds: float = 0.0
    generator_alive_seconds: float = 0.0
    generator_busy_seconds: float = 0.0
    generated_tokens: int = 0
    trainer_busy_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Time of coordinators before the first lease, without that of mid-training."""

    @property
    def generator_busy_fraction(self) -> float:
        return _fraction(self.generator_busy_seconds, self.generator_alive_seconds)

    @property
    def trainer_busy_fraction(self) -> float:
        return _fraction(self.trainer_busy_seconds, self.wall_seconds)


def _fraction(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
