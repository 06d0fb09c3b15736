"""The plan of a run: the containers of each role with command, environment, probes and resources, from the spec. Pure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, TypedDict

from scalerl_api import endpoints
from scalerl_api.built_in import SERVER
from scalerl_api.environment import EnvironmentSpec
from scalerl_api.fields import quantity_bytes
from scalerl_api.paths import RunPaths
from scalerl_api.process import DIR, TOKEN_FILE, TRAINER_HOST
from scalerl_api.spec import ReasoningGymSource, RunSpec, ScaleRLRun, VerifierSpec
from scalerl_api.speculation import MAX_DRAFT_TOKENS, MEMORY_BYTES_PER_TOKEN
from scalerl_lifecycle.workloads import (
    ADDRESS,
    BIND,
    Container,
    Lifetime,
    Plan,
    Probe,
    Resources,
    Role,
    Workload,
    literal,
    port_variable,
)


def plan(run: ScaleRLRun) -> Plan:
    """The workloads of a run."""
    spec = run.spec
    return Plan((_prepare(spec), _coordinator(spec), _generator(spec), _trainer(spec), *_environment(spec)))


# Compilation and large weights make first starts slow; an early failure of the startup probe would restart the process
# repeatedly.
_STARTUP_SECONDS = 1800
_STARTUP_PERIOD_SECONDS = 1.0
_WATERMARK = "0.1"
"""Share of the KV cache that the server keeps free when it admits a sequence, with ``generator.adaptiveConcurrency``."""


_MAX_SERVERS: Final = 1024


class _Probes(TypedDict):
    startup: Probe
    liveness: Probe
    readiness: Probe


def _probes(health: str, ready: str, port: str, *, stuck_seconds: int) -> _Probes:
    """Without an answer for ``stuck_seconds`` the process is restarted."""
    return {
        "startup": Probe(
            health, port, _STARTUP_PERIOD_SECONDS, 5.0, int(_STARTUP_SECONDS / _STARTUP_PERIOD_SECONDS)
        ),
        "liveness": Probe(health, port, 10.0, 10.0, stuck_seconds // 10),
        "readiness": Probe(ready, port, 1.0, 5.0, 1),
    }


_ONLINE: Final = {
    "PYTHONUNBUFFERED": "1",
    # A file in the working directory must not be imported as a module.
    "PYTHONSAFEPATH": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
ENVIRONMENT: Final = _ONLINE | {"HF_HUB_OFFLINE": "1"}
"""Offline: after `prepare`, everything that a role reads is in the run's directory."""


def forecaster() -> Workload:
    """The curve-fit sidecar of a local run."""
    container = Container(
        name="sidecar",
        argv=(
            *("python", "-m", "scalerl_curvefit.sidecar", "--host", f"$({BIND})"),
            *("--port", f"$({port_variable('http')})", "--token-file", f"$({TOKEN_FILE})"),
        ),
        env=ENVIRONMENT,
        ports=("http",),
        resources=Resources(cpu_threads=1),
        **_probes(endpoints.HEALTH, endpoints.HEALTH, "http", stuck_seconds=60),
    )
    return Workload(Role.FORECASTER, Lifetime.SERVICE, (container,), essential=False)


def _graders_memory_bytes(spec: RunSpec) -> int:
    """Memory of all scoring processes of a generator; tasks with equal verifiers share theirs."""
    graders: list[tuple[VerifierSpec, ReasoningGymSource | None]] = []
    for task in spec.tasks:
        for one in task.scoring:
            grader = one, task.reasoning_gym if one.name == "reasoning-gym" else None
            if grader not in graders and one.http is None:
                graders.append(grader)
    environments: list[tuple[EnvironmentSpec, list[VerifierSpec], str]] = []
    for task in spec.tasks:
        if (own := task.stepping_environment) is not None and not own.is_server:
            key = own, list(task.scoring), task.combine  # one beside a verifier is started for each scoring
            if key not in environments:
                environments.append(key)
    return sum(
        (quantity_bytes(verifier.memory) + (quantity_bytes(verifier.code.memory) if verifier.code else 0))
        * verifier.workers
        for verifier, _ in graders
    ) + sum(
        quantity_bytes(own.memory) * own.workers * (2 if own.has_tools else 1)  # and that of a program
        for own, _, _ in environments
    )


def _listen(port: str) -> str:
    return f"$({BIND}):$({port_variable(port)})"


def _prepare(spec: RunSpec) -> Workload:
    uses_hub = spec.model.hub is not None or any(source.uses_hub for source in spec.prompt_sources)
    container = Container(
        name="prepare",
        argv=("python", "-m", "scalerl_trainer.prepare"),
        env=_ONLINE if uses_hub else ENVIRONMENT,
        writes_run=True,
    )
    return Workload(Role.PREPARE, Lifetime.ONCE, (container,))


def _coordinator(spec: RunSpec) -> Workload:
    container = Container(
        name="coordinator",
        argv=("python", "-m", "scalerl_coordinator.main", "--listen", _listen("http")),
        env=ENVIRONMENT,
        ports=("http",),
        resources=Resources(cpu_threads=1),
        writes_run=True,
        **_probes(endpoints.HEALTH, endpoints.READY, "http", stuck_seconds=60),
    )
    return Workload(Role.COORDINATOR, Lifetime.SERVICE, (container,))


