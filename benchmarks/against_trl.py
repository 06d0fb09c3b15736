"""Samples per second beside TRL's GRPO trainer: same model, prompts, lengths and machine, in one invocation.

32 prompts × 16 completions a step; completions of up to 256 tokens with a mean near 60, and of up to 16 tokens, where
what a server spends on a request weighs. Both sides may use every core. TRL comes from requirements/bench.txt.

    python benchmarks/against_trl.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.length_model import make_length_model, write_prompts
from support.measured_run import manifest, measured_run, rate

PROMPTS, COMPLETIONS, MEAN, CONTEXT = 32, 16, 60, 288
STALENESS = 2


def ours(model: Path, prompts: Path, work: Path, max_completion: int, steps: int) -> dict[str, Any]:
    run = manifest(
        "against-trl",
        model,
        prompts,
        CONTEXT,
        recipe={
            "loss": {"ppoClip": {}},
            "aggregation": "SampleAverage",
            "advantage": {"normalization": "Group"},
            "promptsPerStep": PROMPTS,
            "completionsPerPrompt": COMPLETIONS,
            "maxCompletionTokens": max_completion,
            "offPolicy": {"pipeline": {"maxStalenessSteps": STALENESS}},
        },
        generator={"cpuThreads": 1, "kvCache": "512Mi", "maxConcurrentSequences": PROMPTS * COMPLETIONS},
        trainer={"replicas": 1, "cpuThreads": 1},
        budget={"maxSteps": steps},
    )
    summary, rows = measured_run(run, work)
    samples = [{**row, "samples": PROMPTS * COMPLETIONS} for row in rows]
    return {
        "samples_per_second": rate(samples, "samples", STALENESS + 1),
        "mean_tokens": summary["tokens_trained"] / (len(rows) * PROMPTS * COMPLETIONS),
    }


def theirs(model: Path, prompts: Path, work: Path, max_completion: int, steps: int) -> dict[str, Any]:
    command = [
        *(sys.executable, str(Path(__file__).parent / "support/trl_grpo.py"), "--model", str(model)),
        *("--prompts", str(prompts), "--max-completion", str(max_completion), "--steps", str(steps)),
        *("--output", str(work)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode != 0:
        raise RuntimeError(f"TRL failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the short completions only")
    arguments = parser.parse_args()
    cases = [(16, 14, 6)] if arguments.quick else [(256, 14, 3), (16, 40, 20)]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_length_model(work / "model", MEAN, CONTEXT)
        write_prompts(work / "prompts.jsonl", 4000)
        for max_completion, our_steps, their_steps in cases:
            a = ours(
                work / "model",
                work / "prompts.jsonl",
                work / f"ours-{max_completion}",
                max_completion,
                our_steps,
            )
            b = theirs(
                work / "model",
                work / "prompts.jsonl",
                work / f"trl-{max_completion}",
                max_completion,
                their_steps,
            )
            ratio = a["samples_per_second"] / b["samples_per_second"]
            print(
                f"up to {max_completion:3d} tokens: {a['samples_per_second']:7.1f} samples/s (mean {a['mean_tokens']:.1f} tokens) "
                f"against TRL's {b['samples_per_second']:7.1f} (mean {b['mean_tokens']:.1f}): {ratio:.2f}×"
            )
            figures |= {
                f"samples_per_second_{max_completion}": a["samples_per_second"],
                f"trl_samples_per_second_{max_completion}": b["samples_per_second"],
                f"ratio_{max_completion}": ratio,
            }
    print(json.dumps({"benchmark": "against_trl", "figures": figures}))


if __name__ == "__main__":
    main()
