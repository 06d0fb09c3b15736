"""The four experiments of arXiv 2512.07783 in small: op-graph problems, and a model of a million parameters.

    python benchmarks/interplay.py warm-start     # the model that the others begin with: it has seen 2 to 4 operations
    python benchmarks/interplay.py extrapolation  # RL within, at and beyond the edge of what it can do
    python benchmarks/interplay.py context        # a share of 0, .1, 1, 10 % of another context before RL on both
    python benchmarks/interplay.py split          # one budget for mid-training and RL, divided at beta
    python benchmarks/interplay.py process        # rewards for the answer, for answer and steps, for both or nothing

Each makes what is missing, also the warm start, and leaves ``report.md``, ``.csv`` and ``.png`` in --dir/EXPERIMENT. The same
command continues one that was stopped; nothing that is finished is made again. ``--quick`` makes two small runs of an
experiment: it shows that the benchmark works, and nothing else.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from scalerl_api.paths import RunPaths
from scalerl_cli.main import main as scalerl
from scalerl_extras.opgraph import OpGraphSource, OpGraphTask

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/opgraph/run.yaml"
SEEN, WITHIN, EDGE, BEYOND = (2, 4), (2, 2), (3, 3), (5, 6)
"""Operations: of the warm start; of these, what it solves, and what it hardly does; far from them. The paper's are 2 to 10, 7 to 10,
11 to 14, 17 to 20 [P]: a model of two million parameters cannot yet do all that it was shown."""
MEASURED = "measured"
"""Evaluation set of all runs of an experiment. A solution counts if its answer and all of its steps are right [P]."""
EXPOSURES = {"0 %": 0.0, "0.1 %": 0.001, "1 %": 0.01, "10 %": 0.1}
BETAS = ("0.2", "0.5", "0.8")
EXAMPLES = 60_000
"""Lines of a file of worked solutions; a warm start passes over it about twice."""
MIDDLE_SHARE = 0.2
"""Of mid-training: problems like those of the warm start; the rest is of RL's range [P]."""
ENDS = ("maxSteps", "maxComputeTokens")


@dataclass(frozen=True)
class Experiment:
    """arms: runs by name, which all have the evaluation set ``measured``. label: of the report. has_base: the arms begin with the
    warm-started model, which is reported too."""

    arms: dict[str, dict[str, Any]]
    label: str
    has_base: bool = True


@dataclass(frozen=True)
class Size:
    """Of the runs. measured_prompts, samples: of the set that all models are measured on."""

    warm_start_steps: int = 1500
    context_steps: int = 1000
    steps: int = 100
    budget_tokens: int = 500_000
    prompts: int = 8
    completions: int = 8
    measured_prompts: int = 80
    samples: int = 16
    examples: int = EXAMPLES


QUICK = Size(20, 20, 2, 12_000, 4, 2, 18, 2, 400)


def problems(operations: tuple[int, int], seed: int = 7, **contexts: str) -> dict[str, Any]:
    """The parameters of the source opgraph."""
    return {
        "operations": list(operations),
        "contexts": contexts or {"zoo": "1"},
        "modes": ["forward"],
        "distractors": 0,
        "seed": seed,
    }


def base(operations: tuple[int, int], size: Size, verifier: str = "opgraph-blend") -> dict[str, Any]:
    """RL on such problems, from ``model``."""
    run: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    run["metadata"]["name"] = f"op-{operations[0]}-{operations[1]}-{verifier.removeprefix('opgraph-')}"
    spec = run["spec"]
    del spec["warmStart"]
    spec["model"] = {"path": "model", "dtype": "float32", "contextTokens": 640}
    spec["task"] = {
        "plugin": {"name": "opgraph", "parameters": problems(operations)},
        "verifier": {"name": verifier},
        "heldOut": {"size": 12 if size is QUICK else 60},
    }
    spec["recipe"] |= {
        "promptsPerStep": size.prompts,
        "completionsPerPrompt": size.completions,
        "curriculum": {"uniform": {}},
        "length": {"none": {}},
    }
    if (
        size is QUICK
    ):  # so short a warm start solves nothing, and groups without variance would leave no batch
        spec["recipe"]["zeroVarianceFilter"] = False
    spec["evaluation"] = {
        "everySteps": 20,
        "samplesPerPrompt": 2,
        "sets": [{"name": "held-out"}, measured(problems((2, 6), 13), size)],
    }
    spec["checkpoint"] = {"everySteps": 10, "keep": 1}
    spec["budget"] = {"maxSteps": size.steps}
    return run


