"""What went wrong in a run that continues degrades it for as long as it is so, not for good."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from operator_tests.manifests import cluster_run, findings
from scalerl_api import wire
from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.exports import ExportedModel, Exports
from scalerl_api.reasons import Reason
from scalerl_api.status import RunStatus
from scalerl_api.wire import Tracker, Uploads
from scalerl_lifecycle.lifecycle_types import LifecycleDecision, PersistedState
from scalerl_lifecycle.status_fields import waits_for_progress_only
from scalerl_operator.controller.conditions import event_type
from scalerl_operator.controller.coordinator_problems import QUIET_SECONDS
from scalerl_operator.controller.report import report

_COUNTS = dict.fromkeys(
    [
        *("acknowledged", "trained", "filtered", "queued", "leased", "late", "stale", "invalid"),
        *("duplicate", "expired_leases"),
    ],
    0,
)
QUIET = wire.Status(
    phase=wire.Phase.RUNNING,
    waiting_for="",
    step=3,
    published_version=3,
    stop_reason="",
    counts=wire.Counts(**_COUNTS),
    members=[],
    points=[],
    last_step_stats={},
    wall_seconds=0.0,
    device_seconds=0.0,
    tokens_generated=0,
    tokens_trained=0,
    generator_busy_fraction=0.0,
    trainer_busy_fraction=0.0,
    max_staleness_steps=0,
    mean_staleness_steps=0.0,
    checkpoint_version=0,
)
RUN = cluster_run()


class Reconciles:
    """One reconcile after the other; each finds what the last one has written."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self.coordinator_report = QUIET

    def reconcile(
        self, at: float, phase: Phase = Phase.RUNNING, *, silent: bool = False, **coordinator_report: Any
    ) -> str:
        """The reason of Degraded; what was reported stays until it is reported again."""
        self.coordinator_report = msgspec.structs.replace(self.coordinator_report, **coordinator_report)
        decision = LifecycleDecision(phase, PersistedState(attempt=1))
        word = None if silent else self.coordinator_report
        before = RunStatus.model_validate(self.stored)
        self.after = report(findings(RUN, before, unix_seconds=1e9 + at, decision=decision, coordinator=word))
        self.quiet = waits_for_progress_only(before, self.after)
        self.stored = self.after.to_object()
        said = self.after.condition(ConditionType.DEGRADED)
        assert said is not None
        assert (said.status == "True") == (said.reason != Reason.HEALTHY)
        return said.reason


@pytest.fixture
def reconciles() -> Reconciles:
    return Reconciles()


def test_single_grading_failure_clears_after_a_quiet_time(reconciles: Reconciles) -> None:
    assert reconciles.reconcile(0) == Reason.HEALTHY
    assert reconciles.reconcile(5, grading_errors=1) == Reason.GRADING_FAILED
    assert reconciles.reconcile(5 + QUIET_SECONDS - 1) == Reason.GRADING_FAILED
    assert reconciles.reconcile(5 + QUIET_SECONDS + 1) == Reason.HEALTHY
    assert reconciles.reconcile(5 + QUIET_SECONDS + 6, grading_errors=2) == Reason.GRADING_FAILED


def test_skipped_step_is_over_after_a_while(reconciles: Reconciles) -> None:
    assert reconciles.reconcile(0) == Reason.HEALTHY
    assert reconciles.reconcile(5, skipped_steps=1, grading_errors=1) == Reason.STEP_SKIPPED
    assert reconciles.reconcile(5 + QUIET_SECONDS + 1) == Reason.HEALTHY
    assert reconciles.reconcile(5 + QUIET_SECONDS + 6, skipped_steps=2) == Reason.STEP_SKIPPED


def test_faults_of_the_source_do_not_degrade_a_fork(reconciles: Reconciles) -> None:
    """The coordinator's first status is that of an empty run; then it has the counts of the source's checkpoint."""
    assert reconciles.reconcile(0, step=0, checkpoint_version=-1) == Reason.HEALTHY
    source: dict[str, Any] = {"step": 20, "checkpoint_version": 20, "forked_step": 20}
    assert reconciles.reconcile(5, skipped_steps=2, grading_errors=3, **source) == Reason.HEALTHY
    assert reconciles.reconcile(10, skipped_steps=3) == Reason.STEP_SKIPPED


