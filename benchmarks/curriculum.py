"""Rollouts to a target pass@1 and pass@16 by curriculum, of simulated learners, or of real op-graph runs with ``--real``.

    python benchmarks/curriculum.py [--quick] [--seeds 3] [--only neighbours,forgetting]
    python benchmarks/curriculum.py --choices
    python benchmarks/curriculum.py --real [--quick] [--dir DIR] [--seeds 3] [--steps 200]

The samplers and the history are the coordinator's own, with ScaleRL's steps of 48 groups of 16 and k = 8: a slot of step s sees the
steps before s - 8. Every rollout counts, whether it trains or only measures.

The learner is an assumption. 4,000 prompts have a difficulty d of 2 to 20, and a prompt of it is solved with probability
sigma(skill(d) + its own deviation), deviations of standard deviation .7. At first skill(d) = 1.2 (8.5 - d): up to 6 operations nearly
always, above 13 nearly never. A group with m of 16 right gives a signal 4 (m / 16) (1 - m / 16), nothing if all or none are, which is the
shape of a policy gradient's; each learner spreads it in another way (:data:`LEARNERS`). Rates make uniform sampling need some hundred
steps. Both targets are half of the way from the first pass@k to 1, over held-out prompts, computed and not sampled.

``--choices`` times choices among a million prompts. ``--real`` makes runs of ``scalerl compare``, each from one model with 3.6 million
parameters that knows 2 to 4 operations, on prompts of 2 to 12, and continues where it was stopped; on two cores it takes a day or more.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml

from scalerl_api.recipe import RecipeSpec
from scalerl_coordinator.prompt_history import PromptHistory, Tried, absolute_advantage
from scalerl_coordinator.sampler_interface import SamplerInput
from scalerl_coordinator.samplers import make_sampler

SLOTS, COMPLETIONS, LAG = 48, 16, 8
LOW, HIGH = 2, 20
PROMPTS, HELD_OUT = 4000, 1900
CURRICULA: dict[str, dict[str, Any]] = {
    "uniform": {"uniform": {}},
    "noPositiveResampling": {"noPositiveResampling": {}},
    "passRateBand": {"passRateBand": {}},
    # The edge's own bounds, and its share for what is outside of them.
    "difficultyPools": {"difficultyPools": {"edges": ["0.01", "0.8"], "weights": ["0.1", "1", "0.1"]}},
    **{
        f"sec {temperature}": {"sec": {"edges": list(range(4, HIGH)), "temperature": temperature}}
        for temperature in ("0.2", "0.4", "1")  # those of the paper's authors
    },
    "edgeOfCompetence": {"edgeOfCompetence": {}},
}
MAX_STEPS = 3000
"""Steps; a run that does not reach its target counts as this long."""


@dataclass(frozen=True)
class Learner:
    """How a group's signal becomes skill."""

    rate: float
    """Logits for a signal of 1."""
    reach: float = 1.5
    """Skill at another difficulty rises by exp(-distance / reach) of it."""
    own: float = 0.0
    """Part of the rise that is the prompt's own: no other has it."""
    prerequisite: bool = False
    """The rise is multiplied by the mean pass rate one operation below."""
    forgets: float = 0.0
    """Part of what was learned that is lost in a step."""
    slope: float = 1.2
    centre: float = 8.5


LEARNERS = {
    "neighbours": Learner(0.04),
    "far transfer": Learner(0.008, reach=8),
    "prerequisites": Learner(0.2, prerequisite=True),
    "half by heart": Learner(0.06, own=0.5),
    "forgetting": Learner(0.05, forgets=0.002),
    "all in reach": Learner(0.006, slope=0.1, centre=11),
}
"""``all in reach``: every prompt is solved now and then from the start, so there is no edge to find."""
SLOW = "prerequisites"
"""Left out unless it is named: its runs take minutes."""


