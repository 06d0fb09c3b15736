"""Simulation of a run that trains each group in the step of its slot: leases, generation, training, publishing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalerl_coordinator.scheduling import (
    Generator,
    OpenSlot,
    Pace,
    SchedulerInput,
    SchedulingPolicy,
    expected_load,
)
from scalerl_coordinator.slots import OffPolicy
from scalerl_extras.simulation.fleet import Fleet, Spans
from scalerl_extras.simulation.workload import Cluster, Expected, Outcome, Workload
from scalerl_generator.rollouts.occupancy import Occupancy, groups_wanted


@dataclass(slots=True)
class _Held:
    """A leased group."""

    generator: int
    unfinished: int
    """Number of unfinished completions."""
    tokens: float
    """Expected tokens of a completion."""
    leased: float
    """Time of the lease in seconds."""


def simulate(
    work: Workload, cluster: Cluster, policy: SchedulingPolicy, expected: Expected, scheme: OffPolicy
) -> Outcome:
    """Simulate the run under ``policy``, which predicts lengths by ``expected``."""
    return _Run(work, cluster, policy, expected, scheme).run()


class _Run:
    def __init__(
        self,
        work: Workload,
        cluster: Cluster,
        policy: SchedulingPolicy,
        expected: Expected,
        scheme: OffPolicy,
    ) -> None:
        self.work, self.cluster, self.policy, self.expected = work, cluster, policy, expected
        self.scheme = scheme
        self.fleet = Fleet(cluster, work)
        self.out = Outcome()
        self.version, self.published, self.now = 0, 0, 0.0
        self.opened = 0
        self.open: dict[int, OpenSlot] = {}
        self.held: dict[int, _Held] = {}
        self.by_generator: list[dict[int, _Held]] = [{} for _ in range(cluster.generators)]
        self.occupancy = [Occupancy() for _ in range(cluster.generators)]
        self.missing = [work.prompts_per_step] * work.steps
        self.spans: dict[int, Spans] = {}
        self.asking: dict[int, None] = {}
        """Generators that request a lease, in the order of their requests."""
        self.pace = Pace()
        self.pace.observe_step(0, 0.0)
        self.mean_tokens, self.mean_of = 1.0, 0

    def run(self) -> Outcome:
        training_until = publishing_until = math.inf
        self._open_window()
        self._lease()
        while self.version < self.work.steps:
            idle = training_until == publishing_until == math.inf
            if idle and self.missing[self.version] == 0:
                seconds = self.cluster.train(self.work.tokens(self.version))
                training_until = self.now + seconds
                self.out.trainer_busy += seconds
            self.now = min(self.fleet.next_time(), training_until, publishing_until)
            assert self.now < math.inf, "no group of the next step is under way"
            if self.now == training_until:
                training_until = math.inf
                self._train()
                if self.scheme.publishes(self.version):
                    self.fleet.pause(self.now)
                    publishing_until = self.now + self.cluster.publish_seconds
            elif self.now == publishing_until:
                publishing_until = math.inf
                self.published = self.version
                self.fleet.resume(self.version, self.now)
                self._open_window()
                self._lease()
            else:
                self._finish_sequence()
        self.out.generated_tokens = self.fleet.tokens
        self.out.generator_idle, self.out.running = self.fleet.utilisation(self.now)
        return self.out

    def _open_window(self) -> None:
        size = self.work.prompts_per_step
        limit = min(self.work.steps, self.scheme.may_lease(self.published)) * size
        for slot in range(self.opened, limit):
            step = slot // size
            known = self.expected(slot, self.version)
            self.open[slot] = OpenSlot(slot, step, self.mean_tokens if known is None else known)
        self.opened = max(self.opened, limit)

    def _lease(self) -> None:
        for at in range(self.cluster.generators):
            if at not in self.asking and self._room(at) > 0:
                self.asking[at] = None
        given = True
        while self.open and given:
            generators = [self._generator(at) for at in self.asking]
            assigned = self.policy.assign(
                SchedulerInput(list(self.open.values()), generators, self.pace.tokens_per_step)
            )
            given = any(assigned.values())
            for at in list(self.asking):
                for slot in assigned[str(at)]:
                    self._start(at, slot)
                if assigned[str(at)]:
                    del self.asking[at]
                    if self._room(at) > 0:
                        self.asking[at] = None

    def _start(self, at: int, slot: OpenSlot) -> None:
        del self.open[slot.slot]
        lengths = self.work.groups[slot.slot].lengths
        held = _Held(at, len(lengths), slot.tokens, self.now)
        self.held[slot.slot] = self.by_generator[at][slot.slot] = held
        self.fleet.start(at, slot.slot, list(enumerate(lengths)), self.now)

    def _room(self, at: int) -> int:
        per_group = len(self.work.groups[0].lengths)
        held = len(self.by_generator[at])
        return groups_wanted(
            self.cluster.concurrency, per_group, self.occupancy[at].fraction, held * per_group, held
        )

    def _generator(self, at: int) -> Generator:
        held = self.by_generator[at].values()
        load = expected_load((one.tokens, self.pace.tokens(self.now - one.leased)) for one in held)
        return Generator(str(at), self._room(at), len(held), load)

    def _finish_sequence(self) -> None:
        ended = self.fleet.finish()
        self.spans.setdefault(ended.group, []).extend(ended.spans)
        held = self.held[ended.group]
        held.unfinished -= 1
        if held.unfinished:
            return
        del self.held[ended.group], self.by_generator[held.generator][ended.group]
        lengths = self.work.groups[ended.group].lengths
        self.occupancy[held.generator].observe(list(lengths))
        self.pace.observe_group(self.now - held.leased, lengths)
        self.missing[ended.group // self.work.prompts_per_step] -= 1
        self._lease()

    def _train(self) -> None:
        size = self.work.prompts_per_step
        for slot in range(self.version * size, (self.version + 1) * size):
            for version, tokens in self.spans.pop(slot):
                age = self.version - version
                self.out.staleness[age] = self.out.staleness.get(age, 0) + tokens
        lengths = [n for group in self.work.step(self.version) for n in group.lengths]
        self.out.trained.append(lengths)
        self.out.trained_at.append(self.now)
        self.version += 1
        self.pace.observe_step(self.version, self.now)
        self.mean_tokens = (self.mean_tokens * self.mean_of + sum(lengths)) / (self.mean_of + len(lengths))
        self.mean_of += len(lengths)
