"""Resources of containers: what the plan knows, what a process needs beside it, and what the user says."""

from __future__ import annotations

from typing import Final

from scalerl_api.pods import PodResources
from scalerl_operator.build.quantities import binary, canonical
from scalerl_operator.kube.types import Object
from scalerl_operator.workloads import Container

_MI: Final = 2**20
# By container: CPU where the spec names no threads, and memory before any model, cache or grader of its own.
# Coordinator and actor wait more than they compute; a whole core set aside for each would keep small clusters from
# running anything. Neither has a limit. What a real model needs on the CPU, the spec does not know: podTemplate.
_FLOORS: Final = {
    "prepare": ("1", 1024 * _MI),
    "coordinator": ("250m", 256 * _MI),
    "server": ("1", 1024 * _MI),
    "actor": ("250m", 256 * _MI),
    "trainer": ("1", 1024 * _MI),
}
_WAITING: Final = ("coordinator", "actor")
NATIVE: Final = ("cpu", "memory", "ephemeral-storage")


def resources(
    container: Container, given: PodResources, device_resource: str, *, processes: int = 1, shm: int = 0
) -> Object:
    """Requests and limits for so many processes of the container and ``shm`` bytes of ``/dev/shm`` that they share.

    ``given`` wins, but over the devices, which are the spec's; a limit without a request is
    requested too, as the API server would have it; devices are requested as they are limited.
    """
    cpu, memory = _FLOORS[container.name]
    needs = container.resources
    if needs.cpu_threads is not None and container.name not in _WAITING:
        cpu = str(needs.cpu_threads)
    if processes > 1:
        cpu = str(processes * int(cpu))
    requests = {"cpu": cpu, "memory": binary(processes * (memory + (needs.memory_bytes or 0)) + shm)}
    requests |= given.limits
    requests |= given.requests
    limits = dict(given.limits)
    if needs.devices:
        requests[device_resource] = limits[device_resource] = str(processes * needs.devices)
    both = {"requests": _canonical(requests)}
    return both | ({"limits": _canonical(limits)} if limits else {})


def native(given: PodResources) -> PodResources:
    """Without devices and the like: for what runs beside or before the process they are for."""
    return PodResources(
        requests={name: amount for name, amount in given.requests.items() if name in NATIVE},
        limits={name: amount for name, amount in given.limits.items() if name in NATIVE},
    )


def _canonical(amounts: dict[str, str]) -> dict[str, str]:
    return {name: canonical(amount) for name, amount in sorted(amounts.items())}
