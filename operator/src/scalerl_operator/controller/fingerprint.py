"""Whether a run's objects still are as they were when they were last applied, as a hash. Pure.

Most reconciles follow a change of a pod's or a Job's status. To render and compare all of a run's objects is most of what a
reconcile costs, and their inputs have seldom changed.
"""

from __future__ import annotations

import msgspec

from scalerl_api.spec import GROUP, ScaleRLRun
from scalerl_operator.controller.run_context import CLAIM, RunContext, is_deleted
from scalerl_operator.kube.types import Desired, Images, Object
from scalerl_operator.names import Names


def fingerprint(
    run: ScaleRLRun, context: RunContext, desired: Desired, images: Images, *, frozen: bool
) -> int | None:
    """Hash of all that a run's objects are rendered from and of what they hold: while it is the same, applying them would
    change nothing. None while an object is being deleted.

    Pods and statuses are not rendered. Of a Job, which cannot be changed, only its uid and its labels count. The curve is
    compared at every reconcile.
    """
    curve = ("ConfigMap", Names(context.name).curve)
    there: list[tuple[str, str, int]] = []
    for (kind, name), obj in context.objects.items():
        if kind == "Pod" or (kind, name) == curve:
            continue
        if is_deleted(obj):
            return None
        there.append((kind, name, _identity(obj) if kind == "Job" else content_hash(obj)))
    there.sort()
    generation = context.run["metadata"].get("generation")
    labels = tuple(sorted(run.metadata.labels.items()))
    return hash((generation, labels, desired, images, frozen, is_deleted(context.run), tuple(there)))


def _identity(job: Object) -> int:
    return hash((job["metadata"]["uid"], tuple(sorted((job["metadata"].get("labels") or {}).items()))))


def content_hash(obj: Object) -> int:
    """Of what an object holds, without its status and without what other components note in its annotations. Of a claim the
    spec does not count: it can only grow (:mod:`.claim_size`)."""
    metadata = obj["metadata"]
    notes = {k: v for k, v in (metadata.get("annotations") or {}).items() if k.startswith(f"{GROUP}/")}
    parts = [metadata.get(name) for name in ("uid", "labels", "ownerReferences")]
    parts += [obj.get(name) for name in ("data", "binaryData")]
    parts += [notes, None if obj["kind"] == CLAIM else obj.get("spec")]
    return hash(msgspec.json.encode(parts, order="deterministic"))
