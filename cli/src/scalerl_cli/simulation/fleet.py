"""Generators in simulated time: continuous batching, at a speed that depends on the number of running sequences."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from scalerl_cli.simulation.workload import Cluster

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
class _Generator:
    clock: float = 0.0
    """Decoding steps so far: a running sequence gets a token in each."""
    at: float = 0.0
    """Time of ``clock``."""
    running: list[tuple[float, int, int, float]] = field(default_factory=list)
    """Heap of (clock at the end, group, sequence, clock at the start)."""
    waiting: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(group, sequence, tokens); first in, first out."""
    stamp: int = 0
    """Of the only valid event of this generator."""
    versions: list[int] = field(default_factory=lambda: [0])
    since: list[float] = field(default_factory=lambda: [0.0])
    """Clock from which on it holds each of ``versions``."""
    busy_seconds: float = 0.0
    sequence_seconds: float = 0.0


class Fleet:
    """All generators. Times that it is given never decrease."""

    def __init__(self, cluster: Cluster) -> None:
        self._concurrency, self._speed = cluster.concurrency, cluster.decode
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
        end, group, sequence, start = heapq.heappop(generator.running)
        generator.clock = max(generator.clock, end)
        self.tokens += round(end - start)
        self._fill(at)
        return Finished(time, at, group, sequence, _spans(generator, start, end))

    def abort(self, at: int, group: int, now: float) -> dict[int, Spans]:
        """Stop a group's sequences; returns what each has by then."""
        generator = self._generators[at]
        self._advance(generator, now)
        stopped = {
            sequence: _spans(generator, start, min(generator.clock, end))
            for end, number, sequence, start in generator.running
            if number == group
        }
        stopped |= {sequence: [] for number, sequence, _ in generator.waiting if number == group}
        self.tokens += sum(tokens for spans in stopped.values() for _, tokens in spans)
        generator.running = [entry for entry in generator.running if entry[1] != group]
        heapq.heapify(generator.running)
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
        self._paused = False
        for at, generator in enumerate(self._generators):
            generator.at = now
            generator.versions.append(version)
            generator.since.append(generator.clock)
            self._schedule(at)

    def utilisation(self, seconds: float) -> tuple[float, float]:
        """Mean part of the time in which a generator ran nothing, and mean number of its running sequences."""
        whole = seconds * len(self._generators)
        busy = sum(generator.busy_seconds for generator in self._generators)
        return 1 - busy / whole, sum(generator.sequence_seconds for generator in self._generators) / whole

    def _fill(self, at: int) -> None:
        generator = self._generators[at]
        while generator.waiting and len(generator.running) < self._concurrency:
            group, number, tokens = generator.waiting.popleft()
            heapq.heappush(generator.running, (generator.clock + tokens, group, number, generator.clock))
        self._schedule(at)

    def _schedule(self, at: int) -> None:
        generator = self._generators[at]
        generator.stamp += 1
        if generator.running:
            left = max(0.0, generator.running[0][0] - generator.clock)
            seconds = self._speed.seconds(len(generator.running))
            heapq.heappush(self._events, (generator.at + left * seconds, at, generator.stamp))

    def _advance(self, generator: _Generator, now: float) -> None:
        running, elapsed = len(generator.running), now - generator.at
        if running and not self._paused:
            generator.clock += elapsed / self._speed.seconds(running)
            generator.busy_seconds += elapsed
            generator.sequence_seconds += elapsed * running
        generator.at = now


def _spans(generator: _Generator, start: float, end: float) -> Spans:
    """The tokens between two readings of the clock, by the version that sampled them."""
    spans: Spans = []
    at = bisect_right(generator.since, start) - 1
    done, tokens = 0, round(end - start)
    while done < tokens:
        last = at + 1 == len(generator.since)
        until = tokens if last else min(tokens, round(generator.since[at + 1] - start))
        if until > done:
            spans.append((generator.versions[at], until - done))
            done = until
        at += 1
    return spans
