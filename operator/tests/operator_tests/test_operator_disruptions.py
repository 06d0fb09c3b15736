"""A node's failure is no failure of the run: the cluster's objects distinguish the two, and the run continues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from lifecycle_inputs import FIRST, RUNNING, SPEC, spec

from operator_tests import builders
from operator_tests.manifests import UID, findings
from operator_tests.test_operator_degraded import RUN
from scalerl_api.conditions import Phase
from scalerl_api.reasons import Reason
from scalerl_lifecycle.failures import EXIT_CODE_GRACE_SECONDS
from scalerl_lifecycle.lifecycle import decide
from scalerl_lifecycle.lifecycle_types import (
    ContainerExit,
    Job,
    JobState,
    LifecycleDecision,
    LifecycleInput,
    PersistedState,
)
from scalerl_lifecycle.restarts import Record
from scalerl_lifecycle.status_fields import persisted_state, rfc3339
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import Observed
from scalerl_operator.controller.pod_views import LOST_SECONDS, observe_objects, pod_view
from scalerl_operator.controller.report import report
from scalerl_operator.controller.run_state import RunState
from scalerl_operator.names import ATTEMPT

NOW = 1_000_000.0
ALLOCATE = "Allocate failed due to no healthy devices present"
TAKEN = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "room"}
BY_RULE = "Pod ns/x has condition DisruptionTarget matching FailJob rule at index 0"


def a_pod(
    name: str,
    phase: str,
    *,
    role: Role = Role.TRAINER,
    code: int | None = None,
    age: float = 60,
    terminating: bool = False,
    **status: Any,
) -> dict[str, Any]:
    over = {"terminated": {"exitCode": code, "message": f"exit {code}"}}
    return builders.pod(
        name,
        role,
        *([] if code is None else [builders.container(over)]),
        job="j",
        created=rfc3339(NOW - age),
        deleted=rfc3339(NOW) if terminating else None,
        phase=phase,
        **status,
    )


def seen(*pods: dict[str, Any], role: Role = Role.TRAINER, why: str = "BackoffLimitExceeded") -> Observed:
    """With a Job that has failed."""
    failed = {"type": "Failed", "status": "True", "reason": why, "lastTransitionTime": rfc3339(NOW)}
    failed["message"] = BY_RULE if why == "PodFailurePolicy" else "limit"
    job = builders.job(role, failed, name="j", parallelism=2)
    objects = {("Pod", pod["metadata"]["name"]): pod for pod in pods} | {("Job", "j"): job}
    return observe_objects(objects, UID, {Role.PREPARE: "", Role.TRAINER: ""})


REFUSED = a_pod("a", "Failed", reason="UnexpectedAdmissionError", message=ALLOCATE)
CRASHED = a_pod("b", "Failed", code=1)


@pytest.mark.parametrize(
    ("pods", "why", "disrupted"),
    [
        ([REFUSED], "", True),
        ([a_pod("a", "Failed", reason="OutOfnvidia.com/gpu", message="0 free"), CRASHED], "", True),
        ([a_pod("a", "Running", terminating=True, conditions=[TAKEN]), CRASHED], "", True),
        ([a_pod("a", "Failed", code=137, reason="Evicted", conditions=[TAKEN])], "", True),
        (
            [a_pod("a", "Failed", code=137, reason="Evicted", message="exceeds the limit of its disk")],
            "",
            False,
        ),
        ([CRASHED], "PodFailurePolicy", True),
        ([CRASHED], "", False),
        ([], "", True),  # however they were deleted, they had not failed
        ([a_pod("a", "Running")], "", False),  # news of it are yet to come
        ([REFUSED, a_pod("b", "Failed", code=2)], "", False),
        ([REFUSED, a_pod("b", "Failed", code=3)], "PodFailurePolicy", False),
    ],
)
def test_whose_fault_it_was_that_a_gang_failed(pods: list[Any], why: str, disrupted: bool) -> None:
    trainer = seen(*pods, why=why).trainer
    assert (trainer.state, trainer.disrupted, trainer.failed_at) == (JobState.FAILED, disrupted, NOW)


DRAINED = a_pod("a", "Failed", role=Role.PREPARE, code=137, conditions=[TAKEN])


@pytest.mark.parametrize(
    ("last", "disrupted"),
    [
        (a_pod("b", "Failed", role=Role.PREPARE, code=1), False),
        (a_pod("b", "Failed", role=Role.PREPARE, reason="Evicted", message="exceeds its disk"), False),
        (a_pod("b", "Failed", role=Role.PREPARE, reason="OutOfcpu", message="0 free"), True),
    ],
)
def test_preparation_failure_counts_after_a_disruption(last: dict[str, Any], disrupted: bool) -> None:
    """Its Job tries again by itself, and the pods of all tries stay in the list."""
    assert seen(DRAINED, role=Role.PREPARE).prepare.disrupted
    assert seen(DRAINED, last, role=Role.PREPARE).prepare.disrupted == disrupted


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"reason": "UnexpectedAdmissionError"}, Reason.REFUSED_BY_NODE),
        ({"reason": "OutOfcpu"}, Reason.REFUSED_BY_NODE),
        ({"reason": "OutOfnvidia.com/gpu"}, Reason.REFUSED_BY_NODE),
        ({"reason": "NodeShutdown"}, Reason.REFUSED_BY_NODE),
        ({"reason": "NodeLost"}, Reason.EVICTED),
        ({"reason": "Terminated"}, Reason.EVICTED),
        ({"reason": "Evicted"}, Reason.EVICTED),
    ],
)
def test_why_a_pod_failed_that_says_so_itself(status: dict[str, str], reason: Reason) -> None:
    problem = pod_view(a_pod("a", "Failed", message="words", **status)).problem
    assert problem is not None
    assert (problem.reason, problem.message) == (reason, f"{status['reason']}: words")


def test_why_a_pod_failed_that_lost_its_place() -> None:
    problem = pod_view(a_pod("a", "Failed", code=137, conditions=[TAKEN])).problem
    assert problem is not None
    assert (problem.reason, problem.message) == (Reason.EVICTED, "PreemptionByScheduler: room")


def test_refused_pod_is_ignored_once_replaced() -> None:
    corpse = a_pod("a", "Failed", role=Role.GENERATOR, age=60, reason="OutOfcpu", message="full")
    problem = seen(corpse).problem(Role.GENERATOR)
    assert problem is not None
    assert problem.message == "OutOfcpu: full"
    newer = a_pod("b", "Running", role=Role.GENERATOR, age=59)
    assert seen(corpse, newer).problem(Role.GENERATOR) is None
    older = a_pod("b", "Running", role=Role.GENERATOR, age=61)
    assert seen(corpse, older).problem(Role.GENERATOR) is not None


LATE = {"reason": "UnexpectedAdmissionError", "message": ALLOCATE}


@pytest.mark.parametrize(
    ("news", "reason"),
    [
        (a_pod("a", "Failed", **LATE), None),
        (a_pod("a", "Failed", code=2), Reason.BAD_INPUT),
        (a_pod("a", "Running"), Reason.STARTS_FAILED),  # it never comes
    ],
)
@pytest.mark.parametrize("role", [Role.TRAINER, Role.PREPARE])
def test_job_failure_waits_for_pod_termination_reason(
    role: Role, news: dict[str, Any], reason: Reason | None
) -> None:
    """They are watched apart from it, and each judgement is for good."""

    def reconciled(pod: dict[str, Any], seconds: float, persisted: PersistedState) -> LifecycleDecision:
        job = getattr(seen(pod, role=role), role.value)
        trainer = replace(job, attempt=1) if role is Role.TRAINER else Job()
        prepare = job if role is Role.PREPARE else RUNNING.prepare
        facts = replace(RUNNING, unix_seconds=NOW + seconds, trainer=trainer, prepare=prepare)
        last = PersistedState(attempt=1, record=Record(consecutive_failures=5, failed_starts=5))
        return decide(
            spec(trainer={"maxRestarts": 5}), facts, last if persisted == PersistedState() else persisted
        )

    decision = reconciled(a_pod("a", "Running"), 0.5, PersistedState())
    assert (decision.persisted.outcome, decision.persisted.last_recorded_attempt) == (None, 0)
    assert decision.again_seconds is not None
    assert decision.wanted.prepare, "its pods are kept"
    outcome = reconciled(news, EXIT_CODE_GRACE_SECONDS, decision.persisted).persisted.outcome
    if role is Role.PREPARE and reason is Reason.STARTS_FAILED:
        reason = Reason.PREPARE_FAILED
    assert (outcome and outcome.reason) == reason


# --- what follows ----------------------------------------------------------------------------------


def stored(persisted: PersistedState, now: float) -> PersistedState:
    """As the next reconcile finds it."""
    decision = LifecycleDecision(Phase.RUNNING, persisted)
    return persisted_state(report(findings(RUN, unix_seconds=now, decision=decision)))


def tries(
    persisted: PersistedState, failed: Job, seconds: float, **trainer: Any
) -> tuple[PersistedState, int]:
    """The run while each attempt fails at once: what is kept when it is over, or so long has passed, and tries."""
    now, end = 1000.25, 1000.25 + seconds
    state, first = replace(failed, attempt=persisted.attempt), persisted.attempt
    while now < end and persisted.outcome is None:
        decision = decide(spec(trainer=trainer), replace(RUNNING, unix_seconds=now, trainer=state), persisted)
        persisted = stored(decision.persisted, now)
        if decision.wanted.trainer is None:
            state = Job()
        elif state.state is JobState.ABSENT:
            state = replace(failed, attempt=decision.wanted.trainer)
        now = max(now + 1.0, persisted.next_at)
    return persisted, persisted.attempt - first


CRASH = Job(JobState.FAILED, exits=(ContainerExit(1, "volume: stale file handle"),))
LOST = Job(JobState.FAILED, disrupted=True)


def test_run_never_ready_fails_soon() -> None:
    persisted, made = tries(PersistedState(attempt=1), CRASH, 3600)
    assert persisted.outcome is not None
    assert (persisted.outcome.reason, made) == (Reason.STARTS_FAILED, 5)


def test_run_once_ready_survives_half_an_hour_without_start() -> None:
    persisted, made = tries(replace(FIRST, attempt=3, last_recorded_attempt=2), CRASH, 1800)
    assert persisted.outcome is None
    assert 8 <= made <= 15
    persisted, made = tries(replace(FIRST, attempt=3, last_recorded_attempt=2), CRASH, 7200)
    assert persisted.outcome is not None
    assert (persisted.outcome.reason, made) == (Reason.BACKOFF_LIMIT_EXCEEDED, 20)
    assert "stale file handle" in persisted.outcome.message
    persisted, made = tries(replace(FIRST, attempt=3, last_recorded_attempt=2), CRASH, 7200, maxRestarts=2)
    assert (persisted.outcome is not None, made) == (True, 2)


@pytest.mark.parametrize("failed", [LOST, Job(JobState.COMPLETE)])
@pytest.mark.parametrize(
    "persisted", [PersistedState(attempt=1), replace(FIRST, attempt=3, last_recorded_attempt=2)]
)
def test_run_outlives_whatever_nodes_do(persisted: PersistedState, failed: Job) -> None:
    persisted, made = tries(persisted, failed, 86400, maxRestarts=0)
    assert persisted.outcome is None
    assert 250 < made < 320, "every five minutes at last"
    assert (persisted.record.consecutive_failures, persisted.record.failed_starts) == (0, 0)


def test_longest_back_off_is_not_cut_by_rounding() -> None:
    persisted = replace(FIRST, attempt=3, last_recorded_attempt=2, ready_since=None)
    persisted = replace(
        persisted, record=replace(persisted.record, consecutive_failures=15, has_been_ready=True)
    )
    failed = replace(RUNNING, unix_seconds=1000.25, trainer=replace(CRASH, attempt=3))
    persisted = stored(decide(SPEC, failed, persisted).persisted, 1000.25)
    assert persisted.next_at == 1301.0
    assert decide(SPEC, replace(failed, unix_seconds=1000.3), persisted).wanted.trainer == 3, (
        "it stays until then"
    )


@pytest.mark.parametrize(
    "between",
    [
        replace(RUNNING, trainer=replace(CRASH, attempt=1), suspend=True),
        replace(
            RUNNING, trainer=replace(CRASH, attempt=1, stale=True), prepare=Job(JobState.COMPLETE, stale=True)
        ),
    ],
    ids=["resumed", "another spec"],
)
def test_restart_request_retries_at_once(
    between: LifecycleInput,
) -> None:
    """Its image may be another one, and a wrong one."""
    persisted = replace(FIRST, last_recorded_attempt=1, next_at=250.0)
    persisted = replace(
        persisted,
        record=replace(persisted.record, consecutive_failures=20, failed_starts=7, has_been_ready=True),
    )
    persisted = decide(SPEC, between, persisted).persisted
    persisted = decide(SPEC, replace(RUNNING, trainer=Job(), prepare=Job()), persisted).persisted
    decision = decide(SPEC, replace(RUNNING, trainer=Job()), persisted)
    assert (decision.wanted.trainer, decision.persisted.record) == (2, Record())
    persisted, made = tries(decision.persisted, CRASH, 3600)
    assert persisted.outcome is not None
    assert (persisted.outcome.reason, made) == (Reason.STARTS_FAILED, 5)


def test_evicted_preparation_is_recreated_with_back_off() -> None:
    now, persisted, state, made = (
        1000.0,
        PersistedState(),
        Job(JobState.FAILED, disrupted=True, failed_at=1000.0),
        0,
    )
    while now < 1000.0 + 3600:
        decision = decide(SPEC, replace(RUNNING, unix_seconds=now, prepare=state, trainer=Job()), persisted)
        persisted = stored(decision.persisted, now)
        assert persisted.outcome is None
        if not decision.wanted.prepare:
            state = Job()
        elif state.state is JobState.ABSENT:
            state, made = Job(JobState.FAILED, disrupted=True, failed_at=now), made + 1
        now += decision.again_seconds or 1.0
    assert 15 < made < 25
    decision = decide(SPEC, replace(RUNNING, unix_seconds=now, trainer=Job()), persisted)
    assert (decision.wanted.trainer, decision.persisted.record) == (1, Record()), (
        "the trainer has lost nothing yet"
    )
    crashed = Job(JobState.FAILED, exits=(ContainerExit(1, "boom"),))
    over = decide(SPEC, replace(RUNNING, prepare=crashed, trainer=Job()), persisted).persisted.outcome
    assert over is not None
    assert over.reason is Reason.PREPARE_FAILED


def test_on_what_the_next_attempt_waits_is_said() -> None:
    terminating = a_pod("trainer-1-0", "Running", terminating=True)
    for next_at, said in (
        (NOW + 60.5, f"attempt 2 follows at {rfc3339(NOW + 61)}"),
        (NOW - 1, "attempt 2 follows when trainer-1-0 has ended"),
    ):
        persisted = replace(FIRST, last_recorded_attempt=1, next_at=next_at)
        decision = LifecycleDecision(Phase.RUNNING, persisted)
        found = findings(RUN, unix_seconds=NOW, observed=seen(terminating), decision=decision)
        condition = report(found).condition("TrainerReady")
        assert condition is not None
        assert (condition.reason, condition.message) == (Reason.BACK_OFF, said)


# --- lost nodes ---------------------------------------------------------------------------------

TAINTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "m"}


def ready(pod: str, containers: str) -> list[dict[str, str]]:
    return [{"type": "Ready", "status": pod}, {"type": "ContainersReady", "status": containers}]


@pytest.mark.parametrize(
    ("pod", "after", "lost"),
    [
        # What Kubernetes writes: Ready alone, then the eviction.
        (a_pod("a", "Running", terminating=True, conditions=[TAINTED, *ready("False", "True")]), 0, True),
        (a_pod("a", "Running", terminating=False, conditions=[TAINTED, *ready("False", "True")]), 999, False),
        # A kubelet that answers: it ends the pod, and writes both.
        (a_pod("a", "Running", terminating=True, conditions=[TAINTED, *ready("True", "True")]), 0, False),
        (a_pod("a", "Running", terminating=True, conditions=[TAINTED, *ready("False", "False")]), 0, False),
        # Evicted by somebody else, while the node only just stopped answering.
        (a_pod("a", "Running", terminating=True, conditions=[TAKEN, *ready("False", "True")]), 0, False),
        # Any pod that outlives its grace period.
        (a_pod("a", "Running", terminating=True), LOST_SECONDS, False),
        (a_pod("a", "Running", terminating=True), LOST_SECONDS + 1, True),
        (a_pod("a", "Pending", terminating=True), LOST_SECONDS + 1, True),
        (a_pod("a", "Failed", terminating=True, code=1), LOST_SECONDS + 1, False),
        (a_pod("a", "Running"), 1e6, False),
    ],
)
def test_lost_pod_is_one_whose_node_cannot_confirm_its_end(
    pod: dict[str, Any], after: float, lost: bool
) -> None:
    assert pod_view(pod, after).lost is lost


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6], ids=["behind", "alike", "ahead"])
def test_lost_pod_does_not_depend_on_the_api_servers_clock(skew: float) -> None:
    """skew: of the operator's monotonic clock, against that of deletionTimestamp."""
    pod = {"kind": "Pod", **a_pod("a", "Running", terminating=True)}
    pod["metadata"]["deletionGracePeriodSeconds"] = 300
    state, objects = RunState(), {("Pod", "a"): pod}

    def lost(now: float) -> bool:
        terminating = state.terminating_seconds(objects.values(), NOW + skew + now)
        (seen,) = observe_objects(objects, UID, {Role.PREPARE: "", Role.TRAINER: ""}, terminating).pods
        return seen.lost

    limit = 300 + LOST_SECONDS
    assert [lost(0), lost(limit), lost(limit + 1)] == [False, False, True]
    # Another deletion, with a shorter grace period.
    pod["metadata"] |= {"deletionTimestamp": rfc3339(NOW + 7), "deletionGracePeriodSeconds": 5}
    assert [lost(limit + 2), lost(limit + 2 + 65), lost(limit + 2 + 66)] == [False, False, True]
    objects.clear()
    assert state.terminating_seconds((), NOW) == {}
    assert state.terminating == {}, "pods that are gone are forgotten"