class Simulation:
    """A learner, its prompts, and what it is measured by."""

    def __init__(self, learner: Learner, seed: int) -> None:
        self.learner = learner
        self.rng = np.random.default_rng(seed)
        self.difficulties = self.rng.integers(LOW, HIGH + 1, PROMPTS)
        self.deviations = self.rng.normal(0, 0.7, PROMPTS)
        self.held_out = np.arange(HELD_OUT) % (HIGH - LOW + 1)
        self.held_out_deviations = self.rng.normal(0, 0.7, HELD_OUT)
        self.levels = np.arange(LOW, HIGH + 1)
        self.first = self.skill = learner.slope * (learner.centre - self.levels)

    def measure(self) -> tuple[float, float]:
        """pass@1 and pass@16 of held-out prompts."""
        p = sigmoid(self.skill[self.held_out] + self.held_out_deviations)
        return float(p.mean()), float((1 - (1 - p) ** 16).mean())

    def train(self, prompts: list[int]) -> list[int]:
        """Right completions of each group; then the learner has learned from them."""
        chosen = np.array(prompts)
        at = self.difficulties[chosen] - LOW
        right = self.rng.binomial(COMPLETIONS, sigmoid(self.skill[at] + self.deviations[chosen]))
        share = right / COMPLETIONS
        signal = self.learner.rate * 4 * share * (1 - share)
        spread = np.exp(-np.abs(self.levels[:, None] - self.levels[at]) / self.learner.reach)
        rise = (1 - self.learner.own) * (spread @ signal)
        if self.learner.prerequisite:
            rise *= np.concatenate([[1.0], sigmoid(self.skill[:-1])])
        np.add.at(self.deviations, chosen, 10 * self.learner.own * signal)
        self.skill = self.skill + rise - self.learner.forgets * (self.skill - self.first)
        return [int(n) for n in right]


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def rollouts_to_targets(learner: Learner, spec: dict[str, Any], seed: int) -> tuple[int, int, float]:
    """Rollouts to both targets, and the share of groups with differing rewards until both are reached."""
    simulation = Simulation(learner, seed)
    curriculum = RecipeSpec.model_validate({"curriculum": spec}).curriculum
    difficulties = simulation.difficulties.tolist()
    sampler = make_sampler(curriculum, PROMPTS, seed, difficulties.__getitem__)
    history, cursor = PromptHistory(), 0
    targets = [first + (1 - first) / 2 for first in simulation.measure()]
    reached: list[int] = [0, 0]
    mixed = step = 0
    while not all(reached) and step < MAX_STEPS:
        known, prompts = history.as_of(step - LAG), []
        for _ in range(SLOTS):
            prompt, cursor = sampler.choose(SamplerInput(cursor, known))
            prompts.append(prompt)
        history.fold(max(0, step - LAG))
        groups = []
        for prompt, right in zip(prompts, simulation.train(prompts), strict=True):
            advantage = absolute_advantage([1.0] * right + [0.0] * (COMPLETIONS - right))
            groups.append(Tried(prompt, 0, COMPLETIONS, right, 0, 0, advantage, right))
            mixed += 0 < right < COMPLETIONS
        history.add_step(step, groups)
        step += 1
        for at, value in enumerate(simulation.measure()):
            if not reached[at] and value >= targets[at]:
                reached[at] = step
    first, second = (SLOTS * COMPLETIONS * (steps or MAX_STEPS) for steps in reached)
    return first, second, mixed / (step * SLOTS)


