"""The status of a run, from what was observed, decided and checked."""

from __future__ import annotations

from typing import Any

from scalerl_api.recipe.resolve import resolve
from scalerl_api.status import GeneratorsStatus, RecipeValue, RunStatus, SourceStatus
from scalerl_lifecycle.status_fields import (
    decision_fields,
    progress_fields,
    rfc3339,
    trained_spec,
)
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.conditions import conditions
from scalerl_operator.controller.parts import Findings
from scalerl_operator.controller.status_columns import columns
from scalerl_operator.names import selector


def report(findings: Findings) -> RunStatus:
    """The current status."""
    run, accepted, decision = findings.run, findings.accepted, findings.decision
    before, persisted, now = run.before, decision.persisted, rfc3339(run.unix_seconds)
    coordinator, startable = findings.observed.coordinator, findings.checks.not_started is None
    labels = sorted(selector(run.uid, Role.GENERATOR).items())
    update: dict[str, Any] = {
        "observed_generation": run.generation,
        "accepted_spec": accepted.text if startable else before.accepted_spec,
        "accepted_spec_hash": accepted.long_hash if startable else before.accepted_spec_hash,
        "trained_spec": trained_spec(before, persisted, accepted.text) if startable else before.trained_spec,
        "conditions": conditions(findings),
        "source": _source(findings),
        **decision_fields(before, decision, now),
        "model": findings.model,
        "faults": findings.observed.faults,
        "selector": before.selector or ",".join(f"{key}={value}" for key, value in labels),
    }
    scaling = findings.observed.autoscaler
    if scaling.known and scaling.decisions:
        update |= {
            "forecast": scaling.forecast,
            "outlook": scaling.outlook,
            "stop_votes": scaling.votes,
            "decision": scaling.state,
            "decisions": list(scaling.decisions),
        }
    if accepted.found is not None:
        update["recipe"] = [
            RecipeValue(field=choice.field, value=choice.value[:256], origin=choice.shown_origin)
            for choice in resolve(accepted.spec.recipe).choices
        ]
        pods = [pod for pod in findings.observed.of(Role.GENERATOR) if not pod.finished]
        ready = sum(pod.ready for pod in pods)
        update |= {"replicas": len(pods), "generators": GeneratorsStatus(replicas=len(pods), ready=ready)}
    if coordinator is not None:
        update |= progress_fields(coordinator, before, now)
    status = before.model_copy(update=update)
    return status.model_copy(update=columns(findings, status))


def _source(findings: Findings) -> SourceStatus | None:
    """Of a fork, its source: as found at its preparation, with the step as the coordinator reports it."""
    accepted, before = findings.accepted.found, findings.run.before
    coordinator, uid = findings.observed.coordinator, findings.checks.source_uid
    given = None if accepted is None else accepted.spec.fork
    if given is None:
        return before.source
    found = before.source or SourceStatus(run=given.run)
    if uid:
        found = found.model_copy(update={"uid": uid[:64]})
    if coordinator is not None and coordinator.forked_step >= 0:
        found = found.model_copy(update={"step": coordinator.forked_step})
    return found
