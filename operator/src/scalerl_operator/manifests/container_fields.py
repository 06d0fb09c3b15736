"""What containers have by the plan and the spec: environment variables, probes, and resources, also memory by the model's size.
Pure."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Final

from kubernetes.utils.quantity import parse_quantity

from scalerl_api import process as api
from scalerl_api.load import SpecProblem
from scalerl_api.memory.containers import container_bytes, has_estimate, pod_bytes
from scalerl_api.memory.model_size import ModelSize
from scalerl_api.pods import PodResources, PodTemplate
from scalerl_api.reserved_in_pods import RANK_VARIABLES
from scalerl_lifecycle.workloads import ADDRESS, BIND, Container, Probe, Role, port_variable
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.scope import SECTION, PodSettings, Scope, pod_template_of
from scalerl_operator.manifests.volumes import is_own_directory, shared_memory_bytes
from scalerl_operator.names import PORTS, RUN_DIR, SPEC_DIR, SPEC_KEY, TOKEN_DIR, TOKEN_KEY

HOME: Final = "/tmp/home"  # noqa: S108 - a volume of its own
_OF_THE_RUN: Final = (api.DIR, api.RUN_FILE, api.TOKEN_FILE, api.COORDINATOR_URL, api.OWN_DIRECTORY)
"""Variables that environment servers do not have."""
HTTP_PERIOD_SECONDS: Final = 5
EXEC_PERIOD_SECONDS: Final = 10
"""Each exec probe starts a process."""
READINESS_FAILURES: Final = 3
"""One late response of a busy process must not make its pod unavailable, which would block a node drain."""
_START_SECONDS = 5
"""For an exec probe's interpreter to start on a busy machine."""
# A socket needs no packages and ignores proxy variables.
_HTTP_GET = (
    "import socket,sys; s=socket.create_connection(('127.0.0.1',{port}),{timeout}); "
    r"s.sendall(b'GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n'); "
    "sys.exit(not s.makefile('rb').readline().split()[1].startswith(b'2'))"
)
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


def variable(name: str, value: str) -> Object:
    """An entry of ``env``."""
    return {"name": name, "value": value}


def from_field(name: str, path: str) -> Object:
    """A variable from a field of the pod (downward API)."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def environment_of(
    scope: Scope, settings: PodSettings, given: PodTemplate, container: Container
) -> list[Object]:
    """The runtime's variables, each of which may refer to those before it, then the plan's, then the user's. A user's variable
    overrides the plan's, not the runtime's.
    """
    threads = container.resources.cpu_threads
    ports = [port for other in scope.plan.workload(settings.role).containers for port in other.ports]
    fixed = [
        variable(api.DIR, RUN_DIR),
        variable(api.RUN_FILE, f"{SPEC_DIR}/{SPEC_KEY}"),
        variable(api.TOKEN_FILE, f"{TOKEN_DIR}/{TOKEN_KEY}"),
        variable(api.COORDINATOR_URL, scope.names.coordinator_url(scope.namespace)),
        variable(BIND, "0.0.0.0"),  # noqa: S104 - the pod's own network, restricted by the NetworkPolicy
        from_field(ADDRESS, "status.podIP"),
        *_environment_url(scope, settings.role),
        *([variable(api.OWN_DIRECTORY, "true")] if is_own_directory(scope, settings.role) else []),
        *settings.variables,
        from_field(api.NAME, "metadata.name") if settings.name is None else variable(api.NAME, settings.name),
        *(variable(port_variable(port), str(scope.port(port))) for port in ports),
    ]
    if settings.role is Role.ENVIRONMENT:
        fixed = [entry for entry in fixed if entry["name"] not in _OF_THE_RUN]
    planned = {
        "HOME": HOME,
        # torch needs a user name, and the image has no user with this number.
        "USER": "scalerl",
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        **settings.extra.get(container.name, {}),
        **container.env,
    }
    fixed_names = {entry["name"] for entry in fixed}
    user = [entry for entry in given.env if entry["name"] not in fixed_names]
    overridden = {entry["name"] for entry in user}
    if (
        given.env_from and settings.role is not Role.ENVIRONMENT
    ):  # a variable that is not set here would come from there
        planned = {name: "" for name in api.OPTIONAL if name not in fixed_names} | planned
        fixed += [entry for entry in _single_rank(settings) if entry["name"] not in fixed_names]
    return [
        *fixed,
        *(variable(name, text) for name, text in planned.items() if name not in overridden),
        *user,
    ]


def _environment_url(scope: Scope, role: Role) -> list[Object]:
    environment = scope.spec.environment
    if role is not Role.GENERATOR or environment is None:
        return []
    url = scope.names.environment_url(scope.namespace, environment.port)
    return [variable(api.ENVIRONMENT_URL, url)]


def _single_rank(settings: PodSettings) -> list[Object]:
    """Variables of torch.distributed that a trainer pod of one rank, or its launcher, does not set, as for one rank a node."""
    if settings.role is not Role.TRAINER:
        return []
    return [variable(name, "1" if name.endswith("WORLD_SIZE") else "0") for name in RANK_VARIABLES[:5]]


def probes(container: Container) -> Object:
    """``startupProbe``, ``livenessProbe`` and ``readinessProbe`` of a container."""
    given = {
        "startupProbe": container.startup,
        "livenessProbe": container.liveness,
        "readinessProbe": container.readiness,
    }
    return {
        name: _probe(probe, container, readiness=name == "readinessProbe")
        for name, probe in given.items()
        if probe is not None
    }


def _probe(probe: Probe, container: Container, *, readiness: bool) -> Object:
    """A probe with a longer period than in the local runtime, where probes are cheap, and the same time until it fails."""
    inside = probe.port in container.loopback
    period = max(math.ceil(probe.period_seconds), EXEC_PERIOD_SECONDS if inside else HTTP_PERIOD_SECONDS)
    threshold = math.ceil(probe.failure_threshold * probe.period_seconds / period)
    timeout = math.ceil(probe.timeout_seconds)
    action: Object
    if inside:
        code = _HTTP_GET.format(port=PORTS[probe.port], timeout=timeout, path=probe.path)
        action = {"exec": {"command": ["python", "-I", "-S", "-c", code]}}
        timeout += _START_SECONDS
    else:
        action = {"httpGet": {"path": probe.path, "port": probe.port}}
    return {
        **action,
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": max(threshold, READINESS_FAILURES) if readiness else threshold,
    }


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


def bytes_of_pod(scope: Scope, container: str) -> int:
    """Memory of a pod beside its processes; 0 while the model's size is not known."""
    return 0 if scope.size is None else pod_bytes(container, scope.size, scope.spec)


