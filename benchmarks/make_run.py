"""Steps of `make run`'s example in this checkout beside those in another one, alternating.

    python benchmarks/make_run.py OTHER [--runs N] [--steps N]

OTHER is a checkout with its own environment (`make setup`). A run's time is from its fifth step to its last, so starts and
mid-training do not count; evaluations and checkpoints do. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import fmean

import yaml

FIRST = 4
LIMIT_SECONDS = 1200.0


def seconds(checkout: Path, steps: int) -> float:
    """Seconds between steps 5 and ``steps`` of one run."""
    example = checkout / "examples/tiny"
    spec = yaml.safe_load((example / "run.yaml").read_text())
    spec["spec"]["task"]["jsonl"]["path"] = str(example / "data.jsonl")
    spec["spec"]["budget"]["maxSteps"] = steps
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        file.write_text(yaml.safe_dump(spec))
        command = [str(checkout / ".venv/bin/scalerl"), "run", str(file), "--dir", f"{folder}/run"]
        subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS)
        walls = [
            float(json.loads(line)["wall_seconds"])
            for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()
        ]
    return walls[-1] - walls[FIRST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--runs", type=int, default=3, help="of each checkout")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    checkouts = {"other": arguments.other.resolve(), "this": Path(__file__).resolve().parents[1]}
    times: dict[str, list[float]] = {name: [] for name in checkouts}
    for index in range(arguments.runs):
        for name in sorted(checkouts, reverse=bool(index % 2)):
            times[name].append(seconds(checkouts[name], arguments.steps))
            print(f"{name:>6}: {times[name][-1]:.1f} s for {arguments.steps - FIRST - 1} steps", flush=True)
    ratio = fmean(times["this"]) / fmean(times["other"])
    print(json.dumps({"seconds": times, "ratio": ratio}))


if __name__ == "__main__":
    main()
