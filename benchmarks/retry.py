"""Does the second try get better, and better than the first? `examples/tiny-retry`, once a seed: held-out rewards of both tries.

    python benchmarks/retry.py [--quick] [--seeds 0,1,2] [--run DIR]

The first try's is the share of episodes that end with it; the second's, the mean reward of those that have one. ``--run`` prints the
table of a run that there is, and ``--quick`` runs ten steps of one seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from support.measured_run import PYTHON, measured_run

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/tiny-retry/run.yaml"
Row = tuple[int, float, float, float]
"""Version, and rewards of the first try, of the second, and of both together."""


def tries(run: Path) -> list[Row]:
    """Of each evaluation, from the record of rollouts."""
    command = [*PYTHON, "rollouts", str(run), "--json", "--limit", "0", "--split", "held-out"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    episodes: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for one in map(json.loads, lines):
        episodes[one["step"]].append((one["turns"], one["reward"]))
    rows = []
    for version, found in sorted(episodes.items()):
        first = sum(reward for turns, reward in found if turns == 1) / len(found)
        second = [reward for turns, reward in found if turns == 2] or [float("nan")]
        rows.append(
            (version, first, sum(second) / len(second), sum(reward for _, reward in found) / len(found))
        )
    return rows


def example(seed: int, quick: bool) -> dict[str, Any]:
    run: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    spec = run["spec"]
    spec["seed"] = seed
    task, warm = spec["task"]["jsonl"], spec["warmStart"]["dataset"]
    task["path"] = str(EXAMPLE.with_name(task["path"]))
    warm["files"] = [str(EXAMPLE.with_name(name)) for name in warm["files"]]
    if quick:
        spec["budget"]["maxSteps"], spec["warmStart"]["steps"] = 10, 50
    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    seeds = [0] if arguments.quick else [int(seed) for seed in arguments.seeds.split(",")]
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.run is not None:
            found[arguments.run.name] = tries(arguments.run)
            seeds = []
        for seed in seeds:
            work = Path(folder) / str(seed)
            measured_run(example(seed, arguments.quick), work, seconds=1500)
            found[f"{seed}"] = tries(work / "run")
    figures: dict[str, float] = {}
    print("run   version  first  second  both")
    for name, rows in found.items():
        for version, first, second, both in rows:
            print(f"{name:6}{version:7d}  {first:.3f}  {second:.3f}   {both:.3f}")
        for at, when in ((0, "first"), (-1, "last")):
            _, first, second, both = rows[at]
            figures |= {
                f"{name}_{when}_try_1": first,
                f"{name}_{when}_try_2": second,
                f"{name}_{when}_both": both,
            }
    print(json.dumps({"benchmark": "retry", "figures": figures}))


if __name__ == "__main__":
    main()