def test_lost_slots_are_reported_and_expire(reconciles: Reconciles) -> None:
    """Also those of an evaluation; the count moves with what moves all the time."""
    assert reconciles.reconcile(0) == Reason.HEALTHY
    for second in range(5, 500):
        counts = msgspec.structs.replace(QUIET.counts, given_up=8 * second, too_long=8 * second)
        assert reconciles.reconcile(second, counts=counts) == Reason.SLOTS_GIVEN_UP
        assert reconciles.quiet == (second > 5)
    assert reconciles.reconcile(499 + QUIET_SECONDS + 1) == Reason.HEALTHY
    counts = msgspec.structs.replace(counts, held_out_given_up=1)
    assert reconciles.reconcile(499 + QUIET_SECONDS + 6, counts=counts) == Reason.SLOTS_GIVEN_UP
    assert reconciles.after.faults.given_up_rollouts == 8 * 499 + 1


def test_repeated_grading_failures_stay_degraded(reconciles: Reconciles) -> None:
    reconciles.reconcile(0)
    reconciles.reconcile(1, grading_errors=1)
    for minute in range(1, 60):
        assert reconciles.reconcile(60.0 * minute, grading_errors=1 + minute) == Reason.GRADING_FAILED
        assert reconciles.quiet, "the count moves: written with what moves all the time"


def test_failed_checkpoint_clears_with_the_next(reconciles: Reconciles) -> None:
    reconciles.reconcile(0, checkpoint_version=40)
    assert reconciles.reconcile(5, checkpoint_failures=1) == Reason.CHECKPOINT_FAILED
    assert reconciles.reconcile(1e6) == Reason.CHECKPOINT_FAILED, "time alone fixes nothing"
    assert reconciles.reconcile(1e6 + 5, checkpoint_version=60) == Reason.HEALTHY
    assert reconciles.reconcile(1e6 + 10) == Reason.HEALTHY


def test_rollback_of_the_trainer_clears_no_failed_checkpoint(reconciles: Reconciles) -> None:
    reconciles.reconcile(0, checkpoint_version=40)
    reconciles.reconcile(5, checkpoint_failures=1)
    assert reconciles.reconcile(10, checkpoint_version=20) == Reason.CHECKPOINT_FAILED
    assert reconciles.reconcile(15, checkpoint_version=30) == Reason.HEALTHY


def test_checkpoint_failure_with_a_newer_version_is_cleared(reconciles: Reconciles) -> None:
    reconciles.reconcile(0, checkpoint_version=40)
    assert reconciles.reconcile(60, checkpoint_failures=1, checkpoint_version=60) == Reason.HEALTHY
    assert reconciles.reconcile(65, checkpoint_failures=2) == Reason.CHECKPOINT_FAILED


@pytest.mark.parametrize("silent", [False, True])
def test_counts_before_the_first_status_are_ignored(reconciles: Reconciles, *, silent: bool) -> None:
    reconciles.reconcile(0)
    del reconciles.stored["faults"]
    reconciles.reconcile(5, silent=silent, checkpoint_failures=3, grading_errors=7)
    assert reconciles.reconcile(10) == Reason.HEALTHY
    assert reconciles.reconcile(15, checkpoint_failures=4) == Reason.CHECKPOINT_FAILED


def test_first_checkpoint_clears_the_failure(reconciles: Reconciles) -> None:
    reconciles.reconcile(0, checkpoint_version=-1)
    assert reconciles.reconcile(1, checkpoint_failures=1) == Reason.CHECKPOINT_FAILED
    assert reconciles.reconcile(5, checkpoint_version=20) == Reason.HEALTHY


def test_silent_coordinator_keeps_the_problem(reconciles: Reconciles) -> None:
    reconciles.reconcile(0)
    reconciles.reconcile(1, checkpoint_failures=1)
    assert reconciles.reconcile(5, silent=True) == Reason.CHECKPOINT_FAILED


