"""The input of a run's manifests, their metadata, and their hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final

from pydantic import BaseModel
from pydantic.alias_generators import to_snake

from scalerl_api.edits import EDITS, Effect, edit_of, entry_model, nested_model
from scalerl_api.memory.model_size import ModelSize
from scalerl_api.pods import PodTemplate
from scalerl_api.recipe import ONE_OF
from scalerl_api.spec import API_VERSION, KIND, RunSpec, ScaleRLRun
from scalerl_lifecycle.lifecycle_types import NOTHING, Wanted
from scalerl_lifecycle.role_containers import plan
from scalerl_lifecycle.workloads import Plan, Role
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.gang import Gang
from scalerl_operator.names import PORTS, Names

SECTION: Final = {
    Role.PREPARE: "trainer",
    Role.COORDINATOR: "coordinator",
    Role.GENERATOR: "generator",
    Role.TRAINER: "trainer",
    Role.ENVIRONMENT: "environment",
}
"""The section of the spec with each role's podTemplate."""
IMAGE: Final = SECTION | {Role.ENVIRONMENT: "generator"}
"""The name of each role's image in ``spec.images`` and :class:`Images`; of environment servers, unless ``spec.environment`` has one."""


@dataclass(frozen=True)
class Images:
    """Container images of runs whose ``spec.images`` names none."""

    trainer: str
    generator: str
    coordinator: str
    pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class Desired:
    """Which objects of a run should exist.

    Attributes:
        trained: the run has trained steps, which its volume must hold.
        coordinator_attempt: number of the coordinator, from 1.
        gang: of a queued run, whose trainer, coordinator and generators exist once it is admitted.
        source_claim: of the run that this one forks, for its preparation; None: it mounts none.
    """

    wanted: Wanted = NOTHING
    trained: bool = False
    coordinator_attempt: int = 1
    gang: Gang | None = None
    source_claim: str | None = None


@dataclass(frozen=True)
class Scope:
    """The run to render, and the settings outside of its spec.

    Attributes:
        operator_namespace: its operator pods may connect to the coordinator.
        size: of the model, as the preparation found it; None before.
        created: when the run was created, in unix seconds.
    """

    run: ScaleRLRun
    uid: str
    images: Images
    operator_namespace: str
    size: ModelSize | None = None
    desired: Desired = Desired()
    created: int = 0

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    @property
    def namespace(self) -> str:
        return str(self.run.metadata.namespace)

    @cached_property
    def names(self) -> Names:
        return Names(self.run.metadata.name)

    @cached_property
    def plan(self) -> Plan:
        return plan(self.run)

    def labels(self, component: str = "run") -> dict[str, str]:
        return names.labels(self.run.metadata.name, self.uid, component)

    @property
    def queue_labels(self) -> dict[str, str]:
        """Kueue's labels."""
        return {name: text for name, text in self.run.metadata.labels.items() if name in names.QUEUE_LABELS}

    def metadata(self, name: str, component: str = "run", *, owned: bool = True) -> Object:
        return metadata_of(self.run, self.uid, name, component, owned=owned)

    def workload_metadata(self, name: str, role: Role) -> Object:
        """Metadata of a workload, with the operator's default image, which an upgrade does not replace during the run."""
        metadata = self.metadata(name, role)
        extra = (self.names.extra_generators, self.names.extra_environments)
        if self.desired.gang is None or role is Role.PREPARE or name in extra:
            metadata["labels"] |= self.queue_labels
        metadata["annotations"][names.IMAGE] = getattr(self.images, IMAGE[role])
        return metadata

    def image(self, role: Role) -> str:
        """Of the role's containers."""
        own = own_image(self.spec, role)
        return str(own or getattr(self.spec.images, IMAGE[role]) or getattr(self.images, IMAGE[role]))

    def port(self, name: str) -> int:
        """The number of a named port."""
        environment = self.spec.environment
        return environment.port if name == Role.ENVIRONMENT and environment is not None else PORTS[name]


def own_image(spec: RunSpec, role: Role) -> str | None:
    """``environment.image``, of that role."""
    return spec.environment.image if role is Role.ENVIRONMENT and spec.environment is not None else None


