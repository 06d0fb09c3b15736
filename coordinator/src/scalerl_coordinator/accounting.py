"""Totals: the fate of every rollout, what a line of versions has trained, what the run has used.

Three kinds, because a trainer that returns to a checkpoint takes back some and not others: :class:`Fates`
moves rollouts between piles and never loses one; a :class:`Line` is put back to what it was at that version;
:class:`Usage` is spent for good.
"""

from __future__ import annotations

import msgspec

from scalerl_api.mismatch import ALL, POSITIONS, SOURCES, key
from scalerl_api.wire import trained_tokens
from scalerl_coordinator.slots import staleness

Row = dict[str, int | float]
"""A line of metrics.jsonl. With ``int`` named, a count that comes back from a snapshot is still one."""


class Accepted(msgspec.Struct, array_like=True):
    """What is remembered of a group of training rollouts; its tokens stay in the journal."""

    lease_id: str
    prompt_tokens: int
    lengths: list[int]
    scores: list[float]
    truncated: int
    oldest_version: int
    version_tokens: int
    filtered: bool = False
    """Set when its step closes."""
    grading_errors: int = 0
    ungraded: list[int] = []
    masked_tokens: list[int] = []
    given_up: str = ""
    """Why there are no completions: a :class:`~.records.GivenUpFor`."""
    given_up_rollouts: int = 0
    """How many there would have been."""

    @property
    def rollouts(self) -> int:
        return len(self.lengths)

    @property
    def graded_scores(self) -> list[float]:
        return [score for at, score in enumerate(self.scores) if at not in self.ungraded]

    @property
    def trained_tokens(self) -> list[int]:
        """Of each completion, how many tokens have a gradient if the group has one."""
        return trained_tokens(self.lengths, self.masked_tokens, self.ungraded)


class Fates(msgspec.Struct, array_like=True):
    """Training rollouts by fate: ``acknowledged = trained + filtered + queued + skipped`` after every record."""

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
    """Evaluation rollouts that were refused as invalid."""
    grading_errors: int = 0
    """Accepted rollouts, evaluation's too, whose verifier failed."""
    given_up: int = 0
    """Rollouts that slots which were given up would have had; in no other pile."""
    too_long: int = 0
    """Of those: their prompt leaves no room for a completion."""
    ungraded: int = 0
    """Of ``acknowledged``: not trained on, since their verifier failed."""
    masked_tokens: int = 0
    """Of acknowledged rollouts."""
    skipped: int = 0
    """Of steps that were not applied."""
    held_out_given_up: int = 0
    """Evaluation rollouts that count 0 because they could not be generated."""
    timed_out_leases: int = 0
    """Of ``expired_leases``: by their deadline."""


class Line(msgspec.Struct, array_like=True, frozen=True):
    """Sums over the steps trained on the present line of versions, from version 0."""

    work_tokens: int = 0
    """Completion tokens consumed, filtered groups included: the compute axis of the curve."""
    trained_tokens: int = 0
    """As the trainer reports them."""
    staleness_tokens: int = 0
    """Completion tokens of trained (unfiltered) groups, and the sum of their staleness in steps:"""
    staleness_sum: int = 0
    staleness_max: int = 0
    unused: float = 0.0
    unused_too: int = 0
    """Journals and checkpoints have numbers of before in these two places. New fields come last."""
    consecutive_skipped_steps: int = 0

    @property
    def mean_staleness(self) -> float:
        return self.staleness_sum / self.staleness_tokens if self.staleness_tokens else 0.0


class StepSums(msgspec.Struct, array_like=True):
    """What one closed step is made of."""

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
    """Of ``filtered_groups``."""
    graded: int = 0
    """Rollouts with a verdict: ``score_sum`` is over these."""
    masked_tokens: int = 0


def sum_step(step: int, groups: list[Accepted]) -> StepSums:
    """Sums over the groups of closed step ``step``. Staleness counts the tokens that are trained on."""
    sums = StepSums()
    for group in groups:
        tokens = sum(group.lengths)
        sums.groups += 1
        sums.rollouts += group.rollouts
        sums.work_tokens += tokens
        sums.truncated += group.truncated
        sums.score_sum += sum(group.graded_scores)
        sums.graded += len(group.graded_scores)
        sums.grading_errors += group.grading_errors
        sums.masked_tokens += sum(group.masked_tokens)
        sums.given_up_groups += bool(group.given_up)
        if group.filtered:
            sums.filtered_groups += 1
            continue
        sums.trained_rollouts += group.rollouts
        trained = sum(group.trained_tokens)
        sums.staleness_tokens += trained
        # The sum keeps its sign: tokens from ahead of a trainer that went back count as less than fresh.
        sums.staleness_sum += step * trained - group.version_tokens
        sums.staleness_max = max(sums.staleness_max, staleness(step, group.oldest_version))
    return sums


def extend(line: Line, sums: StepSums, trained_tokens: int, *, skipped: bool) -> Line:
    """The line after one more step. One that was skipped used its tokens up, and trained on none of them."""
    if skipped:
        return msgspec.structs.replace(
            line,
            work_tokens=line.work_tokens + sums.work_tokens,
            consecutive_skipped_steps=line.consecutive_skipped_steps + 1,
        )
    return Line(
        work_tokens=line.work_tokens + sums.work_tokens,
        trained_tokens=line.trained_tokens + trained_tokens,
        staleness_tokens=line.staleness_tokens + sums.staleness_tokens,
        staleness_sum=line.staleness_sum + max(0, sums.staleness_sum),
        staleness_max=max(line.staleness_max, sums.staleness_max),
    )


class MismatchSums(msgspec.Struct, array_like=True):
    """One measurement between trainer and generators, over tokens: since the run began, and of late."""

    kl: float = 0.0
    tokens: float = 0.0
    recent_kl: float = 0.0
    recent_tokens: float = 0.0
    """Halved before each new measurement: few tokens alone cannot move what an alert reads, a few measurements can."""

    def add(self, kl: float, tokens: float) -> None:
        """``kl``: mean over ``tokens`` tokens, of which there is at least one."""
        self.kl += kl * tokens
        self.tokens += tokens
        self.recent_kl = self.recent_kl / 2 + kl * tokens
        self.recent_tokens = self.recent_tokens / 2 + tokens


def add_mismatches(sums: dict[str, MismatchSums], stats: dict[str, float]) -> None:
    """Take in what ``stats`` of a step or of a publish hold; keys are those of the KL estimates."""
    for source in SOURCES:
        for positions in (ALL, *POSITIONS):
            name = key(source, "kl", positions)
            tokens = stats.get(key(source, "tokens", positions), 0.0)
            if name in stats and tokens > 0:
                sums.setdefault(name, MismatchSums()).add(stats[name], tokens)


class Usage(msgspec.Struct, array_like=True):
    """What the run has used over all incarnations, since its first lease. Never taken back."""

    wall_seconds: float = 0.0
    device_seconds: float = 0.0
    generator_alive_seconds: float = 0.0
    generator_busy_seconds: float = 0.0
    generated_tokens: int = 0
    trainer_busy_seconds: float = 0.0

    @property
    def generator_busy_fraction(self) -> float:
        return _fraction(self.generator_busy_seconds, self.generator_alive_seconds)

    @property
    def trainer_busy_fraction(self) -> float:
        return _fraction(self.trainer_busy_seconds, self.wall_seconds)


def _fraction(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
