"""``podTemplate``: a user's additions to the pods of a run, for all roles and for each role.

Raw Kubernetes objects (tolerations, affinity, environment entries, volumes, mounts) are passed on unchanged; the API server
validates them when a pod is created. Names, paths, labels and variables that the operator itself sets in a pod are rejected
here. The local runtime creates no pods and ignores the template.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from scalerl_api.fields import Matches, MemoryQuantity, Model, Unique, exactly_one, key_of, quantity_input
from scalerl_api.reserved_in_pods import (
    RANK_VARIABLES,
    RESERVED_VARIABLES,
    RESERVED_VOLUMES,
    Named,
    Raw,
    other_container,
    own_path,
    unreserved,
)

_LABEL_VALUE = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
_QUALIFIED_NAME = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
)
_AMOUNT = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+)?$"
_SMALL = {None: 1.0, "m": 1e-3, "k": 1e3, "Ki": 1024.0}
"""Units of amounts that may be less than 1Mi, as factors."""
_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_OBJECT_NAME = r"^[a-z0-9]+((-+|[.])[a-z0-9]+)*$"

SLICE_SIZE = "kueue.x-k8s.io/podset-slice-size"
"""Annotation of Kueue that the operator reads as a number."""
COUNT = re.compile(r"[1-9][0-9]{0,8}")

_T = TypeVar("_T")


def text_value(entry: Raw) -> Raw:
    """Require text as a variable's value: a number or a boolean in YAML must be quoted."""
    if not isinstance(entry.get("value", ""), str):
        raise ValueError(f"{entry.get('name')}: the value {entry['value']!r} must be text; put it in quotes")
    return entry


def slice_size(annotations: dict[str, str]) -> dict[str, str]:
    """Reject a size of Kueue's slices that is no positive number."""
    if (size := annotations.get(SLICE_SIZE)) is not None and not COUNT.fullmatch(size):
        raise ValueError(f'{SLICE_SIZE} must be a positive number of pods, like "2", got {size!r}')
    return annotations


QualifiedName = Annotated[
    str,
    Field(min_length=1, max_length=317),
    AfterValidator(Matches(_QUALIFIED_NAME, "must be a name like team or example.com/team")),
]
LabelValue = Annotated[
    str,
    Field(max_length=63),
    AfterValidator(
        Matches(_LABEL_VALUE, "must be letters, digits, -, _ and ., with a letter or digit at both ends")
    ),
]
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    AfterValidator(Matches(_OBJECT_NAME, "must be an object's name: lower-case letters, digits, - and .")),
]
ContainerName = Annotated[
    str,
    Field(min_length=1, max_length=40),
    AfterValidator(Matches(_DNS_LABEL, "must be lower-case letters, digits and -")),
    AfterValidator(other_container),
]
EntryName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    AfterValidator(Matches(_DNS_LABEL, "must be lower-case letters, digits and -")),
]
Amount = Annotated[
    str,
    Field(max_length=32),
    BeforeValidator(quantity_input),
    AfterValidator(Matches(_AMOUNT, "must be an amount, like 4, 500m or 16Gi; a fraction in quotes")),
]
"""A Kubernetes quantity, or an integer."""


def enough_memory(amounts: dict[str, str]) -> dict[str, str]:
    """Reject less than 1Mi of memory: a number without a unit is in bytes, which is usually a mistake."""
    small = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)(m|k|Ki)?", amounts.get("memory", "1Mi"))
    if small is not None and float(small[1]) * _SMALL[small[2]] < 2**20:
        raise ValueError(f"memory must be at least 1Mi, got {small[0]}: a number without a unit is bytes")
    return amounts


Amounts = Annotated[dict[QualifiedName, Amount], Field(max_length=16), AfterValidator(enough_memory)]

Labels = Annotated[dict[QualifiedName, LabelValue], Field(max_length=32), AfterValidator(unreserved)]
Annotations = Annotated[
    dict[QualifiedName, Annotated[str, Field(max_length=16_384)]],
    Field(max_length=32),
    AfterValidator(unreserved),
    AfterValidator(slice_size),
]
Variable = Annotated[
    Raw, AfterValidator(Named("variable", RESERVED_VARIABLES, RANK_VARIABLES)), AfterValidator(text_value)
]
Volume = Annotated[Raw, AfterValidator(Named("volume", RESERVED_VOLUMES))]
Mount = Annotated[Raw, AfterValidator(own_path)]


