"""What asynchrony gains: the same run with k = 8 and with k = 0, generator and trainer on one core each.

Trained tokens per second of both, their ratio, and how busy each side was. On cores of their own the two sides stand
for devices of their own; the ratio would be 2 if both sides' work were equal and overlapped without loss.

    python benchmarks/overlap.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from length_model import make_length_model, write_prompts
from measured_run import measured_run, rate

CONTEXT, MAX_COMPLETION, MEAN = 288, 256, 60
SKIP = 3


def manifest(model: Path, prompts: Path, k: int, steps: int) -> dict[str, Any]:
    return {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": f"overlap-k{k}"},
        "spec": {
            "model": {"path": str(model), "dtype": "float32", "contextTokens": CONTEXT},
            "task": {"jsonl": {"path": str(prompts)}, "verifier": {"name": "number"}, "heldOut": {"size": 8}},
            "recipe": {
                "promptsPerStep": 16,
                "completionsPerPrompt": 16,
                "maxCompletionTokens": MAX_COMPLETION,
                "maxStalenessSteps": k,
                "zeroVarianceFilter": False,
                "optimizer": {"learningRate": "1e-7"},
            },
            "generator": {"cpuThreads": 1, "kvCache": "512Mi"},
            "trainer": {"replicas": 1, "cpuThreads": 1},
            "evaluation": {"everySteps": 1000, "samplesPerPrompt": 1},
            "checkpoint": {"everySteps": 1000},
            "budget": {"maxSteps": steps},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--hidden", type=int, default=192, help="width of the model: balances the two sides")
    arguments = parser.parse_args()
    steps = 8 if arguments.quick else 24
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        parameters = make_length_model(work / "model", MEAN, CONTEXT, hidden=arguments.hidden)
        write_prompts(work / "prompts.jsonl", 4000)
        print(f"{parameters / 1e6:.2f} M parameters, completions of mean {MEAN} tokens, {steps} steps")
        for name, k in (("asynchronous", 8), ("synchronous", 0)):
            summary, rows = measured_run(
                manifest(work / "model", work / "prompts.jsonl", k, steps),
                work / name,
                {"generator": {0}, "trainer": {1}, "coordinator": {0}},
            )
            figures[f"{name}_trained_tokens_per_second"] = rate(rows, "trained_tokens", SKIP)
            figures[f"{name}_generator_busy"] = summary["generator_busy_fraction"]
            figures[f"{name}_trainer_busy"] = summary["trainer_busy_fraction"]
            figures[f"{name}_max_staleness_steps"] = summary["max_staleness_steps"]
            print(
                f"{name:>13} k={k}: {figures[f'{name}_trained_tokens_per_second']:8.0f} trained tokens/s, busy "
                f"generator {summary['generator_busy_fraction']:.2f} trainer {summary['trainer_busy_fraction']:.2f}, "
                f"staleness ≤ {summary['max_staleness_steps']}"
            )
    figures["ratio"] = (
        figures["asynchronous_trained_tokens_per_second"] / figures["synchronous_trained_tokens_per_second"]
    )
    print(f"asynchronous / synchronous: {figures['ratio']:.2f}× (target 1.6×)")
    print(json.dumps({"benchmark": "overlap", "figures": figures}))


if __name__ == "__main__":
    main()
