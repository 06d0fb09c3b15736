"""What of a run is to exist, step by step and under anything that can happen."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from coordinator_statuses import status
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lifecycle_inputs import DONE, FIRST, RUNNING, SPEC, exists, reported, spec

from scalerl_api.process import COORDINATOR_TIMEOUT_SECONDS
from scalerl_api.wire import BROKEN, FORECAST, INTERRUPTED
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_lifecycle.lifecycle import DRAIN_SECONDS, decide
from scalerl_lifecycle.lifecycle_types import (
    ContainerExit,
    Job,
    JobState,
    LifecycleInput,
    OutcomeKind,
    PersistedState,
    Service,
    Suspension,
)


def test_generators_exist_until_the_drain_ends() -> None:
    assert decide(SPEC, RUNNING, FIRST).wanted.generators
    assert decide(SPEC, replace(RUNNING, suspend=True), FIRST).wanted.generators
    assert decide(None, replace(RUNNING, deleting=True), FIRST).wanted.generators, (
        "deleted without a valid spec"
    )


def test_silent_coordinator_does_not_increase_reconciles() -> None:
    """Its first answer wakes the run."""
    assert decide(SPEC, replace(RUNNING, status=None), FIRST).again_seconds == 5.0


def test_preparation_comes_before_anything_else() -> None:
    for state in (JobState.ABSENT, JobState.ACTIVE):
        decision = decide(SPEC, LifecycleInput(0.0, prepare=Job(state)), PersistedState())
        assert (decision.phase, exists(decision)) == ("Preparing", (True, False, False, None))
    decision = decide(SPEC, LifecycleInput(0.0, prepare=DONE), PersistedState())
    assert (decision.phase, exists(decision)) == ("Running", (True, True, True, 1))
    assert decision.persisted.attempt == 1


@pytest.mark.parametrize(("code", "reason"), [(2, "BadInput"), (1, "PrepareFailed")])
def test_failed_preparation_ends_run_with_its_last_output(code: int, reason: str) -> None:
    seen = LifecycleInput(
        0.0, prepare=Job(JobState.FAILED, exits=(ContainerExit(code, "model.path: no such folder"),))
    )
    outcome = decide(SPEC, seen, PersistedState()).persisted.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason, outcome.message) == (
        OutcomeKind.FAILED,
        reason,
        "model.path: no such folder",
    )


def test_running_run_is_unchanged_and_polled() -> None:
    decision = decide(SPEC, RUNNING, FIRST)
    assert (decision.phase, exists(decision), decision.request_stop) == (
        "Running",
        (True, True, True, 1),
        None,
    )
    assert decision.persisted == FIRST
    assert decision.again_seconds == 5.0


def test_budget_ends_a_run_whose_trainer_never_registers() -> None:
    """Its pods wait for a node, so its Job does not end by itself."""
    waits = replace(RUNNING, trainer=Job(JobState.ACTIVE, 1))
    persisted = replace(FIRST, ready_since=None)
    finished = msgspec.structs.replace(
        reported(CoordinatorPhase.FINISHED, "maxSeconds", 0.0),
        waiting_seconds=1000.0,
        trainer_registered=False,
    )
    decision = decide(SPEC, replace(waits, status=finished), persisted)
    outcome = decision.persisted.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == (OutcomeKind.COMPLETED, "BudgetReached")
    assert outcome.message == "maxSeconds before the trainer registered: nothing was trained"
    assert exists(decision) == (True, False, False, None), "its Job is deleted"
    registered = msgspec.structs.replace(finished, trainer_registered=True)
    assert decide(SPEC, replace(waits, status=registered), persisted).wanted.trainer == 1, (
        "it saves, and exits"
    )


def test_budget_end_is_requested_and_completed() -> None:
    spent = replace(RUNNING, status=reported(CoordinatorPhase.RUNNING, seconds=1000.0))
    assert decide(SPEC, spent, FIRST).request_stop == "maxSeconds"
    known = replace(RUNNING, status=reported(CoordinatorPhase.FINISHING, "maxSeconds", 1000.0))
    decision = decide(SPEC, known, FIRST)
    assert (decision.phase, decision.request_stop, decision.wanted.trainer) == ("Finishing", None, 1)
    over = replace(
        known,
        status=reported(CoordinatorPhase.FINISHED, "maxSeconds", 1001.0),
        trainer=Job(JobState.COMPLETE, 1),
    )
    outcome = decide(SPEC, over, FIRST).persisted.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == (OutcomeKind.COMPLETED, "BudgetReached")
    last = decide(SPEC, over, replace(FIRST, outcome=outcome))
    assert (last.phase, exists(last)) == ("Completed", (True, False, False, 1)), (
        "what has ended keeps its logs"
    )
    gone = replace(over, trainer=Job(), prepare=Job())
    assert exists(decide(SPEC, gone, last.persisted)) == (False, False, False, None), "and is not made again"


def test_complete_job_waits_for_the_coordinator() -> None:
    """All ranks were terminated, as at a node drain: exit 0, but the run is not over."""
    left = replace(RUNNING, trainer=Job(JobState.COMPLETE, 1))
    silent = decide(SPEC, replace(left, status=None), FIRST)
    assert (silent.wanted.trainer, silent.persisted) == (1, FIRST)
    decision = decide(SPEC, left, FIRST)
    assert decision.persisted.last_recorded_attempt == 1
    assert decision.persisted.outcome is None
    later = decide(SPEC, replace(left, unix_seconds=101.5), decision.persisted)
    assert (later.wanted.trainer, later.persisted.attempt) == (None, 1), (
        "first the old Job goes, with all its pods"
    )
    gone = decide(SPEC, replace(left, unix_seconds=102.0, trainer=Job()), later.persisted)
    assert (gone.wanted.trainer, gone.persisted.attempt) == (2, 2)


def test_failed_gang_restarts_with_back_off_and_limit() -> None:
    persisted, now, waits = FIRST, 100.0, []
    for _ in range(100):
        failed = Job(JobState.FAILED, persisted.attempt, (ContainerExit(137), ContainerExit(1)))
        decision = decide(
            spec(trainer={"maxRestarts": 6}), replace(RUNNING, unix_seconds=now, trainer=failed), persisted
        )
        if decision.persisted.outcome is not None:
            break
        assert decision.wanted.trainer == persisted.attempt, (
            "the failed Job stays to be read until the next is made"
        )
        waits.append(decision.persisted.next_at - now)
        now, before = decision.persisted.next_at, persisted.attempt
        assert (
            decide(
                SPEC, replace(RUNNING, unix_seconds=now, trainer=failed), decision.persisted
            ).wanted.trainer
            is None
        )
        persisted = decide(
            SPEC, replace(RUNNING, unix_seconds=now, trainer=Job()), decision.persisted
        ).persisted
        assert (persisted.attempt, persisted.ready_since) == (before + 1, None)
        persisted = replace(persisted, ready_since=now)
    assert waits == [1, 2, 4, 8, 16, 30]
    assert decision.persisted.outcome is not None
    assert decision.persisted.outcome.reason == "BackoffLimitExceeded"


@pytest.mark.parametrize(("codes", "reason"), [((1, 2), "BadInput"), ((1, 3), None), ((1, 1), None)])
def test_gang_failure_reason_is_the_most_specific_exit_code(
    codes: tuple[int, ...], reason: str | None
) -> None:
    failed = Job(JobState.FAILED, 1, tuple(ContainerExit(c, f"code {c}") for c in codes))
    persisted = decide(SPEC, replace(RUNNING, trainer=failed), FIRST).persisted
    assert (persisted.outcome.reason if persisted.outcome else None) == reason
    assert persisted.record.diverged == (3 in codes)


def test_unrecorded_attempt_is_adopted() -> None:
    decision = decide(SPEC, RUNNING, PersistedState())
    assert (decision.wanted.trainer, decision.persisted.attempt) == (1, 1)


def test_training_that_diverges_again_is_over() -> None:
    failed = Job(JobState.FAILED, 1, (ContainerExit(3, "ratio 1e9"),))
    once = decide(SPEC, replace(RUNNING, trainer=failed), FIRST).persisted
    assert once.outcome is None
    again = replace(once, attempt=2)
    outcome = decide(SPEC, replace(RUNNING, trainer=replace(failed, attempt=2)), again).persisted.outcome
    assert outcome is not None
    assert outcome.reason == "Diverged"
    assert "ratio 1e9" in outcome.message


def test_publish_that_is_refused_again_is_over() -> None:
    """Rank 1 of the gang is lost with rank 0; the exit code of the cause counts."""
    ends = (ContainerExit(1, "lost a rank"), ContainerExit(5, "PUBLISH REFUSED: KL of generator-0 3 nats"))
    failed = Job(JobState.FAILED, 1, ends)
    once = decide(SPEC, replace(RUNNING, trainer=failed), FIRST).persisted
    assert once.outcome is None
    assert once.record.publish_refused
    again = replace(once, attempt=2)
    outcome = decide(SPEC, replace(RUNNING, trainer=replace(failed, attempt=2)), again).persisted.outcome
    assert outcome is not None
    assert outcome.reason == "PublishRefused"
    assert "KL of generator-0 3 nats" in outcome.message
    assert not once.record.reset().publish_refused, "a resumed run may have another probeLimit"


def test_coordinator_has_a_budget_of_restarts() -> None:
    assert decide(SPEC, replace(RUNNING, coordinator=Service(restarts=20)), FIRST).persisted.outcome is None
    spent = decide(SPEC, replace(RUNNING, coordinator=Service(restarts=21)), FIRST).persisted.outcome
    assert spent is not None
    assert spent.reason == "BackoffLimitExceeded"
    wrong = decide(
        SPEC, replace(RUNNING, coordinator=Service(bad_input=ContainerExit(2, "no tokenizer"))), FIRST
    )
    assert wrong.persisted.outcome is not None
    assert (wrong.persisted.outcome.reason, "no tokenizer" in wrong.persisted.outcome.message) == (
        "BadInput",
        True,
    )


@pytest.mark.parametrize(
    ("published", "ready", "starting", "ends"),
    [(-1, 0, 0, True), (0, 0, 0, False), (None, 0, 0, False), (-1, 1, 0, False), (-1, 0, 1, False)],
)
def test_generators_that_reject_their_input_end_a_run_without_weights(
    published: int | None, ready: int, starting: int, ends: bool
) -> None:
    """The coordinator that does not answer (None) may be of a run that has trained for days."""
    bad = Service(
        ready=ready,
        starting=starting,
        bad_input=ContainerExit(2, "vllm_server: vLLM does not start: ValueError: no such architecture"),
    )
    waiting = None
    if published is not None:
        waiting = status([], phase=CoordinatorPhase.WAITING, published_version=published)
    decision = decide(SPEC, replace(RUNNING, generators=bad, status=waiting), FIRST)
    outcome = decision.persisted.outcome
    assert (outcome is not None) == ends
    if outcome is not None:
        assert (decision.phase, outcome.reason) == ("Failed", "BadInput")
        assert (
            outcome.message == "generator: vllm_server: vLLM does not start: ValueError: no such architecture"
        )


def test_generators_that_reject_their_input_do_not_end_mid_training() -> None:
    bad = Service(bad_input=ContainerExit(2, "vLLM does not start"))
    waiting = status([], phase=CoordinatorPhase.WAITING, published_version=-1, checkpoint_version=-1)
    seen = replace(RUNNING, generators=bad, status=waiting)
    trained = spec(warmStart={"steps": 9})
    assert decide(trained, seen, FIRST).persisted.outcome is None
    ended = replace(seen, status=msgspec.structs.replace(waiting, checkpoint_version=0))
    assert decide(trained, ended, FIRST).persisted.outcome is not None


def test_run_with_unsaved_weights_waits_for_the_stop() -> None:
    held = status(
        [],
        phase=CoordinatorPhase.FINISHING,
        stop_reason="maxSteps",
        unsaved_version=10,
        checkpoint_problem="no space left",
        wall_seconds=1e6,
    )
    later = replace(RUNNING, unix_seconds=1e6, status=held, trainer=replace(RUNNING.trainer, ready=True))
    decision = decide(SPEC, later, FIRST)
    assert (decision.phase, exists(decision)) == ("Finishing", (True, True, False, 1)), (
        "it needs no generator"
    )
    assert (decision.request_stop, decision.persisted.outcome) == (None, None), "the budget ends nothing"
    draining = decide(SPEC, replace(later, suspend=True), FIRST)
    assert (draining.phase, draining.wanted.trainer, draining.request_stop) == ("Suspending", 1, None)
    assert "no space left" in draining.waiting_for
    ended = decide(SPEC, replace(later, suspend=True, unix_seconds=1e6 + DRAIN_SECONDS), draining.persisted)
    assert ended.wanted.trainer is None, "its Job is deleted, and the trainer tries once more"


def test_rank_failure_after_the_last_checkpoint() -> None:
    over = replace(
        RUNNING,
        status=reported(CoordinatorPhase.FINISHED, "maxSteps"),
        trainer=Job(JobState.FAILED, 1, (ContainerExit(139),)),
    )
    outcome = decide(SPEC, over, FIRST).persisted.outcome
    assert outcome is not None
    assert outcome.kind is OutcomeKind.COMPLETED


def test_unstarted_trainer_has_nothing_to_save() -> None:
    """It waits for a queue, for a node or for an image that there is not."""
    waiting = replace(RUNNING, status=None, deleting=True)
    assert decide(SPEC, waiting, PersistedState(attempt=1)).release
    held = replace(waiting, trainer=Job(JobState.ACTIVE, 1, gated=True))
    assert decide(SPEC, held, FIRST).release
    assert not decide(SPEC, waiting, FIRST).release


def test_cancelled_drain_is_reset() -> None:
    persisted = decide(SPEC, replace(RUNNING, suspend=True), FIRST).persisted
    assert persisted.drain_since == 100.0
    persisted = decide(SPEC, replace(RUNNING, unix_seconds=110.0), persisted).persisted
    later = decide(SPEC, replace(RUNNING, suspend=True, unix_seconds=100.0 + DRAIN_SECONDS), persisted)
    assert later.phase == "Suspending"


def test_changed_spec_drains_prepares_then_starts() -> None:
    stale = replace(
        RUNNING, prepare=Job(JobState.COMPLETE, stale=True), trainer=Job(JobState.ACTIVE, 1, stale=True)
    )
    decision = decide(SPEC, stale, FIRST)
    assert (decision.request_stop, decision.update_existing, exists(decision)) == (
        INTERRUPTED,
        False,
        (True, True, True, 1),
    )
    left = replace(
        stale,
        status=reported(CoordinatorPhase.FINISHED, INTERRUPTED),
        trainer=Job(JobState.COMPLETE, 1, stale=True),
    )
    decision = decide(SPEC, left, decision.persisted)
    assert exists(decision) == (False, False, False, None)
    gone = replace(left, status=None, prepare=Job(), trainer=Job())
    decision = decide(SPEC, gone, decision.persisted)
    assert exists(decision) == (True, False, False, None)
    decision = decide(SPEC, replace(gone, prepare=DONE), decision.persisted)
    assert exists(decision) == (True, True, True, 1)
    assert decision.persisted.drain_since is None


def test_job_of_an_earlier_spec_ends_before_the_next() -> None:
    stale = replace(RUNNING, trainer=Job(JobState.ACTIVE, 1, stale=True))
    assert decide(SPEC, stale, FIRST).wanted.trainer is None
    terminating = replace(RUNNING, trainer=Job(JobState.TERMINATING, 1))
    assert decide(SPEC, terminating, FIRST).wanted.trainer is None
    gone = decide(SPEC, replace(RUNNING, trainer=Job()), FIRST)
    assert gone.wanted.trainer == 1


def test_suspend_drains_then_suspends_then_resumes() -> None:
    seen = replace(RUNNING, suspend=True)
    decision = decide(SPEC, seen, FIRST)
    assert (decision.phase, decision.request_stop, decision.wanted.trainer, decision.wanted.generators) == (
        "Suspending",
        INTERRUPTED,
        1,
        True,
    )
    requested = replace(
        seen,
        status=reported(CoordinatorPhase.FINISHING, INTERRUPTED),
        unix_seconds=110.0,
    )
    decision = decide(SPEC, requested, decision.persisted)
    assert (decision.request_stop, decision.persisted.drain_since) == (None, 100.0)
    left = replace(
        requested,
        status=reported(CoordinatorPhase.FINISHED, INTERRUPTED),
        trainer=Job(JobState.COMPLETE, 1),
    )
    decision = decide(SPEC, left, decision.persisted)
    assert (decision.phase, exists(decision), decision.again_seconds) == (
        "Suspended",
        (False, False, False, None),
        None,
    )
    quiet = replace(left, status=None, trainer=Job(), prepare=Job())
    assert decide(SPEC, quiet, decision.persisted).persisted == decision.persisted, (
        "a suspended run changes nothing"
    )
    decision = decide(SPEC, replace(quiet, suspend=False), decision.persisted)
    assert decision.persisted.resumed
    decision = decide(SPEC, replace(quiet, suspend=False, prepare=DONE), decision.persisted)
    assert exists(decision) == (True, True, True, 1)
    back = replace(
        RUNNING,
        trainer=Job(JobState.ACTIVE, 1),
        status=reported(CoordinatorPhase.FINISHED, INTERRUPTED),
    )
    decision = decide(SPEC, back, decision.persisted)
    assert (decision.request_stop, decision.phase, decision.persisted.outcome) == ("", "Running", None)


def test_drain_has_a_time_limit() -> None:
    persisted = decide(SPEC, replace(RUNNING, suspend=True), FIRST).persisted
    late = replace(RUNNING, suspend=True, unix_seconds=100.0 + DRAIN_SECONDS)
    assert decide(SPEC, late, persisted).phase == "Suspended"
    back = replace(RUNNING, suspend=True, unix_seconds=50.0)
    assert decide(SPEC, back, persisted).persisted.drain_since == 50.0, (
        "a clock that goes back begins it again"
    )


def test_drain_without_coordinator_deletes_the_trainer_job() -> None:
    silent = replace(RUNNING, suspend=True, status=None)
    decision = decide(SPEC, silent, FIRST)
    assert (decision.wanted.trainer, decision.persisted.unreachable_since) == (1, 100.0)
    late = replace(silent, unix_seconds=100.0 + COORDINATOR_TIMEOUT_SECONDS)
    waits = decide(SPEC, replace(late, unix_seconds=late.unix_seconds - 1.0), decision.persisted)
    assert (waits.wanted.trainer, waits.persisted) == (1, decision.persisted), (
        "the status is not written again"
    )
    decision = decide(SPEC, late, decision.persisted)
    assert (decision.phase, exists(decision)) == ("Suspending", (True, True, True, None)), (
        "the ranks may still reach the coordinator, and save"
    )
    assert "no answer from the coordinator in 300 s" in decision.waiting_for
    terminating = replace(late, trainer=Job(JobState.TERMINATING, 1))
    decision = decide(SPEC, terminating, decision.persisted)
    assert (decision.phase, decision.wanted.coordinator, decision.wanted.trainer) == (
        "Suspending",
        True,
        None,
    )
    decision = decide(SPEC, replace(terminating, trainer=Job()), decision.persisted)
    assert (decision.phase, exists(decision)) == ("Suspended", (False, False, False, None))
    assert (decision.persisted.drain_since, decision.persisted.unreachable_since) == (None, None)


@pytest.mark.parametrize(
    "drains",
    [
        {"suspend": True},
        {"deleting": True},
        {"prepare": Job(JobState.COMPLETE, stale=True), "trainer": Job(JobState.ACTIVE, 1, stale=True)},
    ],
)
def test_drain_waits_for_a_coordinator_that_restarts(drains: dict[str, Any]) -> None:
    """Only time without an answer counts, not the time of the drain."""
    persisted, now = FIRST, 100.0
    for passed, answer in [
        (0.0, None),
        (COORDINATOR_TIMEOUT_SECONDS - 1.0, None),
        (1.0, RUNNING.status),
    ] * 4:
        now += passed
        decision = decide(SPEC, replace(RUNNING, unix_seconds=now, status=answer, **drains), persisted)
        assert decision.wanted.trainer == 1
        persisted = decision.persisted
    assert now - 100.0 > 2 * COORDINATOR_TIMEOUT_SECONDS


def test_forecast_stop_suspends_until_resumed() -> None:
    assert decide(SPEC, replace(RUNNING, stop=FORECAST), FIRST).request_stop == FORECAST
    broken = replace(
        RUNNING,
        status=reported(CoordinatorPhase.FINISHED, BROKEN),
        trainer=Job(JobState.COMPLETE, 1),
    )
    assert decide(spec(autoscaling={"onStop": "Complete"}), broken, FIRST).set_suspend, (
        "what is held can be resumed"
    )
    # Another leader knows nothing of the decision, and holds on to it all the same.
    requested = replace(RUNNING, status=reported(CoordinatorPhase.FINISHING, FORECAST))
    assert decide(SPEC, requested, FIRST).request_stop is None
    over = replace(
        RUNNING,
        status=reported(CoordinatorPhase.FINISHED, FORECAST),
        trainer=Job(JobState.COMPLETE, 1),
    )
    decision = decide(SPEC, over, FIRST)
    assert (decision.phase, decision.set_suspend, decision.persisted.suspension) == (
        "Suspended",
        True,
        Suspension.REQUESTED,
    )
    gone = replace(over, status=None, trainer=Job(), prepare=Job())
    again = decide(SPEC, gone, decision.persisted)
    assert (again.set_suspend, exists(again)) == (True, (False, False, False, None))
    rest = decide(SPEC, replace(gone, suspend=True), again.persisted)
    assert (rest.set_suspend, rest.persisted.suspension) == (False, Suspension.YES)
    resumed = decide(SPEC, gone, rest.persisted).persisted
    back = replace(RUNNING, status=reported(CoordinatorPhase.FINISHED, FORECAST), trainer=Job())
    decision = decide(SPEC, back, resumed)
    assert (decision.request_stop, decision.wanted.trainer, decision.persisted.outcome) == ("", 1, None)
    decision = decide(
        SPEC,
        replace(RUNNING, status=reported(CoordinatorPhase.RUNNING)),
        decision.persisted,
    )
    assert not decision.persisted.resumed
    complete = spec(autoscaling={"onStop": "Complete"})
    outcome = decide(complete, over, FIRST).persisted.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == (OutcomeKind.COMPLETED, "StoppedByForecast")


@pytest.mark.parametrize(
    ("seen", "released"),
    [
        (LifecycleInput(0.0), True),
        (LifecycleInput(0.0, prepare=Job(JobState.ACTIVE)), True),
        (RUNNING, False),
        (replace(RUNNING, status=None), False),
        (replace(RUNNING, trainer=Job(JobState.COMPLETE, 1)), True),
        (replace(RUNNING, trainer=Job(JobState.FAILED, 1)), True),
        (replace(RUNNING, trainer=Job(JobState.TERMINATING, 1)), False),
    ],
)
def test_deleted_run_saves_its_training(seen: LifecycleInput, released: bool) -> None:
    assert decide(SPEC, replace(seen, deleting=True), FIRST).release == released


# --- a small cluster that does what it likes ---------------------------------------------------------


@st.composite
def days(draw: st.DrawFn) -> list[str]:
    return draw(
        st.lists(
            st.sampled_from(
                [
                    "reconcile",
                    "reconcile",
                    "reconcile",
                    "tick",
                    "tick",
                    "pods",
                    "pods",
                    "fail",
                    "leave",
                    "finish",
                    "suspend",
                    "resume",
                    "silence",
                    "forecast",
                    "forget",
                    "hold",
                    "admit",
                ]
            ),
            max_size=60,
        )
    )


def works(job: Job) -> bool:
    return job.state is JobState.ACTIVE and not job.gated


@settings(max_examples=300 if os.environ.get("FULL") else 100, deadline=None)
@example(["reconcile", "admit", "pods", "reconcile", "admit", "fail"], True)
@example(["reconcile", "admit", "pods", "reconcile", "admit", "leave"], True)
@example(
    ["reconcile", "admit", "pods", "reconcile", "suspend", "reconcile", "reconcile", "suspend", "reconcile"],
    True,
)
@given(days(), st.booleans())
def test_at_most_one_attempt_and_every_run_ends(day: list[str], queued: bool) -> None:
    """The world moves at random; then it is left in peace, and the run has to come to its end."""
    persisted, stored, serving = PersistedState(), PersistedState(), False
    trainer, prepare, now = Job(), Job(), 0.0
    word, reason, answers, suspend, forecast = CoordinatorPhase.WAITING, "", True, False, ""
    peace = [*["reconcile", "tick", "admit", "pods", "reconcile"] * 12, "finish"]
    calm = ["resume", *peace * 12]
    for event in day + calm:
        match event:
            case "tick":
                now += 20.0
            case "pods":
                if prepare.state is JobState.ACTIVE and not prepare.gated:
                    prepare = replace(prepare, state=JobState.COMPLETE)
                if trainer.state is JobState.TERMINATING:
                    trainer = Job()
                if works(trainer) and word is CoordinatorPhase.FINISHING:
                    trainer, word = (
                        replace(trainer, state=JobState.COMPLETE),
                        CoordinatorPhase.FINISHED,
                    )
            case "hold" if queued and works(trainer):
                trainer = replace(trainer, gated=True)
            case "admit":
                trainer, prepare = replace(trainer, gated=False), replace(prepare, gated=False)
            case "fail" if works(trainer):
                trainer = replace(trainer, state=JobState.FAILED, exits=(ContainerExit(137),))
            case "leave" if works(trainer):
                trainer = replace(trainer, state=JobState.COMPLETE)
            case "finish" if works(trainer) and word is CoordinatorPhase.RUNNING:
                word, reason = CoordinatorPhase.FINISHING, reason or "maxSteps"
            case "suspend":
                suspend = True
            case "resume":
                suspend, answers = False, True
            case "silence":
                answers = not answers
            case "forecast":
                forecast = FORECAST if trainer.state is JobState.ACTIVE else ""
            case "forget":  # an operator that died before its status was written
                persisted = stored
            case "reconcile":
                stored = persisted
                status_now = reported(word, reason, 1.0) if answers and serving else None
                decision = decide(
                    spec(trainer={"maxRestarts": 1000}),
                    LifecycleInput(
                        now,
                        suspend=suspend,
                        queued=queued,
                        serving=serving,
                        prepare=prepare,
                        trainer=trainer,
                        status=status_now,
                        stop=forecast,
                    ),
                    persisted,
                )
                persisted, forecast = decision.persisted, ""
                if not serving and (decision.wanted.coordinator or decision.wanted.generators):
                    # Of one that left, only the coordinator can say whether the run is over.
                    left = trainer.state is JobState.COMPLETE
                    assert not queued or works(trainer) or left, (
                        "nothing is made beside what waits in a queue"
                    )
                serving = decision.wanted.coordinator or decision.wanted.generators
                if decision.request_stop is not None and answers:
                    reason = decision.request_stop
                    word = CoordinatorPhase.FINISHING if reason else CoordinatorPhase.RUNNING
                suspend = suspend or decision.set_suspend
                if decision.wanted.prepare and prepare.state is JobState.ABSENT:
                    prepare = Job(JobState.ACTIVE, gated=queued)
                if not decision.wanted.prepare:
                    prepare = Job()
                if decision.wanted.trainer != trainer.attempt and trainer.state is not JobState.ABSENT:
                    assert decision.wanted.trainer is None, (
                        "beside one whose pods may still be there, no other is made"
                    )
                    trainer = replace(trainer, state=JobState.TERMINATING)
                if decision.wanted.trainer is not None and trainer.state is JobState.ABSENT:
                    trainer = Job(JobState.ACTIVE, decision.wanted.trainer, gated=queued)
                    word = CoordinatorPhase.FINISHING if reason else CoordinatorPhase.RUNNING
                if persisted.suspension is Suspension.YES and event in calm:
                    suspend = False
    assert persisted.outcome is not None or suspend
