"""Resources of containers. Pure."""

from __future__ import annotations

import math
from typing import Final

from scalerl_api.pods import PodResources
from scalerl_lifecycle.workloads import Container
from scalerl_operator.kube.types import Object

_MI: Final = 2**20
# Requests by container: CPU if the spec sets no threads, and memory without any model, cache or grader, which users add in
# podTemplate. Coordinator and actor mostly wait; a core for each would not fit on small clusters.
_FLOORS: Final = {
    "prepare": ("1", 1024 * _MI),
    "fetch-model": ("250m", 512 * _MI),
    "coordinator": ("250m", 256 * _MI),
    "server": ("1", 1024 * _MI),
    "actor": ("250m", 256 * _MI),
    "trainer": ("1", 1024 * _MI),
    "environment": ("500m", 512 * _MI),
}
_WAITING: Final = ("coordinator", "actor")
NATIVE: Final = ("cpu", "memory", "ephemeral-storage")


def resources(
    container: Container,
    given: PodResources,
    device_resource: str | None,
    *,
    processes: int = 1,
    shared: int = 0,
    estimate: int = 0,
    disk: int = 0,
) -> Object:
    """Requests and limits for ``processes`` processes of the container.

    Args:
        device_resource: None: the devices are not requested here, but by a claim.
        given: from podTemplate, overrides all but the devices. A limit is also the request if that is missing, as in the API
            server.
        estimate: memory of one process by the model's size, with what the spec adds; 0 where the size is not known.
        shared: memory that does not grow with the processes, as of ``/dev/shm``, bytes.
        disk: ephemeral storage; 0 for no request.
    """
    cpu, memory = _FLOORS[container.name]
    needs = container.resources
    if needs.cpu_threads is not None and container.name not in _WAITING:
        cpu = str(needs.cpu_threads)
    if processes > 1:
        cpu = str(processes * int(cpu))
    memory = processes * max(memory + (needs.memory_bytes or 0), estimate) + shared
    requests = {"cpu": cpu, "memory": f"{math.ceil(memory / _MI)}Mi"}
    if disk:
        requests["ephemeral-storage"] = f"{math.ceil(disk / _MI)}Mi"
    requests |= given.limits | given.requests
    limits = dict(given.limits)
    if needs.devices and device_resource is not None:
        requests[device_resource] = limits[device_resource] = str(processes * needs.devices)
    return {"requests": requests} | ({"limits": limits} if limits else {})


def native(given: PodResources) -> PodResources:
    """Removes extended resources such as devices, which the preparation does not use."""
    return PodResources(
        requests={name: amount for name, amount in given.requests.items() if name in NATIVE},
        limits={name: amount for name, amount in given.limits.items() if name in NATIVE},
    )
