"""A run in a queue: it holds nothing while it waits, and what is said of it is what the queue has done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from lifecycle_inputs import DONE, FIRST, RUNNING, SPEC, exists, reported

from operator_tests.manifests import UID, cluster_run, findings
from operator_tests.test_operator_degraded import QUIET
from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.status import RunStatus
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_lifecycle.lifecycle import decide
from scalerl_lifecycle.lifecycle_types import (
    GATED_SECONDS,
    Job,
    JobState,
    LifecycleDecision,
    LifecycleInput,
    PersistedState,
)
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import Observed
from scalerl_operator.controller.pod_views import JOB_NAME, observe_objects
from scalerl_operator.controller.report import report
from scalerl_operator.controller.volume import may_have_mounted
from scalerl_operator.names import ATTEMPT, COMPONENT, QUEUE, RUN_UID

HELD = Job(JobState.ACTIVE, 1, gated=True)
QUEUED = replace(RUNNING, queued=True, serving=True)


def test_run_starts_with_admitted_workloads() -> None:
    """No generator holds a device that the trainer then lacks."""
    waiting = LifecycleInput(0.0, queued=True, prepare=Job(JobState.ACTIVE, gated=True))
    decision = decide(SPEC, waiting, PersistedState())
    assert (decision.phase, exists(decision)) == ("Pending", (True, False, False, None))
    decision = decide(SPEC, replace(waiting, prepare=DONE), PersistedState())
    assert (decision.phase, exists(decision)) == ("Pending", (True, False, False, 1))
    assert decision.again_seconds is not None, "the Job is yet to be seen"
    held = replace(waiting, prepare=DONE, trainer=HELD)
    decision = decide(SPEC, held, decision.persisted)
    assert (decision.phase, exists(decision)) == ("Pending", (True, False, False, 1))
    assert decision.again_seconds is None, "the queue's word wakes us"
    decision = decide(SPEC, replace(held, trainer=Job(JobState.ACTIVE, 1)), decision.persisted)
    assert (decision.phase, exists(decision)) == ("Running", (True, True, True, 1))


@pytest.mark.parametrize(
    ("trainer", "at_work"),
    [
        (HELD, False),
        (replace(HELD, pods_terminating=True), True),
        (replace(HELD, gated=False), True),
        (Job(JobState.TERMINATING, 1), True),
        (Job(JobState.FAILED, 1), False),
    ],
)
def test_queued_trainer_has_no_volume_mounted(trainer: Job, at_work: bool) -> None:
    observed = replace(observe_objects({}, UID, {Role.PREPARE: "", Role.TRAINER: ""}), trainer=trainer)
    assert may_have_mounted(observed) is at_work


def test_without_a_queue_all_begins_at_once() -> None:
    assert exists(decide(SPEC, LifecycleInput(0.0, prepare=DONE), PersistedState())) == (True, True, True, 1)


def test_requeued_trainer_is_no_failure_and_frees_the_run() -> None:
    """Generators would idle on their devices, and the coordinator's clock use the budget up."""
    saving = replace(QUEUED, trainer=replace(HELD, pods_terminating=True))
    for now in (100.0, 100.0 + 2 * GATED_SECONDS):
        decision = decide(SPEC, replace(saving, unix_seconds=now), replace(FIRST, gated_since=100.0))
        assert (decision.phase, exists(decision)) == ("Running", (True, True, True, 1))
        assert decision.persisted == replace(FIRST, gated_since=100.0)
    saved = replace(saving, unix_seconds=100.0 + 2 * GATED_SECONDS, trainer=HELD)
    assert decide(SPEC, saved, decision.persisted).phase == "Pending", "it has been held for long"
    short = replace(QUEUED, trainer=HELD, unix_seconds=100.0)
    persisted = decide(SPEC, short, FIRST).persisted
    short = replace(short, unix_seconds=99.0 + GATED_SECONDS)
    decision = decide(SPEC, short, persisted)
    assert (decision.phase, exists(decision)) == ("Running", (True, True, True, 1))
    assert (decision.persisted.restarts, decision.persisted.record, decision.persisted.ready_since) == (
        0,
        FIRST.record,
        None,
    )
    long = replace(short, unix_seconds=100.0 + GATED_SECONDS)
    decision = decide(SPEC, long, decision.persisted)
    assert (decision.phase, exists(decision)) == ("Pending", (True, False, False, 1))
    back = replace(long, status=None, serving=False, trainer=Job(JobState.ACTIVE, 1))
    decision = decide(SPEC, back, decision.persisted)
    assert (decision.phase, exists(decision), decision.persisted.attempt) == (
        "Running",
        (True, True, True, 1),
        1,
    )
    assert decision.persisted.gated_since is None


def test_trainer_hold_uses_one_clock() -> None:
    """The API server's may go otherwise, and what it said of an earlier hold is past."""
    observed = seen(suspend=True, over=True).trainer
    persisted = FIRST
    for now, there in (
        (5000.0, True),
        (4000.0, True),
        (3999.0 + GATED_SECONDS, True),
        (4000.0 + GATED_SECONDS, False),
    ):
        decision = decide(SPEC, replace(QUEUED, trainer=observed, unix_seconds=now), persisted)
        persisted = decision.persisted
        assert (now, decision.wanted.coordinator) == (now, there)