def test_run_that_is_over_is_not_degraded(reconciles: Reconciles) -> None:
    reconciles.reconcile(0)
    assert reconciles.reconcile(1, checkpoint_failures=1, grading_errors=3) == Reason.CHECKPOINT_FAILED
    assert reconciles.reconcile(5, Phase.SUSPENDED, silent=True) == Reason.HEALTHY


def test_status_shows_exports_and_their_paths(reconciles: Reconciles) -> None:
    model = ExportedModel(
        version=100,
        reward=0.61237,
        path="checkpoints/hf/step-00000100",
        uri="s3://models/a/step-00000100",
        time="2026-08-01T12:00:00Z",
    )
    assert reconciles.reconcile(0, exports=Exports(best=model, last=model)) == Reason.HEALTHY
    assert reconciles.stored["exports"]["best"] == {
        "version": 100,
        "reward": "0.6124",
        "path": "checkpoints/hf/step-00000100",
        "uri": "s3://models/a/step-00000100",
        "time": "2026-08-01T12:00:00Z",
    }
    assert reconciles.stored["exports"]["last"] == reconciles.stored["exports"]["best"]
    reconciles.reconcile(10, exports=None)
    assert reconciles.after.exports.best is not None, (
        "a coordinator that cannot read the file takes nothing back"
    )


def test_failed_export_degrades_until_one_succeeds(reconciles: Reconciles) -> None:
    assert (
        reconciles.reconcile(0, exports=Exports(failures=1, problem="s3://b: refused"))
        == Reason.EXPORT_FAILED
    )
    assert reconciles.after.exports.problem == "s3://b: refused"
    assert reconciles.reconcile(5, exports=Exports(failures=1)) == Reason.HEALTHY


def test_failed_upload_degrades_until_one_succeeds(reconciles: Reconciles) -> None:
    failed = Uploads(version=50, problem="checkpoint 100: s3://b/a: 403 Forbidden")
    assert reconciles.reconcile(0, uploads=failed) == Reason.UPLOAD_FAILED
    said = reconciles.after.condition(ConditionType.DEGRADED)
    assert said is not None
    assert "checkpoint 100: s3://b/a: 403 Forbidden" in (said.message or "")
    assert reconciles.reconcile(5, uploads=Uploads(version=100)) == Reason.HEALTHY


def test_failed_tracker_degrades_until_it_works(reconciles: Reconciles) -> None:
    failing = Tracker(name="mlflow", failures=1, problem="connection refused")
    assert reconciles.reconcile(0, trackers=[Tracker(name="tensorBoard"), failing]) == Reason.TRACKER_FAILED
    said = reconciles.after.condition(ConditionType.DEGRADED)
    assert said is not None
    assert "mlflow: connection refused" in (said.message or "")
    assert "tensorBoard" not in (said.message or "")
    assert reconciles.reconcile(5, trackers=[Tracker(name="mlflow", failures=1)]) == Reason.HEALTHY


def test_run_that_learns_nothing_is_degraded_until_it_does(reconciles: Reconciles) -> None:
    """Its message is the coordinator's, with a sample; while it stays, nothing is written and no Event is repeated."""
    text = "no completion of the last 3 steps or more scored above 0. For example, prompt 'p': reply 'x'"
    assert reconciles.reconcile(0) == Reason.HEALTHY
    assert reconciles.reconcile(5, learning_problem=text) == Reason.NOT_LEARNING
    said = reconciles.after.condition(ConditionType.DEGRADED)
    assert said is not None
    assert (said.status, said.message) == ("True", text)
    assert event_type(said) == "Warning"
    reconciles.reconcile(10)
    assert reconciles.quiet
    assert reconciles.reconcile(15, logprob_problem="no numbers") == Reason.LOGPROBS_NOT_FINITE
    assert reconciles.reconcile(20, learning_problem="", logprob_problem="") == Reason.HEALTHY


