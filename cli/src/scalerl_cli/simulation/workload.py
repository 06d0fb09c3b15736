"""What is generated and trained, what does it, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scalerl_coordinator.off_policy import OffPolicy


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt's completions."""

    prompt: tuple[int, int]
    """Task and index."""
    lengths: tuple[int, ...]
    """Tokens of each completion."""

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
    """Seconds of a decoding step, which samples a token of every running sequence: ``base + per_sequence · running``."""

    base: float
    per_sequence: float

    def seconds(self, running: int) -> float:
        return self.base + self.per_sequence * running


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
    """Seconds that no schedule can beat: every token at full batches, and a chain of steps.

    A step cannot end before its longest completion, alone on a generator, has started after the weights that open the step.
    """
    full = cluster.decode.seconds(cluster.concurrency) / cluster.concurrency / cluster.generators
    all_tokens = sum(group.tokens for group in work.groups) * full
    published = [0.0]
    opened_by = 0
    end = 0.0
    for step in range(work.steps):
        while scheme.may_lease(opened_by) <= step:
            opened_by += 1
        longest = max(max(group.lengths) for group in work.step(step))
        ready = published[opened_by] + longest * cluster.decode.seconds(1)
        end = max(published[-1], ready) + cluster.train(work.tokens(step))
        published.append(end + (cluster.publish_seconds if scheme.publishes(step + 1) else 0.0))
    return max(all_tokens, end)
