"""Pod templates: a workload's containers with the environment, volumes and security context of all pods of a run.

Every pod meets the restricted Pod Security Standard: no root, privileges or capabilities, a read-only root file system, no token
of the API server. Writable are the run's volume, ``/tmp`` (an emptyDir per container, with the home directory) and ``/dev/shm``.

With ``storage.mountedBy: Coordinator``, an emptyDir is in the place of the run's volume in all other pods, and an init container
fetches the prepared model and the tables of ``task.dataset`` into it. That container has the trainer's image and environment, with the bucket's credentials; the
others have their own role's environment only.

Environment servers, which act on the text of a model, have nothing of the run: no volume, spec or token. Their image is a user's, so
that their root file system is writable, for what its permissions let that user write.

``model.path`` and ``task.jsonl.path`` are paths in the containers, in a volume that ``podTemplate`` mounts for all roles: the
coordinator, the actor and the preparation read the task, the preparation also the model, and reports a missing path. A hub's
access token comes from a Secret by ``podTemplate.env``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kubernetes.utils.quantity import parse_quantity

from scalerl_api import endpoints
from scalerl_api import process as api
from scalerl_api.fields import quantity_bytes
from scalerl_api.load import SpecProblem
from scalerl_api.memory import ModelSize
from scalerl_api.pod_memory import container_bytes, directory_bytes, has_estimate, pod_bytes
from scalerl_api.pods import RANK_VARIABLES, EnvSource, InitContainer, PodResources, PodTemplate
from scalerl_operator import names
from scalerl_operator.build import gang
from scalerl_operator.build.resources import native, resources
from scalerl_operator.build.scope import SECTION, Scope, pod_template_of, spec_hash
from scalerl_operator.kube.types import Object
from scalerl_operator.names import (
    COMPILE_CACHE_DIR,
    MODELS_DIR,
    PORTS,
    RUN_DIR,
    SOURCE_DIR,
    SPEC_DIR,
    SPEC_KEY,
    TOKEN_DIR,
    TOKEN_KEY,
)
from scalerl_operator.role_containers import ENVIRONMENT
from scalerl_operator.workloads import (
    ADDRESS,
    BIND,
    Container,
    Probe,
    Role,
    Volume,
    Workload,
    expand,
    port_variable,
)

USER_ID: Final = 10001
SHM_GIB_PER_PROCESS: Final = 1
"""Of ``/dev/shm`` if the spec sets no size; torch needs more than a container's default of 64 MiB."""
LAUNCHER: Final = ("python", "-m", "scalerl_trainer.launch")
"""Prefix of the command of a pod with several ranks; starts it once per rank."""
HOME: Final = "/tmp/home"  # noqa: S108 - a volume of its own
TMP_LIMITS: Final = {"actor": {"sizeLimit": "1Gi"}}
"""Of ``/tmp``, by container. The actor grades untrusted text: if that fills ``/tmp``, its pod is evicted, and the node's disk is
not full. The caches of other containers' libraries have no common bound."""

READ_ONLY_CONTAINERS: Final = ("actor",)
"""Containers that grade untrusted text: of a user's volumes they may write to those only that end with the pod."""

