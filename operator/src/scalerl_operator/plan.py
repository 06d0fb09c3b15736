"""Plan: what has to run for a spec, in words that no runtime owns. Pure.

Arguments and environment may refer to variables as Kubernetes writes them, ``$(NAME)``; text that a
user wrote goes through :func:`literal`, so that nothing in it is one. The values
of the variables below are the runtime's to give, in the environment of every container; all other
text is the same wherever the run lives.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_api.fields import quantity_bytes
from scalerl_api.paths import RunPaths
from scalerl_api.process import COORDINATOR_URL, DIR, TRAINER_HOST
from scalerl_api.spec import ModelSpec, RunSpec, ScaleRLRun

BIND = "SCALERL_BIND"
"""Address to listen on for what others reach (``0.0.0.0`` in a pod, loopback on one machine)."""
ADDRESS = "SCALERL_ADDRESS"
"""Address under which the other roles reach this replica."""

MASTER_PORT = "master"
"""Name of a gang's rendezvous port; a new one for every start of the gang."""

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


class Role(enum.StrEnum):
    PREPARE = "prepare"
    COORDINATOR = "coordinator"
    GENERATOR = "generator"
    TRAINER = "trainer"


class Lifetime(enum.StrEnum):
    """How a workload's replicas live."""

    ONCE = "once"
    """Runs to completion; what comes ``after`` it starts then."""
    SERVICE = "service"
    """Runs as long as the run; each container is restarted by itself."""
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
    """What one container needs.

    devices: accelerators, its alone.
    cpu_threads: compute threads; None leaves it to the runtime, which knows the machine.
    memory_bytes: memory known from the spec to be needed; None if the spec does not say.
    """

    devices: int = 0
    cpu_threads: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Volume:
    """A path that the container has to see."""

    path: str
    writable: bool = False


