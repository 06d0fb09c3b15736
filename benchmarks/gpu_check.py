"""What runs on this machine's GPU, how exactly and how fast. No network; at most ten minutes on one GPU.

    python benchmarks/gpu_check.py [--device cuda|cpu] [--tiny] [--only NAME,...] [--out FILE] [--list]

It needs torch and transformers, pydantic, msgspec and numpy; neither an installation of this project nor DeepSpeed or vLLM: what
cannot run without them says so, and the rest runs. Each check is a process of its own with a deadline, so that one that
crashes or hangs costs nothing but itself. All but the last three take at most 90 s. What has not ended after ten minutes counts as
not run; of those that ``--only`` names each has all of its own time. What settles most comes first:

============ =====================================================================================================
machine      versions, device, driver, speed of a bfloat16 matrix product
attention    torch's variable-length kernel: outputs, gradients, time beside ``sdpa`` of each sequence alone, and in a model
head         the float32 head: errors of log-probabilities and gradients, time, also without kernels, cast to float32, in bfloat16
positions    the trainer's log-probabilities in bfloat16 beside plain transformers, by position, for three kinds of models
engine-FSDP2 the engine on one rank: loss, log-probabilities, gathered weights, a copy of the state beside a step, memory
engine-ZeRO1 the same under DeepSpeed, if that is there
engine-ZeRO3 the same
offload      the same under FSDP2, with parameters and optimizer state in the host's memory
offload-ZeRO the same under ZeRO 3, with optimizer state there
step-0.5B    a training step of that shape beside plain transformers: tokens/s, share of the peak, memory, share of the head
step-1.5B    the same
step-8B      the same of four layers of Llama 3 8B
files        weights through files: a base and a delta, written from the device and read bit by bit
lora         steps of low-rank adapters
moe          steps of a mixture of experts
memory       bytes by the parts of a step, beside the estimate, of wide layers and of all stages
group-1      the process group of weight updates, of one process
group-2      the same of two processes, each on a device of its own where there are two
vllm         vLLM beside the trainer: start, log-probabilities, updates through files, pause, tokens/s; 150 s at most
publish      vLLM: ``benchmarks/publish.py --quick``
run          vLLM: the tiny example, shortened
============ =====================================================================================================

The result is JSON, in ``benchmarks/results/`` by device and day unless ``--out`` says where, and is written after each check. ``--device cpu --tiny`` runs
all of it at tiny shapes. Exit code 1 when a check failed; those that could not run fail nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for member in (
    "processes",
    "api",
    "tasks",
    "trainer",
    "coordinator",
    "curvefit",
    "generator",
    "lifecycle",
    "autoscaling",
    "local",
    "operator",
    "analysis",
    "cli",
    "extras",
):
    if importlib.util.find_spec(f"scalerl_{member}") is None:
        sys.path.insert(0, str(HERE.parent / member / "src"))
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from support.gpu_device import CannotRun, Options  # noqa: E402

from scalerl_processes.kernel import adopt_orphans, reaped  # noqa: E402
from scalerl_processes.process_table import descendants, kill_all  # noqa: E402

TOTAL_SECONDS = 570.0
"""Of all checks. Those that ``--only`` names have only their own limits."""
MIN_SECONDS = 5.0
"""With less left no check begins."""
KILL_SECONDS = 10.0


def supported(module: str, name: str, *arguments: Any) -> Callable[[Options], dict[str, Any]]:
    """A check of ``support``, imported in the check's own process: most need the trainer to import."""

    def check(options: Options) -> dict[str, Any]:
        found: dict[str, Any] = getattr(importlib.import_module(f"support.{module}"), name)(
            options, *arguments
        )
        return found

    return check


CHECKS: dict[str, tuple[Callable[[Options], dict[str, Any]], float]] = {
    "machine": (supported("gpu_device", "check_machine"), 60.0),
    "attention": (supported("gpu_attention", "check_attention"), 90.0),
    "head": (supported("gpu_head", "check_head"), 90.0),
    "positions": (supported("gpu_positions", "check_positions"), 90.0),
    "engine-FSDP2": (supported("gpu_engine", "check_engine", "FSDP2"), 90.0),
    "engine-ZeRO1": (supported("gpu_engine", "check_engine", "ZeRO 1"), 90.0),
    "engine-ZeRO3": (supported("gpu_engine", "check_engine", "ZeRO 3"), 90.0),
    "offload": (supported("gpu_engine", "check_engine", "FSDP2", "OptimizerAndParameters"), 90.0),
    "offload-ZeRO": (supported("gpu_engine", "check_engine", "ZeRO 3", "Optimizer"), 90.0),
    "step-0.5B": (supported("gpu_steps", "check_step", "0.5B"), 90.0),
    "step-1.5B": (supported("gpu_steps", "check_step", "1.5B"), 90.0),
    "step-8B": (supported("gpu_steps", "check_step", "8B"), 90.0),
    "files": (supported("gpu_engine", "check_files"), 90.0),
    "lora": (supported("gpu_engine", "check_lora"), 90.0),
    "moe": (supported("gpu_engine", "check_moe"), 90.0),
    "memory": (supported("gpu_engine", "check_memory"), 90.0),
    "group-1": (supported("gpu_group", "check_group", 1), 90.0),
    "group-2": (supported("gpu_group", "check_group", 2), 90.0),
    "vllm": (supported("gpu_vllm", "check_vllm"), 150.0),
    "publish": (supported("gpu_runs", "check_publish"), 240.0),
    "run": (supported("gpu_runs", "check_run"), 240.0),
}
"""In the order they run, with the seconds that each may take."""