NEVER_EVICT: Final = {
    # For node autoscalers; `kubectl drain` ignores it.
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


_OF_THE_RUN: Final = (api.DIR, api.RUN_FILE, api.TOKEN_FILE, api.COORDINATOR_URL, api.OWN_DIRECTORY)
"""Variables that environment servers do not have."""
_RESTRICTED: Final[Object] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""The security context of every container."""


@dataclass(frozen=True)
class PodSettings:
    """The settings of one role's pods.

    grace_seconds: from SIGTERM to SIGKILL.
    name: SCALERL_NAME, which may refer to ``variables``; None: the pod's name.
    variables: environment entries before the name.
    extra: environment by the name of a container.
    metrics_port: port with Prometheus metrics; None: no metrics.
    pod: fields of the pod's spec.
    extra_pod: beyond the gang of the run.
    """

    role: Role
    grace_seconds: int
    name: str | None = None
    variables: Sequence[Object] = ()
    extra: dict[str, dict[str, str]] = field(default_factory=dict)
    metrics_port: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    pod: dict[str, Any] = field(default_factory=dict)
    extra_pod: bool = False


def pod_template(scope: Scope, settings: PodSettings) -> Object:
    """``template`` of a workload object."""
    role = settings.role
    given = pod_template_of(scope.spec, role)
    containers = scope.workload(role).containers
    scraping: dict[str, str] = {}
    if settings.metrics_port is not None:
        scraping = {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(PORTS[settings.metrics_port]),
            "prometheus.io/path": endpoints.METRICS,
        }
    annotations = settings.annotations | scraping | given.annotations | _without_identity(role, given)
    main = containers[0]
    first = [
        *_fetch_container(scope, settings, given),
        *(_init_container(scope, container) for container in given.init_containers),
    ]
    spec: Object = {
        **({"initContainers": first} if first else {}),
        "containers": [_container(scope, settings, given, one, main=one is main) for one in containers],
        "volumes": [*_volumes(scope, given, scope.workload(role)), *given.volumes],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            # Changing the owner of a volume's many files at every start takes minutes.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.grace_seconds,
        **settings.pod,
        **_placement(scope, role, _with_fetch_secrets(scope, role, given)),
    }
    template = {
        "metadata": {
            "labels": given.labels | scope.labels(role) | settings.labels,
            "annotations": annotations | {names.SPEC_HASH: spec_hash(scope.run, role)},
        },
        "spec": spec,
    }
    if scope.desired.gang is not None and not settings.extra_pod:
        gang.place(template, scope.desired.gang.of(role), role, scope.names.workload)
    return template


def _placement(scope: Scope, role: Role, given: PodTemplate) -> Object:
    # The API server copies the name to a deprecated field, and an apply that left it out would not take it back. The templates of
    # Jobs are never changed.
    account = "default" if role in (Role.COORDINATOR, Role.GENERATOR, Role.ENVIRONMENT) else None
    own_pods = {"labelSelector": {"matchLabels": names.selector(scope.uid, role)}}
    wanted = {
        "nodeSelector": given.node_selector,
        "tolerations": given.tolerations,
        "affinity": given.affinity,
        "topologySpreadConstraints": [own_pods | spread for spread in given.topology_spread_constraints],
        "schedulerName": given.scheduler_name,
        "serviceAccountName": given.service_account_name or account,
        "resourceClaims": [
            claim.model_dump(by_alias=True, exclude_none=True) for claim in given.resource_claims
        ],
        "runtimeClassName": given.runtime_class_name,
        "priorityClassName": given.priority_class_name,
        "imagePullSecrets": [{"name": secret.name} for secret in given.image_pull_secrets],
    }
    return {name: value for name, value in wanted.items() if value}


def _without_identity(role: Role, given: PodTemplate) -> Object:
    """Annotations by which the webhooks of EKS and Azure give no token of the pod's service account to the container that grades
    untrusted text. The metadata server of GKE serves a pod as a whole."""
    if role is not Role.GENERATOR or given.service_account_name is None:
        return {}
    return {
        "eks.amazonaws.com/skip-containers": ",".join(READ_ONLY_CONTAINERS),
        "azure.workload.identity/skip-containers": ";".join(READ_ONLY_CONTAINERS),
    }


# --- containers ----------------------------------------------------------------------------------------------


def _fetches_model(scope: Scope, role: Role) -> bool:
    """Whether a role's pods fetch the prepared model and tables. The coordinator needs the tokenizer only, to identify past responses,
    and the tables."""
    if role is Role.COORDINATOR:
        speculation = scope.spec.generator.speculation
        history = speculation is not None and speculation.history is not None
        return has_own_directory(scope) and (history or scope.spec.has_dataset)
    return has_own_directory(scope) and role not in (Role.PREPARE, Role.ENVIRONMENT)


def _fetch_container(scope: Scope, settings: PodSettings, given: PodTemplate) -> list[Object]:
    """The init container that fetches the prepared model, where that is needed."""
    if not _fetches_model(scope, settings.role):
        return []
    of_trainer = pod_template_of(scope.spec, Role.TRAINER)
    sources = {volume["name"]: volume for volume in of_trainer.volumes}
    mounts = [m for m in of_trainer.volume_mounts if sources.get(m["name"]) in given.volumes]
    template = PodTemplate.model_construct(
        env=of_trainer.env, env_from=of_trainer.env_from, volumes=given.volumes, volume_mounts=mounts
    )
    container = _FETCH if settings.role is not Role.COORDINATOR else _FETCH_TOKENIZER
    return [_container(scope, settings, template, container, image=scope.image(Role.TRAINER))]


def _with_fetch_secrets(scope: Scope, role: Role, given: PodTemplate) -> PodTemplate:
    """The template with the secrets for pulling the trainer's image, which the init container has."""
    if not _fetches_model(scope, role):
        return given
    secrets = pod_template_of(scope.spec, Role.TRAINER).image_pull_secrets
    added = [secret for secret in secrets if secret not in given.image_pull_secrets]
    return given.model_copy(update={"image_pull_secrets": [*given.image_pull_secrets, *added]})


def _container(
    scope: Scope,
    settings: PodSettings,
    given: PodTemplate,
    container: Container,
    *,
    main: bool = False,
    image: str | None = None,
) -> Object:
    """main: the first container of the role. image: None is the role's."""
    workload = scope.workload(settings.role)
    shared = main and workload.per_node > 1
    given_resources = given.resources if main else PodResources()
    claimed = [{"name": claim.name} for claim in given.resource_claims] if main else []
    rendered: Object = {
        "name": container.name,
        "image": image or scope.image(settings.role),
        "imagePullPolicy": scope.spec.images.pull_policy or scope.images.pull_policy,
        **({"command": command} if (command := [*(LAUNCHER if shared else ()), *container.argv]) else {}),
        "env": _environment(scope, settings, given, container),
        "resources": resources(
            container,
            native(given_resources) if settings.role is Role.PREPARE else given_resources,
            None if claimed else scope.spec.device_resource,
            processes=workload.per_node if main else 1,
            shared=shared_memory_bytes(given, workload) + _pod_bytes(scope, container.name) if main else 0,
            estimate=estimate(scope, container.name),
            disk=directory_bytes(container.name, scope.size, scope.spec)
            if main and scope.size is not None and _is_own(scope, settings.role)
            else 0,
        )
        | ({"claims": claimed} if claimed else {}),
        **probes(container),
        "volumeMounts": [
            *_mounts(scope, settings.role, container, main),
            *_given_mounts(given, container),
        ],
        "securityContext": _RESTRICTED
        | ({"readOnlyRootFilesystem": False} if settings.role is Role.ENVIRONMENT else {}),
        # Conditions show the last line of a role's log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if given.env_from:
        rendered["envFrom"] = _env_from(given.env_from)
    open_ports = [port for port in container.ports if port not in container.loopback]
    if open_ports:
        rendered["ports"] = [
            {"name": port, "containerPort": scope.port(port), "protocol": "TCP"} for port in open_ports
        ]
    return rendered


def _init_container(scope: Scope, given: InitContainer) -> Object:
    rendered: Object = {
        "name": given.name,
        "image": given.image,
        "command": given.command,
        "args": given.args,
        "env": given.env,
        "envFrom": _env_from(given.env_from),
        "resources": given.resources.model_dump(exclude_defaults=True),
    }
    return {name: value for name, value in rendered.items() if value} | {
        "imagePullPolicy": scope.spec.images.pull_policy or scope.images.pull_policy,
        "volumeMounts": [*given.volume_mounts, {"name": _tmp(given.name), "mountPath": "/tmp"}],  # noqa: S108
        "securityContext": _RESTRICTED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _env_from(sources: Sequence[EnvSource]) -> list[Object]:
    return [source.model_dump(by_alias=True, exclude_defaults=True) for source in sources]


def _pod_bytes(scope: Scope, container: str) -> int:
    return 0 if scope.size is None else pod_bytes(container, scope.size, scope.spec)


def estimate(scope: Scope, container: str) -> int:
    """Memory of one process of a container by the model's size; 0 where that is not known, or does not matter."""
    scratch = scope.spec.model.scratch
    size = ModelSize.of_scratch(scratch) if container == "prepare" and scratch is not None else scope.size
    return container_bytes(container, size, scope.spec) if size is not None and has_estimate(container) else 0


def memory_warnings(scope: Scope) -> Iterator[SpecProblem]:
    """Amounts of memory in podTemplate that are below the estimate by the model's size. The preparation has the trainer's
    podTemplate: of the two, the warning with the larger estimate."""
    if scope.size is None:
        return
    found: dict[tuple[str, str], tuple[int, SpecProblem]] = {}
    for role in (Role.PREPARE, Role.GENERATOR, Role.TRAINER):
        workload, given = scope.workload(role), pod_template_of(scope.spec, role)
        name = workload.containers[0].name
        needed = workload.per_node * estimate(scope, name) + shared_memory_bytes(given, workload)
        for kind in ("limits", "requests"):
            amount = getattr(given.resources, kind).get("memory")
            if amount is None or _is_enough(amount, needed):
                continue
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
            break
    yield from (problem for _, problem in found.values())


def _is_enough(amount: object, needed: int) -> bool:
    """Whether an amount of memory is at least ``needed`` bytes. What is no quantity gets no warning: the API server reports it."""
    try:
        return bool(parse_quantity(str(amount)) >= needed)  # type: ignore[no-untyped-call]
    except (ValueError, ArithmeticError):
        return True


def variable(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def from_field(name: str, path: str) -> Object:
    """A variable from a field of the pod (downward API)."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _environment(
    scope: Scope, settings: PodSettings, given: PodTemplate, container: Container
) -> list[Object]:
    """The runtime's variables, each of which may refer to those before it, then the plan's, then the user's. A user's variable
    overrides the plan's, not the runtime's.
    """
    threads = container.resources.cpu_threads
    ports = [port for other in scope.workload(settings.role).containers for port in other.ports]
    fixed = [
        variable(api.DIR, RUN_DIR),
        variable(api.RUN_FILE, f"{SPEC_DIR}/{SPEC_KEY}"),
        variable(api.TOKEN_FILE, f"{TOKEN_DIR}/{TOKEN_KEY}"),
        variable(api.COORDINATOR_URL, scope.names.coordinator_url(scope.namespace)),
        variable(BIND, "0.0.0.0"),  # noqa: S104 - the pod's own network, restricted by the NetworkPolicy
        from_field(ADDRESS, "status.podIP"),
        *_environment_url(scope, settings.role),
        *([variable(api.OWN_DIRECTORY, "true")] if _is_own(scope, settings.role) else []),
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


# --- probes --------------------------------------------------------------------------------------------------

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


# --- volumes -------------------------------------------------------------------------------------------------

_RUN, _SPEC, _TOKEN, _SHM = "scalerl-run", "scalerl-spec", "scalerl-token", "scalerl-shm"
_MODELS: Final = "scalerl-models"
_SOURCE: Final = "scalerl-source"
_COMPILED: Final = "scalerl-compile-cache"
COMPILED_FOLDER: Final = "compile-cache"
"""In the run's directory, or on the claim of ``generator.compileCache``."""
_READ_MODELS: Final = ("prepare", "server", "trainer")
"""Containers that read weights. Of these only the preparation may write; the actor, which grades untrusted text, sees none."""


_FETCH: Final = Container(
    name="fetch-model",
    argv=("python", "-m", "scalerl_trainer.fetch_model"),
    env=ENVIRONMENT,
    volumes=(Volume(f"$({api.DIR})", writable=True),),
)
_FETCH_TOKENIZER: Final = replace(_FETCH, argv=(*_FETCH.argv, "--without-weights"))


def has_own_directory(scope: Scope) -> bool:
    """Whether all pods but the coordinator's have a directory of their own in the place of the run's volume."""
    return scope.spec.storage.mounted_by == "Coordinator"


def _is_own(scope: Scope, role: Role) -> bool:
    return has_own_directory(scope) and role is not Role.COORDINATOR


def _tmp(container: str) -> str:
    return f"scalerl-tmp-{container}"


def _shm_size(given: PodTemplate, workload: Workload) -> str:
    return given.shm_size or f"{SHM_GIB_PER_PROCESS * workload.per_node}Gi"


def shared_memory_bytes(given: PodTemplate, workload: Workload) -> int:
    """Of ``/dev/shm`` in the memory request: where ranks share a pod, NCCL uses it."""
    return quantity_bytes(_shm_size(given, workload)) if workload.per_node > 1 else 0


def _volumes(scope: Scope, given: PodTemplate, workload: Workload) -> list[Object]:
    claim = scope.spec.storage.claim_name or scope.names.claim
    own = _is_own(scope, workload.role)
    of_the_run: list[Object] = [
        {"name": _RUN, **({"emptyDir": {}} if own else {"persistentVolumeClaim": {"claimName": claim}})},
        {"name": _SPEC, "configMap": {"name": scope.names.spec}},
        {"name": _TOKEN, "secret": {"secretName": scope.names.token, "defaultMode": 0o440}},
    ]
    fetch = (_FETCH,) if _fetches_model(scope, workload.role) else ()
    return [
        *_models(scope, workload),
        *_compiled(scope, workload),
        *_source(scope, workload),
        *(() if workload.role is Role.ENVIRONMENT else of_the_run),
        {"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": _shm_size(given, workload)}},
        *(
            {"name": _tmp(one.name), "emptyDir": TMP_LIMITS.get(one.name, {})}
            for one in (*fetch, *workload.containers, *given.init_containers)
        ),
    ]


def _models(scope: Scope, workload: Workload) -> list[Object]:
    """The claim of ``model.cache``, in pods with a container that mounts it."""
    cache = scope.spec.model.cache
    if cache is None or not any(container.name in _READ_MODELS for container in workload.containers):
        return []
    source: Object = {"claimName": cache.claim_name}
    if cache.read_only or workload.role is not Role.PREPARE:
        source["readOnly"] = True
    return [{"name": _MODELS, "persistentVolumeClaim": source}]


def _compiled(scope: Scope, workload: Workload) -> list[Object]:
    """The claim of ``generator.compileCache``, if it has one."""
    cache = scope.spec.generator.compile_cache
    if workload.role is not Role.GENERATOR or cache is None or cache.claim_name is None:
        return []
    return [{"name": _COMPILED, "persistentVolumeClaim": {"claimName": cache.claim_name}}]


def _source(scope: Scope, workload: Workload) -> list[Object]:
    """The claim of the run that this one forks, in the preparation's pod."""
    if workload.role is not Role.PREPARE or scope.desired.source_claim is None:
        return []
    return [{"name": _SOURCE, "persistentVolumeClaim": {"claimName": scope.desired.source_claim}}]


def _source_mount(scope: Scope, container: Container) -> list[Object]:
    """The source's directory on its claim, which it may share with other runs."""
    source = scope.spec.source
    if container.name != "prepare" or scope.desired.source_claim is None or source is None:
        return []
    return [{"name": _SOURCE, "mountPath": SOURCE_DIR, "subPath": source.run, "readOnly": True}]


def _compiled_mount(scope: Scope, container: Container) -> list[Object]:
    """Writable in the server's container. The actor, which grades untrusted text, can read it on the run's volume, not write it."""
    cache = scope.spec.generator.compile_cache
    if cache is None or container.name != "server":
        return []
    if cache.claim_name is not None:
        return [{"name": _COMPILED, "mountPath": COMPILE_CACHE_DIR, "subPath": COMPILED_FOLDER}]
    folder = f"{scope.run.metadata.name}/{COMPILED_FOLDER}"
    return [{"name": _RUN, "mountPath": COMPILE_CACHE_DIR, "subPath": folder}]


def _mounts(scope: Scope, role: Role, container: Container, main: bool) -> list[Object]:
    shared = [volume for volume in container.volumes if expand(volume.path, {api.DIR: RUN_DIR}) == RUN_DIR]
    run: Object = {"name": _RUN, "mountPath": RUN_DIR}
    if not _is_own(scope, role):
        # Other runs may share the claim, and a later run of the same name resumes from a claim that outlives its run.
        run["subPath"] = scope.run.metadata.name
    if not any(volume.writable for volume in shared):
        run["readOnly"] = True
    models: list[Object] = []
    if (cache := scope.spec.model.cache) is not None and container.name in _READ_MODELS:
        models = [{"name": _MODELS, "mountPath": MODELS_DIR}]
        if cache.read_only or container.name != "prepare":
            models[0]["readOnly"] = True
    of_the_run = [
        run,
        *models,
        *_compiled_mount(scope, container),
        *_source_mount(scope, container),
        {"name": _SPEC, "mountPath": SPEC_DIR, "readOnly": True},
        {"name": _TOKEN, "mountPath": TOKEN_DIR, "readOnly": True},
    ]
    return [
        *(() if role is Role.ENVIRONMENT else of_the_run),
        {"name": _tmp(container.name), "mountPath": "/tmp"},  # noqa: S108
        *([{"name": _SHM, "mountPath": "/dev/shm"}] if main else []),  # noqa: S108
    ]


def _given_mounts(given: PodTemplate, container: Container) -> list[Object]:
    if container.name not in READ_ONLY_CONTAINERS:
        return given.volume_mounts
    of_the_pod = {
        volume["name"] for volume in given.volumes if not volume.keys().isdisjoint(("emptyDir", "ephemeral"))
    }
    with_token = {
        volume["name"]
        for volume in given.volumes
        if any(
            "serviceAccountToken" in source for source in (volume.get("projected") or {}).get("sources") or ()
        )
    }
    return [
        mount if mount["name"] in of_the_pod else {**mount, "readOnly": True}
        for mount in given.volume_mounts
        if mount["name"] not in with_token
    ]
