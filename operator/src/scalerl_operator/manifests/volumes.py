"""Volumes of pods, and what each container mounts of them: of the run's, a user's and its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scalerl_api.fields import quantity_bytes
from scalerl_api.pods import PodTemplate
from scalerl_lifecycle.role_containers import ENVIRONMENT
from scalerl_lifecycle.workloads import Container, Role, Workload
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.scope import Scope
from scalerl_operator.names import COMPILE_CACHE_DIR, MODELS_DIR, RUN_DIR, SOURCE_DIR, SPEC_DIR, TOKEN_DIR

SHM_GIB_PER_PROCESS: Final = 1
"""Of ``/dev/shm`` if the spec sets no size; torch needs more than a container's default of 64 MiB."""
TMP_LIMITS: Final = {"actor": {"sizeLimit": "1Gi"}}
"""Of ``/tmp``, by container. The actor grades untrusted text: if that fills ``/tmp``, its pod is evicted, and the node's disk is
not full. The caches of other containers' libraries have no common bound."""
READ_ONLY_CONTAINERS: Final = ("actor",)
"""Containers that grade untrusted text: of a user's volumes they may write to those only that end with the pod."""


def fetches_model(scope: Scope, role: Role) -> bool:
    """Whether a role's pods fetch the prepared model and tables. The coordinator needs the tokenizer only, to identify past responses,
    and the tables."""
    if role is Role.COORDINATOR:
        speculation = scope.spec.generator.speculation
        history = speculation is not None and speculation.history is not None
        return has_own_directory(scope) and (history or scope.spec.has_dataset)
    return has_own_directory(scope) and role not in (Role.PREPARE, Role.ENVIRONMENT)


_RUN, _SPEC, _TOKEN, _SHM = "scalerl-run", "scalerl-spec", "scalerl-token", "scalerl-shm"
_MODELS: Final = "scalerl-models"
_SOURCE: Final = "scalerl-source"
_COMPILED: Final = "scalerl-compile-cache"
COMPILED_FOLDER: Final = "compile-cache"
"""In the run's directory, or on the claim of ``generator.compileCache``."""
_READ_MODELS: Final = ("prepare", "server", "trainer")
"""Containers that read weights. Of these only the preparation may write; the actor, which grades untrusted text, sees none."""
FETCH: Final = Container(
    name="fetch-model",
    argv=("python", "-m", "scalerl_trainer.fetch_model"),
    env=ENVIRONMENT,
    writes_run=True,
)
FETCH_TOKENIZER: Final = replace(FETCH, argv=(*FETCH.argv, "--without-weights"))


def has_own_directory(scope: Scope) -> bool:
    """Whether all pods but the coordinator's have a directory of their own in the place of the run's volume."""
    return scope.spec.storage.mounted_by == "Coordinator"


def is_own_directory(scope: Scope, role: Role) -> bool:
    """Whether the role's pods have a directory of their own in the place of the run's volume."""
    return has_own_directory(scope) and role is not Role.COORDINATOR


def tmp_of(container: str) -> str:
    """Name of a container's volume for ``/tmp``."""
    return f"scalerl-tmp-{container}"


def _shm_size(given: PodTemplate, workload: Workload) -> str:
    return given.shm_size or f"{SHM_GIB_PER_PROCESS * workload.per_node}Gi"


def shared_memory_bytes(given: PodTemplate, workload: Workload) -> int:
    """Of ``/dev/shm`` in the memory request: where ranks share a pod, NCCL uses it."""
    return quantity_bytes(_shm_size(given, workload)) if workload.per_node > 1 else 0


def volumes_of(scope: Scope, given: PodTemplate, workload: Workload) -> list[Object]:
    """Volumes of a workload's pods, without a user's."""
    claim = scope.spec.storage.claim_name or scope.names.claim
    own = is_own_directory(scope, workload.role)
    of_the_run: list[Object] = [
        {"name": _RUN, **({"emptyDir": {}} if own else {"persistentVolumeClaim": {"claimName": claim}})},
        {"name": _SPEC, "configMap": {"name": scope.names.spec}},
        {"name": _TOKEN, "secret": {"secretName": scope.names.token, "defaultMode": 0o440}},
    ]
    fetch = (FETCH,) if fetches_model(scope, workload.role) else ()
    return [
        *_models(scope, workload),
        *_compiled(scope, workload),
        *_source(scope, workload),
        *(() if workload.role is Role.ENVIRONMENT else of_the_run),
        {"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": _shm_size(given, workload)}},
        *(
            {"name": tmp_of(one.name), "emptyDir": TMP_LIMITS.get(one.name, {})}
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
    source = scope.spec.fork
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


def mounts_of(scope: Scope, role: Role, container: Container, main: bool) -> list[Object]:
    """What a container mounts of them. main: the first container of its role."""
    run: Object = {"name": _RUN, "mountPath": RUN_DIR}
    if not is_own_directory(scope, role):
        # Other runs may share the claim, and a later run of the same name resumes from a claim that outlives its run.
        run["subPath"] = scope.run.metadata.name
    if not container.writes_run:
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
        {"name": tmp_of(container.name), "mountPath": "/tmp"},  # noqa: S108
        *([{"name": _SHM, "mountPath": "/dev/shm"}] if main else []),  # noqa: S108
    ]


def given_mounts(given: PodTemplate, container: Container) -> list[Object]:
    """What a container mounts of a user's volumes. One that grades untrusted text can write only to those that end with the pod."""
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
