"""``metadata.managedFields``: from an object that we created to one that we apply, and who wrote it last. Pure.

To create an object costs the API server half of what applying one that does not exist costs. But what a create set is held
by an *update* of ours, and an apply takes away only what no one else holds, for which an update of ours counts as
anybody's: what is no longer rendered would stay for ever. So before the first apply the update's fields become applied
ones, as client-go's ``csaupgrade`` does it for ``kubectl``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from scalerl_operator.kube.types import Object
from scalerl_operator.names import FIELD_OWNER

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
