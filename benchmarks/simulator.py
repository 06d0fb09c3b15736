"""``scalerl simulate`` against ``scalerl run``: makespans of whole runs, generator and trainer on one core each.

Each run writes a trace. Its makespan is simulated with the speeds fitted to its own trace, and with those fitted to the traces of
the other runs, which had another staleness or concurrency.

    python benchmarks/simulator.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from support.length_model import make_length_model, write_prompts
from support.measured_run import manifest, measured_run

from scalerl_coordinator.scheduling import LeastLoaded
from scalerl_coordinator.slots import OffPolicy
from scalerl_extras.simulation.simulator import simulate
from scalerl_extras.simulation.speeds import fit_decode, fit_trainer, publish_seconds
from scalerl_extras.simulation.trace_file import RunTrace, read_trace
from scalerl_extras.simulation.workload import Cluster, from_history

PINS = {"generator": 0, "trainer": 1, "coordinator": 1}
CONTEXT, COMPLETION, COMPLETIONS = 288, 256, 8
RUNS = {
    "k = 0, 64 sequences": (0, 64),
    "k = 1, 64 sequences": (1, 64),
    "k = 4, 64 sequences": (4, 64),
    "k = 4, 16 sequences": (4, 16),
}


def cluster_of(run: RunTrace) -> Cluster:
    """With the speeds of the trace."""
    return Cluster(
        run.generators, run.settings.concurrency, fit_decode(run), *fit_trainer(run), publish_seconds(run)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two runs of few steps")
    arguments = parser.parse_args()
    steps, prompts = (6, 4) if arguments.quick else (30, 8)
    traces = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_length_model(work / "model", 80, CONTEXT)
        write_prompts(work / "prompts.jsonl", 4000)
        for name in list(RUNS)[:: 3 if arguments.quick else 1]:
            k, concurrency = RUNS[name]
            run = manifest(
                "simulator",
                work / "model",
                work / "prompts.jsonl",
                CONTEXT,
                recipe={
                    "promptsPerStep": prompts,
                    "completionsPerPrompt": COMPLETIONS,
                    "maxCompletionTokens": COMPLETION,
                    "offPolicy": {"pipeline": {"maxStalenessSteps": k}},
                },
                generator={"cpuThreads": 1, "kvCache": "512Mi", "maxConcurrentSequences": concurrency},
                trainer={"replicas": 1, "cpuThreads": 1},
                budget={"maxSteps": steps},
                trace=True,
            )
            measured_run(run, work / name, PINS)
            traces[name] = read_trace(work / name / "run" / "trace.jsonl")
    clusters = {name: cluster_of(trace) for name, trace in traces.items()}
    figures: dict[str, dict[str, float]] = {}
    print(f"{'makespan s':22}{'measured':>9}" + "".join(f"{name:>22}" for name in traces))
    for name, trace in traces.items():
        k, concurrency = RUNS[name]
        figures[name] = {"measured": trace.makespan}
        for other, speeds in clusters.items():
            cluster = replace(speeds, concurrency=concurrency)
            out = simulate(trace.work, cluster, LeastLoaded(), from_history(trace.work), OffPolicy(k))
            figures[name][f"speeds of {other}"] = out.makespan / trace.makespan - 1
        errors = list(figures[name].values())[1:]
        print(f"{name:22}{trace.makespan:9.1f}" + "".join(f"{error:+22.1%}" for error in errors))
    print(json.dumps({"benchmark": "simulator", "figures": figures}))


if __name__ == "__main__":
    main()
