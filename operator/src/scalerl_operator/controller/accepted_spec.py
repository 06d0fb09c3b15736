"""The spec that a run was last accepted with, which the operator keeps to while the present one is invalid. Pure.

It is kept in the run's status, as it was written: an operator that starts later finds it, and nobody else writes it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from scalerl_api.conditions import ConditionType
from scalerl_api.status import MAX_ACCEPTED_SPEC, RunStatus
from scalerl_operator.controller.observe import Problem
from scalerl_operator.kube.types import Object


def kept(run: Object) -> str | None:
    """The spec of a run as the status keeps it; None where it is too large for that."""
    text = json.dumps(run["spec"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text if len(text) <= MAX_ACCEPTED_SPEC else None


def last_accepted(run: Object, before: RunStatus) -> str | None:
    """The spec accepted before, of a run whose present spec is invalid; None if none ever was.

    An operator of an earlier release, with fewer rules or none that kept the spec, may have accepted the present one.
    """
    said = before.condition(ConditionType.ACCEPTED)
    unchanged = said is not None and said.observed_generation == run["metadata"].get("generation")
    if before.accepted_spec is None and unchanged and said is not None and said.status == "True":
        return kept(run)
    return before.accepted_spec


def with_spec(run: Object, text: str) -> Object:
    """The run with that spec, and the present ``suspend``: a run can be suspended whatever else its spec says."""
    spec: dict[str, Any] = json.loads(text)
    suspend = run["spec"].get("suspend", False)
    return {**run, "spec": {**spec, "suspend": suspend} if isinstance(suspend, bool) else spec}


def continues_with_accepted(invalid: Problem) -> Problem:
    """What is wrong with the spec, and what becomes of the run meanwhile."""
    return replace(invalid, message=f"{invalid.message}; the run continues with the spec accepted before")
