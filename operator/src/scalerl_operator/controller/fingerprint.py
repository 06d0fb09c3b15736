"""Standing: whether a run's objects are still as they were last found, or made. Pure.

Most looks at a run come of a pod or a Job that says something new. To render and compare all of its objects is most of
what a look costs, and what they follow from has seldom changed.
"""

from __future__ import annotations

import msgspec

from scalerl_api.spec import ScaleRLRun
from scalerl_operator.controller.owned import Place, leaving
from scalerl_operator.kube.types import Desired, Images, Object
from scalerl_operator.names import Names


def standing(run: ScaleRLRun, place: Place, desired: Desired, images: Images, *, frozen: bool) -> int | None:
    """What a run's objects follow from, and what they say, as one number: as long as it is the same, rendering and
    comparing would find the same. None while something is on its way out.

    Pods are nothing that is rendered, and no status is. Of a Job it counts that it is there, with its labels: it
    cannot be changed. The curve grows all the time, and is compared at every look anyway.
    """
    curve = ("ConfigMap", Names(place.name).curve)
    there: list[tuple[str, str, int]] = []
    for (kind, name), obj in place.objects.items():
        if kind == "Pod" or (kind, name) == curve:
            continue
        if leaving(obj):
            return None
        there.append((kind, name, _identity(obj) if kind == "Job" else _content(obj)))
    there.sort()
    generation = place.run["metadata"].get("generation")
    labels = tuple(sorted(run.metadata.labels.items()))
    return hash((generation, labels, desired, images, frozen, leaving(place.run), tuple(there)))


def _identity(job: Object) -> int:
    return hash((job["metadata"]["uid"], tuple(sorted((job["metadata"].get("labels") or {}).items()))))


def _content(obj: Object) -> int:
    parts = [obj["metadata"].get(name) for name in ("uid", "labels", "annotations", "ownerReferences")]
    parts += [obj.get(name) for name in ("spec", "data", "binaryData")]
    return hash(msgspec.json.encode(parts, order="deterministic"))
