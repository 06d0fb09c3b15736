"""What asynchrony gains: the same run with k = 8 and with k = 0, generator and trainer on one core each.

Trained tokens per second of both, their ratio, and how busy each side was. On cores of their own the two sides stand
for devices of their own; the ratio would be 2 if both sides' work were equal and overlapped without loss. Only steps
in the steady state count: not those in which the generator gets its lead of k + 1 steps, nor those it has left.

    python benchmarks/overlap.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from support.length_model import make_length_model, write_prompts
from support.measured_run import manifest, measured_run, rate

CONTEXT, MAX_COMPLETION, MEAN = 288, 256, 60
PINS = {"generator": 0, "trainer": 1, "coordinator": 0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="k = 2 and small steps")
    parser.add_argument("--hidden", type=int, default=192, help="width of the model: balances the two sides")
    arguments = parser.parse_args()
    k, steps, prompts = (2, 12, 4) if arguments.quick else (8, 36, 16)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        parameters = make_length_model(work / "model", MEAN, CONTEXT, hidden=arguments.hidden)
        write_prompts(work / "prompts.jsonl", 4000)
        print(f"{parameters / 1e6:.2f} M parameters, completions of mean {MEAN} tokens, {steps} steps")
        for name, staleness in (("asynchronous", k), ("synchronous", 0)):
            run = manifest(
                f"overlap-k{staleness}",
                work / "model",
                work / "prompts.jsonl",
                CONTEXT,
                recipe={
                    "promptsPerStep": prompts,
                    "completionsPerPrompt": 16,
                    "maxCompletionTokens": MAX_COMPLETION,
                    "maxStalenessSteps": staleness,
                },
                generator={"cpuThreads": 1, "kvCache": "512Mi"},
                trainer={"replicas": 1, "cpuThreads": 1},
                budget={"maxSteps": steps},
            )
            summary, rows = measured_run(run, work / name, PINS)
            figures[f"{name}_trained_tokens_per_second"] = rate(rows, "trained_tokens", k + 1)
            figures[f"{name}_generator_busy"] = summary["generator_busy_fraction"]
            figures[f"{name}_trainer_busy"] = summary["trainer_busy_fraction"]
            figures[f"{name}_max_staleness_steps"] = summary["max_staleness_steps"]
            print(
                f"{name:>13} k={staleness}: {figures[f'{name}_trained_tokens_per_second']:8.0f} trained tokens/s, busy "
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