def estimate(scope: Scope, container: str) -> int:
    """Memory of one process of a container by the model's size; 0 where that is not known, or does not matter."""
    scratch = scope.spec.model.scratch
    size = ModelSize.of_scratch(scratch) if container == "prepare" and scratch is not None else scope.size
    return container_bytes(container, size, scope.spec) if size is not None and has_estimate(container) else 0


def memory_warnings(scope: Scope) -> Iterator[SpecProblem]:
    """Amounts of memory in actorResources that are below the default, and in podTemplate below the estimate by the model's size.
    The preparation has the trainer's podTemplate: of the two, the warning with the larger estimate."""
    (actor,) = (one for one in scope.plan.workload(Role.GENERATOR).containers if one.name == "actor")
    default = _FLOORS["actor"][1] + (actor.resources.memory_bytes or 0)
    if small := _too_little(scope.spec.generator.actor_resources, default):
        yield SpecProblem(
            f"spec.generator.actorResources.{small[0]}.memory",
            f"{small[1]} is below the {default / _MI:.0f}Mi of the container actor: 256Mi and verifier.memory × workers",
            "raise it, or leave it out",
        )
    if scope.size is None:
        return
    found: dict[tuple[str, str], tuple[int, SpecProblem]] = {}
    for role in (Role.PREPARE, Role.GENERATOR, Role.TRAINER):
        workload, given = scope.plan.workload(role), pod_template_of(scope.spec, role)
        name = workload.containers[0].name
        needed = workload.per_node * estimate(scope, name) + shared_memory_bytes(given, workload)
        if small := _too_little(given.resources, needed):
            kind, amount = small
            own = getattr(scope.spec, SECTION[role]).pod_template
            section = (
                "" if own is None or "memory" not in getattr(own.resources, kind) else f"{SECTION[role]}."
            )
            problem = SpecProblem(
                f"spec.{section}podTemplate.resources.{kind}.memory",
                f"{amount} is below the estimate of {needed / 2**30:.1f}Gi for the container {name} with this model "
                f"({scope.size.parameters / 1e6:,.0f} M parameters)",
                "raise it, or leave it out",
            )
            key = (SECTION[role], problem.where)
            found[key] = max(found.get(key, (0, problem)), (needed, problem), key=lambda one: one[0])
    yield from (problem for _, problem in found.values())


def _too_little(given: PodResources, needed: int) -> tuple[str, str] | None:
    """The limit or request of memory below ``needed`` bytes: its kind and amount. The API server reports what is no quantity."""
    for kind, amounts in (("limits", given.limits), ("requests", given.requests)):
        with contextlib.suppress(ValueError, ArithmeticError):
            if "memory" in amounts and parse_quantity(amounts["memory"]) < needed:  # type: ignore[no-untyped-call]
                return kind, amounts["memory"]
    return None
