"""The size of a run's claim: it grows with ``spec.storage.size``, or by hand, and never shrinks. No I/O.

Whether a claim can grow is for its StorageClass to say. A refusal keeps nothing else of the run from being applied.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from scalerl_api.conditions import Reason
from scalerl_operator.build.quantities import value
from scalerl_operator.controller.observe import Problem
from scalerl_operator.controller.run_context import CLAIM, RunContext
from scalerl_operator.kube.errors import ApiError
from scalerl_operator.kube.types import Object
from scalerl_operator.names import Names

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


def not_enlarged(context: RunContext) -> Problem | None:
    """Why the run's claim is smaller than wanted."""
    if context.state.size_refused is not None:
        return context.state.size_refused[2]
    claim = context.objects.get((CLAIM, Names(context.name).claim))
    return failed(claim) if claim is not None else None


def waits(context: RunContext, wanted: Object, live: Object) -> bool:
    """Whether the API server refused this size of the claim a short while ago."""
    size, at, _ = context.state.size_refused or (None, 0.0, None)
    if size == _size(wanted) and size != _size(live) and 0 <= context.unix_seconds - at < RETRY_SECONDS:
        return True
    context.state.size_refused = None
    return False


def refused_size(context: RunContext, wanted: Object, live: Object, error: ApiError) -> bool:
    """Notes that the API server refused the claim; False if it was not asked for another size."""
    if _size(wanted) == _size(live):
        return False
    name = wanted["metadata"]["name"]
    said = f"PersistentVolumeClaim {name} stays at {_size(live)}, spec.storage.size is {_size(wanted)}: {error.message}"
    problem = Problem(Reason.CLAIM_NOT_ENLARGED, said)
    context.state.size_refused = (_size(wanted), context.unix_seconds, problem)
    return True
