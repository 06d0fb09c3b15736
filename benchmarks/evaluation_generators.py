"""What ``evaluation.generators`` gains: the coordinator's own decisions in logical time, with stand-ins for generators and trainer.

Each generator samples a number of groups at once, whose seconds are lognormal; a step and a publish have fixed seconds, and a publish
runs beside the next step. Nothing competes for a processor, as on devices of their own. Reported are steps per second, the part of the time
in which the trainer computes, how long a version under evaluation keeps its generators, and the mean staleness of the trained groups.

    python benchmarks/evaluation_generators.py [--quick]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

sys.path += [str(Path(__file__).resolve().parents[1] / p) for p in ("coordinator/tests", "tests/support")]

from coordinator_client import make_group
from coordinator_world import World, make_settings

from scalerl_api.wire import Lease, NextAction, Split

PROMPTS, HELD_OUT, EVERY = 32, 64, 20
CONCURRENT = 16
"""Groups that a generator samples at once."""
GROUP_SECONDS, DEVIATION = 8.0, 0.5
"""Median, and standard deviation of the logarithm."""
PUBLISH_SECONDS = 0.5
SPARE = 0.15
FIRST = 20
"""The first step that counts."""


@dataclass
class Simulation:
    """One run. Times are logical seconds."""

    generators: int
    kept: int | None
    k: int
    step_seconds: float
    drawn: random.Random = field(default_factory=lambda: random.Random(0))
    trained_at: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    waited: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _free: dict[str, int] = field(default_factory=dict)
    _publishing: bool = False
    _computed: int | None = None
    """A step that is computed and waits for the publish beside it."""
    _idle_since: float | None = None

    def run(self, steps: int) -> dict[str, float]:
        self.world = world = World(
            make_settings(
                max_staleness_steps=self.k,
                prompts_per_step=PROMPTS,
                held_out_prompts=HELD_OUT,
                evaluation_every=EVERY,
                evaluation_generators=self.kept,
                hold_seconds=900.0,
                lease_seconds=1e9,
                heartbeat_seconds=1e9,
            )
        )
        world.hello("t")
        self._free = {world.register(f"g{n}"): CONCURRENT for n in range(self.generators)}
        self._idle_since = 0.0
        while len(self.trained_at) < steps:
            self._decide()
            world.now, _, event = heapq.heappop(self._events)
            event()
        seconds = self.trained_at[-1] - self.trained_at[FIRST - 1]
        points = [p for p in world.state.points if p.version >= FIRST]
        assert not any(point.mixed_versions for point in points)
        trained = len(self.trained_at) - FIRST
        return {
            "steps_per_second": trained / seconds,
            "trainer_busy": trained * self.step_seconds / seconds,
            "evaluation_seconds": fmean(p.wall_seconds - self.trained_at[p.version - 1] for p in points),
            "mean_staleness": fmean(self.staleness[FIRST * PROMPTS :]),
            "max_staleness": max(self.staleness),
        }

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.world.now + seconds, next(self._numbers), event))

    def _decide(self) -> None:
        """Everything that can begin now."""
        world = self.world
        if self._idle_since is not None and (following := world.next("t")) is not None:
            if following.action is NextAction.TRAIN:
                self._idle_since = None
                self._after(self.step_seconds, lambda: self._end_step(following.step))
            elif following.action is NextAction.PUBLISH and not self._publishing:
                self._publish()
        members = world.core.membership.members
        for member, free in self._free.items():
            if free and members[member].version >= 0:
                for lease in world.lease(member, members[member].version, free):
                    self._free[member] -= 1
                    seconds = GROUP_SECONDS * self.drawn.lognormvariate(0.0, DEVIATION)
                    self._after(seconds, lambda m=member, one=lease: self._deliver(m, one))
        world.core.flush_usage(world.now)
        world.core.outbox.clear()

    def _deliver(self, member: str, lease: Lease) -> None:
        self._free[member] += 1
        self.world.push(member, make_group(lease, version=lease.policy_version))
        if lease.split is Split.TRAIN:
            self.staleness.append(self.world.state.step_of(lease.slot) - lease.policy_version)

    def _end_step(self, step: int) -> None:
        if self._publishing:
            self._computed = step
            return
        self.world.report("t", step)
        self.trained_at.append(self.world.now)
        self._idle_since = self.world.now
        self._publish()

    def _publish(self) -> None:
        permit = self.world.begin_publish("t")
        if permit is None:
            return
        self._publishing = True
        updated = [m.member_id for m in permit.members]
        version = self.world.state.version

        def commit() -> None:
            assert self.world.state.version == version
            self.world.commit_publish("t", updated)
            self._publishing = False
            if self._computed is not None:
                step, self._computed = self._computed, None
                self._end_step(step)

        self._after(PUBLISH_SECONDS, commit)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two generators, 100 steps")
    arguments = parser.parse_args()
    steps = 100 if arguments.quick else 300
    figures = {}
    for generators, k in [(2, 1)] if arguments.quick else [(2, 1), (2, 2), (2, 8), (8, 1), (8, 2), (8, 8)]:
        # Generators with evaluations keep up with a trainer that never waits, with SPARE of their time left.
        groups = PROMPTS + HELD_OUT / EVERY
        step_seconds = (
            groups * GROUP_SECONDS * math.exp(DEVIATION**2 / 2) / (generators * CONCURRENT) / (1 - SPARE)
        )
        for kept in (None, 1, 2, 4):
            if kept is not None and kept >= generators:
                continue
            name = f"{generators} generators, k = {k}, kept: {kept or 'all'}"
            figures[name] = one = Simulation(generators, kept, k, step_seconds).run(steps)
            print(name + "".join(f"  {key} {value:.3f}" for key, value in one.items()), flush=True)
    print(json.dumps({"benchmark": "evaluation_generators", "figures": figures}))


if __name__ == "__main__":
    main()