def measured(source: dict[str, Any], size: Size) -> dict[str, Any]:
    """The set is evaluated at the beginning and at the end."""
    return {
        "name": MEASURED,
        "everySteps": 1000,
        "samplesPerPrompt": size.samples,
        "task": {
            "plugin": {"name": "opgraph", "parameters": source},
            "size": size.measured_prompts,
            "verifier": {"name": "opgraph-strict"},
        },
    }


def see_through(run: dict[str, Any], folder: Path, name: str) -> Path:
    """Make the run ``name``, or what is left of it; its directory.

    Exits if it fails, is interrupted, or is held as broken.
    """
    directory = folder / name
    if stop_reason(directory) in ENDS:
        return directory
    run["metadata"]["name"] = name
    # Paths in a spec are relative to its file.
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(run))
    resumed = ["--resume"] if RunPaths(directory).run_file.exists() else []
    check(scalerl(["run", str(file), "--dir", str(directory), *resumed]))
    if (reason := stop_reason(directory)) not in ENDS:
        sys.exit(f"{directory} ended by {reason or 'an error'}, not by its budget: see its logs")
    return directory


def stop_reason(directory: Path) -> str:
    """Empty if the run has no summary."""
    try:
        return str(json.loads(RunPaths(directory).summary.read_text())["stop_reason"])
    except FileNotFoundError:
        return ""


def check(code: int) -> None:
    """End with the exit code of a command that did not succeed."""
    if code:
        sys.exit(code)


def warm_start(folder: Path, size: Size) -> Path:
    """Make ``folder/model``: supervised steps on 2 to 4 operations, and one of RL that changes nothing. The run's directory.

    Batches are small: at a given number of tokens more updates teach a model of this size more.
    """
    run = unchanged(size)
    spec = run["spec"]
    spec["model"] = scratch()
    spec["warmStart"] = supervised(size.warm_start_steps)
    spec["checkpoint"]["everySteps"] = 100
    directory = see_through(run, folder, "supervised")
    if not (folder / "model").exists():
        check(scalerl(["export", str(directory), "--to", str(folder / "model")]))
    return directory


def unchanged(size: Size) -> dict[str, Any]:
    """One step of RL that changes nothing: the model is evaluated."""
    run = base(SEEN, size)
    run["spec"]["recipe"]["optimizer"] = {"learningRate": "1e-12"}
    run["spec"]["budget"] = {"maxSteps": 1}
    return run


def scratch() -> dict[str, Any]:
    model: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())["spec"]["model"]
    return model


def supervised(steps: int) -> dict[str, Any]:
    return {"steps": steps, "batchSize": 32, "learningRate": "3e-3"}


def write_examples(path: Path, count: int, shares: Iterable[tuple[dict[str, Any], float]]) -> None:
    """A JSONL file of worked solutions: of each source its share of ``count``, evenly mixed."""
    if path.exists():  # a run under way refuses a file that is written again
        return
    lines: list[tuple[float, str]] = []
    for fields, share in shares:
        task = OpGraphTask(
            tuple(fields["operations"]),
            fields["contexts"],
            tuple(fields["modes"]),
            distractors=fields["distractors"],
            seed=fields["seed"],
        )
        source, wanted = OpGraphSource(task), round(share * count)
        for index in range(wanted):
            prompt = source[index]
            row = {
                "prompt": prompt.text,
                "answer": prompt.answer,
                "solution": prompt.worked_solution,
                "difficulty": int(prompt.labels["operations"]),
            }
            lines.append(((index + 0.5) / wanted, json.dumps(row)))
    staged = path.with_name(f".{path.name}")
    staged.write_text("".join(f"{line}\n" for _, line in sorted(lines)))
    staged.rename(path)


def extrapolation(folder: Path, size: Size) -> Experiment:
    ranges = {"within": WITHIN, "edge": EDGE, "beyond": BEYOND}
    arms = {f"{name}, op {low}-{high}": base((low, high), size) for name, (low, high) in ranges.items()}
    return Experiment(arms, "operations")


