"""What became of every prompt so far, and from when on a sampler may know it.

"A step's prompts never depend on timing" holds for samplers that look at results only if they look at the same results
whatever has arrived. Weights of version v generate for steps up to v + k (:mod:`.off_policy`), so when the first slot of
step s is issued, all steps before s − k are trained. A sampler sees the history of exactly those: results of later steps
wait in ``pending``, and are folded in as slots of later steps are issued. So the sequence of prompts follows from the
rewards alone, and a run that resumes goes through the same one.

Steps that are trained again, after the trainer has returned to a checkpoint, have the same groups: what is folded in
already is not counted twice. With another k under way, the bound of the history moves on from where it is.

The columns are sums over a prompt's life, for every prompt. Groups of the last :data:`RECENT_STEPS` steps are kept one by
one: a model that moves is judged by what it did lately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from scalerl_coordinator.accounting import Accepted

RECENT_STEPS = 64
"""Steps whose groups are known one by one: 64 of ScaleRL's are 3,072 groups, about 100 kB in a snapshot."""


class Tried(msgspec.Struct, frozen=True, array_like=True):
    """A prompt's group in one step."""

    prompt: int
    slot: int
    """Where its responses are: the journal keeps groups by slot. -1: the slot was refilled, and they are not kept."""
    completions: int
    """Those with a score."""
    score_sum: float
    tokens: int
    """Of the scored completions, as if they were as long as the others."""
    longest: int
    absolute_advantage: float = 0.0
    """Mean over the scored completions of |score - mean| / standard deviation; 0 where all scores are equal, and in
    histories of earlier releases."""
    passed: int = -1
    """Scored completions that passed (score 1, as pass@k counts them); -1: unknown, in histories of earlier releases."""


def tried(prompt: int, slot: int, group: Accepted) -> Tried:
    """What a group says of its prompt."""
    scores = group.graded_scores
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
    # Scores may differ by so little that their squares do not.
    return sum(abs(score - mean) for score in scores) / len(scores) / variance**0.5 if variance else 0.0


_COLUMNS = {
    "completions": "<u4",
    "score_sum": "<f8",
    "tokens": "<u8",
    "longest": "<u4",
    "step": "<i4",
    "slot": "<i8",
}


class PromptHistory(msgspec.Struct):
    """Columns over the prompts, as far as any was tried; 36 bytes a prompt. 0 completions: never tried."""

    completions: bytearray = msgspec.field(default_factory=bytearray)
    """Scored completions, uint32."""
    score_sum: bytearray = msgspec.field(default_factory=bytearray)
    """Their scores, float64."""
    tokens: bytearray = msgspec.field(default_factory=bytearray)
    """Tokens of all completions, uint64."""
    longest: bytearray = msgspec.field(default_factory=bytearray)
    """Longest completion, uint32."""
    step: bytearray = msgspec.field(default_factory=bytearray)
    """Step of the newest group, int32."""
    slot: bytearray = msgspec.field(default_factory=bytearray)
    """Slot of the newest group, int64."""
    pending: dict[int, list[Tried]] = {}
    """By step, from ``folded`` on."""
    folded: int = 0
    """The steps before it are in the columns."""
    recent: dict[int, list[Tried]] = {}
    """By step, the :data:`RECENT_STEPS` before ``folded``. Empty in snapshots of earlier releases."""

    def add_step(self, step: int, groups: Iterable[Tried]) -> None:
        """Results of a step that is trained (or trained again)."""
        if step >= self.folded:
            self.pending[step] = list(groups)

    def fold(self, until: int) -> None:
        """Bring the results of the steps before ``until`` into the columns."""
        for step in sorted(step for step in self.pending if step < until):
            self.recent[step] = self.pending.pop(step)
            for tried in self.recent[step]:
                self._add(step, tried)
        self.folded = max(self.folded, until)
        for step in [step for step in self.recent if step < self.folded - RECENT_STEPS]:
            del self.recent[step]

    def as_of(self, until: int) -> KnownHistory:
        """The history of the steps before ``until``."""
        scores: dict[int, tuple[int, float]] = {}
        for step, groups in self.pending.items():
            for group in groups if step < until else ():
                completions, score_sum = scores.get(group.prompt, (0, 0.0))
                scores[group.prompt] = completions + group.completions, score_sum + group.score_sum
        return KnownHistory(self, scores, max(until, self.folded))

    def scores(self, prompt: int) -> tuple[int, float]:
        """Scored completions of a prompt in the columns, and the sum of their scores."""
        if prompt >= len(self.completions) // 4:
            return 0, 0.0
        return int(self._column("completions")[prompt]), float(self._column("score_sum")[prompt])

    def mean_tokens(self, prompt: int) -> float | None:
        """Mean tokens of a prompt's completions in the columns; None if there are none."""
        if prompt >= len(self.completions) // 4 or not (count := int(self._column("completions")[prompt])):
            return None
        return float(self._column("tokens")[prompt]) / count

    @property
    def overall_mean_tokens(self) -> float | None:
        """The same of all prompts."""
        count = int(self._column("completions").sum(dtype=np.uint64))
        return float(self._column("tokens").sum()) / count if count else None

    def before(self, version: int) -> PromptHistory:
        """As it is for a checkpoint of ``version``: without results of steps that will have other groups."""
        copy = msgspec.structs.replace(self)
        copy.pending = {step: groups for step, groups in self.pending.items() if step < version}
        return copy

    def _add(self, step: int, tried: Tried) -> None:
        self._grow(tried.prompt + 1)
        self._column("completions")[tried.prompt] += tried.completions
        self._column("score_sum")[tried.prompt] += tried.score_sum
        self._column("tokens")[tried.prompt] += tried.tokens
        longest = self._column("longest")
        longest[tried.prompt] = max(int(longest[tried.prompt]), tried.longest)
        self._column("step")[tried.prompt] = step
        self._column("slot")[tried.prompt] = tried.slot

    def _column(self, name: str) -> Any:
        return np.frombuffer(getattr(self, name), dtype=_COLUMNS[name])

    def _grow(self, prompts: int) -> None:
        """Doubling, so that growing costs nothing on average."""
        have = len(self.completions) // 4
        if prompts > have:
            size = max(prompts, 2 * have, 64)
            for name, dtype in _COLUMNS.items():
                column: bytearray = getattr(self, name)
                column.extend(bytes((size - have) * np.dtype(dtype).itemsize))


@dataclass(frozen=True, slots=True)
class KnownHistory:
    """A history up to a step."""

    history: PromptHistory
    later: dict[int, tuple[int, float]]
    """Scored completions and sums of scores, by prompt, that the columns do not have yet."""
    until: int = 0
    """Results of the steps before it are known."""

    def recent_steps(self) -> Iterator[tuple[int, Sequence[Tried]]]:
        """The last :data:`RECENT_STEPS` steps with their groups that had a score, the newest first."""
        for step in range(self.until - 1, max(-1, self.until - 1 - RECENT_STEPS), -1):
            groups = self.history.recent.get(step) or self.history.pending.get(step) or ()
            yield step, [group for group in groups if group.completions]

    def pass_rate(self, prompt: int) -> float | None:
        """Mean score of all its completions; None if it has none."""
        (completions, score_sum), (more, more_sum) = (
            self.history.scores(prompt),
            self.later.get(prompt, (0, 0.0)),
        )
        return (score_sum + more_sum) / (completions + more) if completions + more else None
