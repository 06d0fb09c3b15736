"""The size of a run's claim: it grows with ``spec.storage.size``, or by hand, and never shrinks. No I/O.

Whether a claim can grow is for its StorageClass to say. A refusal keeps nothing else of the run from being applied.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from scalerl_api.conditions import Reason
from scalerl_operator.build.quantities import value
from scalerl_operator.controller.observe import Problem
from scalerl_operator.kube.errors import ApiError
from scalerl_operator.kube.types import Object

RETRY_SECONDS: Final = 300.0
"""After a refusal: the class may allow it by now."""
_FAILED: Final = ("ControllerResizeError", "NodeResizeError")
"""Conditions of a claim whose storage could not be enlarged."""


def _size(claim: Object) -> Any:
    return claim["spec"]["resources"]["requests"]["storage"]


def never_smaller(wanted: Object, live: Object) -> Object:
    """The claim as it is wanted, and as large as it is if that is more."""
    if value(str(_size(live))) <= value(str(_size(wanted))):
        return wanted
    wanted = copy.deepcopy(wanted)
    wanted["spec"]["resources"]["requests"]["storage"] = _size(live)
    return wanted


def failed(claim: Object) -> Problem | None:
    """What the storage says of a claim that it could not enlarge."""
    for said in (claim.get("status") or {}).get("conditions") or ():
        if said["type"] in _FAILED and said["status"] == "True":
            name, why = claim["metadata"]["name"], said.get("message") or said["type"]
            return Problem(Reason.CLAIM_NOT_ENLARGED, f"PersistentVolumeClaim {name}: {why}")
    return None


class Resizes:
    """Sizes that the API server refused, by run: not asked for again at each look."""

    def __init__(self) -> None:
        self._refused: dict[str, tuple[Any, float, Problem]] = {}

    def forget(self, uid: str) -> None:
        """The run is gone."""
        self._refused.pop(uid, None)

    def problem(self, uid: str) -> Problem | None:
        """Why the claim is smaller than wanted."""
        return self._refused[uid][2] if uid in self._refused else None

    def waits(self, uid: str, wanted: Object, live: Object, now: float) -> bool:
        """Whether the claim was refused this size a short while ago."""
        size, at, _ = self._refused.get(uid, (None, 0.0, None))
        if size == _size(wanted) and size != _size(live) and 0 <= now - at < RETRY_SECONDS:
            return True
        self._refused.pop(uid, None)
        return False

    def refused(self, uid: str, wanted: Object, live: Object, error: ApiError, now: float) -> bool:
        """The API server refused the claim; whether it was asked for another size."""
        if _size(wanted) == _size(live):
            return False
        name = wanted["metadata"]["name"]
        said = f"PersistentVolumeClaim {name} stays at {_size(live)}, spec.storage.size is {_size(wanted)}: {error.message}"
        self._refused[uid] = (_size(wanted), now, Problem(Reason.CLAIM_NOT_ENLARGED, said))
        return True
