"""Workloads of a run, as both runtimes (a cluster, one machine) start them. Pure.

Arguments and environment may refer to variables as Kubernetes writes them, ``$(NAME)``; :func:`literal` escapes text
of the user. The runtime sets the variables below in the environment of every container; all other text is the same
on both runtimes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

BIND = "SCALERL_BIND"
"""Address to listen on for what others reach (``0.0.0.0`` in a pod, loopback on one machine)."""
ADDRESS = "SCALERL_ADDRESS"
"""Address under which the other roles reach this replica."""

MASTER_PORT = "master"
"""Name of a gang's rendezvous port; a new one for every start of the gang."""

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


class Role(enum.StrEnum):
    PREPARE = "prepare"
    FORECASTER = "forecaster"
    """The curve-fit sidecar. On a cluster it runs in the operator's pod, so no plan of a run has it."""
    COORDINATOR = "coordinator"
    GENERATOR = "generator"
    TRAINER = "trainer"


class Lifetime(enum.StrEnum):
    """How a workload's replicas live."""

    ONCE = "once"
    """Runs to completion before the others start."""
    SERVICE = "service"
    """Runs as long as the run; each container is restarted on its own."""
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

    devices: accelerators, not shared with others.
    cpu_threads: compute threads; None: the runtime chooses for the machine.
    memory_bytes: memory that the spec asks for; None: the spec does not say.
    """

    devices: int = 0
    cpu_threads: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Volume:
    """A path that is mounted in the container."""

    path: str
    writable: bool = False


@dataclass(frozen=True)
class Container:
    """One process: its command, its ports and its probes.

    startup: runs until it succeeds once, before the other probes; past its threshold the process is restarted.
    liveness: past its threshold the process is restarted.
    readiness: whether the process takes work; a failure restarts nothing.
    loopback: those of ``ports`` that only the replica's own containers reach; probed from inside.
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
    volumes: tuple[Volume, ...] = ()


@dataclass(frozen=True)
class Workload:
    """Replicas of one role; the containers of a replica share its ports and its address.

    per_node: replicas that share a node's devices; a cluster runs them as processes of one pod.
    essential: the run ends when it fails for good.
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


class UnknownVariable(Exception):
    """A plan refers to a variable that the runtime does not set."""


def port_variable(port: str) -> str:
    """Environment variable that carries the number of a named port.

    >>> port_variable("http")
    'SCALERL_PORT_HTTP'
    """
    return f"SCALERL_PORT_{port.upper()}"


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace every ``$(NAME)``, and ``$$`` by ``$``.

    >>> expand("--listen=$(SCALERL_BIND):$(SCALERL_PORT_HTTP)", {"SCALERL_BIND": "::", "SCALERL_PORT_HTTP": "80"})
    '--listen=:::80'

    Raises:
        UnknownVariable: a name is not among ``variables``.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        if name not in variables:
            raise UnknownVariable(f"$({name}) in {text!r}; known: {', '.join(sorted(variables))}")
        return variables[name]

    return _REFERENCE.sub(value, text)


def literal(text: str) -> str:
    """Escape text so that :func:`expand` returns it unchanged.

    >>> literal("a$(b)"), expand(literal("a$(b)"), {})
    ('a$$(b)', 'a$(b)')
    """
    return text.replace("$", "$$")