def context(folder: Path, size: Size) -> Experiment:
    """The prompts of both contexts make the vocabulary, so that words of the rare one are not spelled by letters."""
    arms = {}
    for name, share in EXPOSURES.items():
        file = folder / f"exposure-{share:g}.jsonl"
        own, other = problems(WITHIN, 11), problems(WITHIN, 11, school="1")
        write_examples(file, size.examples, ((own, 1 - share), (other, share)))
        run = base(WITHIN, size)
        run["metadata"]["name"] = f"exposure-{str(share).replace('.', '-')}"
        spec = run["spec"]
        spec["model"] = scratch()
        spec["warmStart"] = supervised(size.context_steps) | {"jsonl": {"path": file.name}}
        spec["task"]["plugin"]["parameters"] = problems(WITHIN, zoo="0.5", school="0.5")
        spec["evaluation"]["sets"][1] = measured(problems(WITHIN, 13, zoo="0.5", school="0.5"), size)
        arms[f"exposure {name}"] = run
    return Experiment(arms, "context", has_base=False)


def split(folder: Path, size: Size) -> Experiment:
    file = folder / "mid-training.jsonl"
    shares = ((problems(SEEN, 11), MIDDLE_SHARE), (problems(EDGE, 11), 1 - MIDDLE_SHARE))
    write_examples(file, size.examples, shares)
    arms = {}
    for beta in (*BETAS, None):
        run = base(EDGE, size)
        budget: dict[str, Any] = {"maxComputeTokens": size.budget_tokens}
        if beta is not None:
            budget["split"] = {"beta": beta}
            run["spec"]["warmStart"] = {
                "batchSize": 16,
                "learningRate": "1e-3",
                "jsonl": {"path": file.name},
            }
        run["metadata"]["name"] = "rl-alone" if beta is None else f"beta-{beta.replace('.', '-')}"
        run["spec"]["budget"] = budget
        arms["RL alone" if beta is None else f"beta {beta}"] = run
    return Experiment(arms, "operations")


def process(folder: Path, size: Size) -> Experiment:
    arms = {name: base(EDGE, size, f"opgraph-{name}") for name in ("outcome", "blend", "strict")}
    return Experiment(arms, "operations")


EXPERIMENTS = {"extrapolation": extrapolation, "context": context, "split": split, "process": process}


def experiment(folder: Path, name: str, size: Size, seeds: int) -> dict[str, float]:
    """Make what is missing, and the report; the figures."""
    made = EXPERIMENTS[name](folder, size)
    reported = []
    if made.has_base:
        warm_start(folder, size)
        reported.append(("base model", see_through(unchanged(size), folder, "base")))
    for arm, run in islice(made.arms.items(), 2 if size is QUICK else None):
        kind = run["metadata"]["name"]
        for seed in range(seeds):
            run["spec"]["seed"] = seed
            reported.append((arm, see_through(run, folder, f"{kind}-seed-{seed}")))
    words = [f"{arm}={directory}" for arm, directory in reported]
    check(scalerl(["report", *words, "--set", MEASURED, "--label", made.label, "--to", str(folder / name)]))
    figures: dict[str, list[float]] = {}
    for arm, directory in reported:
        with RunPaths(directory).set_curve(MEASURED).open() as file:
            *_, point = csv.DictReader(file)
        figures.setdefault(f"{arm}: reward", []).append(float(point["reward"]))
        right = float(point["reward_part_outcome"])
        figures.setdefault(f"{arm}: right answers", []).append(right)
        if right:
            wrong = 1 - float(point["reward"]) / right
            figures.setdefault(f"{arm}: right answers by wrong steps", []).append(wrong)
    means = {what: round(sum(values) / len(values), 4) for what, values in figures.items()}
    for what, value in means.items():
        print(f"{what}: {value:.3f}")
    return means


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=("warm-start", *EXPERIMENTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dir", type=Path, help="default: ./interplay; of --quick a temporary one")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    with tempfile.TemporaryDirectory() as temporary:
        default = Path(temporary) if arguments.quick else Path("interplay")
        folder = (arguments.dir or default).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.experiment == "warm-start":
            directory = warm_start(folder, size)
            check(scalerl(["report", str(directory), "--label", "operations"]))
            figures: dict[str, float] = {}
        else:
            figures = experiment(
                folder, arguments.experiment, size, 1 if arguments.quick else arguments.seeds
            )
    print(json.dumps({"benchmark": f"interplay {arguments.experiment}", "figures": figures}))


if __name__ == "__main__":
    main()
