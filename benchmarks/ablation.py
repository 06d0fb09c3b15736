"""ScaleRL and its eight leave-one-out variants on the tiny example: A, B, reward at equal compute, and what separates.

Then PipelineRL-8 against PPO-off-policy-8 over wall time. One supervised model is made first, and every run starts from
it. Runs are those of ``scalerl compare`` in --dir: the same command continues where an earlier one was stopped.

    python benchmarks/ablation.py [--quick] [--dir DIR] [--seeds 3] [--steps 160] [--only 'ppo-off-policy-8,dapo loss']

Two variants cannot differ from the base here but by noise, and show how large that is: the model is in float32 already
(no fp32 logits), and right answers are all of one length, so short that they lose nothing (length penalty). For the same reason the
base has no forced interruption: there are no thoughts to interrupt. ``--quick`` makes a few small steps of the base and of
PPO-off-policy-8: it shows that the benchmark works, and nothing else.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from scalerl_cli.main import main as scalerl

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/tiny/run.yaml"
PPO = "ppo-off-policy-8"
VARIANTS = {
    PPO: "recipe.offPolicy={ppo: {stepsPerBatch: 8}}",
    "dapo loss": "recipe.loss={ppoClip: {clipLow: 0.2, clipHigh: 0.26}}",
    "no fp32 logits": "recipe.fp32Logits=None",
    "sample average": "recipe.aggregation=SampleAverage",
    "prompt advantage": "recipe.advantage.normalization=Group",
    "whole batch": "recipe.zeroVarianceFilter=false",
    "uniform sampling": "recipe.curriculum={uniform: {}}",
    "length penalty": "recipe.length={penalty: {}}",
}
"""The paper's leave-one-out variants [P]."""
EVERY = 8
"""Steps between evaluations. PPO-off-policy-8 publishes no weights within 8 steps; a base that is evaluated more often than it
would lose time by that."""
SPARSE = 3
"""Every third of the example's prompts is taken, so that there are later epochs, which solved ones leave."""


def example(name: str, **recipe: Any) -> dict[str, Any]:
    """The tiny example with one rank, which leaves the generator a core, and with the given fields of the recipe."""
    run: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    run["metadata"]["name"] = name
    spec = run["spec"]
    spec["task"]["jsonl"]["path"] = "data.jsonl"
    spec["trainer"] |= {"replicas": 1, "zeroStage": 0}
    spec["recipe"] |= recipe
    spec["budget"] = {}
    return run


def supervised_model(folder: Path, quick: bool) -> None:
    """Make ``folder/model``, on which every run starts: the example's warm start, and one step that changes nothing."""
    if (folder / "model").exists():
        return
    run = example("supervised", promptsPerStep=8, optimizer={"learningRate": "1e-12"})
    if quick:
        run["spec"]["warmStart"]["steps"] = 50
    run["spec"]["evaluation"] = {"everySteps": 1, "samplesPerPrompt": 4}
    run["spec"]["budget"] = {"maxSteps": 1}
    (folder / "supervised.yaml").write_text(yaml.safe_dump(run))
    shutil.rmtree(folder / "supervised", ignore_errors=True)
    check(scalerl(["run", str(folder / "supervised.yaml"), "--dir", str(folder / "supervised")]))
    check(scalerl(["export", str(folder / "supervised"), "--to", str(folder / "model")]))


def check(code: int) -> None:
    """End with the exit code of a command that did not succeed."""
    if code:
        sys.exit(code)


def compared(folder: Path, name: str, variants: list[str], *more: str) -> dict[str, dict[str, str]]:
    """The rows of the comparison by recipe; its files are kept as ``name``.*"""
    words = [f"--vary={variant}:{VARIANTS[variant]}" for variant in variants]
    code = scalerl(["compare", str(folder / "scalerl.yaml"), *words, "--dir", str(folder / "runs"), *more])
    if code not in (0, 1):  # with a failed run there is a table all the same
        sys.exit(code)
    for suffix in ("md", "csv", "png"):
        shutil.copy(folder / f"runs/comparison.{suffix}", folder / f"{name}.{suffix}")
    with (folder / f"{name}.csv").open() as file:
        return {row["recipe"]: row for row in csv.DictReader(file)}


