"""False alarms of the rules of ``scalerl status`` and of the condition TrainingHealthy, and how soon they find a fault.

Healthy runs are simulated, each with its own size, speed, task and noise: skill grows, entropy falls to a third or more, lengths drift,
gradients have spikes, single updates are skipped, and the trainer waits up to a fifth of the time. A fault begins in the middle of such a run.
Each step is judged as ``scalerl status`` would at that time, and as the coordinator does, which reports what lasts.

    python benchmarks/health.py [--quick] [--runs N] [DIR ...]

DIR: of real runs, whose sentences are printed, with the part of the steps at which ``scalerl status`` says them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scalerl_api.health import LAST, LONG, RULES, HealthMonitor, Row, Steps, broken_rule, rows_of

STEPS = 150
FAULT = STEPS // 2
Fault = Callable[[Row, float], Row]
"""Changes a row; the number rises from 0 to 1 in the 10 steps after the fault begins."""

FAULTS: dict[str, Fault] = {
    "_skipped": lambda row, share: {"skipped": float(row["step"] % 3 == 0)},
    "_checkpoints": lambda row, share: {"checkpoint_failures": 10 * share},
    "_ungraded": lambda row, share: {"grading_errors": 0.03 * share * row["rollouts"]},
    "_given_up": lambda row, share: {"given_up_groups": 0.15 * share * row["groups"]},
    "_no_reward": lambda row, share: {"reward": 0.0, "unsolved_groups_fraction": 1.0},
    "_mismatch": lambda row, share: {"ratio_kl": row["ratio_kl"] + 0.2 * share},
    "_gradient": lambda row, share: {"grad_norm": row["grad_norm"] * 30**share},
    "_entropy": lambda row, share: {"entropy": row["entropy"] * 0.05**share},
    "_shorter": lambda row, share: {"mean_completion_tokens": row["mean_completion_tokens"] * 0.3**share},
    "_truncated": lambda row, share: {"truncated_fraction": row["truncated_fraction"] + 0.2 * share},
    "_no_gradient": lambda row, share: {"filtered_groups": row["filtered_groups"] ** (1 - share) * (0.95 * row["groups"]) ** share},
    "_waiting": lambda row, share: {"wait_seconds": row["wait_seconds"] + share * 0.5 * row["step_seconds"]},
}  # fmt: skip


def simulated(rng: np.random.Generator, fault: Fault | None) -> list[Row]:
    """The rows of a run; with a fault, from the step ``FAULT`` on."""
    groups, size = int(rng.choice([8, 16, 64, 128])), int(rng.choice([8, 16]))
    start, gain = rng.uniform(-2.5, 0.5), rng.uniform(0.5, 3.0)
    spread, pace = rng.uniform(1.0, 2.5), rng.uniform(0.2, 1.0)
    entropy, floor = rng.uniform(0.2, 1.5), rng.uniform(0.3, 0.8)
    tokens, drift, cap = rng.uniform(50, 4000), rng.uniform(0.75, 2.0), rng.uniform(3.5, 8.0)
    kl, wait, seconds = 10 ** rng.uniform(-4, -2), rng.uniform(0.0, 0.2), rng.uniform(5, 300)
    errors, given_up, skips = rng.uniform(0, 0.003), rng.uniform(0, 0.01), rng.uniform(0, 0.01)
    norm, wall = 10 ** rng.uniform(-2, 1), 0.0
    rows = []
    for step in range(STEPS):
        share = 1 - np.exp(-pace * 3 * step / STEPS)
        skill = rng.normal(start + gain * share, spread, groups)
        scores = rng.binomial(size, 1 / (1 + np.exp(-skill))) / size
        lengths = tokens * drift**share * rng.lognormal(-0.15, 0.55, groups * size)
        spent = seconds * rng.lognormal(0, 0.15)
        wall += spent
        row: Row = {
            "step": step,
            "wall_seconds": wall,
            "step_seconds": spent,
            "wait_seconds": min(0.9, wait * rng.lognormal(0, 0.5)) * spent,
            "skipped": float(rng.random() < skips),
            "checkpoint_failures": 0.0,
            "grading_errors": float(rng.binomial(groups * size, errors)),
            "rollouts": float(groups * size),
            "groups": float(groups),
            "given_up_groups": float(rng.binomial(groups, given_up)),
            "filtered_groups": float(((scores == 0) | (scores == 1)).sum()),
            "unsolved_groups_fraction": float((scores == 0).mean()),
            "solved_groups_fraction": float((scores == 1).mean()),
            "reward": float(scores.mean()),
            "ratio_kl": kl * rng.lognormal(0, 0.5),
            "grad_norm": norm * rng.lognormal(0, 0.4) * (20 if rng.random() < 0.02 else 1),
            "entropy": entropy * (floor + (1 - floor) * np.exp(-4 * step / STEPS)) * rng.lognormal(0, 0.05),
            "mean_completion_tokens": float(np.minimum(lengths, cap * tokens).mean()),
            "truncated_fraction": float((lengths > cap * tokens).mean()),
        }
        if fault is not None and step >= FAULT:
            row |= fault(row, min(1.0, (step - FAULT) / 10))
        rows.append(row)
    return rows


def judged(rows: list[Row]) -> tuple[list[str], list[str]]:
    """The rule, or nothing, at each step: as ``scalerl status`` says it, and as the coordinator reports it."""
    monitor, at_once, lasting = HealthMonitor(), [], []
    for step, row in enumerate(rows):
        first = rows[:LAST] if step + 1 >= LONG else []
        found = broken_rule(Steps(first, rows[max(0, step + 1 - LAST) : step + 1]))
        at_once.append("" if found is None else found[0])
        monitor.add(row)
        lasting.append(monitor.rule)
    return at_once, lasting


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 runs")
    parser.add_argument("--runs", type=int, default=200, help="healthy runs; a tenth of them for each fault")
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path)
    arguments = parser.parse_args()
    runs = 20 if arguments.quick else arguments.runs
    rng = np.random.default_rng(0)
    healthy = [judged(simulated(rng, None)) for _ in range(runs)]
    figures = {}
    print(f"{runs} healthy runs of {STEPS} steps; a fault in {runs // 10} runs for each rule")
    print(
        f"{'rule':13} {'steps with it':>14} {'runs: at once':>14} {'reported':>9} {'found':>6} {'after steps':>12}"
    )
    for rule in (rule.__name__ for rule in RULES):
        steps = sum(at_once.count(rule) for at_once, _ in healthy) / (runs * STEPS)
        at_once, lasting = (sum(rule in said[which] for said in healthy) / runs for which in (0, 1))
        found = [judged(simulated(rng, FAULTS[rule]))[1][FAULT:] for _ in range(runs // 10)]
        delays = [said.index(rule) for said in found if rule in said]
        delay = float(np.median(delays)) if delays else None
        figures[rule] = [steps, at_once, lasting, len(delays) / len(found), delay]
        print(
            f"{rule:13} {steps:14.2%} {at_once:14.1%} {lasting:9.1%} {len(delays) / len(found):6.0%} {delay!s:>12}"
        )
    any_ = [sum(any(said[which]) for said in healthy) / runs for which in (0, 1)]
    print(f"any rule: at some step of {any_[0]:.1%} of the healthy runs, reported in {any_[1]:.1%}")
    for directory in arguments.directories:
        rows = rows_of((directory / "metrics.jsonl").read_bytes().splitlines())
        now, lasting_rules = judged(rows)
        counted = ", ".join(f"{rule} {count / len(rows):.0%}" for rule, count in Counter(now).items() if rule)
        reported = ", ".join(dict.fromkeys(rule for rule in lasting_rules if rule))
        print(
            f"{directory.name}, {len(rows)} steps: {counted or 'nothing'}; reported: {reported or 'nothing'}"
        )
    print(json.dumps({"benchmark": "health", "runs": runs, "figures": figures, "any": any_}))


if __name__ == "__main__":
    main()