def _generator(spec: RunSpec) -> Workload:
    generator = spec.generator
    cache = quantity_bytes(generator.kv_cache) if generator.kv_cache else 0
    workers = generator.cpu_workers or 1
    threads = generator.cpu_threads and generator.cpu_threads * workers
    drafts = MEMORY_BYTES_PER_TOKEN * spec.draft_memory_tokens
    server = Container(
        name="server",
        # Loopback, not $(SCALERL_BIND): only the actor of the same replica may call vLLM's development endpoints.
        argv=(
            *("python", "-m", "scalerl_generator.vllm_server"),
            *("--host", "127.0.0.1", "--port", f"$({port_variable('vllm')})"),
            *_server_options(spec),
        ),
        env=ENVIRONMENT,
        ports=("vllm",),
        loopback=("vllm",),
        resources=Resources(generator.devices, threads, workers * cache + drafts or None),
        **_probes("/health", "/health", "vllm", stuck_seconds=120),
    )
    actor = Container(
        name="actor",
        argv=(
            *(
                "python",
                "-m",
                "scalerl_generator.actor",
                "--server",
                f"http://127.0.0.1:$({port_variable('vllm')})",
            ),
            *("--listen", _listen("control")),
            *("--advertise", f"http://$({ADDRESS}):$({port_variable('control')})"),
        ),
        env=ENVIRONMENT,
        ports=("control",),
        resources=Resources(cpu_threads=1, memory_bytes=_graders_memory_bytes(spec)),
        **_probes(endpoints.HEALTH, endpoints.READY, "control", stuck_seconds=60),
    )
    return Workload(Role.GENERATOR, Lifetime.SERVICE, (server, actor), generator.replicas)


def environment_replicas(spec: RunSpec, generator_replicas: int | None = None) -> int:
    """Servers of ``spec.environment``: given, or as many as the sessions of ``generator_replicas`` need, by default all of the spec."""
    server = spec.environment
    assert server is not None
    if server.sessions_per_replica is None:
        return server.replicas
    each = sum(one.sessions for one in spec.server_environments.values() if one.name == SERVER)
    count = spec.generator.replicas if generator_replicas is None else generator_replicas
    needed = math.ceil(count * each / server.sessions_per_replica)
    return min(max(server.replicas, needed), _MAX_SERVERS)


def _environment(spec: RunSpec) -> tuple[Workload, ...]:
    """A server gets nothing of the run but where to listen: it acts on the text of a model."""
    server = spec.environment
    if server is None:
        return ()
    host, port = f"$({BIND})", f"$({port_variable('environment')})"
    command = (literal(word).replace("$$(HOST)", host).replace("$$(PORT)", port) for word in server.command)
    container = Container(
        name="environment",
        argv=tuple(command),
        env={"PYTHONUNBUFFERED": "1", "HOST": host, "PORT": port},
        ports=("environment",),
        **_probes("/health", "/health", "environment", stuck_seconds=300),
    )
    return (Workload(Role.ENVIRONMENT, Lifetime.SERVICE, (container,), environment_replicas(spec)),)


def _server_options(spec: RunSpec) -> tuple[str, ...]:
    generator = spec.generator
    options = [
        *("--model", RunPaths(Path(f"$({DIR})")).base_model.as_posix()),
        *("--dtype", spec.model.dtype),
        *("--max-model-len", str(spec.model.context_tokens)),
        *("--max-num-seqs", str(generator.max_concurrent_sequences)),
        *("--memory-fraction", generator.memory_fraction, "--seed", str(spec.seed)),
        *("--tensor-parallel", str(generator.workers)),
        "--fp32-head" if spec.recipe.fp32_logits in ("Both", "Generator") else "--no-fp32-head",
    ]
    if generator.kv_cache:
        options += ["--kv-cache-bytes", str(quantity_bytes(generator.kv_cache))]
    if generator.adaptive_concurrency:
        options += ["--stats", "--watermark", _WATERMARK]
    if generator.speculation and (history := generator.speculation.history):
        options += ["--max-draft-tokens", str(MAX_DRAFT_TOKENS)]
        options += ["--draft-memory-tokens", str(spec.draft_memory_tokens)]
        if history.drafter:
            options += ["--drafter", literal(history.drafter.model_dump_json())]
    if spec.trainer.router_replay:
        options.append("--routed-experts")
    lora = spec.trainer.lora
    if lora and spec.lora_versions:
        options += ["--lora-versions", str(spec.lora_versions), "--lora-rank", str(lora.rank)]
        if lora.target_modules:
            options += ["--lora-targets", ",".join(lora.target_modules)]
    if generator.cpu_threads:
        options += ["--threads", str(generator.cpu_threads)]
    return (*options, *(("--", *map(literal, generator.extra_args)) if generator.extra_args else ()))


def _trainer(spec: RunSpec) -> Workload:
    trainer = spec.trainer
    environment = ENVIRONMENT | {TRAINER_HOST: f"$({ADDRESS})"}
    if trainer.devices == 0:
        environment["DS_ACCELERATOR"] = "cpu"
    container = Container(
        name="trainer",
        argv=("python", "-m", "scalerl_trainer.main", "--listen", _listen("http")),
        env=environment,
        ports=("http",),
        resources=Resources(min(1, trainer.devices), trainer.cpu_threads),
        writes_run=True,
        **_probes(endpoints.HEALTH, endpoints.READY, "http", stuck_seconds=300),
    )
    return Workload(
        Role.TRAINER, Lifetime.GANG, (container,), trainer.ranks, per_node=max(1, trainer.devices)
    )
