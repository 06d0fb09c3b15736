"""The results of every prompt, and from which step on a sampler may use them.

The prompts of a step must not depend on timing, so samplers that use results must use the same results regardless of which
have arrived. Weights of version v generate for steps up to v + k (:mod:`.slots`); when the first slot of step s is
issued, all steps before s − k are therefore trained. A sampler sees the history of exactly those steps. Results of later
steps wait in ``pending``, and are folded into the columns as slots of later steps are issued. The sequence of prompts then
depends on the rewards alone, and a resumed run repeats it.

Steps that are trained again after the trainer returned to a checkpoint have the same groups, and are not folded in again. If
k changes during a run, the bound of the history continues from its current value.

A completion passes with a score of 1, here, in pass@k and for every sampler. A partial score is no part of a pass: a prompt
whose completions all score .9 was never solved, and one with a pass in ten is no better than at .1. Where scores are 0 or 1,
as in ScaleRL (arXiv 2510.13786 [P]), the pass rate is the mean score.

The columns have sums over all groups of each prompt. The groups of the last :data:`RECENT_STEPS` steps are also kept
individually, because recent results describe the current policy best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from scalerl_coordinator.accepted_group import Accepted

RECENT_STEPS = 64
"""Steps whose groups are kept individually: 64 of ScaleRL's steps have 3,072 groups, about 100 kB in a snapshot."""


class Tried(msgspec.Struct, frozen=True, array_like=True):
    """A prompt's group in one step."""

    prompt: int
    slot: int
    """The slot, by which the journal keeps the group; -1 if the slot was refilled and the group is not kept."""
    completions: int
    """Number of completions with a score."""
    score_sum: float
    tokens: int
    """Tokens of the scored completions, estimated as their share of all tokens of the group."""
    longest: int
    """Tokens of the longest completion."""
    absolute_advantage: float = 0.0
    """Mean over the scored completions of |score - mean| / standard deviation; 0 if all scores are equal."""
    passed: int = 0
    """Number of scored completions with score 1."""


def tried(prompt: int, slot: int, group: Accepted) -> Tried:
    scores = group.graded(group.scores)
    lengths = group.lengths
    tokens = sum(lengths) * len(scores) // max(len(lengths), 1)
    return Tried(
        *(prompt, slot, len(scores), sum(scores), tokens, max(lengths, default=0)),
        *(absolute_advantage(scores), sum(score >= 1.0 for score in scores)),
    )


def absolute_advantage(scores: Sequence[float]) -> float:
    """Mean absolute advantage of a group, as GRPO normalizes it (arXiv 2402.03300 §4.1 [P]).

    >>> round(absolute_advantage([1.0, 0.0, 0.0, 0.0]), 6)  # 2 * sqrt(1/4 * 3/4)
    0.866025
    >>> absolute_advantage([1.0, 1.0]), absolute_advantage([])
    (0.0, 0.0)
    """
    if len(set(scores)) <= 1:
        return 0.0
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores) / len(scores)
    # Scores may differ so little that the squared differences underflow to 0.
    return sum(abs(score - mean) for score in scores) / len(scores) / variance**0.5 if variance else 0.0


_COLUMNS = {
    "completions": "<u4",
    "passes": "<f8",
    "tokens": "<u8",
    "longest": "<u4",
    "step": "<i4",
    "slot": "<i8",
}