def child(name: str, options: Options, answer: Any) -> None:
    """One check, in a process and a process group of its own, so that a signal to the group does not reach the others."""
    os.setpgrp()
    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        result = {"status": "ok"} | CHECKS[name][0](options)
    except CannotRun as reason:
        result = {"status": "not run", "reason": str(reason)}
    except ImportError as error:
        result = {"status": "not run", "reason": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        lines = traceback.format_exc().splitlines()[-6:]
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:2000], "trace": lines}
    answer.send(result)
    answer.close()
    sys.stdout.flush()
    # Threads that are stuck in a collective would hold up an ordinary exit.
    os._exit(0)


def run_check(context: Any, name: str, options: Options, left: float) -> dict[str, Any]:
    """What a check answers within its limit and the ``left`` seconds.

    Then all processes that it has started are killed, those with a session of their own too.
    """
    limit = CHECKS[name][1] * (2 if options.device == "cpu" else 1)
    late = {"status": "not run", "reason": f"{left:.0f} s left, it needs {limit:.0f}"}
    if left < MIN_SECONDS:
        return late
    adopt_orphans()
    forkserver.ensure_running()
    others = set(descendants(os.getpid()))  # the fork server, and what else multiprocessing needs
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, options, theirs))
    begin = time.monotonic()
    process.start()
    theirs.close()

    def remaining() -> list[int]:
        list(reaped())
        return [pid for pid in descendants(os.getpid()) if pid not in others]

    try:
        if ours.poll(min(limit, left)):
            result: dict[str, Any] = ours.recv()
        elif left < limit:
            result = late
        else:
            result = {"status": "failed", "reason": f"did not end within {limit:.0f} s"}
    except EOFError:
        process.join(KILL_SECONDS)
        result = {"status": "failed", "reason": f"the process ended with {process.exitcode}"}
    finally:
        kill_all(remaining, KILL_SECONDS)
    return result | {"check_seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: whether it runs, not how fast")
    parser.add_argument("--only", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("--list", action="store_true", help="the checks' names")
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    options = Options(arguments.device, arguments.tiny)
    if arguments.receive is not None:
        importlib.import_module("support.gpu_group").receive(arguments.receive, options)
        return 0
    if arguments.list:
        print("\n".join(CHECKS))
        return 0
    names = arguments.only.split(",") if arguments.only else list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"no check is called {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    # No process but the checks' own ever touches the device: what it holds is gone when the check is.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers"])
    begin = time.monotonic()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    results: dict[str, Any] = {}
    out: Path | None = None
    for name in names:
        left = math.inf if arguments.only else TOTAL_SECONDS - (time.monotonic() - begin)
        results[name] = run_check(context, name, options, left)
        show(name, results[name])
        report = {
            "device": results.get("machine", {}).get("name", options.device),
            "tiny": options.tiny,
            "commit": commit(),
            "at": started,
            "seconds": round(time.monotonic() - begin, 1),
            "left": names[len(results) :],
            "checks": results,
        }
        before, out = out, arguments.out or result_file(str(report["device"]), started)
        write(report, out)
        if (
            before is not None and before != out
        ):  # named before the check `machine` has given the device's name
            before.unlink()
    print(f"written to {out}")
    return 1 if any(result["status"] == "failed" for result in results.values()) else 0


def result_file(device: str, started: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return HERE / "results" / f"gpu-check-{slug}-{started[:10]}.json"


def write(report: dict[str, Any], out: Path) -> None:
    """Replace ``out`` atomically: a run that is cut off leaves what its checks have measured so far."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.new")
    aside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    aside.replace(out)


def show(name: str, result: dict[str, Any]) -> None:
    print(
        f"{name:10} {result['status']:8} {result.get('check_seconds', 0):6.1f} s  {result.get('reason', '')}"
    )
    for key, value in result.items():
        if isinstance(value, dict):
            parts = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
            print(f"    {key}: {', '.join(parts)}")
        elif key not in ("status", "reason", "check_seconds"):
            print(f"    {key}: {value:.4g}" if isinstance(value, float) else f"    {key}: {value}")
    sys.stdout.flush()


def commit() -> str | None:
    """None where this is no repository, as in a copied working tree."""
    try:
        done = subprocess.run(
            ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