class PullSecret(Model):
    """A Secret with registry credentials in the namespace of the run."""

    name: ObjectName
    """Name of the Secret."""


class PodResources(Model):
    """Requests and limits of a container; resources not listed keep the operator's defaults."""

    requests: Amounts = {}
    """Requests by resource, like ``cpu: "4"`` or ``memory: 16Gi``."""
    limits: Amounts = {}
    """Limits by resource, like ``rdma/ib: 1``."""


class SourceReference(Model):
    """A Secret or a ConfigMap in the namespace of the run."""

    name: ObjectName
    """Its name."""
    optional: bool = False
    """Start without it if it does not exist."""


class EnvSource(Model):
    """Variables from all keys of a Secret or a ConfigMap, as Kubernetes' ``EnvFromSource``."""

    secret_ref: SourceReference | None = None
    """A Secret."""
    config_map_ref: SourceReference | None = None
    """A ConfigMap."""
    prefix: Annotated[str, Field(max_length=64)] = ""
    """Prefix of the names of the variables."""

    rules = (exactly_one("secretRef", "configMapRef"),)


class DeviceClaim(Model):
    """A claim of devices by dynamic resource allocation (DRA), as Kubernetes' ``PodResourceClaim``."""

    name: EntryName
    """Name of the claim in the pod."""
    resource_claim_template_name: ObjectName | None = None
    """ResourceClaimTemplate from which each pod gets a claim of its own."""
    resource_claim_name: ObjectName | None = None
    """ResourceClaim that all pods share."""

    rules = (exactly_one("resourceClaimTemplateName", "resourceClaimName"),)


EnvSources = Annotated[list[EnvSource], Field(max_length=16)]


class InitContainer(Model):
    """A container that runs to its end before those of the role, as Kubernetes' ``Container``.

    It has the security context of the role's containers (no root, a read-only root file system, no capabilities), a ``/tmp`` of
    its own, and neither the run's volume nor its token.
    """

    name: ContainerName
    """Its name."""
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    """Its image."""
    command: Annotated[list[Annotated[str, Field(max_length=16_384)]], Field(max_length=64)] = []
    """Command in place of the image's."""
    args: Annotated[list[Annotated[str, Field(max_length=16_384)]], Field(max_length=64)] = []
    """Arguments in place of the image's."""
    env: Annotated[list[Variable], Field(max_length=32), AfterValidator(Unique("name"))] = []
    """Its variables, as Kubernetes' ``EnvVar``. Those of the podTemplate are for the role's containers only."""
    env_from: EnvSources = []
    """Variables from Secrets and ConfigMaps."""
    volume_mounts: Annotated[list[Mount], Field(max_length=16), AfterValidator(Unique("mountPath"))] = []
    """Mounts of the podTemplate's volumes, as Kubernetes' ``VolumeMount``."""
    resources: PodResources = PodResources()
    """Its requests and limits; a container without any may be refused by a quota."""


