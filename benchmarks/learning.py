"""Does the tiny example learn, whatever the seed? ``make run``'s own run, once a seed, held-out reward before and after.

    python benchmarks/learning.py [--quick] [--seeds 0,1,2]

``--quick`` runs ten steps of one seed: it shows that the benchmark works, not that the model learns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import yaml
from support.measured_run import measured_run

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/tiny/run.yaml"
KEYS = ("first_reward", "last_reward", "wall_seconds", "sampled_kl", "max_staleness_steps")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", default="0,1,2")
    arguments = parser.parse_args()
    seeds = [0] if arguments.quick else [int(seed) for seed in arguments.seeds.split(",")]
    figures: dict[str, float] = {}
    print("seed  first  last   gain   seconds  mismatch KL  staleness")
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            run = yaml.safe_load(EXAMPLE.read_text())
            run["spec"]["seed"] = seed
            run["spec"]["task"]["jsonl"]["path"] = str(EXAMPLE.with_name("data.jsonl"))
            if arguments.quick:
                run["spec"]["budget"]["maxSteps"] = 10
                run["spec"]["warmStart"]["steps"] = 50
            summary, _ = measured_run(run, Path(folder) / str(seed))
            first, last, seconds, mismatch, staleness = (summary[key] for key in KEYS)
            print(
                f"{seed:4d}  {first:.3f}  {last:.3f}  {last - first:+.3f}  {seconds:7.0f}  {mismatch:11.1e}  {staleness:9d}",
                flush=True,
            )
            figures |= {
                f"first_reward_{seed}": first,
                f"last_reward_{seed}": last,
                f"gain_{seed}": last - first,
                f"sampled_kl_{seed}": mismatch,
                f"max_staleness_steps_{seed}": staleness,
            }
    figures["least_gain"] = min(figures[f"gain_{seed}"] for seed in seeds)
    print(json.dumps({"benchmark": "learning", "figures": figures}))


if __name__ == "__main__":
    main()
