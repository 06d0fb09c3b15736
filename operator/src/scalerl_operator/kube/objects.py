"""Compares objects, and reads who wrote them (``metadata.managedFields``). Pure.

To create an object costs the API server half of what applying one that does not exist costs. But what a create set is held
by an *update* of ours, and an apply takes away only what no one else holds, for which an update of ours counts as
anybody's: what is no longer rendered would stay for ever. So before the first apply the update's fields become applied
ones, as client-go's ``csaupgrade`` does it for ``kubectl``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

import msgspec

from scalerl_api.spec import GROUP
from scalerl_operator.kube.types import Object
from scalerl_operator.names import FIELD_OWNER, RENDERED_HASH

_EXPECTED: Final = {("kube-controller-manager", ""), ("kube-scheduler", "")}
"""They write the revision of a Deployment, and the volume and the node of a claim: no field that somebody renders."""


def applied(managed: Sequence[Object]) -> list[Object] | None:
    """``metadata.managedFields`` with what we set by creating as set by applying; None: there is nothing of the kind.

    What others set stays as it is, and so does what was written to a subresource (``status``).
    """
    created = [entry for entry in managed if _is_ours(entry, "Update")]
    if not created:
        return None
    before = [entry for entry in managed if _is_ours(entry, "Apply")]
    others = [entry for entry in managed if entry not in created and entry not in before]
    newest = created[-1]
    fields: Object = {}
    for entry in (*before, *created):
        fields = _union(fields, entry.get("fieldsV1") or {})
    return [*others, {**newest, "operation": "Apply", "fieldsV1": fields}]


def other_writers(managed: Sequence[Object]) -> list[str]:
    """Managers that wrote the object itself, not its status, since we did.

    >>> ours = {"manager": FIELD_OWNER, "operation": "Update", "time": "2026-01-01T00:00:00Z"}
    >>> other_writers([ours, {"manager": "kubectl-edit", "operation": "Update", "time": "2026-01-01T00:00:07Z"}])
    ['kubectl-edit']
    """
    ours = max((str(e.get("time", "")) for e in managed if e.get("manager") == FIELD_OWNER), default="")
    # A time has no fraction of a second: in the same second another may have been later.
    later = [entry for entry in managed if str(entry.get("time", "")) >= ours]
    writers = {(str(entry.get("manager")), str(entry.get("subresource", ""))) for entry in later}
    return sorted(name for name, part in writers - _EXPECTED if name != FIELD_OWNER and part != "status")


def _is_ours(entry: Object, operation: str) -> bool:
    mine = (entry.get("manager"), entry.get("operation")) == (FIELD_OWNER, operation)
    return mine and not entry.get("subresource")


def _union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of two sets of fields, which are maps of maps."""
    return {name: _union(one.get(name, {}), other.get(name, {})) for name in {**one, **other}}


# --- comparing ----------------------------------------------------------------------------------


def content_hash(obj: Object) -> int:
    """Of what an object holds, without its status and without what other components note in its annotations. Of a claim the
    spec does not count: it can only grow."""
    metadata = obj["metadata"]
    notes = {k: v for k, v in (metadata.get("annotations") or {}).items() if k.startswith(f"{GROUP}/")}
    parts = [metadata.get(name) for name in ("uid", "labels", "ownerReferences")]
    parts += [obj.get(name) for name in ("data", "binaryData")]
    parts += [notes, None if obj["kind"] == "PersistentVolumeClaim" else obj.get("spec")]
    return hash(msgspec.json.encode(parts, order="deterministic"))


def first_difference(before: Any, after: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first field of two versions of an object that differs, as (path, before, after); None for a field that is absent.

    Status and what the API server itself writes of an object do not count.

    >>> first_difference({"spec": {"replicas": 5}}, {"spec": {"replicas": 1}, "status": {}})
    ('spec.replicas', 5, 1)
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            below = f"{path}.{name}" if path else name
            if below not in _NOT_COMPARED:
                found = first_difference(before.get(name), after.get(name), below)
                if found is not None:
                    return found
        return None
    if isinstance(before, list) and isinstance(after, list):
        for index, (one, other) in enumerate(zip_longest(before, after)):
            if (found := first_difference(one, other, f"{path}[{index}]")) is not None:
                return found
        return None
    return None if before == after else (path, before, after)


_NOT_COMPARED: Final = frozenset(
    ("status", "metadata.generation", "metadata.resourceVersion", "metadata.managedFields")
)


def rendered_hash(obj: Object) -> str:
    """The hash of an object as rendered, from its annotation; an object without one is compared by all annotations."""
    annotations = obj["metadata"].get("annotations") or {}
    ours = sorted((name, text) for name, text in annotations.items() if name.startswith(f"{GROUP}/"))
    return str(annotations.get(RENDERED_HASH) or ours)


def is_untouched(wanted: Object, live: Object) -> bool:
    """Whether an object is as an earlier process applied it, by what it says itself: who wrote it since, and, as the removal
    of a field leaves no trace there, whether every field that we set is still there."""
    return not other_writers(live["metadata"].get("managedFields") or ()) and _has_all(wanted, live)


def _has_all(wanted: Any, live: Any) -> bool:
    """Whether ``live`` has a value wherever ``wanted`` has one that the API server keeps; values are not compared."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return all(_has_all(value, live.get(name)) for name, value in wanted.items() if value)
    if isinstance(wanted, list) and isinstance(live, list):
        named = {item["name"]: item for item in live if isinstance(item, dict) and "name" in item}
        if all(isinstance(item, dict) and "name" in item for item in wanted):
            return all(_has_all(item, named.get(item["name"])) for item in wanted)
        return len(live) >= len(wanted)
    return live is not None