def benchmark(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Run what is missing; the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (EXAMPLE.with_name("data.jsonl")).read_text().splitlines(keepends=True)
    if not (folder / "data.jsonl").exists():  # a run under way refuses data that is written again
        (folder / "data.jsonl").write_text("".join(lines[::SPARSE]))
    supervised_model(folder, arguments.quick)
    run = example(
        "scalerl",
        offPolicy={"pipeline": {"maxStalenessSteps": 8}},
        curriculum={"noPositiveResampling": {}},
        length={"none": {}},
        completionsPerPrompt=4 if arguments.quick else 8,
        **({"promptsPerStep": 8} if arguments.quick else {}),
    )
    spec = run["spec"]
    del spec["warmStart"]
    spec["model"] = {"path": "model", "dtype": "float32", "contextTokens": 32}
    spec["evaluation"] = {"everySteps": EVERY, "samplesPerPrompt": 4}
    spec["checkpoint"] = {"everySteps": 25, "keep": 1}
    spec["budget"] = {"maxSteps": 32 if arguments.quick else arguments.steps}
    (folder / "scalerl.yaml").write_text(yaml.safe_dump(run))
    chosen = [PPO] if arguments.quick else arguments.only
    seeds = ("--seeds", str(1 if arguments.quick else arguments.seeds))
    rows = compared(folder, "ablation", chosen, *seeds)
    figures = {
        f"{name}_{recipe}".replace(" ", "_"): float(row[name])
        for recipe, row in rows.items()
        for name in ("A", "B", "reward", "difference")
        if row[name]
    }
    for what in ("separates", "separates_at_equal_compute"):
        separating = [recipe for recipe, row in rows.items() if row[what] == "True"]
        print(f"{what.replace('_', ' ')}: {', '.join(separating) or 'nothing'}")
        figures[what] = len(separating)
    if PPO in chosen:
        print("\nPipelineRL-8 against PPO-off-policy-8 over wall time")
        wall = compared(folder, "wall", [PPO], *seeds, "--x", "wall_seconds", "--unit", "seconds")
        for recipe, name in (("scalerl", "pipeline"), (PPO, "ppo")):
            found = [json.loads((run / "summary.json").read_text()) for run in runs_of(folder, recipe)]
            ended = [summary for summary in found if summary["stop_reason"] == "maxSteps"]
            if ended:
                figures[f"wall_seconds_{name}"] = sum(s["wall_seconds"] for s in ended) / len(ended)
            if wall[recipe]["reward"]:
                figures[f"wall_reward_{name}"] = float(wall[recipe]["reward"])
        if {"wall_seconds_ppo", "wall_seconds_pipeline"} <= figures.keys():
            figures["wall_ratio"] = figures["wall_seconds_ppo"] / figures["wall_seconds_pipeline"]
            print(
                f"time for the same steps: PPO-off-policy-8 takes {figures['wall_ratio']:.2f} times PipelineRL-8's"
            )
    return figures


def runs_of(folder: Path, recipe: str) -> list[Path]:
    """The directories of a recipe's runs; of each seed the newest, for an older one is of other settings."""
    pattern = "scalerl-seed-*" if recipe == "scalerl" else f"scalerl-{recipe}-seed-*"
    ended = [path.parent for path in (folder / "runs").glob(f"{pattern}/summary.json")]
    return list({run.name[:-9]: run for run in sorted(ended, key=lambda run: run.stat().st_mtime)}.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dir", type=Path, help="default: ./ablation; of --quick a temporary one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(VARIANTS), help="variants, by name"
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.only if name not in VARIANTS]:
        parser.error(f"--only {', '.join(unknown)}: there are {', '.join(VARIANTS)}")
    with tempfile.TemporaryDirectory() as temporary:
        default = Path(temporary) if arguments.quick else Path("ablation")
        figures = benchmark((arguments.dir or default).resolve(), arguments)
    print(json.dumps({"benchmark": "ablation", "figures": figures}))


if __name__ == "__main__":
    main()