class PodTemplate(Model):
    """Additions to pods. Ignored by the local runtime."""

    node_selector: Annotated[dict[QualifiedName, LabelValue], Field(max_length=32)] = {}
    """Required node labels."""
    tolerations: Annotated[list[Raw], Field(max_length=32)] = []
    """Tolerations of the pods, as Kubernetes' ``Toleration``."""
    affinity: Raw | None = None
    """Node and pod affinity, as Kubernetes' ``Affinity``."""
    topology_spread_constraints: Annotated[list[Raw], Field(max_length=16)] = []
    """Spread of a role's pods over nodes or zones, as Kubernetes' ``TopologySpreadConstraint``; without a ``labelSelector``, over
    the pods of the same role of the run."""
    scheduler_name: ObjectName | None = None
    """Scheduler of the pods, like ``volcano`` or ``kai-scheduler``; default: the cluster's."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of the pods, for workload identity. Their containers get no token of the API server. Generators, which grade
    untrusted text, have only that of ``generator.podTemplate``."""
    env_from: EnvSources = []
    """Variables of every container of the role from Secrets and ConfigMaps, as Kubernetes' ``EnvFromSource``. Variables of
    ``env`` and those of the operator come before them: the names reserved there have no effect here."""
    env: Annotated[list[Variable], Field(max_length=64), AfterValidator(Unique("name"))] = []
    """Variables of every container of the role, as Kubernetes' ``EnvVar``. Reserved: ``SCALERL_*``, and for the
    trainer ``RANK``, ``LOCAL_RANK``, ``NODE_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``."""
    volumes: Annotated[list[Volume], Field(max_length=32), AfterValidator(Unique("name"))] = []
    """Additional volumes, as Kubernetes' ``Volume``: data, a hub cache, a Secret."""
    volume_mounts: Annotated[list[Mount], Field(max_length=32), AfterValidator(Unique("mountPath"))] = []
    """Mounts of those volumes in every container of the role, as Kubernetes' ``VolumeMount``. The actor, which grades untrusted
    text, may write to an ``emptyDir`` and an ``ephemeral`` volume only; its other mounts are read-only."""
    resources: PodResources = PodResources()
    """Resources of the role's main container: the trainer, the coordinator, a generator's vLLM server."""
    resource_claims: Annotated[list[DeviceClaim], Field(max_length=8), AfterValidator(Unique("name"))] = []
    """Devices by dynamic resource allocation, for the role's main container. With them, ``deviceResource`` is not requested;
    ``devices`` still says how many devices a pod uses. The preparation has none."""
    init_containers: Annotated[list[InitContainer], Field(max_length=4), AfterValidator(Unique("name"))] = []
    """Containers that run before the role's, in this order: to fetch data into a volume of the podTemplate."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, like ``nvidia``."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
    labels: Labels = {}
    """Additional pod labels; ``scalerl.dev/`` and ``app.kubernetes.io/`` are reserved."""
    annotations: Annotations = {}
    """Additional pod annotations; ``scalerl.dev/`` is reserved."""
    image_pull_secrets: Annotated[list[PullSecret], Field(max_length=16), AfterValidator(Unique("name"))] = []
    """Secrets for pulling the images."""
    shm_size: MemoryQuantity | None = None
    """Size limit of ``/dev/shm``, counted against the container's memory; default: 1Gi, in a trainer pod 1Gi per
    rank. NCCL between the devices of a generator needs more than 1Gi."""

    def over(self, base: PodTemplate | None) -> PodTemplate:
        """This role's template merged over ``base``, the template for all roles.

        Maps and lists with keys are merged, and the role's entry takes precedence. Tolerations, spread constraints, sources of
        variables and pull secrets are appended. A single value of the role replaces that of ``base``.

        >>> PodTemplate(labels={"a": "1"}).over(PodTemplate(labels={"a": "0", "b": "2"})).labels
        {'a': '1', 'b': '2'}
        """
        if base is None:
            return self
        # The parts were validated. The result is not: a rule of a later release must not break a run accepted before it.
        return PodTemplate.model_construct(
            node_selector=base.node_selector | self.node_selector,
            tolerations=_appended(base.tolerations, self.tolerations),
            topology_spread_constraints=_appended(
                base.topology_spread_constraints, self.topology_spread_constraints
            ),
            scheduler_name=self.scheduler_name or base.scheduler_name,
            service_account_name=self.service_account_name or base.service_account_name,
            env_from=_appended(base.env_from, self.env_from),
            resource_claims=_joined(base.resource_claims, self.resource_claims, "name"),
            init_containers=_joined(base.init_containers, self.init_containers, "name"),
            affinity=self.affinity if self.affinity is not None else base.affinity,
            env=_joined(base.env, self.env, "name"),
            volumes=_joined(base.volumes, self.volumes, "name"),
            volume_mounts=_joined(base.volume_mounts, self.volume_mounts, "mountPath"),
            resources=PodResources.model_construct(
                requests=base.resources.requests | self.resources.requests,
                limits=base.resources.limits | self.resources.limits,
            ),
            runtime_class_name=self.runtime_class_name or base.runtime_class_name,
            priority_class_name=self.priority_class_name or base.priority_class_name,
            labels=base.labels | self.labels,
            annotations=base.annotations | self.annotations,
            image_pull_secrets=_appended(base.image_pull_secrets, self.image_pull_secrets),
            shm_size=self.shm_size or base.shm_size,
        )


def _appended(base: list[_T], role: list[_T]) -> list[_T]:
    return base + [entry for entry in role if entry not in base]


def _joined(base: list[_T], role: list[_T], key: str) -> list[_T]:
    """Merged in the order of ``base``, followed by entries of the role alone: a variable may refer to an earlier one."""
    own = {key_of(item, key): item for item in role}
    return [own.pop(key_of(item, key), item) for item in base] + list(own.values())
