"""``podTemplate``: a user's additions to the pods of a run, for all roles and for each role.

Raw Kubernetes objects (tolerations, affinity, environment entries, volumes, mounts) are passed on unchanged; the API server
validates them when a pod is created. Names, paths, labels and variables that the operator itself sets in a pod are rejected
here. The local runtime creates no pods and ignores the template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from scalerl_api.fields import Matches, MemoryQuantity, Model, quantity_input

RESERVED_VARIABLES = "SCALERL_"
"""Prefix of the variables that a runtime sets."""
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables of torch.distributed for the trainer's ranks; the runtime sets them too."""
RESERVED_LABELS = ("scalerl.dev/", "app.kubernetes.io/", "batch.kubernetes.io/")
"""Prefixes of the labels and annotations that select a run's objects."""
RESERVED_PATHS = (
    *("/run/scalerl", "/var/run/scalerl", "/etc/scalerl", "/tmp", "/dev/shm"),  # noqa: S108
    *("/opt/scalerl", "/opt/scalerl-members"),
)
"""Mount paths of the operator (the run's volume, its spec and token, writable directories of the roles), and the directories of
the images' programs. A user's mount may be neither at, nor below, nor above such a path. ``/var/run`` is a link to ``/run`` in
the images."""
SYSTEM_PATHS = ("/bin", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr", "/usr/lib", "/usr/local")
"""Directories without which no program starts. A user's mount may be below such a path, but not at it."""
RESERVED_VOLUMES = "scalerl-"
"""Prefix of the operator's own volumes."""

_LABEL_VALUE = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
_QUALIFIED_NAME = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
)
_AMOUNT = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+)?$"
_SMALL = {None: 1.0, "m": 1e-3, "k": 1e3, "Ki": 1024.0}
"""Units of amounts that may be less than 1Mi, as factors."""
_OBJECT_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"

PLAIN_PATH = re.compile(r"(/|(/([^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+))+/?)")
PLAIN_PATH_MESSAGE = "must be written plainly: no //, no /./ and no /../"
RESERVED_PATH_MESSAGE = "the operator mounts there itself, or below it; choose another path"
RESERVED_MOUNT_MESSAGE = (
    f"volumes whose names start with {RESERVED_VOLUMES} are the operator's, with the files of every run that shares the claim; "
    "mount a volume of your own"
)
SYSTEM_PATH_MESSAGE = "a mount there hides the image's own programs; choose another path"

Raw = dict[str, Any]
"""A Kubernetes object, as in the Kubernetes API reference."""


@dataclass(frozen=True)
class Named:
    """Requires a ``name`` that is not reserved."""

    what: str
    """Kind of entry, for error messages."""
    reserved: str
    """Reserved prefix of names."""
    taken: tuple[str, ...] = ()
    """Reserved names."""

    def __call__(self, value: Raw) -> Raw:
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"every {self.what} needs a name")
        if name.startswith(self.reserved):
            raise ValueError(
                f"{name}: names that start with {self.reserved} are the operator's; choose another"
            )
        if name in self.taken:
            raise ValueError(f"{name}: the operator itself sets {', '.join(self.taken)}; leave it out")
        return value


def text_value(entry: Raw) -> Raw:
    """Require text as a variable's value: a number or a boolean in YAML must be quoted."""
    if not isinstance(entry.get("value", ""), str):
        raise ValueError(f"{entry.get('name')}: the value {entry['value']!r} must be text; put it in quotes")
    return entry


def own_path(mount: Raw) -> Raw:
    """Require the name of a user's volume, and an absolute mount path that the operator does not use."""
    name, path = mount.get("name"), mount.get("mountPath")
    if not isinstance(name, str) or not name or not isinstance(path, str) or not path:
        raise ValueError("every mount needs a name (of a volume) and a mountPath")
    if name.startswith(RESERVED_VOLUMES):
        raise ValueError(f"{name}: {RESERVED_MOUNT_MESSAGE}")
    if not path.startswith("/"):
        raise ValueError(f"mountPath {path} must be absolute")
    if not PLAIN_PATH.fullmatch(path):
        raise ValueError(f"mountPath {path}: {PLAIN_PATH_MESSAGE}")
    below = path if path.endswith("/") else path + "/"
    if any(below.startswith(taken + "/") or taken.startswith(below) for taken in RESERVED_PATHS):
        raise ValueError(f"mountPath {path}: {RESERVED_PATH_MESSAGE}")
    if below[:-1] in SYSTEM_PATHS:
        raise ValueError(f"mountPath {path}: {SYSTEM_PATH_MESSAGE}")
    return mount


@dataclass(frozen=True)
class Unique:
    """Requires distinct values of ``key``, which all entries of the list have."""

    key: str

    def __call__(self, values: list[Any]) -> list[Any]:
        seen: set[str] = set()
        for value in values:
            name = value[self.key] if isinstance(value, dict) else getattr(value, self.key)
            if name in seen:
                raise ValueError(f"{self.key} {name} is given twice")
            seen.add(name)
        return values


def unreserved(values: dict[str, str]) -> dict[str, str]:
    """Reject labels and annotations that the operator sets itself."""
    for name in values:
        if name.startswith(RESERVED_LABELS):
            raise ValueError(f"{name}: {name.split('/')[0]}/ is the operator's own; choose another prefix")
    return values


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
    """Requests and limits of a role's main container; resources not listed keep the operator's defaults."""

    requests: Amounts = {}
    """Requests by resource, like ``cpu: "4"`` or ``memory: 16Gi``."""
    limits: Amounts = {}
    """Limits by resource, like ``rdma/ib: 1``."""


class PodTemplate(Model):
    """Additions to pods. Ignored by the local runtime."""

    node_selector: Annotated[dict[QualifiedName, LabelValue], Field(max_length=32)] = {}
    """Required node labels."""
    tolerations: Annotated[list[Raw], Field(max_length=32)] = []
    """Tolerations of the pods, as Kubernetes' ``Toleration``."""
    affinity: Raw | None = None
    """Node and pod affinity, as Kubernetes' ``Affinity``."""
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

        Maps and lists with keys are merged, and the role's entry takes precedence. Tolerations and pull secrets are appended.
        A single value of the role replaces that of ``base``.

        >>> PodTemplate(labels={"a": "1"}).over(PodTemplate(labels={"a": "0", "b": "2"})).labels
        {'a': '1', 'b': '2'}
        """
        if base is None:
            return self
        # The parts were validated. The result is not: a rule of a later release must not break a run accepted before it.
        return PodTemplate.model_construct(
            node_selector=base.node_selector | self.node_selector,
            tolerations=base.tolerations + [t for t in self.tolerations if t not in base.tolerations],
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
            image_pull_secrets=base.image_pull_secrets
            + [s for s in self.image_pull_secrets if s not in base.image_pull_secrets],
            shm_size=self.shm_size or base.shm_size,
        )


def _joined(base: list[Raw], role: list[Raw], key: str) -> list[Raw]:
    """Merged in the order of ``base``, followed by entries of the role alone: a variable may refer to an earlier one."""
    own = {item[key]: item for item in role}
    return [own.pop(item[key], item) for item in base] + list(own.values())
