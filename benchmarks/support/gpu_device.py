"""The device of ``gpu_check``, its clock, and why a check cannot run."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TOLERANCE = 0.02
"""Mean difference of a log-probability, in nats, that rounding explains; a rotary table in bfloat16 gives .1 to 2."""


@dataclass(frozen=True)
class Options:
    device: str
    tiny: bool


class CannotRun(Exception):
    """Why a check cannot run on this machine."""


def require(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise CannotRun(f"{module} is not installed")


def clock(device: Any) -> float:
    """Now, with all that was asked of the device done."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(work: Callable[[], object], device: Any, repeats: int) -> float:
    """The best of ``repeats``, after one that does not count."""
    work()
    best = math.inf
    for _ in range(repeats):
        begin = clock(device)
        work()
        best = min(best, clock(device) - begin)
    return best


def open_device(options: Options) -> Any:
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise CannotRun("torch sees no CUDA device")
    torch.set_num_threads(min(4, torch.get_num_threads()))
    return torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")


def need_devices(count: int, why: str) -> None:
    """Raise ``CannotRun`` where this process sees fewer than ``count`` GPUs."""
    import torch

    there = torch.cuda.device_count()
    if there < count:
        raise CannotRun(f"{count} GPUs are needed, this process sees {there}: {why}")


def peak_bytes(device: Any) -> int | None:
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def check_machine(options: Options) -> dict[str, Any]:
    import torch
    import transformers

    from scalerl_trainer.utilization import peak_tflops

    device = open_device(options)
    versions: dict[str, str | None] = {"torch": torch.__version__, "transformers": transformers.__version__}
    for module in ("deepspeed", "vllm", "flash_attn"):
        found = importlib.util.find_spec(module)
        versions[module] = "installed" if found else None
    size = 256 if options.tiny else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(lambda: left @ right, device, 10)
    result: dict[str, Any] = {
        "python": sys.version.split()[0],
        "versions": versions,
        "matmul_tflops": 2 * size**3 / seconds / 1e12,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        result |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "devices": torch.cuda.device_count(),
            "peak_tflops": peak_tflops(properties.name),
            "bfloat16": torch.cuda.is_bf16_supported(),
        }
    return result