def test_unavailable_teacher_degrades_until_it_answers(reconciles: Reconciles) -> None:
    problem = "generator-0: http://teacher:8000: refused"
    assert reconciles.reconcile(0, teacher_problem=problem) == Reason.TEACHER_UNAVAILABLE
    said = reconciles.after.condition(ConditionType.DEGRADED)
    assert said is not None
    assert problem in (said.message or "")
    assert reconciles.reconcile(5, teacher_problem="") == Reason.HEALTHY


def test_unavailable_reward_service_degrades_until_it_answers(reconciles: Reconciles) -> None:
    problem = "generator-0: the reward service http://rewards/score answered with status 500"
    assert reconciles.reconcile(0, reward_problem=problem) == Reason.REWARD_SERVICE_UNAVAILABLE
    said = reconciles.after.condition(ConditionType.DEGRADED)
    assert said is not None
    assert problem in (said.message or "")
    assert reconciles.reconcile(5, reward_problem="") == Reason.HEALTHY
    failing = "generator-0: the environment game.py:Game failed in 40 of the last 64 episodes: KeyError"
    assert reconciles.reconcile(10, environment_problem=failing) == Reason.ENVIRONMENT_FAILING
    assert reconciles.reconcile(15, environment_problem="") == Reason.HEALTHY


def test_unsaved_weights_are_neither_stalled_nor_failed(reconciles: Reconciles) -> None:
    """The trainer keeps them in memory; the message has the disk's error, and what to do."""
    reconciles.reconcile(0)
    full = "rank 0: OSError: [Errno 28] No space left on device"
    assert reconciles.reconcile(5, checkpoint_problem=full) == Reason.CHECKPOINT_FAILED
    degraded = reconciles.after.condition(ConditionType.DEGRADED)
    assert degraded is not None
    assert degraded.message == full
    reconciles.coordinator_report = msgspec.structs.replace(
        reconciles.coordinator_report, phase=wire.Phase.FINISHING, stop_reason="maxSteps"
    )
    assert reconciles.reconcile(1e5, Phase.FINISHING, unsaved_version=3) == Reason.UNSAVED_WEIGHTS
    for type_ in (ConditionType.DEGRADED, ConditionType.PROGRESSING):
        condition = reconciles.after.condition(type_)
        assert condition is not None
        assert condition.reason == Reason.UNSAVED_WEIGHTS
        assert condition.message.startswith(f"version 3 is in no checkpoint: {full}. ")
        assert "free space" in condition.message
    failed = reconciles.after.condition(ConditionType.FAILED)
    assert failed is not None
    assert failed.status == "False"
    assert reconciles.reconcile(1e5 + 60, Phase.SUSPENDING) == Reason.UNSAVED_WEIGHTS, (
        "a suspension waits, too"
    )
    assert reconciles.reconcile(1e5 + 90, unsaved_version=-1, checkpoint_problem="") == Reason.HEALTHY


def test_unhealthy_training_is_no_degradation_and_stays_while_the_coordinator_is_silent(
    reconciles: Reconciles,
) -> None:
    def said() -> tuple[str, str, str | None]:
        found = reconciles.after.condition(ConditionType.TRAINING_HEALTHY)
        assert found is not None
        return found.status, found.reason, event_type(found)

    text = "14% of the completions are cut off at their maximum length (at step 41)"
    reconciles.reconcile(0)
    assert said() == ("True", Reason.HEALTHY, None)
    assert reconciles.reconcile(5, health_problem=text) == Reason.HEALTHY
    assert said() == ("False", Reason.HEALTH_RULE, "Warning")
    for at, silent in ((10, False), (15, True), (20, False)):
        reconciles.reconcile(at, silent=silent)
        condition = reconciles.after.condition(ConditionType.TRAINING_HEALTHY)
        assert condition is not None
        assert (condition.status, condition.message) == ("False", text)
        assert reconciles.quiet or silent or at == 20
    reconciles.reconcile(25)
    assert reconciles.quiet
    reconciles.reconcile(30, Phase.SUSPENDED)
    assert said() == ("False", Phase.SUSPENDED, None)
    reconciles.reconcile(35, health_problem="")
    assert said() == ("True", Reason.HEALTHY, None)
