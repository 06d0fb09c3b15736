"""What more evaluation sets cost the trainer: a run with one set, and the same with four, generator and trainer on one core each.

Seconds of a step in which the trainer works, publishes and waits. Evaluations are generated beside training, in the generator's time: a
run whose trainer waits for rollouts anyway waits longer.

    python benchmarks/evaluation_sets.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from support.length_model import make_length_model, write_prompts
from support.measured_run import manifest, measured_run

PINS = {"generator": 0, "trainer": 1, "coordinator": 1}
LEAD = 4
"""Steps that are left out: the generator gets ahead in them."""
CONTEXT, COMPLETION = 160, 128
PROMPTS = 48
"""Of each set."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps")
    arguments = parser.parse_args()
    steps = 8 if arguments.quick else 40
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_length_model(work / "model", 60, CONTEXT)
        write_prompts(work / "all.jsonl", 4000)
        lines = (work / "all.jsonl").read_text().splitlines(keepends=True)
        for n in range(3):
            (work / f"set-{n}.jsonl").write_text("".join(lines[PROMPTS * n : PROMPTS * (n + 1)]))
        (work / "prompts.jsonl").write_text("".join(lines[3 * PROMPTS :]))
        # Alternated: the machine may become slower or faster meanwhile.
        runs: dict[int, list[dict[str, Any]]] = {1: [], 4: []}
        for number, sets in enumerate((1, 4) if arguments.quick else (1, 4, 1, 4)):
            _, rows = measured_run(_run(work, sets, steps), work / f"run-{number}", PINS)
            runs[sets] += rows[LEAD:]
    for sets, rows in runs.items():
        figures[f"{sets} sets"] = {
            "busy_seconds": statistics.median(row["busy_seconds"] for row in rows),
            "publish_seconds": statistics.median(
                row["publish_seconds"] for row in rows if "publish_seconds" in row
            ),
            "wait_seconds": statistics.mean(row["wait_seconds"] for row in rows),
        }
        print(f"{sets} sets: " + ", ".join(f"{k} {v:.3f}" for k, v in figures[f"{sets} sets"].items()))
    ratio = figures["4 sets"]["busy_seconds"] / figures["1 sets"]["busy_seconds"]
    print(f"seconds of a step that the trainer works, with four sets over one: {ratio:.3f}")
    print(json.dumps({"benchmark": "evaluation_sets", "figures": figures | {"ratio": ratio}}))


def _run(work: Path, sets: int, steps: int) -> dict[str, Any]:
    run = manifest(
        "evaluation-sets",
        work / "model",
        work / "prompts.jsonl",
        CONTEXT,
        recipe={
            "promptsPerStep": 8,
            "completionsPerPrompt": 16,
            "maxCompletionTokens": COMPLETION,
            "offPolicy": {"pipeline": {"maxStalenessSteps": 2}},
        },
        generator={"cpuThreads": 1, "kvCache": "256Mi"},
        trainer={"replicas": 1, "cpuThreads": 1},
        budget={"maxSteps": steps},
    )
    others = [
        {
            "name": f"set-{n}",
            "task": {
                "jsonl": {"path": str(work / f"set-{n}.jsonl")},
                "size": PROMPTS,
                "verifier": {"name": "number"},
            },
        }
        for n in range(sets - 1)
    ]
    run["spec"]["task"]["heldOut"]["size"] = PROMPTS
    run["spec"]["evaluation"] = {
        "everySteps": 4,
        "samplesPerPrompt": 1,
        "sets": [{"name": "held-out"}, *others],
    }
    return run


if __name__ == "__main__":
    main()
