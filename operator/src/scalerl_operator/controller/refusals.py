"""What it means for a run that the API server refused an object, or that another's object has its name. Pure."""

from __future__ import annotations

from scalerl_api.conditions import Reason
from scalerl_api.spec import KIND
from scalerl_operator.controller.message_patterns import creation_problem
from scalerl_operator.controller.observe import Problem
from scalerl_operator.controller.run_context import CLAIM, RunContext, is_deleted
from scalerl_operator.controller.spec_fields import in_terms_of_the_spec
from scalerl_operator.kube import errors
from scalerl_operator.kube.types import Object


def name_taken(live: Object, context: RunContext) -> Problem | None:
    """Why an object that exists cannot be the run's; None: it is the run's."""
    if context.owns(live):
        return None
    kind = live["kind"]
    what = f"{kind} {live['metadata']['name']}"
    if kind == CLAIM:
        return Problem(Reason.CLAIM_TAKEN, f"{what} holds another run's data")
    owners = live["metadata"].get("ownerReferences") or ()
    if is_deleted(live) or any(o.get("kind") == KIND and o.get("name") == context.name for o in owners):
        return Problem(
            Reason.NAME_TAKEN, f"{what} is of an earlier run of this name, and still being removed"
        )
    return Problem(Reason.NAME_TAKEN, f"{what} exists and is not this run's")


def refused(error: errors.ApiError, obj: Object, context: RunContext) -> Problem:
    """Why the API server refused ``obj``, in terms of the run's spec."""
    what = f"{obj['kind']} {obj['metadata']['name']}"
    if isinstance(error, errors.QuotaExceeded):
        return Problem(Reason.QUOTA_EXCEEDED, f"{what}: {error.message}")
    if isinstance(error, errors.Forbidden) and "cannot" in error.message and "User" in error.message:
        return Problem(Reason.FORBIDDEN, f"{what}: {error.message}")
    return Problem(
        creation_problem(error.message), f"{what}: {in_terms_of_the_spec(error, obj, context.run)}"
    )