def with_jobs(*pods: dict[str, Any], deleted: bool = False, later: bool = False) -> Observed:
    jobs = {"j": builders.job(Role.TRAINER, name="j", parallelism=2)}
    if later:
        jobs["k"] = builders.job(Role.TRAINER, name="k", parallelism=2)
    for number, job in enumerate(jobs.values(), 1):
        job["metadata"]["labels"][ATTEMPT] = str(number)
    if deleted:
        jobs["j"]["metadata"]["deletionTimestamp"] = rfc3339(NOW)
    objects = {("Pod", pod["metadata"]["name"]): pod for pod in pods}
    objects |= {("Job", name): job for name, job in jobs.items()}
    return observe_objects(objects, UID, {Role.PREPARE: "", Role.TRAINER: ""})


LOST = a_pod("a", "Running", terminating=True, conditions=[TAINTED, *ready("False", "True")])


@pytest.mark.parametrize(
    ("pods", "deleted", "later", "expected"),
    [
        (
            [LOST, a_pod("b", "Running")],
            False,
            False,
            Job(JobState.FAILED, 1, pods_terminating=True, disrupted=True),
        ),
        # What a rank said before its node was lost comes first.
        (
            [LOST, a_pod("b", "Failed", code=2)],
            False,
            False,
            Job(JobState.FAILED, 1, exits=(ContainerExit(2, "exit 2"),), pods_terminating=True),
        ),
        # The others of the gang are still ending.
        (
            [LOST, a_pod("b", "Running", terminating=True)],
            True,
            False,
            Job(JobState.TERMINATING, 1, pods_terminating=True),
        ),
        ([LOST, a_pod("b", "Failed", code=1)], True, False, Job(abandoned=1)),
        ([LOST], True, False, Job(abandoned=1)),
        ([], True, False, Job(JobState.TERMINATING, 1)),
        ([LOST], True, True, Job(JobState.ACTIVE, 2, abandoned=1)),
    ],
)
def test_job_with_lost_pods(pods: list[Any], deleted: bool, later: bool, expected: Job) -> None:
    assert with_jobs(*pods, deleted=deleted, later=later).trainer == expected


