"""Validates a run's spec.

While the current spec is invalid, the run continues with the spec accepted before, which the status holds as it was written.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from scalerl_api.conditions import Reason
from scalerl_api.load import SpecError, accepted_run, run_from_object
from scalerl_api.status import MAX_ACCEPTED_SPEC
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.kube.types import Object
from scalerl_operator.policy.edits_of_run import edits_since, hash_of
from scalerl_operator.policy.problems import Problem
from scalerl_operator.workloads import Role

log = logging.getLogger(__name__)

_ROLES: Final = (Role.PREPARE, Role.TRAINER)


def accept(context: RunContext) -> None:
    """Sets the run's accepted spec in ``context``; pure."""
    try:
        context.accepted = run_from_object(context.obj)
        text = json.dumps(context.obj["spec"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        if len(text) <= MAX_ACCEPTED_SPEC:
            context.spec_text = text
        else:
            context.long_spec = hash_of(context.obj["spec"])
    except SpecError as error:
        message = "; ".join(str(problem) for problem in error.problems)
        context.spec_text = context.before.accepted_spec
        context.long_spec = context.before.accepted_spec_hash
        if context.spec_text is not None:
            message += "; the run continues with the spec accepted before"
            context.accepted = accepted_run(with_spec(context.obj, context.spec_text))
        context.invalid = Problem(Reason.SPEC_INVALID, message)
    if context.accepted is not None:
        context.edit, context.unproven = edits_since(
            context.before, context.accepted.spec, context.obj["spec"], context.spec_text
        )


def with_spec(run: Object, text: str) -> Object:
    """The run with that spec, and its current ``suspend``: a run with an invalid spec can be suspended too."""
    spec: dict[str, Any] = json.loads(text)
    suspend = run["spec"].get("suspend", False)
    return {**run, "spec": {**spec, "suspend": suspend} if isinstance(suspend, bool) else spec}
