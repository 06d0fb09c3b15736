"""What a reconcile leaves in the status is what the next one finds there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_tests.manifests import UID, findings
from operator_tests.test_operator_degraded import QUIET, RUN
from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.status import RunStatus
from scalerl_lifecycle.lifecycle_types import (
    Job,
    LifecycleDecision,
    OutcomeKind,
    PersistedState,
    Problem,
    RunOutcome,
    Suspension,
)
from scalerl_lifecycle.restarts import Record
from scalerl_lifecycle.status_fields import persisted_state
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import Observed
from scalerl_operator.controller.pod_views import observe_objects
from scalerl_operator.controller.report import report
from scalerl_operator.controller.run_object import merge_patch
from scalerl_operator.names import COMPONENT, RUN_UID

INVALID = Problem(Reason.SPEC_INVALID, "model: missing")
leaves = (
    st.none()
    | st.booleans()
    | st.integers(0, 3)
    | st.text(max_size=2)
    | st.lists(st.integers(0, 2), max_size=2)
)
objects = st.recursive(
    leaves, lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), max_leaves=8
).filter(lambda value: isinstance(value, dict))


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return value


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386, as it is written there."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


@given(objects, objects)
def test_merge_patch_removes_old_fields(before: dict[str, Any], after: dict[str, Any]) -> None:
    before, after = without_nulls(before), without_nulls(after)
    assert merged(before, merge_patch(before, after)) == after


times = st.none() | st.integers(1, 2_000_000_000).map(float)
memories = st.builds(
    PersistedState,
    attempt=st.integers(0, 5),
    last_recorded_attempt=st.integers(0, 5),
    record=st.builds(Record, *[st.integers(0, 9)] * 2, *[st.booleans()] * 3, st.integers(0, 9)),
    restarts=st.integers(0, 9),
    ready_since=times,
    drain_since=times,
    unreachable_since=times,
    gated_since=times,
    coordinator_attempt=st.integers(1, 9),
    suspension=st.sampled_from(Suspension),
    resumed=st.booleans(),
    outcome=st.none()
    | st.builds(
        RunOutcome,
        st.sampled_from(OutcomeKind),
        st.sampled_from([Reason.BAD_INPUT, Reason.BUDGET_REACHED]),
        st.just("why"),
    ),
    has_trained=st.booleans(),
    unproven_since=st.none() | st.integers(0, 9),
    suspending_for=st.none()
    | st.builds(
        RunOutcome, st.just(OutcomeKind.SUSPENDED), st.sampled_from(Reason), st.text("why", min_size=1)
    ),
    awaited_since=times,
).filter(lambda persisted: persisted.outcome is None or persisted.suspension is Suspension.NO)


@given(memories, memories)
def test_reconcile_state_round_trips_over_any_earlier_state(
    first: PersistedState, second: PersistedState
) -> None:
    stored: dict[str, Any] = {}
    for persisted in (first, second):
        before = RunStatus.model_validate(stored)
        new = report(
            findings(None, before, decision=LifecycleDecision(Phase.RUNNING, persisted), invalid=INVALID)
        ).to_object()
        stored = merged(stored, merge_patch(stored, new))
        assert stored == new
        assert persisted_state(RunStatus.model_validate(stored)) == persisted


@pytest.mark.parametrize("end", OutcomeKind)
def test_outcome_is_read_also_from_a_later_release(end: OutcomeKind) -> None:
    """Or it would be run again."""
    ended = {"type": end.value, "status": "True", "reason": "ProphecyFulfilled", "message": "as foretold"}
    stored = {"phase": "Legendary", "conditions": [ended | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    for _ in range(2):
        before = RunStatus.read(stored)
        persisted = persisted_state(before)
        assert persisted.outcome == RunOutcome(end, Reason.OTHER_RELEASE, "ProphecyFulfilled: as foretold")
        decision = LifecycleDecision(Phase(end.value), persisted)
        stored = report(findings(None, before, decision=decision, invalid=INVALID)).to_object()


@pytest.mark.parametrize("phase", Phase)
def test_every_condition_has_a_message(phase: Phase) -> None:
    coordinator_report = msgspec.structs.replace(QUIET, step=0, waiting_for="the trainer to say hello")
    trainer = Observed(trainer=Job(ready=True))
    status = report(
        findings(
            RUN,
            decision=LifecycleDecision(phase, PersistedState()),
            coordinator=coordinator_report,
            observed=trainer,
        )
    )
    assert [c.type for c in status.conditions] == list(ConditionType)
    assert [c.type for c in status.conditions if not c.message] == []
    progressing = status.condition(ConditionType.PROGRESSING)
    assert progressing is not None
    if phase in (Phase.RUNNING, Phase.FINISHING):
        said = (progressing.reason, progressing.message)
        assert said == (Reason.STALLED, "waiting for the trainer to say hello")


@pytest.mark.parametrize(
    ("refused", "reason"), [("HTTP 426: 2, not 1", "CoordinatorRefused"), ("", "CoordinatorUnreachable")]
)
def test_refused_connection_is_distinguished_from_unreachable(refused: str, reason: str) -> None:
    decision = LifecycleDecision(
        Phase.RUNNING, PersistedState(attempt=1), waiting_for="the coordinator to answer"
    )
    pod = {"metadata": {"name": "c", "labels": {RUN_UID: UID, COMPONENT: Role.COORDINATOR}}}
    pod["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    observed = observe_objects({("Pod", "c"): pod}, UID, {Role.PREPARE: "", Role.TRAINER: ""})
    status = report(findings(RUN, observed=replace(observed, refusal=refused), decision=decision))
    for type_ in (ConditionType.COORDINATOR_READY, ConditionType.PROGRESSING):
        condition = status.condition(type_)
        assert condition is not None
        assert (condition.status, condition.reason) == ("False", reason)
        assert refused in condition.message
