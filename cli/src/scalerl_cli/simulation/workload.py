"""What is generated and trained, what does it, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from scalerl_coordinator.off_policy import OffPolicy

_Numbers = TypeVar("_Numbers", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class Drafts:
    """Of a prompt: every drafted token is accepted with the same probability, once all before it in its draft are."""

    acceptance: float = 0.0
    """That probability, less than 1; 0: nothing is drafted."""
    length: float | None = None
    """Tokens of each draft, in batches of any size; None: as many as pay."""

    @classmethod
    def measured(cls, tokens: float, drafted: float, *, fixed: bool = False) -> Drafts:
        """Those of which a verification yields ``tokens`` for ``drafted`` tokens, in the mean. fixed: in batches of any size.

        >>> round(Drafts.measured(1.75, 2).acceptance, 6)  # 1 + 1/2 + 1/4
        0.5
        """
        low, high = 0.0, 0.999
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if _yield(middle, drafted) < tokens else (low, middle)
        if fixed:
            return cls(max(low, 1e-9) if drafted else 0.0, drafted)
        return cls(low) if min(drafted, tokens - 1) > 0 else cls()


def _yield(acceptance: _Numbers, length: _Numbers) -> _Numbers:
    """Tokens of a verification of so many drafted ones: 1 + p + p² + …"""
    tokens: _Numbers = (1 - acceptance ** (length + 1)) / (1 - acceptance)
    return tokens


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt's completions."""

    prompt: tuple[int, int]
    """Task and index."""
    lengths: tuple[int, ...]
    """Tokens of each completion."""
    drafts: Drafts = Drafts()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Workload:
    """The groups of a run, by slot; every ``prompts_per_step`` of them are a step."""

    groups: Sequence[Group]
    prompts_per_step: int

    @property
    def steps(self) -> int:
        return len(self.groups) // self.prompts_per_step

    def step(self, number: int) -> Sequence[Group]:
        return self.groups[number * self.prompts_per_step : (number + 1) * self.prompts_per_step]

    def tokens(self, number: int) -> int:
        """Of a step."""
        return sum(group.tokens for group in self.step(number))


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Seconds of a decoding step, which samples a token of every running sequence, and verifies drafted ones:
    ``base + per_sequence · running + per_draft · drafted``."""

    base: float
    per_sequence: float
    per_draft: float = 0.0
    free_rows: float = 0.0
    """Tokens that are computed while the step waits for memory: as many, less the running sequences, are verified for nothing."""

    def seconds(self, running: int, drafted: float = 0.0) -> float:
        costly = max(0.0, drafted - max(0.0, self.free_rows - running))
        return self.base + self.per_sequence * running + self.per_draft * costly

    def step(self, batch: Sequence[tuple[Drafts, int]], longest: int) -> tuple[float, list[float]]:
        """A step of sequences with drafts of at most ``longest`` tokens: its seconds, and the tokens of a sequence of each kind.

        A draft ends where its next token is accepted, with all before it, less probably than a threshold. A server learns the one
        at which no longer draft pays (:mod:`scalerl_generator.draft_threshold`); here it is the best of a grid.
        """
        running = sum(count for _, count in batch)
        if not any(drafts.acceptance for drafts, _ in batch):
            return self.seconds(running), [1.0] * len(batch)
        count_k = np.array([count for _, count in batch])
        acceptance_k = np.array([drafts.acceptance for drafts, _ in batch]).clip(1e-9)
        fixed_k = np.array([np.nan if drafts.length is None else drafts.length for drafts, _ in batch])
        thresholds_t = _LOG_THRESHOLDS if np.isnan(fixed_k).any() else _LOG_THRESHOLDS[:1]
        pays_tk = (thresholds_t[:, None] / np.log(acceptance_k)).clip(0, longest) // 1
        length_tk = np.where(np.isnan(fixed_k), pays_tk, fixed_k)
        tokens_tk = _yield(acceptance_k, length_tk)
        seconds_t = [self.seconds(running, drafted) for drafted in (length_tk * count_k).sum(1)]
        best = int(np.argmax((tokens_tk * count_k).sum(1) / seconds_t))
        return seconds_t[best], list(tokens_tk[best])


_LOG_THRESHOLDS = np.linspace(0, np.log(0.05), 31)
"""From 1, at which nothing is drafted, down to the least threshold of a server."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What generates and trains."""

    generators: int
    concurrency: int
    """Sequences that a generator samples at once; others wait in its queue."""
    decode: DecodeSpeed
    train_seconds: float
    """Of a step, whatever it has."""
    train_seconds_per_token: float
    publish_seconds: float
    """Generators pause that long for new weights."""
    longest_draft: int = 16
    """Tokens."""

    def train(self, tokens: int) -> float:
        """Seconds of a step."""
        return self.train_seconds + self.train_seconds_per_token * tokens


