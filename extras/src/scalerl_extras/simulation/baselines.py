"""Schedules that the coordinator cannot run.

Two policies in slot order; one by length (HistoPipe); and two published schedules that move groups between steps, in rounds of
generation that are each followed by a training step and a publish. The assumptions favour these two: continuing a partial
completion costs nothing, and no completion is discarded for its staleness.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby, islice

from scalerl_coordinator.scheduling import Assignment, SchedulerInput, spread
from scalerl_extras.simulation.fleet import Fleet, Spans
from scalerl_extras.simulation.workload import Cluster, Outcome, Workload

TAIL_BATCHING_FACTOR = 1.25
"""η of RollPacker (arXiv 2509.21009 [S]): prompts launched over prompts kept, and responses over responses kept."""
APRIL_FACTOR = 1.5
"""Prompts issued over prompts trained (arXiv 2509.18521 [S]; the factor [?])."""


class SlotOrder:
    """First come, first served: a generator gets as many groups as fit."""

    def assign(self, inputs: SchedulerInput) -> Assignment:
        slots = iter(inputs.slots)
        return {one.name: list(islice(slots, one.capacity)) for one in inputs.generators}


class RoundRobin:
    """The same number of groups for each requesting generator, regardless of its load."""

    def assign(self, inputs: SchedulerInput) -> Assignment:
        return spread(inputs.slots, inputs, lambda generator: 0.0, lambda slot: 1.0)


class HistoPipe:
    """RhymeRL's first tier (arXiv 2508.18588 [S]): the groups of a step, sorted by length, are split into a range per generator.

    Ranges ascend in odd steps and descend in even ones, so that a generator with the longest groups of one step gets the
    shortest of the next. A group whose generator is full goes to the next generator with room.
    """

    def assign(self, inputs: SchedulerInput) -> Assignment:
        generators = sorted(inputs.generators, key=lambda one: one.name)
        assigned: Assignment = {one.name: [] for one in generators}
        for step, slots in groupby(inputs.slots, key=lambda slot: slot.step):
            ranked = sorted(slots, key=lambda slot: slot.tokens, reverse=step % 2 == 0)
            for rank, slot in enumerate(ranked):
                first = rank * len(generators) // len(ranked)
                for one in (*generators[first:], *generators[:first]):
                    if len(assigned[one.name]) < one.capacity:
                        assigned[one.name].append(slot)
                        break
        return assigned


@dataclass(slots=True)
class _Launch:
    """A group in a round."""

    slot: int
    lengths: list[int]
    """Tokens of each launched response."""
    wanted: int
    """Number of finished responses that complete the group."""
    spans: dict[int, Spans] = field(default_factory=dict)
    """Tokens so far of each response, by index."""
    finished: list[int] = field(default_factory=list)
    """Indices of finished responses, in the order in which they finished."""
    generator: int = -1

    def left(self) -> list[tuple[int, int]]:
        """Unfinished responses: index and missing tokens."""
        return [
            (number, length - sum(tokens for _, tokens in self.spans.get(number, ())))
            for number, length in enumerate(self.lengths)
            if number not in self.finished
        ]


class _Rounds:
    def __init__(self, work: Workload, cluster: Cluster) -> None:
        self.work, self.cluster = work, cluster
        self.fleet, self.out, self.now = Fleet(cluster, work), Outcome(), 0.0

    def generate(self, launches: list[_Launch], complete: int) -> tuple[list[_Launch], list[_Launch]]:
        """Run groups, in their order, until ``complete`` of them are complete; returns these, and the partial or unstarted others."""
        waiting, active, done = deque(launches), dict[int, _Launch](), list[_Launch]()
        load = [0] * self.cluster.generators
        most = self.cluster.concurrency

        def fill() -> None:
            while waiting:
                at = min(range(len(load)), key=load.__getitem__)
                if load[at] >= most:
                    break
                launch = waiting.popleft()
                launch.generator = at
                active[launch.slot] = launch
                left = launch.left()
                load[at] += len(left)
                self.fleet.start(at, launch.slot, left, self.now)

        fill()
        while len(done) < complete:
            self.now = self.fleet.next_time()
            assert self.now < math.inf
            ended = self.fleet.finish()
            launch = active[ended.group]
            launch.finished.append(ended.sequence)
            launch.spans.setdefault(ended.sequence, []).extend(ended.spans)
            load[launch.generator] -= 1
            if len(launch.finished) == launch.wanted:
                load[launch.generator] -= len(launch.left())
                self._stop(launch)
                done.append(active.pop(launch.slot))
            fill()
        for launch in active.values():
            self._stop(launch)
        return done, [*active.values(), *waiting]

    def _stop(self, launch: _Launch) -> None:
        for number, spans in self.fleet.abort(launch.generator, launch.slot, self.now).items():
            launch.spans.setdefault(number, []).extend(spans)

    def train(self, launches: list[_Launch]) -> None:
        """A training step, and the publish after it."""
        version = len(self.out.trained)
        lengths = [launch.lengths[number] for launch in launches for number in launch.finished]
        for launch in launches:
            for number in launch.finished:
                for sampled_by, tokens in launch.spans[number]:
                    age = version - sampled_by
                    self.out.staleness[age] = self.out.staleness.get(age, 0) + tokens
        self.fleet.pause(self.now)
        seconds = self.cluster.train(sum(lengths))
        self.now += seconds
        self.out.trainer_busy += seconds
        self.out.trained.append(lengths)
        self.out.trained_at.append(self.now)
        self.now += self.cluster.publish_seconds
        self.fleet.resume(version + 1, self.now)

    def outcome(self) -> Outcome:
        self.out.generated_tokens = self.fleet.tokens
        self.out.generator_idle, self.out.running = self.fleet.utilisation(self.out.makespan)
        return self.out


def tail_batching(
    work: Workload, cluster: Cluster, factor: float = TAIL_BATCHING_FACTOR, seed: int = 0
) -> Outcome:
    """RollPacker's rounds. A short round launches more prompts and responses than it keeps, and keeps those that finish first. A
    long round regenerates the prompts that short rounds aborted; their tokens are discarded.

    The lengths of the additional responses are drawn from those of their group.
    """
    rounds, drawn = _Rounds(work, cluster), random.Random(seed)
    size, fresh, deferred = work.prompts_per_step, deque(range(len(work.groups))), deque[int]()
    while fresh or deferred:
        short = len(fresh) >= size and len(deferred) < size
        if short:
            slots = [fresh.popleft() for _ in range(min(len(fresh), math.ceil(factor * size)))]
        else:
            slots = [(deferred or fresh).popleft() for _ in range(size)]
        launches = []
        for slot in slots:
            lengths = list(work.groups[slot].lengths)
            more = math.ceil(factor * len(lengths)) - len(lengths) if short else 0
            launches.append(
                _Launch(slot, lengths + [drawn.choice(lengths) for _ in range(more)], len(lengths))
            )
        done, aborted = rounds.generate(launches, size)
        deferred.extend(launch.slot for launch in aborted)
        rounds.train(done)
    return rounds.outcome()


def april(work: Workload, cluster: Cluster, factor: float = APRIL_FACTOR) -> Outcome:
    """APRIL's rounds: each issues more prompts than a step needs, stops once the step is complete, and continues partial ones first."""
    rounds = _Rounds(work, cluster)
    size, fresh, partial = work.prompts_per_step, deque(range(len(work.groups))), list[_Launch]()
    while fresh or partial:
        issued = max(size, math.ceil(factor * size))
        new = [fresh.popleft() for _ in range(min(len(fresh), issued - min(issued, len(partial))))]
        launches = partial + [
            _Launch(slot, list(work.groups[slot].lengths), len(work.groups[slot].lengths)) for slot in new
        ]
        done, partial = rounds.generate(launches, size)
        rounds.train(done)
    return rounds.outcome()