@dataclass(frozen=True)
class Container:
    """One process: its command, what it listens on, and how to tell that it works.

    startup: until it succeeds once, the others are not asked; past its threshold the process is restarted.
    liveness: past its threshold the process is restarted.
    readiness: says only whether the process takes work.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[str, ...] = ()
    startup: Probe | None = None
    liveness: Probe | None = None
    readiness: Probe | None = None
    resources: Resources = Resources()
    volumes: tuple[Volume, ...] = ()


@dataclass(frozen=True)
class Workload:
    """Replicas of one role; the containers of a replica share its ports and its address.

    essential: the run ends when it fails for good.
    """

    role: Role
    lifetime: Lifetime
    containers: tuple[Container, ...]
    replicas: int = 1
    after: tuple[Role, ...] = ()
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

    run: str
    workloads: tuple[Workload, ...]

    def workload(self, role: Role) -> Workload:
        return next(w for w in self.workloads if w.role is role)

    def devices(self) -> int:
        """Accelerators that all replicas need together."""
        return sum(w.replicas * c.resources.devices for w in self.workloads for c in w.containers)


class UnknownVariable(Exception):
    """A plan refers to a variable that the runtime did not give."""


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
    """Text that :func:`expand` gives back as it is.

    >>> literal("a$(b)"), expand(literal("a$(b)"), {})
    ('a$$(b)', 'a$(b)')
    """
    return text.replace("$", "$$")


def plan(run: ScaleRLRun) -> Plan:
    """The workloads of a run. Same spec, same plan; nothing is read, nothing is chosen by chance."""
    spec = run.spec
    return Plan(run.metadata.name, (_prepare(spec), _coordinator(spec), _generator(spec), _trainer(spec)))


# Compiled helpers and large weights make first starts slow; a probe that gives up early would turn
# a slow start into an endless one.
_STARTUP_SECONDS = 1800
_STARTUP_PERIOD_SECONDS = 1.0


def _probes(health: str, ready: str, port: str, *, stuck_seconds: int) -> tuple[Probe, Probe, Probe]:
    """Startup, liveness and readiness; ``stuck_seconds``: no answer for so long means restart."""
    startup = Probe(
        health, port, _STARTUP_PERIOD_SECONDS, 5.0, int(_STARTUP_SECONDS / _STARTUP_PERIOD_SECONDS)
    )
    return startup, Probe(health, port, 10.0, 10.0, stuck_seconds // 10), Probe(ready, port, 1.0, 5.0, 1)


def _environment(spec: RunSpec, *, offline: bool = True) -> dict[str, str]:
    environment = {
        "PYTHONUNBUFFERED": "1",
        # A file in the folder where the user stands must not pass for a module.
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if offline:
        # Everything a role reads lies in the run's directory once `prepare` is done.
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def _volumes(spec: RunSpec, *, sources: bool, writable: bool = True) -> tuple[Volume, ...]:
    run = Volume(f"$({DIR})", writable=writable)
    jsonl = (Volume(literal(spec.task.jsonl.path)),) if spec.task.jsonl else ()
    model = (Volume(literal(spec.model.path)),) if sources and spec.model.path else ()
    return (run, *model, *jsonl)


def _listen(port: str) -> str:
    return f"$({BIND}):$({port_variable(port)})"


def _prepare(spec: RunSpec) -> Workload:
    container = Container(
        name="prepare",
        argv=("python", "-m", "scalerl_trainer.prepare"),
        env=_environment(spec, offline=_is_local(spec.model)),
        volumes=_volumes(spec, sources=True),
    )
    return Workload(Role.PREPARE, Lifetime.ONCE, (container,))


def _is_local(model: ModelSpec) -> bool:
    return model.hub is None


def _coordinator(spec: RunSpec) -> Workload:
    startup, liveness, readiness = _probes("/healthz", "/readyz", "http", stuck_seconds=60)
    container = Container(
        name="coordinator",
        argv=("python", "-m", "scalerl_coordinator.main", "--listen", _listen("http")),
        env=_environment(spec),
        ports=("http",),
        startup=startup,
        liveness=liveness,
        readiness=readiness,
        resources=Resources(cpu_threads=1),
        volumes=_volumes(spec, sources=False),
    )
    return Workload(Role.COORDINATOR, Lifetime.SERVICE, (container,), after=(Role.PREPARE,))


def _generator(spec: RunSpec) -> Workload:
    generator = spec.generator
    startup, liveness, readiness = _probes("/health", "/health", "vllm", stuck_seconds=120)
    server = Container(
        name="server",
        # Loopback, not $(SCALERL_BIND): vLLM's development endpoints are for the actor beside it alone.
        argv=(
            "python",
            "-m",
            "scalerl_generator.vllm_server",
            *("--host", "127.0.0.1", "--port", f"$({port_variable('vllm')})"),
            *_server_options(spec),
        ),
        env=_environment(spec),
        ports=("vllm",),
        startup=startup,
        liveness=liveness,
        readiness=readiness,
        resources=Resources(
            generator.devices,
            generator.cpu_threads,
            quantity_bytes(generator.kv_cache) if generator.kv_cache else None,
        ),
        volumes=_volumes(spec, sources=False, writable=False),
    )
    startup, liveness, readiness = _probes("/healthz", "/readyz", "control", stuck_seconds=60)
    verifier = spec.task.verifier
    actor = Container(
        name="actor",
        argv=(
            "python",
            "-m",
            "scalerl_generator.actor",
            "--server",
            f"http://127.0.0.1:$({port_variable('vllm')})",
            "--listen",
            _listen("control"),
            "--advertise",
            f"http://$({ADDRESS}):$({port_variable('control')})",
        ),
        env=_environment(spec),
        ports=("control",),
        startup=startup,
        liveness=liveness,
        readiness=readiness,
        resources=Resources(cpu_threads=1, memory_bytes=quantity_bytes(verifier.memory) * verifier.workers),
        volumes=_volumes(spec, sources=False, writable=False),
    )
    return Workload(
        Role.GENERATOR, Lifetime.SERVICE, (server, actor), generator.replicas, after=(Role.PREPARE,)
    )


def _server_options(spec: RunSpec) -> tuple[str, ...]:
    generator = spec.generator
    options = [
        *("--model", RunPaths(Path(f"$({DIR})")).base_model.as_posix()),
        *("--dtype", spec.model.dtype),
        *("--max-model-len", str(spec.model.context_tokens)),
        *("--max-num-seqs", str(generator.max_concurrent_sequences)),
        *("--memory-fraction", generator.memory_fraction),
        *("--tensor-parallel", str(max(1, generator.devices))),
        "--fp32-head" if spec.recipe.fp32_head else "--no-fp32-head",
    ]
    if generator.kv_cache:
        options += ["--kv-cache-bytes", str(quantity_bytes(generator.kv_cache))]
    if generator.cpu_threads:
        options += ["--threads", str(generator.cpu_threads)]
    return (*options, *(("--", *map(literal, generator.extra_args)) if generator.extra_args else ()))


def _trainer(spec: RunSpec) -> Workload:
    trainer = spec.trainer
    startup, liveness, readiness = _probes("/healthz", "/readyz", "http", stuck_seconds=300)
    environment = _environment(spec) | {TRAINER_HOST: f"$({ADDRESS})"}
    if trainer.devices == 0:
        environment["DS_ACCELERATOR"] = "cpu"
    container = Container(
        name="trainer",
        argv=("python", "-m", "scalerl_trainer.main", "--listen", _listen("http")),
        env=environment,
        ports=("http",),
        startup=startup,
        liveness=liveness,
        readiness=readiness,
        resources=Resources(trainer.devices, trainer.cpu_threads),
        volumes=_volumes(spec, sources=False),
    )
    return Workload(Role.TRAINER, Lifetime.GANG, (container,), trainer.replicas, after=(Role.PREPARE,))


__all__ = [
    "ADDRESS",
    "BIND",
    "COORDINATOR_URL",
    "MASTER_PORT",
    "Container",
    "Lifetime",
    "Plan",
    "Probe",
    "Resources",
    "Role",
    "UnknownVariable",
    "Volume",
    "Workload",
    "expand",
    "literal",
    "plan",
    "port_variable",
]
