"""Validates a run's spec.

While the current spec is invalid, the run continues with the spec accepted before, which the status holds as it was written.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from scalerl_api import plugins
from scalerl_api.load import SpecError, SpecProblem, accepted_run, run_from_object
from scalerl_api.reasons import Reason
from scalerl_api.registry import Kind
from scalerl_api.spec import RunSpec, ScaleRLRun
from scalerl_lifecycle.edits_of_run import as_accepted, edits_since
from scalerl_lifecycle.lifecycle_types import Problem
from scalerl_operator.controller.parts import Accepted, Run
from scalerl_operator.kube.types import Object


def accept(run: Run) -> Accepted:
    """The run's accepted spec, and what has been edited since the last reconcile, and since the last steps that were trained. Pure."""
    found: ScaleRLRun | None = None
    invalid: Problem | None = None
    text, long_hash = run.before.accepted_spec, run.before.accepted_spec_hash
    try:
        found = run_from_object(run.obj)
        written = as_accepted(run.obj["spec"])
        edited = run.before.start_time is not None and text not in (None, written[0])
        if edited and (missing := plugin_problem(found.spec)) is not None:
            where, _, message = missing.message.partition(": ")
            raise SpecError(run.name, [SpecProblem(where, message)])
        text, long_hash = written
    except SpecError as error:
        message = "; ".join(str(problem) for problem in error.problems)
        if text is not None:
            message += "; the run continues with the spec accepted before"
            found = accepted_run(with_spec(run.obj, text))
        invalid = Problem(Reason.SPEC_INVALID, message)
    accepted = Accepted(found, text, long_hash, invalid)
    if found is None:
        return accepted
    edit, unproven = edits_since(run.before, found.spec, run.obj["spec"], text)
    return replace(accepted, edit=edit, unproven=unproven)


def with_spec(run: Object, text: str) -> Object:
    """The run with that spec, and its current ``suspend``: a run with an invalid spec can be suspended too."""
    spec: dict[str, Any] = json.loads(text)
    suspend = run["spec"].get("suspend", False)
    return {**run, "spec": {**spec, "suspend": suspend} if isinstance(suspend, bool) else spec}


def plugin_problem(spec: RunSpec) -> Problem | None:
    """The first name of what the coordinator opens that its image does not have: that image is the operator's, unless the run names
    another one. The preparation and the vLLM servers check what is in theirs."""
    if spec.images.coordinator is not None:
        return None
    found = plugins.problems(
        spec, (Kind.SOURCE, Kind.VERIFIER, Kind.ENVIRONMENT, Kind.SCHEDULE, Kind.TRACKER)
    )
    return Problem(Reason.REFERENCE_NOT_FOUND, ": ".join(found[0])) if found else None