@dataclass(slots=True)
class Outcome:
    """What a simulation found. Times are seconds since its start."""

    trained_at: list[float] = field(default_factory=list)
    """End of each step."""
    trained: list[list[int]] = field(default_factory=list)
    """Lengths of the completions of each step."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Trained tokens by staleness in steps."""
    generated_tokens: int = 0
    """Those that were discarded included."""
    trainer_busy: float = 0.0
    """Seconds."""
    generator_idle: float = 0.0
    """Mean part of the makespan in which a generator ran nothing."""
    running: float = 0.0
    """Mean number of running sequences of a generator."""

    @property
    def makespan(self) -> float:
        return self.trained_at[-1]

    @property
    def trained_tokens(self) -> int:
        return sum(map(sum, self.trained))


Expected = Callable[[int, int], float | None]
"""Expected tokens of a completion of a slot, from the results of the steps before a given one; None without any."""


def from_history(work: Workload) -> Expected:
    """The mean of all earlier completions of the prompt, as the coordinator keeps it."""
    slots: dict[tuple[int, int], list[int]] = {}
    for slot, group in enumerate(work.groups):
        slots.setdefault(group.prompt, []).append(slot)

    def expected(slot: int, until: int) -> float | None:
        before = [s for s in slots[work.groups[slot].prompt] if s // work.prompts_per_step < until]
        completions = sum(len(work.groups[s].lengths) for s in before)
        return sum(work.groups[s].tokens for s in before) / completions if completions else None

    return expected


def known(work: Workload) -> Expected:
    """The length itself: what no run can know."""
    return lambda slot, until: float(max(work.groups[slot].lengths))


def lower_bound(work: Workload, cluster: Cluster, scheme: OffPolicy) -> float:
    """Seconds that no schedule can beat: every token at the fastest batches, with the best drafts, and a chain of steps.

    A step cannot end before its longest completion, alone on a generator, has started after the weights that open the step.
    """
    most = max((group.drafts for group in work.groups), key=lambda drafts: drafts.acceptance)
    least = min(_per_token(cluster, most, running) / running for running in range(1, cluster.concurrency + 1))
    all_tokens = sum(group.tokens for group in work.groups) * least / cluster.generators
    published = [0.0]
    opened_by = 0
    end = 0.0
    for step in range(work.steps):
        while scheme.may_lease(opened_by) <= step:
            opened_by += 1
        alone = max(max(group.lengths) * _per_token(cluster, group.drafts, 1) for group in work.step(step))
        ready = published[opened_by] + alone
        end = max(published[-1], ready) + cluster.train(work.tokens(step))
        published.append(end + (cluster.publish_seconds if scheme.publishes(step + 1) else 0.0))
    return max(all_tokens, end)


def _per_token(cluster: Cluster, drafts: Drafts, running: int) -> float:
    """Seconds between two tokens of a sequence, in a batch of equal ones."""
    seconds, (tokens,) = cluster.decode.step([(drafts, running)], cluster.longest_draft)
    return seconds / tokens
