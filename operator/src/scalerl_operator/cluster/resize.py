"""The size of a run's claim: one that somebody enlarged stays so; it never shrinks. Pure."""

from __future__ import annotations

import copy
from typing import Any

from scalerl_operator.cluster.render.quantities import value
from scalerl_operator.cluster.types import Object


def _size(claim: Object) -> Any:
    return claim["spec"]["resources"]["requests"]["storage"]


def never_smaller(wanted: Object, live: Object) -> Object:
    """The claim as it is wanted, and as large as it is if that is more."""
    if value(str(_size(live))) <= value(str(_size(wanted))):
        return wanted
    wanted = copy.deepcopy(wanted)
    wanted["spec"]["resources"]["requests"]["storage"] = _size(live)
    return wanted
