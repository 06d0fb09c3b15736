"""Runs of `make run`'s example in this checkout beside those in another one, alternating, each pair with a seed of its own.

    python benchmarks/make_run.py --base OTHER [--runs N] [--steps N]

OTHER is a checkout with its own environment (`make setup`). A run is measured from its fifth step to its last, so starts and
mid-training do not count; evaluations and checkpoints do: steps per second, and the part of the time in which the trainer
computed. The reward is that of the last evaluation, the mismatch the mean of `probe_kl`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import fmean

import yaml

FIRST = 4
LIMIT_SECONDS = 1200.0


def measured(checkout: Path, steps: int, seed: int) -> dict[str, float]:
    """One run."""
    example = checkout / "examples/tiny"
    manifest = yaml.safe_load((example / "run.yaml").read_text())
    spec = manifest["spec"]
    spec["task"]["jsonl"]["path"] = str(example / "data.jsonl")
    spec["budget"]["maxSteps"] = steps
    spec["seed"] = seed
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        file.write_text(yaml.safe_dump(manifest))
        command = [str(checkout / ".venv/bin/scalerl"), "run", str(file), "--dir", f"{folder}/run"]
        subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS)
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        with Path(folder, "run/curve.csv").open() as curve:
            points = list(csv.DictReader(curve))
    seconds = rows[-1]["wall_seconds"] - rows[FIRST]["wall_seconds"]
    last = rows[FIRST + 1 :]
    busy = sum(row["forward_backward_seconds"] + row["optimizer_seconds"] for row in last)
    return {
        "seconds": seconds,
        "steps_per_second": len(last) / seconds,
        "trainer_busy": busy / seconds,
        "reward": float(points[-1]["reward"]),
        "mismatch": fmean(row["probe_kl"] for row in last if "probe_kl" in row),
        "staleness_max": max(row["staleness_max"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, help="the other checkout")
    parser.add_argument("--runs", type=int, default=3, help="of each checkout")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    checkouts = {"base": arguments.base.resolve(), "this": Path(__file__).resolve().parents[1]}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for index in range(arguments.runs):
        for name in sorted(checkouts, reverse=bool(index % 2)):
            runs[name].append(measured(checkouts[name], arguments.steps, index))
            figures = "  ".join(f"{key} {value:.4g}" for key, value in runs[name][-1].items())
            print(f"{name}, seed {index}: {figures}", flush=True)
    faster = fmean(r["steps_per_second"] for r in runs["this"]) / fmean(
        r["steps_per_second"] for r in runs["base"]
    )
    print(json.dumps({"runs": runs, "ratio": faster}))


if __name__ == "__main__":
    main()
