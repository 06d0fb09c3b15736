"""What all files of this package build on: one run's scope, metadata, and the two hashes that objects carry."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any, Final

from scalerl_api.edits import Effect, edit_of, leaves
from scalerl_api.pods import PodTemplate
from scalerl_api.spec import API_VERSION, KIND, RunSpec, ScaleRLRun
from scalerl_operator import names
from scalerl_operator.names import Names
from scalerl_operator.kube.types import Images, Object
from scalerl_operator.plan import plan
from scalerl_operator.workloads import Plan, Role, Workload

SPEC_HASH_VERSION: Final = "3"
"""Of :func:`spec_hash`: raised with every change of what it is taken over, so that no hash of another release is held
against one of this."""
_PODS: Final = (Role.PREPARE, Role.COORDINATOR, Role.GENERATOR, Role.TRAINER)


@dataclass(frozen=True)
class Scope:
    """One run as it is rendered."""

    run: ScaleRLRun
    uid: str
    images: Images
    operator_namespace: str

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    @property
    def namespace(self) -> str:
        """Raises ValueError: a run that no API server has given a namespace."""
        if self.run.metadata.namespace is None:
            raise ValueError(
                f"run {self.run.metadata.name} has no namespace; only what a cluster holds is rendered"
            )
        return self.run.metadata.namespace

    @cached_property
    def names(self) -> Names:
        return Names(self.run.metadata.name)

    @cached_property
    def plan(self) -> Plan:
        return plan(self.run)

    @cached_property
    def _spec_hashes(self) -> dict[Role, str]:
        return {}

    def spec_hash(self, role: Role) -> str:
        """:func:`spec_hash` of the run; a Job and its pods carry the same."""
        if role not in self._spec_hashes:
            self._spec_hashes[role] = spec_hash(self.run, role)
        return self._spec_hashes[role]

    def workload(self, role: Role) -> Workload:
        return self.plan.workload(role)

    def labels(self, component: str = "run") -> dict[str, str]:
        return names.labels(self.run.metadata.name, self.uid, component)

    @property
    def queue_labels(self) -> dict[str, str]:
        """Kueue's, for what it is to queue."""
        return {name: text for name, text in self.run.metadata.labels.items() if name in names.QUEUE_LABELS}

    def metadata(self, name: str, component: str = "run", *, owned: bool = True) -> Object:
        """Of an object that goes with the run; not ``owned``: of one that stays."""
        metadata: Object = {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(component),
            "annotations": {},
        }
        if owned:
            metadata["ownerReferences"] = [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": self.run.metadata.name,
                    "uid": self.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ]
        return metadata


def pod_template_of(spec: RunSpec, role: Role) -> PodTemplate:
    """What the user adds to the pods of a role; the preparation's are the trainer's."""
    own = {
        Role.COORDINATOR: spec.coordinator.pod_template,
        Role.GENERATOR: spec.generator.pod_template,
        Role.TRAINER: spec.trainer.pod_template,
        Role.PREPARE: spec.trainer.pod_template,
    }[role]
    return (own or PodTemplate()).over(spec.pod_template)


def spec_hash(run: ScaleRLRun, role: Role) -> str:
    """Over the fields whose edit restarts a role, and what the user says of its pods: another hash needs other pods.

    Which fields those are, :mod:`scalerl_api.edits` says. What the operator brings along (its images, defaults of
    fields that an older release did not have) is not in it, so that an upgrade stops no trainer. Before the hash stands
    its version (:mod:`scalerl_operator.controller.accept`).
    """
    spec = run.spec
    read = _pruned(spec.model_dump(mode="json", exclude=_unread(role), exclude_defaults=True))
    image = {
        Role.COORDINATOR: spec.images.coordinator,
        Role.GENERATOR: spec.images.generator,
    }.get(role, spec.images.trainer)
    pods = pod_template_of(spec, role).model_dump(mode="json", exclude_defaults=True)
    digest = _digest([run.metadata.name, read, pods, image, spec.device_resource, spec.storage.claim_name])
    return f"{SPEC_HASH_VERSION}-{digest}"


@cache
def _unread(role: Role) -> dict[str, Any]:
    """Fields whose edit does not restart ``role``, as ``model_dump`` excludes them."""
    unread: dict[str, Any] = {}
    for leaf in leaves():
        # A field that is refused was the same all the while: it is in the hash, so that what made it is plain.
        if edit_of(leaf.path).effect is not Effect.REFUSED and role not in edit_of(leaf.path).effect.roles:
            section = unread
            for name in leaf.names[:-1]:
                section = section.setdefault(name, {})
            section[leaf.names[-1]] = True
    return unread


def _pruned(value: Any) -> Any:
    """Without objects of nothing: an object of defaults, written out or not, is no difference."""
    if not isinstance(value, dict):
        return value
    kept = {name: _pruned(item) for name, item in value.items()}
    return {name: item for name, item in kept.items() if item != {}}


def raw_hash(run: ScaleRLRun) -> str:
    """Over what decides whether an API server takes the run's pods: what the user says of them in Kubernetes' own words,
    and the amounts that come from the rest of the spec. Two runs that train otherwise may well have the same.
    """
    spec = run.spec
    said = [pod_template_of(spec, role).model_dump(mode="json", exclude_defaults=True) for role in _PODS]
    amounts = [[c.name, asdict(c.resources)] for work in plan(run).workloads for c in work.containers]
    queue = {name: text for name, text in run.metadata.labels.items() if name in names.QUEUE_LABELS}
    return _digest([said, amounts, spec.device_resource, spec.images.model_dump(mode="json"), queue])


def finished(rendered: Object) -> Object:
    """A copy that shares nothing with the run, with the hash of itself: so a field no longer wanted is noticed too."""
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
