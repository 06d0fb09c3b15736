"""Messages of conditions name the cause: a full disk, a program that is not there, a run that has ended."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from operator_tests import builders
from operator_tests.builders import Object
from operator_tests.manifests import UID, cluster_run, findings
from operator_tests.test_operator_degraded import QUIET
from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import Condition, RunStatus
from scalerl_api.wire import Status
from scalerl_lifecycle.lifecycle_types import (
    LifecycleDecision,
    OutcomeKind,
    PersistedState,
    Problem,
    RunOutcome,
)
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.conditions import event_type
from scalerl_operator.controller.parts import Observed
from scalerl_operator.controller.pod_views import observe_objects
from scalerl_operator.controller.report import report
from scalerl_operator.names import QUEUE

RUN = cluster_run()
ROLES = (ConditionType.COORDINATOR_READY, ConditionType.GENERATORS_READY, ConditionType.TRAINER_READY)
HASHES = {Role.PREPARE: "", Role.TRAINER: ""}


def pod(name: str, role: Role, state: Object, *, ready: bool = False, **status: Any) -> Object:
    conditions = [{"type": "Ready", "status": str(ready)}]
    only = builders.container(state, ready=ready, name=str(role), **status)
    return builders.pod(name, role, only, conditions=conditions)


def observed(*pods: Object, jobs: tuple[Role, ...] = ()) -> Observed:
    objects = {("Pod", p["metadata"]["name"]): p for p in pods} | {
        ("Job", str(r)): builders.job(r) for r in jobs
    }
    return observe_objects(objects, UID, HASHES)


def conditions(
    phase: Phase,
    found: Observed | None = None,
    *,
    coordinator_report: Status | None = None,
    outcome: RunOutcome | None = None,
    blocked: Problem | None = None,
    run: ScaleRLRun = RUN,
    before: RunStatus | None = None,
    queue_missing: str = "",
) -> dict[str, Condition]:
    decision = LifecycleDecision(phase, PersistedState(attempt=1, outcome=outcome))
    found_now = findings(
        run,
        before,
        blocked=blocked,
        observed=found or observed(),
        decision=decision,
        coordinator=coordinator_report,
        queue_missing=queue_missing,
    )
    return {c.type: c for c in report(found_now).conditions}


@pytest.mark.parametrize(
    ("phase", "end", "other"),
    [
        (Phase.COMPLETED, OutcomeKind.COMPLETED, ConditionType.FAILED),
        (Phase.FAILED, OutcomeKind.FAILED, ConditionType.COMPLETED),
    ],
)
def test_conditions_of_an_ended_run(phase: Phase, end: OutcomeKind, other: ConditionType) -> None:
    found = conditions(phase, outcome=RunOutcome(end, Reason.BUDGET_REACHED, "maxSteps"))
    for type_ in (*ROLES, other):
        assert (found[type_].status, found[type_].reason) == ("False", phase), type_
    said = " ".join(c.message for c in found.values())
    assert "under way" not in said
    assert "comes before" not in said


def test_conditions_of_a_suspended_run() -> None:
    found = conditions(Phase.SUSPENDED)
    assert {found[type_].reason for type_ in ROLES} == {"Suspended"}
    assert {conditions(Phase.PREPARING)[type_].reason for type_ in ROLES} == {"Preparing"}


def test_phase_reason_names_what_a_drain_waits_for() -> None:
    decision = LifecycleDecision(Phase.PREPARING, PersistedState(attempt=1), waiting_for="the checkpoint")
    found = {c.type: c for c in report(findings(RUN, observed=observed(), decision=decision)).conditions}
    for type_ in ROLES:
        assert (found[type_].reason, found[type_].message) == ("Preparing", "Waiting for the checkpoint")


@pytest.mark.parametrize(
    ("type_", "status", "reason", "expected"),
    [
        (ConditionType.ACCEPTED, "False", Reason.SPEC_INVALID, "Warning"),
        (ConditionType.ACCEPTED, "True", Reason.ACCEPTED, "Normal"),
        (ConditionType.ACCEPTED, "True", Reason.ACCEPTED_WITH_WARNINGS, "Warning"),
        (ConditionType.ADMITTED, "False", Reason.WAITING_FOR_QUOTA, "Normal"),
        (ConditionType.ADMITTED, "False", Reason.REFERENCE_NOT_FOUND, "Warning"),
        (ConditionType.ADMITTED, "False", Phase.SUSPENDED, None),
        (ConditionType.TRAINER_READY, "False", Reason.STARTING, None),
        (ConditionType.TRAINER_READY, "False", Reason.UNSCHEDULABLE, "Warning"),
        (ConditionType.TRAINER_READY, "False", Phase.PENDING, None),
        (ConditionType.DEGRADED, "True", Reason.CLAIM_DELETED, "Warning"),
        (ConditionType.DEGRADED, "False", Reason.HEALTHY, None),
        (ConditionType.SUSPENDED, "True", Reason.BROKEN, "Normal"),
        (ConditionType.FAILED, "True", Reason.DIVERGED, "Warning"),
        (ConditionType.FAILED, "True", Reason.PUBLISH_REFUSED, "Warning"),
        (ConditionType.FAILED, "False", Phase.RUNNING, None),
    ],
)
def test_event_type_of_a_changed_condition(
    type_: ConditionType, status: Literal["True", "False"], reason: str, expected: str | None
) -> None:
    changed = Condition(type=type_, status=status, reason=reason, last_transition_time="2026-01-01T00:00:00Z")
    assert event_type(changed) == expected


def test_full_disk_explains_an_unready_coordinator() -> None:
    coordinator_report = msgspec.structs.replace(QUIET, journal_error="No space left on device")
    running = pod("c-0", Role.COORDINATOR, {"running": {}}, started=True)
    found = conditions(Phase.RUNNING, observed(running), coordinator_report=coordinator_report)
    for type_, status in ((ConditionType.COORDINATOR_READY, "False"), (ConditionType.PROGRESSING, "False"), (ConditionType.DEGRADED, "True")):  # fmt: skip
        condition = found[type_]
        assert (condition.status, condition.reason) == (status, "VolumeNotWritable")
        assert condition.message == "the run's volume cannot be written: No space left on device"


def test_steps_are_not_progressing_without_a_trainer() -> None:
    running = pod("t-0", Role.TRAINER, {"running": {}}, ready=True)
    up = conditions(Phase.RUNNING, observed(running, jobs=(Role.TRAINER,)), coordinator_report=QUIET)
    assert (up["Progressing"].status, up["Progressing"].reason) == ("True", "Healthy")
    down = conditions(Phase.RUNNING, observed(), coordinator_report=QUIET)["Progressing"]
    assert (down.status, down.reason) == ("False", "Stalled")
    assert down.message == "the trainer is not ready, after step 3"
    assert conditions(Phase.FINISHING, observed(), coordinator_report=QUIET)["Progressing"].status == "True"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"scratch": {"layers": 2}}, "the model is initialized randomly"),
        ({"hub": {"name": "a/b"}}, "the model a/b is downloaded to the run's volume"),
        ({"path": "/models/a"}, "the model is taken from /models/a"),
    ],
)
def test_prepared_says_where_the_model_comes_from(model: Object, says: str) -> None:
    run = cluster_run(model=model)
    assert conditions(Phase.PREPARING, run=run)["Prepared"].message == says


def test_prepared_says_what_its_last_try_ended_with() -> None:
    over = {"terminated": {"exitCode": 1, "message": "noise\nOSError: No space left on device"}}
    found = observed(pod("p-1", Role.PREPARE, over), jobs=(Role.PREPARE,))
    condition = conditions(Phase.PREPARING, found)["Prepared"]
    assert (condition.reason, condition.message) == (
        "BackOff",
        "exit code 1: OSError: No space left on device",
    )


_NO_PROGRAM = 'exec: "python": executable file not found in $PATH: unknown'


@pytest.mark.parametrize(
    "state",
    [
        {"terminated": {"exitCode": 128, "reason": "StartError", "message": _NO_PROGRAM}},
        {"terminated": {"exitCode": 127, "reason": "ContainerCannotRun", "message": _NO_PROGRAM}},
        {"waiting": {"reason": "RunContainerError", "message": _NO_PROGRAM}},
    ],
)
def test_container_whose_program_cannot_start_is_named(state: Object) -> None:
    found = observed(pod("p-1", Role.PREPARE, state), jobs=(Role.PREPARE,))
    condition = conditions(Phase.PREPARING, found)["Prepared"]
    assert (condition.reason, condition.message) == ("ContainerStartFailed", f"prepare: {_NO_PROGRAM}")


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.PREPARING, Phase.RUNNING])
def test_queue_that_does_not_exist_is_named(phase: Phase) -> None:
    missing = "no LocalQueue team in the namespace ml"
    queued = cluster_run(labels={QUEUE: "team"})
    found = observed(jobs=(Role.PREPARE,))
    said = conditions(phase, found, run=queued, queue_missing=missing)["Admitted"]
    assert (said.status, said.reason, said.message) == ("False", "ReferenceNotFound", missing)
    assert conditions(phase, found, queue_missing="")["Admitted"].reason == "NoQueue"


def test_claim_event_explains_an_unready_volume() -> None:
    pending = pod("p-1", Role.PREPARE, {})
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    scheduled["message"] = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
    pending["status"] = {"phase": "Pending", "conditions": [scheduled]}
    found = observed(pending, jobs=(Role.PREPARE,))
    assert conditions(Phase.PREPARING, found)["Prepared"].reason == "VolumeNotReady"
    why = Problem(Reason.REFERENCE_NOT_FOUND, 'storageclass.storage.k8s.io "fast" not found')
    assert conditions(Phase.PREPARING, found, blocked=why)["Prepared"].reason == "ReferenceNotFound"