class PromptHistory(msgspec.Struct):
    """Columns over the prompts, up to the highest one that was tried: 36 bytes per prompt. 0 completions: never tried."""

    completions: bytearray = msgspec.field(default_factory=bytearray)
    """Number of scored completions, uint32."""
    passes: bytearray = msgspec.field(default_factory=bytearray)
    """Number of them that passed, float64."""
    tokens: bytearray = msgspec.field(default_factory=bytearray)
    """Tokens of all completions, uint64."""
    longest: bytearray = msgspec.field(default_factory=bytearray)
    """Longest completion, uint32."""
    step: bytearray = msgspec.field(default_factory=bytearray)
    """Step of the newest group, int32."""
    slot: bytearray = msgspec.field(default_factory=bytearray)
    """Slot of the newest group, int64."""
    pending: dict[int, list[Tried]] = {}
    """Results by step, from ``folded`` on."""
    folded: int = 0
    """The results of all steps before this one are in the columns."""
    recent: dict[int, list[Tried]] = {}
    """Results by step, of the last :data:`RECENT_STEPS` before ``folded``."""

    def add_step(self, step: int, groups: Iterable[Tried]) -> None:
        """Add the results of a step that was trained (or trained again)."""
        if step >= self.folded:
            self.pending[step] = list(groups)

    def fold(self, until: int) -> None:
        """Fold the results of the steps before ``until`` into the columns."""
        for step in sorted(step for step in self.pending if step < until):
            self.recent[step] = self.pending.pop(step)
            for tried in self.recent[step]:
                self._add(step, tried)
        self.folded = max(self.folded, until)
        for step in [step for step in self.recent if step < self.folded - RECENT_STEPS]:
            del self.recent[step]

    def as_of(self, until: int) -> KnownHistory:
        """The history of the steps before ``until``."""
        later: dict[int, tuple[int, float]] = {}
        for step, groups in self.pending.items():
            for group in groups if step < until else ():
                completions, passes = later.get(group.prompt, (0, 0.0))
                later[group.prompt] = completions + group.completions, passes + group.passed
        return KnownHistory(self, later, max(until, self.folded))

    def passed(self, prompt: int) -> tuple[int, float]:
        """Number of scored completions of a prompt in the columns, and of those that passed."""
        if prompt >= len(self.completions) // 4:
            return 0, 0.0
        return int(self._column("completions")[prompt]), float(self._column("passes")[prompt])

    def mean_tokens(self, prompt: int) -> float | None:
        """Mean tokens of a prompt's completions in the columns; None if there are none."""
        if prompt >= len(self.completions) // 4 or not (count := int(self._column("completions")[prompt])):
            return None
        return float(self._column("tokens")[prompt]) / count

    @property
    def overall_mean_tokens(self) -> float | None:
        """Mean tokens of all prompts' completions in the columns; None if there are none."""
        count = int(self._column("completions").sum(dtype=np.uint64))
        return float(self._column("tokens").sum()) / count if count else None

    def before(self, version: int) -> PromptHistory:
        """A copy for a checkpoint of ``version``, without results of later steps, which will have other groups."""
        copy = msgspec.structs.replace(self)
        copy.pending = {step: groups for step, groups in self.pending.items() if step < version}
        return copy

    def _add(self, step: int, tried: Tried) -> None:
        self._grow(tried.prompt + 1)
        self._column("completions")[tried.prompt] += tried.completions
        self._column("passes")[tried.prompt] += tried.passed
        self._column("tokens")[tried.prompt] += tried.tokens
        longest = self._column("longest")
        longest[tried.prompt] = max(int(longest[tried.prompt]), tried.longest)
        self._column("step")[tried.prompt] = step
        self._column("slot")[tried.prompt] = tried.slot

    def _column(self, name: str) -> Any:
        return np.frombuffer(getattr(self, name), dtype=_COLUMNS[name])

    def _grow(self, prompts: int) -> None:
        """Extend the columns to ``prompts``; doubling makes the amortized cost constant."""
        have = len(self.completions) // 4
        if prompts > have:
            size = max(prompts, 2 * have, 64)
            for name, dtype in _COLUMNS.items():
                column: bytearray = getattr(self, name)
                column.extend(bytes((size - have) * np.dtype(dtype).itemsize))


@dataclass(frozen=True, slots=True)
class KnownHistory:
    """The history up to a step, as a sampler may use it."""

    history: PromptHistory
    later: dict[int, tuple[int, float]]
    """Number of scored completions and of those that passed, by prompt, that are not in the columns yet."""
    until: int = 0
    """Only results of steps before this one are included."""

    def recent_steps(self) -> Iterator[tuple[int, Sequence[Tried]]]:
        """The last :data:`RECENT_STEPS` steps, newest first, each with its groups that have a score."""
        for step in range(self.until - 1, max(-1, self.until - 1 - RECENT_STEPS), -1):
            groups = self.history.recent.get(step) or self.history.pending.get(step) or ()
            yield step, [group for group in groups if group.completions]

    def pass_rate(self, prompt: int) -> float | None:
        """Part of all scored completions of a prompt that passed; None if it has none."""
        completions, passes = self.history.passed(prompt)
        more, more_passes = self.later.get(prompt, (0, 0.0))
        return (passes + more_passes) / (completions + more) if completions + more else None