def metadata_of(
    run: ScaleRLRun, uid: str, name: str, component: str = "run", *, owned: bool = True
) -> Object:
    """Metadata of an object of the run. owned: the garbage collector deletes it with the run.

    Raises:
        ValueError: the run has no namespace.
    """
    if run.metadata.namespace is None:
        raise ValueError(f"run {run.metadata.name} has no namespace; only runs of a cluster are rendered")
    metadata: Object = {
        "name": name,
        "namespace": run.metadata.namespace,
        "labels": names.labels(run.metadata.name, uid, component),
        "annotations": {},
    }
    if owned:
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": run.metadata.name, "uid": uid}
        metadata["ownerReferences"] = [owner | {"controller": True, "blockOwnerDeletion": True}]
    return metadata


def pod_template_of(spec: RunSpec, role: Role) -> PodTemplate:
    """``podTemplate`` of a role, merged with the run's; the preparation has the trainer's, without devices.

    Generators, which grade untrusted text, have no service account but their own. Environment servers have nothing of the run's.
    """
    section = getattr(spec, SECTION[role])
    own: PodTemplate = (None if section is None else section.pod_template) or PodTemplate()
    if role is Role.ENVIRONMENT:
        return own
    merged = own.over(spec.pod_template)
    if role is Role.PREPARE and merged.resource_claims:
        return merged.model_copy(update={"resource_claims": []})
    if role is Role.GENERATOR and merged.service_account_name != own.service_account_name:
        return merged.model_copy(update={"service_account_name": own.service_account_name})
    return merged


def spec_hash(run: ScaleRLRun, role: Role) -> str:
    """Hash of the fields whose edit restarts a role (:mod:`scalerl_api.edits`) and of its podTemplate: when it changes, the
    pods are replaced.

    The operator's images and the defaults of new fields are left out, so that an upgrade stops no trainer.
    """
    spec = run.spec
    fields = _pruned(spec.model_dump(mode="json", exclude=_excluded(role), exclude_defaults=True))
    pods = pod_template_of(spec, role).model_dump(mode="json", exclude_defaults=True)
    image: str | None = getattr(spec.images, IMAGE[role])
    content: list[Any] = [
        run.metadata.name,
        fields,
        pods,
        image,
        spec.device_resource,
        spec.storage.claim_name,
    ]
    if (
        role is Role.ENVIRONMENT
    ):  # they have nothing of the run but, without an image of their own, the generators'
        without = spec.environment is None or spec.environment.image is not None
        content = [run.metadata.name, fields, pods, None if without else image]
    return _short_hash(_canonical(content))


@cache
def _excluded(role: Role) -> dict[str, Any]:
    """Fields whose edit does not restart ``role``, for ``exclude`` of ``model_dump``; sections with only such fields as a whole."""

    def excluded(model: type[BaseModel], path: str) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, info in model.model_fields.items():
            here, nested = f"{path}{info.alias}", nested_model(info.annotation)
            entry = entry_model(info.annotation)
            if entry is not None and any(edited.startswith(f"{here}.") for edited in EDITS):
                fields[name] = {"__all__": excluded(entry, f"{here}.")}
            elif nested is not None and nested.model_fields:
                below = excluded(nested, f"{here}.")
                whole = below.keys() == nested.model_fields.keys() and all(v is True for v in below.values())
                fields |= {name: True if whole else below} if below else {}
            # Fields that cannot be edited never change the hash, and are part of it.
            elif edit_of(here).effect is not Effect.REFUSED and role not in edit_of(here).effect.roles:
                fields[name] = True
        return fields

    return excluded(RunSpec, "")


_SWITCHES: Final = frozenset(
    [
        *("by_length", "code", "compile_cache", "history", "off_policy_mask", "refill"),
        *("tensor_board", "wandb"),
        *(to_snake(name) for alternatives in ONE_OF.values() for name in alternatives),
    ]
)
"""Fields whose presence has an effect, also with an empty object."""


def _pruned(value: Any) -> Any:
    """Removes empty objects, which are objects of defaults, unless their presence has an effect."""
    if not isinstance(value, dict):
        return value
    kept = {name: _pruned(item) for name, item in value.items()}
    return {name: item for name, item in kept.items() if item != {} or name in _SWITCHES}


def finished(rendered: Object) -> Object:
    """A deep copy with its own hash, by which the operator also detects removed fields."""
    text = _canonical(rendered)
    copied: Object = json.loads(text)
    copied["metadata"]["annotations"][names.RENDERED_HASH] = _short_hash(text)
    return copied


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class PodSettings:
    """The settings of one role's pods, which its file in this package gives to :mod:`.pods`.

    Attributes:
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
