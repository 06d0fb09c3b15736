"""Makespan by schedule on synthetic traces, simulated: 64 generators and 16 trainers.

Lengths are lognormal over prompts and within a prompt's group, cut at 16,384 tokens. Between epochs, so many responses move by
more than a quarter of the ranking by length as RhymeRL reports to change rank materially (2 to 4 %, arXiv 2508.18588 [S]).
The first epoch has no history. Speeds are those of an 8 B model in bfloat16 on H100s by their bandwidth and 39 % of their
arithmetic.

    python benchmarks/schedule.py [--quick] [--seeds N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import ks_2samp

from scalerl_coordinator.scheduling import ByLength, LeastLoaded
from scalerl_coordinator.slots import OffPolicy
from scalerl_extras.simulation.baselines import HistoPipe, RoundRobin, SlotOrder, april, tail_batching
from scalerl_extras.simulation.simulator import simulate
from scalerl_extras.simulation.workload import (
    Cluster,
    DecodeSpeed,
    Group,
    Outcome,
    Workload,
    from_history,
    known,
    lower_bound,
)

CAP, COMPLETIONS, EPOCHS = 16_384, 16, 3
MEDIAN_TOKENS = 1_500
BETWEEN, WITHIN, MOVED = 1.2, 0.3, 0.05
"""Standard deviations of log lengths over prompts and within a group; part of the prompts whose length is drawn again."""
GENERATORS, TRAINERS = 64, 16
DECODE = DecodeSpeed(8e-3, 1.6e-4)
"""16 GB of weights, and half a GB of KV cache a sequence of 4,000 tokens, at 3.35 TB/s, and 3 ms of overhead."""
TRAIN_SECONDS_PER_TOKEN = 1 / 8_000 / TRAINERS
PUBLISH_SECONDS = 1.0


@dataclass(frozen=True)
class Scenario:
    """Batch and cluster. k: of PipelineRL-k."""

    name: str
    prompts_per_step: int
    k: int
    concurrency: int
    steps_per_epoch: int


SCENARIOS = (
    Scenario("PipelineRL-8, ScaleRL's batch", 48, 8, 256, 12),
    Scenario("PipelineRL-8, full generators", 128, 8, 16, 12),
    Scenario("PipelineRL-1, large batch", 256, 1, 16, 5),
    Scenario("PipelineRL-4, large batch", 256, 4, 32, 5),
    Scenario("synchronous, large batch", 256, 0, 32, 5),
)


def make_work(prompts: int, per_step: int, seed: int) -> tuple[Workload, float]:
    """A trace, and the part of its responses that move by more than a quarter of the ranking between epochs."""
    drawn = np.random.default_rng(seed)
    means = np.log(MEDIAN_TOKENS) + BETWEEN * drawn.standard_normal(prompts)
    groups, ranks = [], []
    for _ in range(EPOCHS):
        lengths = np.exp(means[:, None] + WITHIN * drawn.standard_normal((prompts, COMPLETIONS)))
        lengths = lengths.clip(1, CAP).astype(int)
        groups += [Group((0, int(p)), tuple(map(int, lengths[p]))) for p in drawn.permutation(prompts)]
        ranks.append(np.sort(lengths, 1).ravel().argsort().argsort() / lengths.size)
        redrawn = np.log(MEDIAN_TOKENS) + BETWEEN * drawn.standard_normal(prompts)
        means = np.where(drawn.random(prompts) < MOVED, redrawn, means)
    moved = float(np.mean([np.mean(abs(a - b) > 0.25) for a, b in itertools.pairwise(ranks)]))
    return Workload(groups, per_step), moved


def run(scenario: Scenario, seed: int) -> tuple[dict[str, dict[str, float]], float, float]:
    """Figures by schedule; the lower bound; and the part of responses that change rank."""
    size = scenario.prompts_per_step
    work, moved = make_work(scenario.steps_per_epoch * size, size, seed)
    cluster = Cluster(GENERATORS, scenario.concurrency, DECODE, 0.5, TRAIN_SECONDS_PER_TOKEN, PUBLISH_SECONDS)
    scheme, history, lengths = OffPolicy(scenario.k), from_history(work), known(work)
    schedules: dict[str, Callable[[], Outcome]] = {
        "slot order": lambda: simulate(work, cluster, SlotOrder(), history, scheme),
        "round-robin": lambda: simulate(work, cluster, RoundRobin(), history, scheme),
        "least loaded (default)": lambda: simulate(work, cluster, LeastLoaded(), history, scheme),
        "tail batching": lambda: tail_batching(work, cluster),
        "APRIL": lambda: april(work, cluster),
        "HistoPipe": lambda: simulate(work, cluster, HistoPipe(), history, scheme),
        "byLength": lambda: simulate(work, cluster, ByLength(), history, scheme),
        "oracle": lambda: simulate(work, cluster, ByLength(), lengths, scheme),
    }
    half = work.steps // 2
    in_order = [n for step in range(half) for group in work.step(step) for n in group.lengths]
    figures = {}
    for name, make in schedules.items():
        out = make()
        trained = [n for lengths in out.trained[:half] for n in lengths]
        first = out.trained_at[scenario.steps_per_epoch - 1]
        figures[name] = {
            "makespan": out.makespan,
            "later": out.makespan - first,
            "tokens_per_second": out.trained_tokens / out.makespan,
            "idle": out.generator_idle,
            "mean_staleness": sum(a * n for a, n in out.staleness.items()) / sum(out.staleness.values()),
            "max_staleness": max(out.staleness),
            "ks_p": float(ks_2samp(trained, in_order).pvalue),
            "discarded": 1 - out.trained_tokens / out.generated_tokens,
        }
    return figures, lower_bound(work, cluster, scheme), moved


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, the first and the last scenario")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    seeds = range(1 if arguments.quick else arguments.seeds)
    scenarios = SCENARIOS[:: len(SCENARIOS) - 1] if arguments.quick else SCENARIOS
    result = {}
    for scenario in scenarios:
        runs = [run(scenario, seed) for seed in seeds]
        bound = statistics.mean(bound for _, bound, _ in runs)
        moved = statistics.mean(moved for *_, moved in runs)
        print(
            f"\n{scenario.name}: {scenario.prompts_per_step} prompts × {COMPLETIONS} a step, {EPOCHS} epochs of "
            f"{scenario.steps_per_epoch} steps, k = {scenario.k}, {scenario.concurrency} sequences a generator; "
            f"{100 * moved:.1f} % of responses change rank; {len(runs)} seeds"
        )
        print(
            f"{'':22}{'makespan s':>11}{'later s':>9}{'× slots':>9}{'tokens/s':>10}{'idle':>6}{'staleness':>13}{'KS p':>9}"
        )
        mean = {
            name: {key: statistics.mean(f[name][key] for f, *_ in runs) for key in runs[0][0][name]}
            for name in runs[0][0]
        }
        in_order = mean["slot order"]["makespan"]
        for name, one in mean.items():
            stale = max(f[name]["max_staleness"] for f, *_ in runs)
            ks = min(f[name]["ks_p"] for f, *_ in runs)
            print(
                f"{name:22}{one['makespan']:11.0f}{one['later']:9.0f}{in_order / one['makespan']:9.2f}"
                f"{one['tokens_per_second']:10.0f}{one['idle']:6.2f}{one['mean_staleness']:8.2f} ≤{stale:3.0f}{ks:9.2g}"
            )
        print(f"{'lower bound':22}{bound:11.0f}")
        ours = {}
        for key, when in (("makespan", "in all"), ("later", "after the first epoch")):
            least, best = mean["least loaded (default)"][key], mean["oracle"][key]
            ours[f"gap_{key}"] = 1 - best / least
            if least > 1.05 * best:
                closed = ours[f"gap_closed_{key}"] = (least - mean["byLength"][key]) / (least - best)
                print(
                    f"byLength closes {100 * closed:.0f} % of the gap from least loaded to the oracle {when}"
                )
            else:
                print(f"least loaded is within 5 % of the oracle {when}")
        result[scenario.name] = {**mean, "lower_bound": bound, "moved": moved, **ours}
    print(json.dumps({"benchmark": "schedule", "figures": result}))


if __name__ == "__main__":
    main()