def test_number_of_an_abandoned_attempt_is_not_used_again() -> None:
    """Its end was not recorded, as when the run was suspended meanwhile."""
    persisted = PersistedState(attempt=3, last_recorded_attempt=2)
    gone = decide(SPEC, replace(RUNNING, trainer=Job(abandoned=3)), persisted)
    assert (gone.wanted.trainer, gone.persisted.attempt) == (4, 4)
    deleted_by_hand = decide(SPEC, replace(RUNNING, trainer=Job()), persisted)
    assert deleted_by_hand.wanted.trainer == 3
    assert (
        decide(
            SPEC, replace(RUNNING, trainer=Job(JobState.ACTIVE, 4, abandoned=3)), gone.persisted
        ).wanted.trainer
        == 4
    )


def coordinators(*numbers: int) -> Observed:
    """Pods of coordinators on lost nodes, with those numbers; 0: without one."""
    pods = [a_pod(f"c{n}", "Running", role=Role.COORDINATOR, terminating=True) for n in numbers]
    for pod, number in zip(pods, numbers, strict=True):
        pod["status"]["conditions"] = [TAINTED, *ready("False", "True")]
        if number:
            pod["metadata"]["labels"][ATTEMPT] = str(number)
    objects = {("Pod", pod["metadata"]["name"]): pod for pod in pods}
    return observe_objects(objects, UID, {Role.PREPARE: "", Role.TRAINER: ""})


