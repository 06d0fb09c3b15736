"""Types of the plan: the workloads of a run for both runtimes (a cluster, one machine). Pure.

Arguments and environment may refer to variables in Kubernetes' syntax, ``$(NAME)``; :func:`literal` escapes a user's text. Both
runtimes set the variables below in the environment of each container.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

BIND = "SCALERL_BIND"
"""Address to listen on (``0.0.0.0`` in a pod, loopback on one machine)."""
ADDRESS = "SCALERL_ADDRESS"
"""Address under which the other roles reach this replica."""

MASTER_PORT = "master"
"""Name of a gang's rendezvous port."""

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


class Role(enum.StrEnum):
    PREPARE = "prepare"
    FORECASTER = "forecaster"
    """The curve-fit sidecar of a local run. On a cluster it runs in the operator's pod, so no plan has it."""
    COORDINATOR = "coordinator"
    GENERATOR = "generator"
    TRAINER = "trainer"
    ENVIRONMENT = "environment"
    """Servers of ``spec.environment``: a program of the user, so that its exit codes have no meaning here."""


class Lifetime(enum.StrEnum):
    """When the replicas of a workload start and end."""

    ONCE = "once"
    """Runs to completion before the others start."""
    SERVICE = "service"
    """Runs until the run ends; each container is restarted separately."""
    GANG = "gang"
    """Replicas start together and, when one fails, restart together; the run is complete when all have exited 0."""


@dataclass(frozen=True)
class Probe:
    """``GET path`` on the named port: a 2xx within ``timeout_seconds`` is a success."""

    path: str
    port: str
    period_seconds: float
    timeout_seconds: float
    failure_threshold: int


@dataclass(frozen=True)
class Resources:
    """Resources of one container.

    Attributes:
        devices: accelerators, not shared with others.
        cpu_threads: compute threads; None: the runtime chooses.
        memory_bytes: from the spec; None: not specified.
    """

    devices: int = 0
    cpu_threads: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Container:
    """One process: its command, its ports and its probes.

    Attributes:
        loopback: those of ``ports`` that only containers of the replica can reach; probed from inside.
        startup: runs before the other probes until it succeeds once; at its threshold the process is restarted.
        liveness: at its threshold the process is restarted.
        readiness: whether the process accepts work; a failure restarts nothing.
        writes_run: whether it may write to the run's directory.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[str, ...] = ()
    loopback: tuple[str, ...] = ()
    startup: Probe | None = None
    liveness: Probe | None = None
    readiness: Probe | None = None
    resources: Resources = Resources()
    writes_run: bool = False


@dataclass(frozen=True)
class Workload:
    """Replicas of one role; the containers of a replica share its ports and its address.

    Attributes:
        replicas: by the spec. On one machine, the autoscaler changes the number of generators.
        per_node: replicas that share a node's devices; a cluster runs them as processes of one pod.
        essential: the run fails when the workload does.
    """

    role: Role
    lifetime: Lifetime
    containers: tuple[Container, ...]
    replicas: int = 1
    per_node: int = 1
    essential: bool = True

    def replica_name(self, index: int) -> str:
        """Stable name of a replica, e.g. ``generator-0``.

        >>> Workload(Role.TRAINER, Lifetime.GANG, ()).replica_name(1)
        'trainer-1'
        """
        return f"{self.role}-{index}"


@dataclass(frozen=True)
class Plan:
    """All workloads of one run."""

    workloads: tuple[Workload, ...]

    def workload(self, role: Role) -> Workload:
        return next(w for w in self.workloads if w.role is role)

    def devices(self) -> int:
        """Accelerators that all replicas need together."""
        return sum(w.replicas * c.resources.devices for w in self.workloads for c in w.containers)


def port_variable(port: str) -> str:
    """Environment variable with the number of a named port.

    >>> port_variable("http")
    'SCALERL_PORT_HTTP'
    """
    return f"SCALERL_PORT_{port.upper()}"


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces each ``$(NAME)`` by its value, and ``$$`` by ``$``. Raises KeyError for a name that is not among ``variables``.

    >>> expand("--listen=$(SCALERL_BIND):$(SCALERL_PORT_HTTP)", {"SCALERL_BIND": "::", "SCALERL_PORT_HTTP": "80"})
    '--listen=:::80'
    """
    return _REFERENCE.sub(lambda match: "$" if match[1] is None else variables[match[1]], text)


def literal(text: str) -> str:
    """Escapes text so that :func:`expand` returns it unchanged.

    >>> literal("a$(b)"), expand(literal("a$(b)"), {})
    ('a$$(b)', 'a$(b)')
    """
    return text.replace("$", "$$")
