"""Validates a run's spec.

While the current spec is invalid, the run continues with the spec accepted before, which the status holds as it was written.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any, Final

from scalerl_api.conditions import Reason
from scalerl_api.load import SpecError, accepted_run, run_from_object
from scalerl_api.spec import API_VERSION, KIND
from scalerl_api.status import MAX_ACCEPTED_SPEC
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.kube.types import Object
from scalerl_operator.policy.edits_of_run import (
    UNKNOWN_FIELDS,
    SpecEdit,
    changed_fields,
    differing_paths,
    edit_between,
    hash_of,
)
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
    _compare(context)


def _compare(context: RunContext) -> None:
    """Sets in ``context`` what has been edited since the last reconcile, and since the last steps that were trained."""
    before, accepted = context.before, context.accepted
    last, proven = before.accepted_spec, before.trained_spec or before.accepted_spec
    if accepted is None:
        return
    if last is not None and last != context.spec_text:
        earlier = accepted_run({**context.obj, "spec": json.loads(last)}).spec
        context.edit = edit_between(earlier, accepted.spec, before)
    elif last is None and before.accepted_spec_hash not in (None, hash_of(context.obj["spec"])):
        context.edit = SpecEdit((UNKNOWN_FIELDS,))
    if proven is not None and context.spec_text not in (None, proven):
        context.unproven = _differences(proven, context.spec_text)


@functools.lru_cache(maxsize=8)
def _differences(before: str, after: str) -> tuple[str, ...]:
    """The fields that differ between two accepted specs; cached, since they stay the same for many reconciles. Few are: a spec
    may have 256 KiB."""
    nameless: Object = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "run"}}
    old, new = json.loads(before), json.loads(after)
    changed = changed_fields(*(accepted_run(nameless | {"spec": spec}).spec for spec in (old, new)))
    # As they were written: a preset or an alternative has many values that nobody wrote.
    return changed and (differing_paths(old, new) or changed)


def with_spec(run: Object, text: str) -> Object:
    """The run with that spec, and its current ``suspend``: a run with an invalid spec can be suspended too."""
    spec: dict[str, Any] = json.loads(text)
    suspend = run["spec"].get("suspend", False)
    return {**run, "spec": {**spec, "suspend": suspend} if isinstance(suspend, bool) else spec}
