"""Reads objects, compares them, and reads their field managers (``metadata.managedFields``). Pure.

The operator creates objects with POST, which costs the API server half as much as applying an object that does not exist.
Fields set by a POST are owned by an *Update* entry, and an apply does not remove a field that another entry owns: a field
that is no longer rendered would stay. So before the first apply of an object, the operator turns its own Update entries into
Apply entries, as client-go's ``csaupgrade`` does for ``kubectl``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

import msgspec

from scalerl_api.spec import GROUP
from scalerl_operator.kube.types import Object
from scalerl_operator.names import FIELD_OWNER, RENDERED_HASH, RUN_UID

_EXPECTED_MANAGERS: Final = {("kube-controller-manager", ""), ("kube-scheduler", "")}
"""They write the revision of a Deployment, and the volume and the node of a claim: none of these fields is rendered."""


def belongs(obj: Object, uid: str) -> bool:
    """Whether an object belongs to the run with that uid: by its label, or by its owner where the label was removed."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return label(obj, RUN_UID) == uid or any(owner.get("uid") == uid for owner in owners)


def label(obj: Object, name: str) -> str:
    """A label's value; empty without it."""
    labels = obj["metadata"].get("labels") or {}
    return str(labels.get(name, ""))


def is_deleted(obj: Object) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in obj["metadata"]


def true_condition(obj: Object, type_: str) -> Object:
    """The condition if its status is True, else empty."""
    for condition in (obj.get("status") or {}).get("conditions") or ():
        if condition["type"] == type_ and condition["status"] == "True":
            return dict(condition)
    return {}


def applied(managed: Sequence[Object]) -> list[Object] | None:
    """``metadata.managedFields`` with the operator's Update entries as Apply entries; None: it has no Update entry.

    The entries of other managers and of subresources (``status``) stay as they are.
    """
    created = [entry for entry in managed if _is_own(entry, "Update")]
    if not created:
        return None
    own = [*(entry for entry in managed if _is_own(entry, "Apply")), *created]
    fields: Object = {}
    for entry in own:
        fields = _union(fields, entry.get("fieldsV1") or {})
    others = [entry for entry in managed if entry not in own]
    return [*others, {**created[-1], "operation": "Apply", "fieldsV1": fields}]


def other_writers(managed: Sequence[Object]) -> list[str]:
    """Managers that wrote the object itself, not its status, after the operator.

    >>> ours = {"manager": FIELD_OWNER, "operation": "Update", "time": "2026-01-01T00:00:00Z"}
    >>> other_writers([ours, {"manager": "kubectl-edit", "operation": "Update", "time": "2026-01-01T00:00:07Z"}])
    ['kubectl-edit']
    """
    ours = max((str(e.get("time", "")) for e in managed if e.get("manager") == FIELD_OWNER), default="")
    # Times have whole seconds: of two writes in one second, the order is not known.
    later = [entry for entry in managed if str(entry.get("time", "")) >= ours]
    writers = {(str(entry.get("manager")), str(entry.get("subresource", ""))) for entry in later}
    return sorted(
        name for name, part in writers - _EXPECTED_MANAGERS if name != FIELD_OWNER and part != "status"
    )


def _is_own(entry: Object, operation: str) -> bool:
    own = (entry.get("manager"), entry.get("operation")) == (FIELD_OWNER, operation)
    return own and not entry.get("subresource")


def _union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Union of two sets of fields, which are nested maps."""
    return {name: _union(one.get(name, {}), other.get(name, {})) for name in {**one, **other}}


# --- comparing ----------------------------------------------------------------------------------


def content_hash(obj: Object) -> int:
    """Hash of an object without its status and without the annotations of other components; of a claim without its spec, which
    can only grow."""
    metadata = obj["metadata"]
    parts = [metadata.get(name) for name in ("uid", "labels", "ownerReferences")]
    parts += [obj.get(name) for name in ("data", "binaryData")]
    parts += [_own_annotations(obj), None if obj["kind"] == "PersistentVolumeClaim" else obj.get("spec")]
    return hash(msgspec.json.encode(parts, order="deterministic"))


def _own_annotations(obj: Object) -> dict[str, str]:
    annotations = obj["metadata"].get("annotations") or {}
    return {name: text for name, text in annotations.items() if name.startswith(f"{GROUP}/")}


_NOT_COMPARED: Final = ("status", "metadata.generation", "metadata.resourceVersion", "metadata.managedFields")


def first_difference(before: Any, after: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first field that differs between two versions of an object, as (path, before, after); an absent field is None.

    The status and the fields that the API server itself writes are not compared.

    >>> first_difference({"spec": {"replicas": 5}}, {"spec": {"replicas": 1}, "status": {}})
    ('spec.replicas', 5, 1)
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            below = f"{path}.{name}" if path else name
            if below in _NOT_COMPARED:
                continue
            if (difference := first_difference(before.get(name), after.get(name), below)) is not None:
                return difference
        return None
    if isinstance(before, list) and isinstance(after, list):
        for index, (one, other) in enumerate(zip_longest(before, after)):
            if (difference := first_difference(one, other, f"{path}[{index}]")) is not None:
                return difference
        return None
    return None if before == after else (path, before, after)


def rendered_hash(obj: Object) -> str:
    """The hash of an object as rendered, from its annotation; an object without one is compared by the operator's annotations."""
    annotations = _own_annotations(obj)
    return annotations.get(RENDERED_HASH) or str(sorted(annotations.items()))


def is_untouched(wanted: Object, live: Object) -> bool:
    """Whether an object is as an earlier process of the operator applied it: no other manager has written it since, and it
    has every field of ``wanted`` (``managedFields`` do not show that a field was removed)."""
    return not other_writers(live["metadata"].get("managedFields") or ()) and _has_all(wanted, live)


def _has_all(wanted: Any, live: Any) -> bool:
    """Whether ``live`` has a value wherever ``wanted`` has a non-empty one; values are not compared."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return all(_has_all(value, live.get(name)) for name, value in wanted.items() if value)
    if isinstance(wanted, list) and isinstance(live, list):
        named = {item["name"]: item for item in live if isinstance(item, dict) and "name" in item}
        if all(isinstance(item, dict) and "name" in item for item in wanted):
            return all(_has_all(item, named.get(item["name"])) for item in wanted)
        return len(live) >= len(wanted)
    return live is not None
