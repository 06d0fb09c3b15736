"""Accelerators of this machine, counted without loading any framework, and who gets which."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from scalerl_operator.plan import Plan

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_LIST_SECONDS = 30


class NotEnoughDevices(Exception):
    """The spec asks for more accelerators than this machine offers."""


def machine_devices(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names of the usable devices: what ``CUDA_VISIBLE_DEVICES`` lists, else all that ``nvidia-smi -L`` lists."""
    listed = environ.get(VISIBLE)
    if listed is not None:
        names = [name.strip() for name in listed.split(",") if name.strip()]
        # CUDA stops reading at the first entry that names no device.
        return tuple(names[: names.index("-1")] if "-1" in names else names)
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    try:
        answer = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=_LIST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return ()
    gpus = [line for line in answer.stdout.splitlines() if line.startswith("GPU ")]
    return tuple(str(i) for i in range(len(gpus))) if answer.returncode == 0 else ()


def check(plan: Plan, available: Sequence[str]) -> None:
    """Raise NotEnoughDevices unless every process can have devices of its own."""
    if plan.devices() <= len(available):
        return
    asked = "; ".join(
        f"spec.{w.role}: {w.replicas} × {c.resources.devices}"
        for w in plan.workloads
        for c in w.containers
        if c.resources.devices
    )
    raise NotEnoughDevices(
        f"{plan.devices()} devices asked for ({asked}), {len(available)} found on this machine; "
        "lower replicas or devices, set devices: 0 to run on CPU, or see that nvidia-smi -L and "
        f"{VISIBLE} show the devices"
    )


def assign(plan: Plan, available: Sequence[str]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Devices by (replica name, container name); disjoint, neighbours together, in the plan's order."""
    check(plan, available)
    assigned: dict[tuple[str, str], tuple[str, ...]] = {}
    used = 0
    for workload in plan.workloads:
        for index in range(workload.replicas):
            for container in workload.containers:
                count = container.resources.devices
                assigned[workload.replica_name(index), container.name] = tuple(available[used : used + count])
                used += count
    return assigned
