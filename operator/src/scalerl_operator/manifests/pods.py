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

from collections.abc import Sequence
from typing import Final

from scalerl_api import endpoints
from scalerl_api.memory.containers import directory_bytes
from scalerl_api.pods import EnvSource, InitContainer, PodResources, PodTemplate
from scalerl_lifecycle.workloads import Container, Role
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests import gang
from scalerl_operator.manifests.container_fields import (
    bytes_of_pod,
    environment_of,
    estimate,
    native,
    probes,
    resources,
)
from scalerl_operator.manifests.scope import PodSettings, Scope, pod_template_of, spec_hash
from scalerl_operator.manifests.volumes import (
    FETCH,
    FETCH_TOKENIZER,
    READ_ONLY_CONTAINERS,
    fetches_model,
    given_mounts,
    is_own_directory,
    mounts_of,
    shared_memory_bytes,
    tmp_of,
    volumes_of,
)
from scalerl_operator.names import PORTS

USER_ID: Final = 10001
LAUNCHER: Final = ("python", "-m", "scalerl_trainer.launch")
"""Prefix of the command of a pod with several ranks; starts it once per rank."""
NEVER_EVICT: Final = {
    # For node autoscalers; `kubectl drain` ignores it.
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def container_security() -> Object:
    """The security context of every container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security() -> Object:
    """The security context of every pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        # Changing the owner of a volume's many files at every start takes minutes.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def pod_template(scope: Scope, settings: PodSettings) -> Object:
    """``template`` of a workload object."""
    role = settings.role
    given = pod_template_of(scope.spec, role)
    containers = scope.plan.workload(role).containers
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
        "volumes": [*volumes_of(scope, given, scope.plan.workload(role)), *given.volumes],
        "securityContext": pod_security(),
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


def _fetch_container(scope: Scope, settings: PodSettings, given: PodTemplate) -> list[Object]:
    """The init container that fetches the prepared model, where that is needed."""
    if not fetches_model(scope, settings.role):
        return []
    of_trainer = pod_template_of(scope.spec, Role.TRAINER)
    sources = {volume["name"]: volume for volume in of_trainer.volumes}
    mounts = [m for m in of_trainer.volume_mounts if sources.get(m["name"]) in given.volumes]
    template = PodTemplate.model_construct(
        env=of_trainer.env, env_from=of_trainer.env_from, volumes=given.volumes, volume_mounts=mounts
    )
    container = FETCH if settings.role is not Role.COORDINATOR else FETCH_TOKENIZER
    return [_container(scope, settings, template, container, image=scope.image(Role.TRAINER))]


def _with_fetch_secrets(scope: Scope, role: Role, given: PodTemplate) -> PodTemplate:
    """The template with the secrets for pulling the trainer's image, which the init container has."""
    if not fetches_model(scope, role):
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
    workload = scope.plan.workload(settings.role)
    shared = main and workload.per_node > 1
    of_actor = scope.spec.generator.actor_resources if container.name == "actor" else PodResources()
    given_resources = given.resources if main else of_actor
    claimed = [{"name": claim.name} for claim in given.resource_claims] if main else []
    rendered: Object = {
        "name": container.name,
        "image": image or scope.image(settings.role),
        "imagePullPolicy": scope.spec.images.pull_policy or scope.images.pull_policy,
        **({"command": command} if (command := [*(LAUNCHER if shared else ()), *container.argv]) else {}),
        "env": environment_of(scope, settings, given, container),
        "resources": resources(
            container,
            native(given_resources) if settings.role is Role.PREPARE else given_resources,
            None if claimed else scope.spec.device_resource,
            processes=workload.per_node if main else 1,
            shared=shared_memory_bytes(given, workload) + bytes_of_pod(scope, container.name) if main else 0,
            estimate=estimate(scope, container.name),
            disk=directory_bytes(container.name, scope.size, scope.spec)
            if main and scope.size is not None and is_own_directory(scope, settings.role)
            else 0,
        )
        | ({"claims": claimed} if claimed else {}),
        **probes(container),
        "volumeMounts": [
            *mounts_of(scope, settings.role, container, main),
            *given_mounts(given, container),
        ],
        "securityContext": container_security()
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
        "volumeMounts": [*given.volume_mounts, {"name": tmp_of(given.name), "mountPath": "/tmp"}],  # noqa: S108
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _env_from(sources: Sequence[EnvSource]) -> list[Object]:
    return [source.model_dump(by_alias=True, exclude_defaults=True) for source in sources]
