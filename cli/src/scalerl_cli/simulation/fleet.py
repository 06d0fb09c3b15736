"""Generators in simulated time: continuous batching, at a speed that depends on the number of running sequences."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from scalerl_cli.simulation.workload import Cluster, Drafts, Workload

Spans = list[tuple[int, int]]
"""Tokens of a sequence by version: (version, tokens)."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that ended."""

    time: float
    generator: int
    group: int
    sequence: int
    spans: Spans


@dataclass(slots=True)
class _Group:
    """Running sequences of a group, which advance together."""

    drafts: Drafts
    versions: list[int]
    since: list[float] = field(default_factory=lambda: [0.0])
    """Clock from which on the generator holds each of ``versions``."""
    clock: float = 0.0
    """Tokens so far of a sequence that has run from the beginning."""
    speed: float = 0.0
    """Tokens a second of each sequence."""
    running: list[tuple[float, int, float]] = field(default_factory=list)
    """Heap of (clock at the end, sequence, clock at the start)."""

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.running[0][0] - self.clock) / self.speed


@dataclass(slots=True)
class _Generator:
    at: float = 0.0
    """Time of the groups' clocks."""
    groups: dict[int, _Group] = field(default_factory=dict)
    """Those with running sequences."""
    running: int = 0
    """Sequences."""
    waiting: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(group, sequence, tokens); first in, first out."""
    stamp: int = 0
    """Of the only valid event of this generator."""
    version: int = 0
    busy_seconds: float = 0.0
    sequence_seconds: float = 0.0


class Fleet:
    """All generators. Times that it is given never decrease."""

    def __init__(self, cluster: Cluster, work: Workload) -> None:
        self._cluster, self._work = cluster, work
        self._generators = [_Generator() for _ in range(cluster.generators)]
        self._events: list[tuple[float, int, int]] = []
        self._paused = False
        self.tokens = 0
        """Generated so far, without those of running sequences."""

    def start(self, at: int, group: int, sequences: list[tuple[int, int]], now: float) -> None:
        """Give generator ``at`` sequences of a group: number and tokens of each."""
        generator = self._generators[at]
        self._advance(generator, now)
        generator.waiting.extend((group, number, tokens) for number, tokens in sequences)
        self._fill(at)

    def next_time(self) -> float:
        """When the next sequence ends; infinite without one, and while generators are paused."""
        while self._events and self._events[0][2] != self._generators[self._events[0][1]].stamp:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events and not self._paused else float("inf")

    def finish(self) -> Finished:
        """End the sequence that :meth:`next_time` speaks of."""
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
        """Stop a group's sequences; returns what each has by then."""
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
        """Stop all; sequences keep what they have."""
        for generator in self._generators:
            self._advance(generator, now)
        self._paused = True

    def resume(self, version: int, now: float) -> None:
        """Continue all with the weights of ``version``."""
        for at, generator in enumerate(self._generators):
            self._advance(generator, now)
            generator.version = version
            for group in generator.groups.values():
                group.versions.append(version)
                group.since.append(group.clock)
            self._schedule(at)
        self._paused = False

    def utilisation(self, seconds: float) -> tuple[float, float]:
        """Mean part of the time in which a generator ran nothing, and mean number of its running sequences."""
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
    """The tokens between two readings of the clock, by the version that sampled them."""
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