def test_next_attempt_is_admitted_again_while_others_stay() -> None:
    between = decide(SPEC, replace(QUEUED, trainer=Job()), replace(FIRST, last_recorded_attempt=1))
    assert exists(between) == (True, True, True, 2)
    held = replace(QUEUED, trainer=Job(JobState.ACTIVE, 2, gated=True))
    assert exists(decide(SPEC, held, between.persisted)) == (True, True, True, 2)


def test_requeue_at_the_end_needs_no_devices() -> None:
    over = replace(QUEUED, status=reported(CoordinatorPhase.FINISHED, "maxSteps"), trainer=HELD)
    outcome = decide(SPEC, over, FIRST).persisted.outcome
    assert outcome is not None
    assert outcome.reason == "BudgetReached"
    assert (
        decide(SPEC, replace(over, trainer=replace(HELD, pods_terminating=True)), FIRST).persisted.outcome
        is None
    )


@pytest.mark.parametrize(("ending", "released"), [(True, False), (False, True)])
def test_deletion_while_requeued_saves_first(ending: bool, released: bool) -> None:
    decision = decide(
        SPEC, replace(QUEUED, deleting=True, trainer=replace(HELD, pods_terminating=ending)), FIRST
    )
    assert decision.release == released


# --- what is seen, and what is said of it -------------------------------------------------------------


def seen(*, suspend: bool, over: bool = False, terminating: bool = True) -> Observed:
    """A trainer's Job that has been requeued, or admitted again, and one pod of it that is terminating, or not yet."""
    labels = {RUN_UID: UID, COMPONENT: Role.TRAINER, ATTEMPT: "1"}
    put_back = {"type": "Suspended", "status": str(suspend), "lastTransitionTime": "1970-01-01T00:01:40Z"}
    job: dict[str, Any] = {
        "metadata": {"name": "job", "labels": labels},
        "spec": {"parallelism": 1, "suspend": suspend},
        "status": {"conditions": [put_back]},
    }
    metadata = {"name": "pod", "labels": labels | {JOB_NAME: "job"}}
    if terminating:
        metadata["deletionTimestamp"] = "1970-01-01T00:06:40Z"
    pod = {"metadata": metadata, "status": {"phase": "Succeeded" if over else "Running"}}
    return observe_objects(
        {("Job", "job"): job, ("Pod", "pod"): pod}, UID, {Role.PREPARE: "", Role.TRAINER: ""}
    )


def test_requeued_job_and_its_ending_pods_are_observed() -> None:
    trainer = seen(suspend=True).trainer
    assert (trainer.gated, trainer.pods_terminating) == (True, True)
    assert not seen(suspend=True, over=True).trainer.pods_terminating
    assert seen(suspend=True, terminating=False).trainer.pods_terminating, (
        "the Job's controller has not deleted them yet"
    )
    assert not seen(suspend=False, terminating=False).trainer.pods_terminating
    assert not seen(suspend=False).trainer.gated


def nothing() -> Observed:
    return observe_objects({}, UID, {Role.PREPARE: "", Role.TRAINER: ""})


def said(observed: Observed, phase: Phase, before: RunStatus, type_: ConditionType) -> tuple[str, str]:
    decision = LifecycleDecision(phase, PersistedState(attempt=1))
    run = cluster_run(labels={QUEUE: "team"})
    found = findings(run, before, observed=observed, decision=decision, coordinator=QUIET)
    condition = report(found).condition(type_)
    assert condition is not None
    return condition.status, condition.reason


@pytest.mark.parametrize(
    ("observed", "phase", "before", "expected"),
    [
        (nothing(), Phase.PENDING, "False", ("False", Reason.WAITING_FOR_QUOTA)),
        (seen(suspend=True), Phase.PENDING, "True", ("False", Reason.WAITING_FOR_QUOTA)),
        (seen(suspend=False), Phase.RUNNING, "False", ("True", Reason.QUEUE_ADMITTED)),
        # Between two attempts.
        (nothing(), Phase.RUNNING, "True", ("True", Reason.QUEUE_ADMITTED)),
        (nothing(), Phase.SUSPENDED, "True", ("False", Phase.SUSPENDED)),
    ],
)
def test_admitted_says_what_the_queue_has_done(
    observed: Observed, phase: Phase, before: str, expected: tuple[str, str]
) -> None:
    old = {"type": "Admitted", "status": before, "reason": "QueueAdmitted", "message": ""}
    status = RunStatus.read({"conditions": [old | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]})
    assert said(observed, phase, status, ConditionType.ADMITTED) == expected


def test_recreated_preparation_waits_for_quota_again() -> None:
    old = {"type": "Prepared", "status": "True", "reason": "Prepared", "message": ""}
    before = RunStatus.read({"conditions": [old | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]})
    waiting = replace(nothing(), prepare=Job(JobState.ACTIVE, gated=True))
    now = said(waiting, Phase.PENDING, before, ConditionType.PREPARED)
    assert now == ("False", Reason.WAITING_FOR_QUOTA)
    assert said(nothing(), Phase.SUSPENDED, before, ConditionType.PREPARED) == ("True", Reason.PREPARED)


def test_requeued_trainer_waits_for_quota() -> None:
    now = said(seen(suspend=True), Phase.RUNNING, RunStatus(), ConditionType.TRAINER_READY)
    assert now == ("False", Reason.WAITING_FOR_QUOTA)
