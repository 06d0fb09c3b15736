"""Inputs and result of a simulation: workload, cluster, expected lengths, outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from scalerl_coordinator.slots import OffPolicy

_Numbers = TypeVar("_Numbers", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts for the completions of a prompt. A drafted token is accepted with a constant probability, given that all before it
    are.
    """

    acceptance: float = 0.0
    """This probability, less than 1; 0 for no drafts."""
    length: float | None = None
    """Tokens of each draft, in batches of any size; None for the length with the highest throughput."""

    @classmethod
    def measured(cls, tokens: float, drafted: float, *, fixed: bool = False) -> Drafts:
        """Drafts of which a verification of ``drafted`` tokens yields ``tokens`` on average.

        Args:
            fixed: drafts have this length in batches of any size.

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
    """Expected tokens from the verification of a draft of ``length`` tokens: 1 + p + p² + … + p^length."""
    tokens: _Numbers = (1 - acceptance ** (length + 1)) / (1 - acceptance)
    return tokens


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of a prompt."""

    prompt: tuple[int, int]
    """Index of the task, and of the prompt in it."""
    lengths: tuple[int, ...]
    """Tokens of each completion."""
    drafts: Drafts = Drafts()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Workload:
    """The groups of a run, by slot; each ``prompts_per_step`` consecutive groups are a step."""

    groups: Sequence[Group]
    prompts_per_step: int

    @property
    def steps(self) -> int:
        return len(self.groups) // self.prompts_per_step

    def step(self, number: int) -> Sequence[Group]:
        return self.groups[number * self.prompts_per_step : (number + 1) * self.prompts_per_step]

    def tokens(self, number: int) -> int:
        """Tokens of a step."""
        return sum(group.tokens for group in self.step(number))


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Seconds of a decoding step, which samples a token of every running sequence and verifies drafted tokens:
    ``base + per_sequence · running + per_draft · drafted``.
    """

    base: float
    per_sequence: float
    per_draft: float = 0.0
    free_rows: float = 0.0
    """Tokens per step that are computed while the step waits for memory. Drafted tokens cost nothing up to this number less the
    running sequences.
    """

    def seconds(self, running: int, drafted: float = 0.0) -> float:
        costly = max(0.0, drafted - max(0.0, self.free_rows - running))
        return self.base + self.per_sequence * running + self.per_draft * costly

    def step(self, batch: Sequence[tuple[Drafts, int]], longest: int) -> tuple[float, list[float]]:
        """Seconds of a decoding step, and expected tokens of a sequence with each of the drafts in ``batch``.

        Args:
            batch: drafts, and number of sequences with them.
            longest: limit on the tokens of a draft.

        A draft ends before the first token whose probability of acceptance, together with all before it, is below a threshold. A
        server learns the threshold with the highest throughput (:mod:`scalerl_generator.drafts.draft_threshold`); here it is the best
        of a grid.
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
"""Logarithms of the thresholds: from 1, which drafts nothing, to .05, the lowest of a server."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Generators and trainer."""

    generators: int
    concurrency: int
    """Limit on the sequences that a generator samples at once; others wait in its queue."""
    decode: DecodeSpeed
    train_seconds: float
    """Fixed seconds of a training step."""
    train_seconds_per_token: float
    publish_seconds: float
    """Seconds for which generators pause for new weights."""
    longest_draft: int = 16
    """Limit on the tokens of a draft."""

    def train(self, tokens: int) -> float:
        """Seconds of a training step."""
        return self.train_seconds + self.train_seconds_per_token * tokens


@dataclass(slots=True)
class Outcome:
    """Result of a simulation. Times are seconds since its start."""

    trained_at: list[float] = field(default_factory=list)
    """End of each training step."""
    trained: list[list[int]] = field(default_factory=list)
    """Lengths in tokens of the completions of each step."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Trained tokens by staleness in steps."""
    generated_tokens: int = 0
    """All generated tokens, including discarded ones."""
    trainer_busy: float = 0.0
    """Seconds of training."""
    generator_idle: float = 0.0
    """Mean fraction of the makespan in which a generator has no running sequence."""
    running: float = 0.0
    """Mean number of running sequences of a generator."""

    @property
    def makespan(self) -> float:
        return self.trained_at[-1]

    @property
    def trained_tokens(self) -> int:
        return sum(map(sum, self.trained))


Expected = Callable[[int, int], float | None]
"""(slot, step) → expected tokens of a completion of the slot, from the results of earlier steps; None without any."""


def from_history(work: Workload) -> Expected:
    """Mean length of all earlier completions of the prompt, as the coordinator computes it."""
    slots: dict[tuple[int, int], list[int]] = {}
    for slot, group in enumerate(work.groups):
        slots.setdefault(group.prompt, []).append(slot)

    def expected(slot: int, until: int) -> float | None:
        before = [s for s in slots[work.groups[slot].prompt] if s // work.prompts_per_step < until]
        completions = sum(len(work.groups[s].lengths) for s in before)
        return sum(work.groups[s].tokens for s in before) / completions if completions else None

    return expected


def known(work: Workload) -> Expected:
    """Length of the longest completion of the group itself, which a real run does not know in advance."""
    return lambda slot, until: float(max(work.groups[slot].lengths))


def lower_bound(work: Workload, cluster: Cluster, scheme: OffPolicy) -> float:
    """Lower bound of the makespan in seconds: the larger of a throughput bound and a critical path.

    Throughput: all tokens in batches of the fastest size, with the best drafts. Critical path: a step ends no earlier than its
    longest completion, which runs alone on a generator from the publish that opens the step.
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
    """Seconds per token of a sequence, in a batch of ``running`` sequences with the same drafts."""
    seconds, (tokens,) = cluster.decode.step([(drafts, running)], cluster.longest_draft)
    return seconds / tokens
