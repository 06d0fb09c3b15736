"""Host memory of each container of a run, measured, beside the request that the operator derives (``scalerl_api.memory.containers``).

    python benchmarks/pod_memory.py [--quick] [--only NAME;...]

Each case is a run on this machine with a scratch model: a preparation, a vLLM server with its actor, and one or two trainer ranks
that take two steps with a checkpoint, a publish and an export after each. *measured* is the highest sum of the proportional
resident memory (PSS: private pages, a share of shared ones, mapped libraries) of a container's processes, sampled five times a
second; of a trainer rank at least the kernel's own maximum of its anonymous pages. *estimate* may not be below it. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from scalerl_api.load import load_run
from scalerl_api.memory.containers import container_bytes
from scalerl_api.memory.model_size import ModelSize

LIMIT_SECONDS = 900.0
_MIB = 2**20
SMALL = {"layers": 4, "hiddenSize": 128, "attentionHeads": 4, "intermediateSize": 384, "vocabularySize": 128}
MEDIUM = {
    "layers": 14,
    "hiddenSize": 768,
    "attentionHeads": 12,
    "intermediateSize": 2048,
    "vocabularySize": 512,
}
"""99 M parameters."""
LARGE = {
    "layers": 18,
    "hiddenSize": 1280,
    "attentionHeads": 20,
    "intermediateSize": 3456,
    "vocabularySize": 512,
}
"""357 M parameters."""


def case(model: dict[str, int], dtype: str, ranks: int, **trainer: Any) -> dict[str, Any]:
    return {"model": model, "dtype": dtype, "trainer": {"replicas": ranks, **trainer}}


CASES: dict[str, dict[str, Any]] = {
    "1 M, float32, 1 rank": case(SMALL, "float32", 1),
    "99 M, float32, 1 rank": case(MEDIUM, "float32", 1),
    "99 M, float32, 2 ranks": case(MEDIUM, "float32", 2),
    "99 M, bfloat16, 1 rank": case(MEDIUM, "bfloat16", 1),
    "99 M, bfloat16, 2 ranks": case(MEDIUM, "bfloat16", 2),
    "99 M, bfloat16, 2 ranks, ZeRO 3": case(MEDIUM, "bfloat16", 2, zeroStage=3),
    "357 M, bfloat16, 1 rank": case(LARGE, "bfloat16", 1),
}
QUICK = ("1 M, float32, 1 rank",)


def run_file(folder: Path, settings: dict[str, Any]) -> Path:
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(20) for b in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "model": {"scratch": settings["model"], "dtype": settings["dtype"], "contextTokens": 32},
        "task": {"jsonl": {"path": "data.jsonl"}, "verifier": {"name": "exact"}, "heldOut": {"size": 8}},
        "recipe": {
            "promptsPerStep": 4,
            "completionsPerPrompt": 2,
            "maxCompletionTokens": 6,
            "zeroVarianceFilter": False,
        },
        "generator": {"cpuThreads": 1, "kvCache": "256Mi"},
        "trainer": {"cpuThreads": 1, "zeroStage": 1, "microBatchTokens": 64} | settings["trainer"],
        "evaluation": {"everySteps": 1, "samplesPerPrompt": 1},
        "checkpoint": {"everySteps": 1, "keep": 1},
        "budget": {"maxSteps": 2, "maxSeconds": int(LIMIT_SECONDS)},
    }
    run = {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": "memory"},
        "spec": spec,
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def containers(directory: Path) -> dict[str, list[int]]:
    """Processes of the run in ``directory``, by container."""
    wanted = f"SCALERL_DIR={directory}".encode()
    found: dict[str, list[int]] = defaultdict(list)
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                names[int(entry.name)] = _container(command)
        except (OSError, IndexError, ValueError):
            continue
    for pid in parents:
        above = pid
        while above in parents and not names.get(above):
            above = parents[above]
        if names.get(above):
            found[f"{names[above]} {_leader(above, names, parents)}"].append(pid)
    return found


def _leader(pid: int, names: dict[int, str], parents: dict[int, int]) -> int:
    """The first process of the same container above this one."""
    while names.get(parents.get(pid, 0)) == names[pid]:
        pid = parents[pid]
    return pid


def _container(command: str) -> str:
    if "subreaper" in command:
        return ""
    modules = {
        "scalerl_trainer.prepare": "prepare",
        "scalerl_trainer.models.structure": "prepare",
        "scalerl_trainer.main": "trainer",
        "scalerl_generator.vllm_server": "server",
    }
    return next((name for module, name in modules.items() if module in command), "")


def resident(pid: int) -> tuple[int, int]:
    """Proportional resident bytes, and the highest anonymous ones so far; zeros for a process that has ended."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        pss = next(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
        status = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
        highest = int(status["VmHWM"].split()[0]) - int(status["RssFile"].split()[0])
    except (OSError, StopIteration, KeyError, ValueError):
        return 0, 0
    return pss * 1024, highest * 1024


def measure(settings: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Peak and estimated bytes by container (of trainer ranks the largest). Raises ``RuntimeError`` with the run's last lines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, directory = run_file(folder, settings), folder / "run"
        spec = load_run(file).spec
        with (folder / "output").open("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "scalerl_cli.main", "run", str(file), "--dir", str(directory)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder,
            )  # fmt: skip
            highest: dict[str, int] = defaultdict(int)
            end = time.monotonic() + LIMIT_SECONDS
            while process.poll() is None and time.monotonic() < end:
                for container, pids in containers(directory).items():
                    found = [resident(pid) for pid in pids]
                    now = sum(pss for pss, _ in found)
                    if container.startswith("trainer"):
                        now = max(now, max(anonymous for _, anonymous in found))
                    highest[container.split()[0]] = max(highest[container.split()[0]], now)
                time.sleep(0.2)
            if process.poll() is None:
                process.terminate()
            if process.wait() != 0:
                log.seek(0)
                raise RuntimeError(log.read()[-3000:])
        assert spec.model.scratch is not None
        size = ModelSize.of_scratch(spec.model.scratch)
        return dict(highest), {
            "prepare": container_bytes("prepare", size, spec),
            "server": container_bytes("server", size, spec),
            "trainer": container_bytes("trainer", size, spec),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one case")
    parser.add_argument("--only", help="names of cases, separated by semicolons")
    arguments = parser.parse_args()
    names = arguments.only.split(";") if arguments.only else QUICK if arguments.quick else tuple(CASES)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'case':32} {'container':9} {'measured':>9} {'estimate':>9} {'above':>7}   MiB")
    for name in names:
        found, estimates = measure(CASES[name])
        rows[name] = {}
        for container, expected in estimates.items():
            peak = found.get(container, 0)
            row = {"measured": round(peak / _MIB), "estimate": round(expected / _MIB)}
            rows[name][container] = row
            above = expected / peak - 1 if peak else 0.0
            print(
                f"{name:32} {container:9} {row['measured']:9,} {row['estimate']:9,} {above:+7.1%}", flush=True
            )
    print(json.dumps(rows))
    if any(row["estimate"] < row["measured"] for case in rows.values() for row in case.values()):
        sys.exit("an estimate is below what was measured")


if __name__ == "__main__":
    main()
