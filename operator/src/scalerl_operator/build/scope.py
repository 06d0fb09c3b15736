"""Input of all manifests of one run: the run, images, metadata, and the hashes that objects carry."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

from pydantic import BaseModel
from pydantic.alias_generators import to_snake

from scalerl_api.edits import EDITS, Effect, edit_of, entry_model, nested_model
from scalerl_api.pods import PodTemplate
from scalerl_api.recipe import ONE_OF
from scalerl_api.spec import API_VERSION, KIND, RunSpec, ScaleRLRun
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.names import Names
from scalerl_operator.role_containers import plan
from scalerl_operator.workloads import Plan, Role, Workload

SPEC_HASH_VERSION: Final = "4"
"""Of :func:`spec_hash`: raised with every change of its input, so that hashes of two releases are never compared."""
SECTION: Final = {
    Role.PREPARE: "trainer",
    Role.COORDINATOR: "coordinator",
    Role.GENERATOR: "generator",
    Role.TRAINER: "trainer",
}
"""The part of the spec with each role's podTemplate, and the name of its image in ``spec.images`` and :class:`Images`."""


@dataclass(frozen=True)
class Images:
    """Container images where a run's ``spec.images`` names none."""

    trainer: str
    generator: str
    coordinator: str
    pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class Desired:
    """Which objects of a run are to exist now.

    generators: replicas; at 0 there is no Deployment at all.
    trainer_attempt: which start of the gang, from 1; None: no trainer.
    trained: the run has trained steps, which its volume must then hold.
    """

    prepare: bool = False
    coordinator: bool = False
    generators: int = 0
    trainer_attempt: int | None = None
    trained: bool = False


@dataclass(frozen=True)
class Scope:
    """The run to render, with what the spec does not hold."""

    run: ScaleRLRun
    uid: str
    images: Images
    operator_namespace: str

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    @property
    def namespace(self) -> str:
        return namespace_of(self.run)

    @cached_property
    def names(self) -> Names:
        return Names(self.run.metadata.name)

    @cached_property
    def plan(self) -> Plan:
        return plan(self.run)

    def workload(self, role: Role) -> Workload:
        return self.plan.workload(role)

    def labels(self, component: str = "run") -> dict[str, str]:
        return names.labels(self.run.metadata.name, self.uid, component)

    @property
    def queue_labels(self) -> dict[str, str]:
        """Kueue's labels, for workloads that it queues."""
        return {name: text for name, text in self.run.metadata.labels.items() if name in names.QUEUE_LABELS}

    def metadata(self, name: str, component: str = "run", *, owned: bool = True) -> Object:
        return metadata_of(self.run, self.uid, name, component, owned=owned)

    def workload_metadata(self, name: str, role: Role) -> Object:
        """Metadata of a workload, with the operator's own image, which an upgrade does not replace during the run."""
        metadata = self.metadata(name, role)
        metadata["labels"] |= self.queue_labels
        metadata["annotations"][names.IMAGE] = getattr(self.images, SECTION[role])
        return metadata

    def image(self, role: Role) -> str:
        """Of the role's containers."""
        return str(getattr(self.spec.images, SECTION[role]) or getattr(self.images, SECTION[role]))


def namespace_of(run: ScaleRLRun) -> str:
    """Raises ValueError: the run was not read from an API server."""
    if run.metadata.namespace is None:
        raise ValueError(f"run {run.metadata.name} has no namespace; only what a cluster holds is rendered")
    return run.metadata.namespace


def metadata_of(
    run: ScaleRLRun, uid: str, name: str, component: str = "run", *, owned: bool = True
) -> Object:
    """Metadata of an object of the run. owned: the garbage collector deletes it with the run."""
    metadata: Object = {
        "name": name,
        "namespace": namespace_of(run),
        "labels": names.labels(run.metadata.name, uid, component),
        "annotations": {},
    }
    if owned:
        metadata["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": run.metadata.name,
                "uid": uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return metadata


def pod_template_of(spec: RunSpec, role: Role) -> PodTemplate:
    """``podTemplate`` of a role, merged with the run's; the preparation has the trainer's."""
    own: PodTemplate | None = getattr(spec, SECTION[role]).pod_template
    return (own or PodTemplate()).over(spec.pod_template)


def spec_hash(run: ScaleRLRun, role: Role) -> str:
    """Hash of the fields whose edit restarts a role (:mod:`scalerl_api.edits`) and of its podTemplate: when it changes, the
    pods are replaced.

    The operator's images and the defaults of new fields are not in it, so that an upgrade stops no trainer. The hash begins
    with its version (:mod:`scalerl_operator.controller.accept`).
    """
    spec = run.spec
    read = _pruned(spec.model_dump(mode="json", exclude=_unread(role), exclude_defaults=True))
    image = getattr(spec.images, SECTION[role])
    pods = pod_template_of(spec, role).model_dump(mode="json", exclude_defaults=True)
    digest = _digest([run.metadata.name, read, pods, image, spec.device_resource, spec.storage.claim_name])
    return f"{SPEC_HASH_VERSION}-{digest}"


@cache
def _unread(role: Role) -> dict[str, Any]:
    """Fields whose edit does not restart ``role``, as ``model_dump`` excludes them; a section without others as a whole."""

    def unread(model: type[BaseModel], path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, field in model.model_fields.items():
            here, nested = f"{path}{field.alias}", nested_model(field.annotation)
            entry = entry_model(field.annotation)
            if entry is not None and any(edited.startswith(f"{here}.") for edited in EDITS):
                found[name] = {"__all__": unread(entry, f"{here}.")}
            elif nested is not None and nested.model_fields:
                below = unread(nested, f"{here}.")
                whole = below.keys() == nested.model_fields.keys() and all(v is True for v in below.values())
                found |= {name: True if whole else below} if below else {}
            # Fields that cannot be edited are in the hash too, although they never change it.
            elif edit_of(here).effect is not Effect.REFUSED and role not in edit_of(here).effect.roles:
                found[name] = True
        return found

    return unread(RunSpec, "")


_SWITCHES: Final = frozenset(
    [
        *("by_length", "history", "refill", "tensor_board", "wandb"),
        *(to_snake(name) for alternatives in ONE_OF.values() for name in alternatives),
    ]
)
"""Fields that do something by being there, also without any field of their own."""


def _pruned(value: Any) -> Any:
    """Without empty objects: an object of defaults, written out or not, is no difference, unless its presence is one."""
    if not isinstance(value, dict):
        return value
    kept = {name: _pruned(item) for name, item in value.items()}
    return {name: item for name, item in kept.items() if item != {} or name in _SWITCHES}


def finished(rendered: Object) -> Object:
    """A deep copy with the hash of itself, by which the operator notices removed fields too."""
    text = _canonical(rendered)
    whole: Object = json.loads(text)
    whole["metadata"]["annotations"][names.RENDERED_HASH] = _short_hash(text)
    return whole


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _digest(value: Any) -> str:
    return _short_hash(_canonical(value))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
