"""What asynchrony gains: one run, with k = 8 and then with k = 0, generator and trainer on one core each.

Trained tokens per second of both halves, their ratio, and how busy the trainer was. On cores of their own the two sides
stand for devices of their own; the ratio would be 2 if both sides' work were equal and overlapped without loss. Only
steps in the steady state count: not those in which the generator gets its lead of k + 1 steps, nor those in which it
loses it.

    python benchmarks/overlap.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from support.length_model import make_length_model, write_prompts
from support.measured_run import Edit, manifest, measured_run, rate

PINS = {"generator": 0, "trainer": 1, "coordinator": 1}
"""vLLM takes longest to start: it has a core of its own for that."""
PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="k = 2, few small steps, short completions")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model: balances the two sides")
    arguments = parser.parse_args()
    k, steps, prompts, longest, mean = (2, 7, 2, 128, 30) if arguments.quick else (8, 36, 16, 256, 60)
    context = PROMPT_TOKENS + longest
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        parameters = make_length_model(work / "model", mean, context, hidden=arguments.hidden)
        write_prompts(work / "prompts.jsonl", 4000)
        print(f"{parameters / 1e6:.2f} M parameters, completions of mean {mean} tokens, {steps} steps each")
        run = manifest(
            "overlap",
            work / "model",
            work / "prompts.jsonl",
            context,
            recipe={
                "promptsPerStep": prompts,
                "completionsPerPrompt": 16,
                "maxCompletionTokens": longest,
                "offPolicy": {"pipeline": {"maxStalenessSteps": k}},
            },
            generator={"cpuThreads": 1, "kvCache": "512Mi"},
            trainer={"replicas": 1, "cpuThreads": 1},
            budget={"maxSteps": 2 * steps},
        )
        _, rows = measured_run(
            run, work / "run", PINS, edit=Edit(steps, {"offPolicy": {"pipeline": {"maxStalenessSteps": 0}}})
        )
    figures: dict[str, float] = {}
    # In the second half, the first steps are of rollouts that the first had sampled ahead, and the coordinator returns.
    lead = k + 1
    for name, half in (("asynchronous", rows[:steps]), ("synchronous", rows[steps:])):
        steady = half[lead:]
        busy = sum(row["busy_seconds"] for row in steady)
        figures[f"{name}_trained_tokens_per_second"] = rate(half, "trained_tokens", lead, 0)
        figures[f"{name}_trainer_busy"] = busy / (steady[-1]["wall_seconds"] - half[lead - 1]["wall_seconds"])
        figures[f"{name}_max_staleness_steps"] = max(row["staleness_max"] for row in steady)
        print(
            f"{name:>13}: {figures[f'{name}_trained_tokens_per_second']:8.0f} trained tokens/s, trainer busy "
            f"{figures[f'{name}_trainer_busy']:.2f}, staleness ≤ {figures[f'{name}_max_staleness_steps']}"
        )
    assert figures["synchronous_max_staleness_steps"] == 0
    figures["ratio"] = (
        figures["asynchronous_trained_tokens_per_second"] / figures["synchronous_trained_tokens_per_second"]
    )
    print(f"asynchronous / synchronous: {figures['ratio']:.2f}× (target 1.9×)")
    print(json.dumps({"benchmark": "overlap", "figures": figures}))


if __name__ == "__main__":
    main()
