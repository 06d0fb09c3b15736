"""Programs that need vLLM beside the trainer, ``benchmarks/publish.py`` and a run, for ``gpu_check``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.gpu_device import Options, need_devices, require

BENCHMARKS = Path(__file__).parents[1]


def check_publish(options: Options) -> dict[str, Any]:
    require("vllm", "deepspeed", "aiohttp")
    from support.vllm_process import use_source_tree

    with tempfile.TemporaryDirectory() as folder:
        use_source_tree(Path(folder))
        return last_json([sys.executable, str(BENCHMARKS / "publish.py"), "--quick"])


def check_run(options: Options) -> dict[str, Any]:
    """The tiny example's first steps after a short warm start."""
    require("vllm", "deepspeed", "aiohttp")
    import yaml

    from support.measured_run import measured_run

    example = BENCHMARKS.parent / "examples" / "tiny"
    manifest = yaml.safe_load((example / "run.yaml").read_text())
    spec = manifest["spec"]
    # A relative path starts at the folder of the run file, which is another one here.
    spec["task"]["jsonl"]["path"] = str(example / spec["task"]["jsonl"]["path"])
    spec["warmStart"] = {"steps": 50, "batchSize": 64, "learningRate": "1e-3"}
    spec["budget"] = {"maxSteps": 4}
    if options.device == "cuda":
        need_devices(2, "trainer and generator need a GPU each")
        for role in ("trainer", "generator"):
            spec[role] = {**spec.get(role, {}), "replicas": 1, "devices": 1}
            for only_on_cpu in ("cpuThreads", "kvCache"):
                spec[role].pop(only_on_cpu, None)
    with tempfile.TemporaryDirectory() as folder:
        summary, rows = measured_run(manifest, Path(folder) / "work", seconds=220)
    return {"steps": len(rows), "summary": summary}


def last_json(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[1]} ended with {done.returncode}: {done.stdout[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
