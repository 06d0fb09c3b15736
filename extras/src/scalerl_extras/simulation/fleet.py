"""Generators in simulated time: continuous batching, at a speed that depends on the number of running sequences."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from scalerl_extras.simulation.workload import Cluster, Drafts, Workload

Spans = list[tuple[int, int]]
"""Tokens of a sequence by the weight version that sampled them: (version, tokens), in order."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished sequence."""

    time: float
    """Seconds since the start of the simulation."""
    generator: int
    group: int
    """Slot of its group."""
    sequence: int
    """Index in its group."""
    spans: Spans


@dataclass(slots=True)
class _Group:
    """Running sequences of a group on a generator, which all have the same speed."""

    drafts: Drafts
    versions: list[int]
    """Weight versions that have sampled the group, in order."""
    since: list[float] = field(default_factory=lambda: [0.0])
    """Clock at which the generator loaded each of ``versions``."""
    clock: float = 0.0
    """Tokens so far of a sequence that runs since the start of the group."""
    speed: float = 0.0
    """Tokens per second of each sequence."""
    running: list[tuple[float, int, float]] = field(default_factory=list)
    """Heap of (clock at the end, sequence, clock at the start)."""

    @property
    def seconds_left(self) -> float:
        """Seconds until its next sequence ends, at the present speed."""
        return max(0.0, self.running[0][0] - self.clock) / self.speed


@dataclass(slots=True)
class _Generator:
    at: float = 0.0
    """Time in seconds up to which the clocks of its groups have advanced."""
    groups: dict[int, _Group] = field(default_factory=dict)
    """Groups with running sequences, by slot."""
    running: int = 0
    """Number of running sequences."""
    waiting: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(group, sequence, tokens); first in, first out."""
    stamp: int = 0
    """Number of its newest event; older ones in the heap are invalid."""
    version: int = 0
    """Weight version."""
    busy_seconds: float = 0.0
    """Seconds with a running sequence."""
    sequence_seconds: float = 0.0
    """Running sequences integrated over time."""


class Fleet:
    """All generators. The times passed to its methods must not decrease."""

    def __init__(self, cluster: Cluster, work: Workload) -> None:
        self._cluster, self._work = cluster, work
        self._generators = [_Generator() for _ in range(cluster.generators)]
        self._events: list[tuple[float, int, int]] = []
        self._paused = False
        self.tokens = 0
        """Tokens generated so far, without those of running sequences."""

    def start(self, at: int, group: int, sequences: list[tuple[int, int]], now: float) -> None:
        """Queue sequences of a group on generator ``at``: index and tokens of each."""
        generator = self._generators[at]
        self._advance(generator, now)
        generator.waiting.extend((group, number, tokens) for number, tokens in sequences)
        self._fill(at)

    def next_time(self) -> float:
        """Time in seconds at which the next sequence ends; infinite without a running sequence, and while generators are paused."""
        while self._events and self._events[0][2] != self._generators[self._events[0][1]].stamp:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events and not self._paused else float("inf")

    def finish(self) -> Finished:
        """Finish the next sequence, at :meth:`next_time`."""
        time, at, _ = self._events[0]
        generator = self._generators[at]
        self._advance(generator, time)
        number = min(generator.groups, key=lambda number: generator.groups[number].seconds_left)
        group = generator.groups[number]
        end, sequence, start = heapq.heappop(group.running)
        group.clock = max(group.clock, end)
        generator.running -= 1
        if not group.running:
            del generator.groups[number]
        self.tokens += round(end - start)
        self._fill(at)
        return Finished(time, at, number, sequence, _spans(group, start, end))

    def abort(self, at: int, group: int, now: float) -> dict[int, Spans]:
        """Stop the sequences of a group; returns the tokens that each has, by index."""
        generator = self._generators[at]
        self._advance(generator, now)
        stopped: dict[int, Spans] = {}
        if left := generator.groups.pop(group, None):
            generator.running -= len(left.running)
            for end, sequence, start in left.running:
                stopped[sequence] = _spans(left, start, min(left.clock, end))
        stopped |= {sequence: [] for number, sequence, _ in generator.waiting if number == group}
        self.tokens += sum(tokens for spans in stopped.values() for _, tokens in spans)
        generator.waiting = deque(entry for entry in generator.waiting if entry[0] != group)
        self._fill(at)
        return stopped

    def pause(self, now: float) -> None:
        """Pause all generators; sequences keep their tokens."""
        for generator in self._generators:
            self._advance(generator, now)
        self._paused = True

    def resume(self, version: int, now: float) -> None:
        """Resume all generators with the weights of ``version``."""
        for at, generator in enumerate(self._generators):
            self._advance(generator, now)
            generator.version = version
            for group in generator.groups.values():
                group.versions.append(version)
                group.since.append(group.clock)
            self._schedule(at)
        self._paused = False

    def utilisation(self, seconds: float) -> tuple[float, float]:
        """Mean idle fraction of a generator over the first ``seconds``, and mean number of its running sequences."""
        whole = seconds * len(self._generators)
        busy = sum(generator.busy_seconds for generator in self._generators)
        return 1 - busy / whole, sum(generator.sequence_seconds for generator in self._generators) / whole

    def _fill(self, at: int) -> None:
        generator = self._generators[at]
        while generator.waiting and generator.running < self._cluster.concurrency:
            number, sequence, tokens = generator.waiting.popleft()
            group = generator.groups.get(number)
            if group is None:
                group = _Group(self._work.groups[number].drafts, [generator.version])
                generator.groups[number] = group
            heapq.heappush(group.running, (group.clock + tokens, sequence, group.clock))
            generator.running += 1
        self._schedule(at)

    def _schedule(self, at: int) -> None:
        generator = self._generators[at]
        generator.stamp += 1
        if groups := generator.groups.values():
            batch = [(group.drafts, len(group.running)) for group in groups]
            seconds, tokens = self._cluster.decode.step(batch, self._cluster.longest_draft)
            for group, of_one in zip(groups, tokens, strict=True):
                group.speed = of_one / seconds
            left = min(group.seconds_left for group in groups)
            heapq.heappush(self._events, (generator.at + left, at, generator.stamp))

    def _advance(self, generator: _Generator, now: float) -> None:
        elapsed = now - generator.at
        if generator.running and not self._paused:
            for group in generator.groups.values():
                group.clock += elapsed * group.speed
            generator.busy_seconds += elapsed
            generator.sequence_seconds += elapsed * generator.running
        generator.at = now


def _spans(group: _Group, start: float, end: float) -> Spans:
    """Tokens between two readings of the clock of a group, by the version that sampled them."""
    spans: Spans = []
    at = bisect_right(group.since, start) - 1
    done, tokens = 0, round(end - start)
    while done < tokens:
        last = at + 1 == len(group.since)
        until = tokens if last else min(tokens, round(group.since[at + 1] - start))
        if until > done:
            spans.append((group.versions[at], until - done))
            done = until
        at += 1
    return spans
