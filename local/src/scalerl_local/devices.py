"""The accelerators of this machine, listed without loading a framework, and their assignment to processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from scalerl_lifecycle.workloads import Plan, Role, Workload

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_LIST_SECONDS = 30


class NotEnoughDevices(Exception):
    """The spec needs more accelerators than this machine has, or their names are not numbers, which DeepSpeed needs."""


def machine_devices(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names of the usable devices: those in ``CUDA_VISIBLE_DEVICES``, else all that ``nvidia-smi -L`` lists."""
    listed = environ.get(VISIBLE)
    if listed is not None:
        names = [name.strip() for name in listed.split(",") if name.strip()]
        # CUDA ignores the first invalid entry and all after it.
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
    """Raises NotEnoughDevices unless each process can have its own devices."""
    containers = [(w, c) for w in plan.workloads for c in w.containers if c.resources.devices]
    if plan.devices() > len(available):
        wanted = "; ".join(f"spec.{w.role}: {w.replicas} × {c.resources.devices}" for w, c in containers)
        raise NotEnoughDevices(
            f"{plan.devices()} devices asked for ({wanted}), {len(available)} found on this machine; "
            "lower replicas or devices, set devices: 0 to run on CPU, or see that nvidia-smi -L and "
            f"{VISIBLE} show the devices"
        )
    named = next((name for name in available if not name.isdecimal()), None)
    if named is not None and any(w.role is Role.TRAINER for w, _ in containers):
        # DeepSpeed (0.19) ends with a ValueError.
        raise NotEnoughDevices(
            f"{VISIBLE} names {named}, but the trainer's DeepSpeed reads only numbers: give those of nvidia-smi -L"
        )


class Pool:
    """Assigns the devices of this machine to processes: disjoint, adjacent ones together.

    Raises:
        NotEnoughDevices: see :func:`check`.
    """

    def __init__(self, plan: Plan) -> None:
        available = machine_devices() if plan.devices() else ()
        check(plan, available)
        self._free = list(available)
        self._assigned: dict[tuple[str, str], tuple[str, ...]] = {}
        for workload in plan.workloads:
            self.take(workload, range(workload.replicas))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, workload: Workload, indices: Iterable[int]) -> None:
        """Assigns devices to all of these replicas, or to none.

        Raises:
            NotEnoughDevices: nothing was assigned.
        """
        wanted = [
            (workload.replica_name(i), c.name, c.resources.devices)
            for i in indices
            for c in workload.containers
        ]
        count = sum(devices for *_, devices in wanted)
        if count > len(self._free):
            raise NotEnoughDevices(
                f"{count} more devices asked for, {len(self._free)} of this machine are free"
            )
        for replica, container, devices in wanted:
            self._assigned[replica, container] = tuple(self._free[:devices])
            del self._free[:devices]

    def give_back(self, replica: str) -> None:
        """Frees the devices of a replica that has ended."""
        for key in [key for key in self._assigned if key[0] == replica]:
            self._free.extend(self._assigned.pop(key))

    def of(self, replica: str, container: str) -> tuple[str, ...]:
        return self._assigned[replica, container]