@pytest.mark.parametrize(
    ("lost", "before", "after"), [((), 1, 1), ((0,), 1, 1), ((1,), 1, 2), ((1,), 2, 2), ((1, 2), 2, 3)]
)
def test_coordinator_after_a_lost_one_has_a_greater_number(
    lost: tuple[int, ...], before: int, after: int
) -> None:
    found = replace(RUNNING, coordinator=coordinators(*lost).service(Role.COORDINATOR))
    assert [pod.attempt for pod in coordinators(*lost).lost_coordinators] == [n for n in lost if n]
    for observed in (found, replace(found, suspend=True), replace(found, deleting=True)):
        decision = decide(SPEC, observed, replace(FIRST, coordinator_attempt=before))
        assert decision.persisted.coordinator_attempt == after
        status = report(findings(RUN, decision=decision))
        assert persisted_state(status).coordinator_attempt == after


def test_evicted_generator_does_not_start():
    """Its object stays, and must not hide that all others reject their input."""
    evicted = a_pod("g-1", "Failed", role=Role.GENERATOR, reason="Evicted", message="low on memory")
    rejects = a_pod("g-2", "Running", role=Role.GENERATOR, code=2)
    generators = seen(evicted, rejects).service(Role.GENERATOR)
    assert (generators.ready, generators.starting) == (0, 0)
    assert generators.bad_input is not None
    assert seen(evicted, a_pod("g-2", "Pending", role=Role.GENERATOR)).service(Role.GENERATOR).starting == 1