def simulated(seeds: int, learners: list[str]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in learners:
        found = {
            curriculum: [rollouts_to_targets(LEARNERS[name], spec, seed) for seed in range(seeds)]
            for curriculum, spec in CURRICULA.items()
        }
        edge = found["edgeOfCompetence"]
        print(f"\n{name}")
        print(
            f"{'curriculum':22}{'pass@1':>12}{'pass@16':>12}{'groups with':>13}   rollouts / edge's, by seed"
        )
        print(f"{'':22}{'rollouts':>12}{'rollouts':>12}{'variance':>13}")
        for curriculum, runs in found.items():
            ratios = [[run[k] / best[k] for run, best in zip(runs, edge, strict=True)] for k in (0, 1)]
            text = "   ".join(" ".join(f"{ratio:.2f}" for ratio in one) for one in ratios)
            means = [mean(run[k] for run in runs) for k in range(3)]
            limit = ">" if max(run[0] for run in runs) >= MAX_STEPS * SLOTS * COMPLETIONS else ""
            print(
                f"{curriculum:22}{limit + f'{means[0]:,.0f}':>12}{means[1]:>12,.0f}{means[2]:>13.2f}   {text}"
            )
            for k, target in ((0, "pass_at_1"), (1, "pass_at_16")):
                figures[f"{name}/{curriculum}/{target}".replace(" ", "_")] = round(mean(ratios[k]), 3)
    return figures


def timed_choices(prompts: int = 1_000_000, steps: int = 72, each: int = 20) -> dict[str, float]:
    """Milliseconds of a choice: mean and longest of several steps, after ``steps`` steps of simulated groups."""
    rng = np.random.default_rng(0)
    figures: dict[str, float] = {}
    for name, spec in CURRICULA.items():
        curriculum = RecipeSpec.model_validate({"curriculum": spec}).curriculum
        sampler = make_sampler(curriculum, prompts, 0, lambda prompt: prompt % 19 + 2)
        history, cursor = PromptHistory(), 0
        for step in range(steps):
            right = rng.binomial(COMPLETIONS, rng.choice([0.0, 0.3, 1.0], SLOTS))
            chosen = rng.integers(0, prompts, SLOTS).tolist()
            history.add_step(
                step,
                [
                    Tried(p, 0, COMPLETIONS, float(n), 0, 0, 0.5, int(n))
                    for p, n in zip(chosen, right, strict=True)
                ],
            )
            history.fold(step)
        took = []
        for until in range(steps - each, steps):
            known = history.as_of(until)
            for _ in range(SLOTS):
                begin = time.process_time()
                _, cursor = sampler.choose(SamplerInput(cursor, known))
                took.append(1000 * (time.process_time() - begin))
        print(f"{name:22}{mean(took):>8.3f} ms   longest {max(took):.2f} ms")
        figures[f"{name}/mean_ms".replace(" ", "_")] = round(mean(took), 3)
        figures[f"{name}/longest_ms".replace(" ", "_")] = round(max(took), 2)
    return figures


# --- real runs -----------------------------------------------------------------------------------

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/opgraph/run.yaml"
OPERATIONS = (2, 12)
"""Of the prompts; the supervised model knows those up to 4, as in the example."""
CONTEXT_TOKENS = 768
REAL = {
    "no positive resampling": CURRICULA["noPositiveResampling"],
    "pools": CURRICULA["difficultyPools"],
    "sec": {"sec": {"edges": list(range(3, OPERATIONS[1] + 1))}},
    "edge": CURRICULA["edgeOfCompetence"],
}


def real(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Runs of uniform sampling and of each curriculum of :data:`REAL`; the rollouts to uniform's own midpoints."""
    from scalerl_cli.main import main as scalerl

    def check(code: int) -> None:
        if code:
            sys.exit(code)

    folder.mkdir(parents=True, exist_ok=True)
    run: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    spec = run["spec"]
    quick = arguments.quick
    if not (folder / "model").exists():
        run["metadata"]["name"] = "supervised"
        spec["model"]["contextTokens"] = CONTEXT_TOKENS
        if not quick:
            spec["model"]["scratch"] |= {"hiddenSize": 256, "intermediateSize": 768}
        if quick:
            spec["warmStart"] |= {"steps": 20, "batchSize": 16}
            spec["task"]["heldOut"] = {"size": 8}
        spec["recipe"] |= {"optimizer": {"learningRate": "1e-12"}}
        spec["budget"] = {"maxSteps": 1}
        (folder / "supervised.yaml").write_text(yaml.safe_dump(run))
        check(scalerl(["run", str(folder / "supervised.yaml"), "--dir", str(folder / "supervised")]))
        check(scalerl(["export", str(folder / "supervised"), "--to", str(folder / "model")]))
    run = yaml.safe_load(EXAMPLE.read_text())
    run["metadata"]["name"], spec = "uniform", run["spec"]
    del spec["warmStart"]
    spec["model"] = {"path": "model", "dtype": "float32", "contextTokens": CONTEXT_TOKENS}
    spec["task"]["plugin"]["parameters"] |= {"operations": list(OPERATIONS), "size": 2000}
    spec["recipe"] |= {"curriculum": {"uniform": {}}, "length": {"none": {}}, "maxCompletionTokens": 400}
    spec["evaluation"] = {"everySteps": 10, "samplesPerPrompt": 16}
    spec["budget"] = {"maxSteps": arguments.steps}
    if quick:
        spec["task"]["plugin"]["parameters"]["size"] = 100
        spec["task"]["heldOut"] = {"size": 4}
        spec["recipe"] |= {"promptsPerStep": 2, "completionsPerPrompt": 2, "maxCompletionTokens": 16}
        spec["evaluation"] = {"everySteps": 2, "samplesPerPrompt": 16}
        spec["budget"] = {"maxSteps": 4}
    (folder / "uniform.yaml").write_text(yaml.safe_dump(run))
    chosen = {"edge": REAL["edge"]} if quick else REAL
    words = [f"--vary={name}:recipe.curriculum={json.dumps(value)}" for name, value in chosen.items()]
    seeds = ("--seeds", str(1 if quick else arguments.seeds))
    code = scalerl(["compare", str(folder / "uniform.yaml"), *words, "--dir", str(folder / "runs"), *seeds])
    if code not in (0, 1):
        sys.exit(code)
    curves = {
        name: [
            curve(path.parent)
            for path in (folder / "runs").glob(
                "uniform-seed-*/curve.csv" if name == "uniform" else f"uniform-{name}-seed-*/curve.csv"
            )
        ]
        for name in ("uniform", *chosen)
    }
    figures: dict[str, float] = {}
    for column in ("reward", "pass_at_16"):
        own = [point[column] for points in curves["uniform"] for _, point in points]
        target = (min(own) + max(own)) / 2
        for name, runs in curves.items():
            reached = [first(points, column, target) for points in runs]
            text = ", ".join("not reached" if n is None else f"{n:,}" for n in reached)
            print(f"rollouts to {column} {target:.3f}: {name}: {text}")
            if reached and None not in reached:
                figures[f"{name}/{column}"] = mean(n for n in reached if n is not None)
    return figures


def curve(run: Path) -> list[tuple[int, dict[str, float]]]:
    """Points of a run, each with the rollouts until it."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    until = {row["step"] + 1: row["rollouts"] for row in rows}
    columns = ("version", "reward", "pass_at_16")
    with (run / "curve.csv").open() as file:
        points = [{name: float(row[name]) for name in columns} for row in csv.DictReader(file)]
    return [(sum(n for step, n in until.items() if step <= point["version"]), point) for point in points]


def first(points: list[tuple[int, dict[str, float]]], column: str, target: float) -> int | None:
    return next((rollouts for rollouts, point in points if point[column] >= target), None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--choices", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument(
        "--dir", type=Path, help="of --real; default: ./curricula; with --quick a temporary one"
    )
    parser.add_argument("--steps", type=int, default=200, help="of --real")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[name for name in LEARNERS if name != SLOW],
        help="learners, by name",
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.only if name not in LEARNERS]:
        parser.error(f"--only {', '.join(unknown)}: there are {', '.join(LEARNERS)}")
    begin = time.process_time()
    if arguments.real:
        with tempfile.TemporaryDirectory() as temporary:
            default = Path(temporary) if arguments.quick else Path("curricula")
            figures = real((arguments.dir or default).resolve(), arguments)
    elif arguments.choices:
        figures = timed_choices()
    else:
        learners = ["neighbours"] if arguments.quick else arguments.only
        figures = simulated(1 if arguments.quick else arguments.seeds, learners)
        print(f"\n{time.process_time() - begin:.0f} s of processor time")
    print(json.dumps({"benchmark": "curriculum", "figures": figures}))


if __name__ == "__main__":
    main()
