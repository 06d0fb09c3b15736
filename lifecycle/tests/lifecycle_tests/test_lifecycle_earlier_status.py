"""A status that the release before wrote, when fields of it had other names, is read, and written with the present ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lifecycle_inputs import SPEC, exists

from scalerl_api import crd
from scalerl_api.conditions import Phase
from scalerl_api.reasons import Reason
from scalerl_api.status import FaultStatus, RunStatus
from scalerl_lifecycle import restarts
from scalerl_lifecycle.lifecycle import decide
from scalerl_lifecycle.lifecycle_types import (
    LifecycleInput,
    OutcomeKind,
    PersistedState,
    RunOutcome,
    Suspension,
)
from scalerl_lifecycle.status_fields import persisted_fields, persisted_state

STATUS = json.loads((Path(__file__).parent / "golden/status-earlier-names.json").read_text())
RENAMED = {"rest": "suspension", "holding": "suspendingFor", "trouble": "faults"}
EXPECTED = PersistedState(
    attempt=3,
    last_recorded_attempt=3,
    record=restarts.Record(
        consecutive_failures=2,
        failed_starts=1,
        diverged=True,
        publish_refused=True,
        has_been_ready=True,
        disruptions=4,
    ),
    restarts=5,
    ready_since=1700000001.0,
    next_at=1700000002.0,
    gated_since=1700000003.0,
    drain_since=1700000004.0,
    unreachable_since=1700000005.0,
    coordinator_attempt=2,
    suspension=Suspension.REQUESTED,
    resumed=True,
    has_trained=True,
    unproven_since=7,
    suspending_for=RunOutcome(OutcomeKind.SUSPENDED, Reason.PUBLISH_REFUSED, "two in a row"),
    awaited_since=1700000006.0,
    outcome=RunOutcome(OutcomeKind.FAILED, Reason.CLAIM_LOST, "because"),
)
FAULTS = FaultStatus(
    grading_errors=2,
    last_grading_error_time="2023-11-14T22:13:27Z",
    skipped_steps=1,
    given_up_rollouts=8,
    checkpoint_failures=3,
    unsaved_since=4,
    checkpoint_version=4,
)


def test_earlier_names_are_read() -> None:
    status = RunStatus.read(STATUS)
    assert (persisted_state(status), status.faults) == (EXPECTED, FAULTS)


def test_only_present_names_are_written() -> None:
    written = RunStatus(**persisted_fields(EXPECTED), faults=FAULTS).to_object()
    present = {RENAMED.get(name, name): value for name, value in STATUS.items()} | {"suspension": "Requested"}
    of_conditions = {"phase", "conditions"}
    assert {name: written[name] for name in present.keys() - of_conditions} == {
        name: value for name, value in present.items() if name not in of_conditions
    }
    assert not RENAMED.keys() & RunStatus.read(STATUS).to_object().keys()


def test_present_names_precede_earlier_ones() -> None:
    both = STATUS | {"suspension": "", "faults": {"gradingErrors": 5}}
    status = RunStatus.read(both)
    assert (status.suspension, status.faults) == ("", FaultStatus(grading_errors=5))
    assert status.suspending_for is not None


@pytest.mark.parametrize(("earlier", "present"), [("", ""), ("Asked", "Requested"), ("Resting", "Suspended")])
def test_values_of_suspension_are_read(earlier: str, present: str) -> None:
    assert RunStatus.read({"rest": earlier}).suspension == present


def test_suspended_run_whose_field_was_pruned_stays_suspended_and_resumes() -> None:
    """After a rollback the definition lacks ``suspension``, or the operator does not know it: the condition remains."""
    time = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    condition = {"type": "Suspended", "status": "True", "reason": "SuspendedBySpec"} | time
    found = persisted_state(RunStatus.read({"phase": "Suspended", "conditions": [condition]}))
    decision = decide(SPEC, LifecycleInput(100.0, suspend=True), found)
    assert (decision.phase, decision.persisted.suspension) == (Phase.SUSPENDED, Suspension.YES)
    assert not any(exists(decision))
    resumed = decide(SPEC, LifecycleInput(200.0), decision.persisted)
    assert (resumed.phase, resumed.persisted.resumed) == (Phase.PENDING, True)


def test_definition_keeps_every_earlier_field() -> None:
    """An API server prunes what the schema lacks, before the operator reads it."""
    version = crd.definition()["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["status"]
    assert pruned(STATUS, schema) == STATUS


def pruned(value: Any, schema: dict[str, Any]) -> Any:
    """``value`` without the fields that the schema lacks, as an API server keeps it."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        return {name: pruned(inner, fields[name]) for name, inner in value.items() if name in fields}
    return [pruned(item, schema["items"]) for item in value] if isinstance(value, list) else value
