"""Speculative decoding at 64 generators and 16 trainers, simulated from the acceptance length that ``rollout.py`` measured.

The work is that of ``schedule.py``: three epochs under PipelineRL-8, completions up to 16,384 tokens, groups to the least loaded
generator. In the first epoch nothing is drafted. Speeds are those of an 8 B model in bfloat16 on an H100, with two costs of a
drafted token: what its arithmetic takes, if that is not done while the step waits for memory anyway, and, as on a processor that
never waits, as much as a sequence. ``suffix`` drafts as much in batches of any size; ``history`` what pays.

    python benchmarks/speculation.py [--quick] [--seeds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, replace

from schedule import CAP, DECODE, GENERATORS, PUBLISH_SECONDS, SCENARIOS, TRAIN_SECONDS_PER_TOKEN, make_work

from scalerl_coordinator.scheduling import LeastLoaded
from scalerl_coordinator.slots import OffPolicy
from scalerl_extras.simulation.simulator import simulate
from scalerl_extras.simulation.workload import Cluster, DecodeSpeed, Drafts, Workload, from_history

DRAFTING_SECONDS = 3.6e-6
"""Of ``history``, a sequence and step (``rollout.py``); that of ``suffix`` is not counted."""
PER_DRAFT = 2 * 8e9 / (0.39 * 989e12)
"""Arithmetic of a token."""
COSTS = {
    "by arithmetic": replace(DECODE, per_draft=PER_DRAFT, free_rows=16e9 / 3.35e12 / PER_DRAFT),
    "as a sequence": replace(DECODE, per_draft=DECODE.per_sequence),
}
"""In the first, tokens are free until their arithmetic takes as long as reading the weights."""
BATCHES = (1, 8, 32, 64, 128, 256)


@dataclass(frozen=True)
class Drafter:
    """measured: tokens and drafted tokens of a verification, in the second and the third epoch. Nothing is known of drafts that
    are longer in the mean than these, so none is."""

    name: str
    measured: tuple[tuple[float, float], ...]

    @property
    def longest(self) -> int:
        return max((round(drafted) for _, drafted in self.measured), default=0)

    def drafts(self, visit: int) -> Drafts:
        if visit == 0 or not self.measured:
            return Drafts()
        tokens, drafted = self.measured[min(visit, len(self.measured)) - 1]
        return Drafts.measured(tokens, drafted, fixed=self.name.startswith("suffix"))

    def speed(self, cost: DecodeSpeed) -> DecodeSpeed:
        ours = self.name.startswith("history")
        return replace(cost, per_sequence=cost.per_sequence + DRAFTING_SECONDS * ours)


DRAFTERS = (
    Drafter("none", ()),
    Drafter("suffix, entropy .17", ((5.08, 14.2), (4.88, 14.0))),
    Drafter("history, entropy .17", ((7.39, 16.5), (6.67, 15.6))),
    Drafter("suffix, entropy .8", ((2.71, 11.4), (2.63, 11.6))),
    Drafter("history, entropy .8", ((2.89, 7.3), (2.77, 6.8))),
)


def with_drafts(work: Workload, drafter: Drafter) -> Workload:
    visits: dict[tuple[int, int], int] = {}
    groups = []
    for group in work.groups:
        visit = visits[group.prompt] = visits.get(group.prompt, -1) + 1
        groups.append(replace(group, drafts=drafter.drafts(visit)))
    return Workload(groups, work.prompts_per_step)


def speed_up(drafter: Drafter, cost: DecodeSpeed, running: int) -> float:
    """Tokens a second of a generator in the second epoch, over those without drafts."""
    seconds, (tokens,) = drafter.speed(cost).step([(drafter.drafts(1), running)], drafter.longest)
    return float(tokens * cost.seconds(running) / seconds)


def makespans(drafter: Drafter, cost: DecodeSpeed, generators: int, seeds: range) -> dict[str, float]:
    """Means over the seeds: seconds in all, after the first epoch, and the part of these in which a trainer is busy."""
    scenario = SCENARIOS[0]
    figures = []
    for seed in seeds:
        size = scenario.prompts_per_step
        work, _ = make_work(scenario.steps_per_epoch * size, size, seed)
        cluster = Cluster(
            generators,
            scenario.concurrency,
            drafter.speed(cost),
            0.5,
            TRAIN_SECONDS_PER_TOKEN,
            PUBLISH_SECONDS,
            drafter.longest,
        )
        scheme = OffPolicy(scenario.k)
        out = simulate(with_drafts(work, drafter), cluster, LeastLoaded(), from_history(work), scheme)
        later = out.makespan - out.trained_at[scenario.steps_per_epoch - 1]
        busy = sum(cluster.train(work.tokens(step)) for step in range(scenario.steps_per_epoch, work.steps))
        figures.append({"makespan": out.makespan, "later": later, "trainer": busy / later})
    return {key: statistics.mean(one[key] for one in figures) for key in figures[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 64 generators")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    seeds = range(1 if arguments.quick else arguments.seeds)
    fleets = (GENERATORS,) if arguments.quick else (GENERATORS, GENERATORS // 4)
    result: dict[str, object] = {}
    print(f"completions of up to {CAP:,} tokens; {len(seeds)} seeds")
    for name, cost in COSTS.items():
        print(f"\na drafted token costs {name}: {1e6 * cost.per_draft:.0f} µs beyond {cost.free_rows:.0f}")
        print(f"{'speed-up at a batch of':22}" + "".join(f"{running:8}" for running in BATCHES))
        for drafter in DRAFTERS[1:]:
            ratios = {running: speed_up(drafter, cost, running) for running in BATCHES}
            result[f"{name}, {drafter.name}, speed-up"] = ratios
            print(f"{drafter.name:22}" + "".join(f"{ratio:8.2f}" for ratio in ratios.values()))
        print(f"{'seconds (later; trainer busy)':30}" + "".join(f"{n:>11} generators" for n in fleets))
        for drafter in DRAFTERS:
            of = {generators: makespans(drafter, cost, generators, seeds) for generators in fleets}
            result[f"{name}, {drafter.name}"] = of
            columns = (f"{x['makespan']:8.0f} ({x['later']:5.0f}; {x['trainer']:3.0%})" for x in of.values())
            print(f"{drafter.name:30}" + "  ".join(columns), flush=True)
    print(json.dumps({"benchmark": "speculation", "figures": result}))


if __name__ == "__main__":
    main()
