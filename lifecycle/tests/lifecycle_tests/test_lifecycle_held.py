"""A run that has trained is held, not ended, when it fails after an edit; and what lets an ended run continue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from coordinator_statuses import status
from lifecycle_inputs import DONE, FIRST, RUNNING, SPEC, exists, reported

from scalerl_api.spec import RunSpec
from scalerl_api.status import RunStatus, UsageStatus
from scalerl_api.wire import FORECAST, INTERRUPTED
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_lifecycle.edits_of_run import SpecEdit, edit_between
from scalerl_lifecycle.failures import PROVEN_STEPS
from scalerl_lifecycle.lifecycle import DRAIN_SECONDS, decide
from scalerl_lifecycle.lifecycle_types import (
    ContainerExit,
    Job,
    JobState,
    LifecycleDecision,
    LifecycleInput,
    OutcomeKind,
    PersistedState,
    RunOutcome,
    Service,
    Suspension,
)
from scalerl_lifecycle.restarts import Record
from scalerl_lifecycle.status_fields import persisted_fields, persisted_state

FIELDS = ("recipe.loss.cispo.ratioCap", "podTemplate.volumeMounts.0.mountPath")
SENTENCE = (
    "; revert or fix the edit of spec.recipe.loss.cispo.ratioCap, spec.podTemplate.volumeMounts.0.mountPath"
)
EDITED = replace(FIRST, has_trained=True, unproven_since=120)
LIVE = replace(RUNNING, steps=120, unproven=FIELDS, status=status([], step=120, published_version=120))
BAD = ContainerExit(2, "task.jsonl.path: /data/dat.jsonl does not exist")
FAILED = Job(JobState.FAILED, exits=(BAD,))
NO_STATUS: dict[str, Any] = {"status": None, "trainer": Job()}

FAILURES: dict[str, tuple[dict[str, Any], PersistedState, str]] = {
    "preparation rejects its input": (NO_STATUS | {"prepare": FAILED}, EDITED, "BadInput: task.jsonl.path:"),
    "preparation runs out of memory": (
        NO_STATUS | {"prepare": Job(JobState.FAILED, exits=(ContainerExit(137, "OOMKilled"),))},
        EDITED,
        "PrepareFailed: OOMKilled",
    ),
    "trainer rejects its input": ({"trainer": replace(FAILED, attempt=1)}, EDITED, "BadInput: trainer: "),
    "trainer never becomes ready": (
        {"trainer": Job(JobState.FAILED, 1, (ContainerExit(137, "OOMKilled"),))},
        replace(EDITED, ready_since=None, record=Record(consecutive_failures=5, failed_starts=5)),
        "StartsFailed: trainer: it failed 6 times in a row before it was ready: OOMKilled",
    ),
    "trainer fails at its first step, again and again": (
        {"trainer": Job(JobState.FAILED, 1, (ContainerExit(1, "out of memory"),))},
        replace(EDITED, record=Record(consecutive_failures=20, has_been_ready=True)),
        "BackoffLimitExceeded: trainer: it was restarted 20 times",
    ),
    "training diverges": (
        {"trainer": Job(JobState.FAILED, 1, (ContainerExit(3, "loss is nan"),))},
        replace(EDITED, record=Record(diverged=True)),
        "Diverged: trainer: BROKEN",
    ),
    "coordinator rejects its input": (
        {"status": None, "coordinator": Service(bad_input=ContainerExit(2, "no tracker"))},
        EDITED,
        "BadInput: coordinator: no tracker",
    ),
    "coordinator crashes": (
        {"status": None, "coordinator": Service(restarts=21, restarted="math-coordinator-0")},
        EDITED,
        "BackoffLimitExceeded: math-coordinator-0 was restarted 21 times",
    ),
    "generators reject their input": (
        {"trainer": Job(JobState.COMPLETE, 1), "generators": Service(bad_input=ContainerExit(2, "no such option"))},
        EDITED,
        "BadInput: generator: no such option",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "persisted", "says"), FAILURES.values(), ids=FAILURES)
def test_failure_after_an_edit_holds_a_run_that_has_trained(
    change: dict[str, Any], persisted: PersistedState, says: str
) -> None:
    decision = decide(SPEC, replace(LIVE, **change), persisted)
    outcome = decision.persisted.outcome
    assert outcome is not None
    assert (decision.phase, outcome.kind, outcome.reason) == (
        "Suspended",
        OutcomeKind.SUSPENDED,
        "EditFailed",
    )
    assert outcome.message.startswith(says)
    assert outcome.message.endswith(SENTENCE)
    assert (decision.wanted.coordinator, decision.wanted.generators) == (False, False), "it holds no devices"


@pytest.mark.parametrize(("change", "persisted", "says"), FAILURES.values(), ids=FAILURES)
def test_failure_of_a_run_that_has_not_trained_ends_it(
    change: dict[str, Any], persisted: PersistedState, says: str
) -> None:
    new = status([], step=0, published_version=-1) if change.get("status", LIVE.status) else None
    never = replace(LIVE, **{**change, "status": new}, steps=0, edit=SpecEdit(FIELDS))
    outcome = decide(
        SPEC, never, replace(persisted, has_trained=False, unproven_since=None)
    ).persisted.outcome
    assert outcome is not None
    assert outcome.kind is OutcomeKind.FAILED
    assert outcome.reason == says.partition(":")[0]


@pytest.mark.parametrize("steps", [PROVEN_STEPS - 1, PROVEN_STEPS])
def test_edit_is_proven_by_steps(steps: int) -> None:
    ready = replace(LIVE, trainer=Job(JobState.ACTIVE, 1, ready=True))
    later = replace(ready, status=status([], step=120 + steps), steps=120 + steps)
    persisted = decide(SPEC, later, EDITED).persisted
    assert (persisted.unproven_since is None) == (steps == PROVEN_STEPS)
    failed = replace(later, trainer=replace(FAILED, attempt=1))
    outcome = decide(SPEC, failed, persisted).persisted.outcome
    assert outcome is not None
    assert outcome.kind is (OutcomeKind.FAILED if steps == PROVEN_STEPS else OutcomeKind.SUSPENDED)


def test_edit_without_a_restart_is_no_cause() -> None:
    persisted = decide(SPEC, replace(LIVE, edit=SpecEdit(("budget.maxSeconds",))), FIRST).persisted
    assert (persisted.has_trained, persisted.unproven_since) == (True, None)
    persisted = decide(SPEC, replace(LIVE, edit=SpecEdit(("trace",))), FIRST).persisted
    assert persisted.unproven_since == 120


def test_steps_with_the_generators_before_prove_no_edit() -> None:
    """They train on while those of the edited spec crash."""
    ready = replace(LIVE, trainer=Job(JobState.ACTIVE, 1, ready=True))
    later = replace(ready, status=status([], step=180), steps=180, started=False)
    persisted = decide(SPEC, later, EDITED).persisted
    assert persisted.unproven_since == 180
    persisted = decide(SPEC, replace(later, status=status([], step=189), started=True), persisted).persisted
    assert persisted.unproven_since == 180
    assert (
        decide(SPEC, replace(ready, status=status([], step=190)), persisted).persisted.unproven_since is None
    )


@pytest.mark.parametrize("recorded", [0, 100])
def test_steps_that_are_not_recorded_yet_prove_no_edit(recorded: int) -> None:
    """The status has the first steps seconds later, others up to 15 s later; a drain ends with a step of the spec before."""
    persisted = FIRST if recorded == 0 else replace(FIRST, has_trained=True)
    observed = replace(LIVE, steps=recorded, edit=SpecEdit(FIELDS), prepare=replace(DONE, stale=True))
    persisted = decide(SPEC, observed, persisted).persisted
    assert (persisted.has_trained, persisted.unproven_since) == (True, 120)
    draining = replace(observed, edit=SpecEdit(), status=status([], step=121, published_version=121))
    persisted = decide(SPEC, draining, persisted).persisted
    assert persisted.unproven_since == 121
    outcome = decide(SPEC, replace(LIVE, **NO_STATUS | {"prepare": FAILED}), persisted).persisted.outcome
    assert outcome is not None
    assert outcome.kind is OutcomeKind.SUSPENDED


def test_resumption_that_fails_holds_the_run() -> None:
    """Nothing was edited: another release of the operator, or a hub that is away."""
    rest = replace(EDITED, suspension=Suspension.YES, unproven_since=None)
    quiet = replace(LIVE, **NO_STATUS, prepare=Job(), unproven=())
    resumed = decide(SPEC, quiet, rest).persisted
    outcome = decide(SPEC, replace(quiet, prepare=FAILED), resumed).persisted.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason, outcome.message) == (OutcomeKind.SUSPENDED, "BadInput", BAD.message)


def held(**change: Any) -> tuple[LifecycleInput, PersistedState]:
    """A run that is held since its preparation failed, whose Job is still there."""
    observed = replace(LIVE, **NO_STATUS, prepare=FAILED)
    persisted = decide(SPEC, observed, EDITED).persisted
    assert persisted.outcome is not None
    return replace(observed, **change), persisted


def until_started(observed: LifecycleInput, persisted: PersistedState) -> LifecycleDecision:
    """The decisions until the preparation is created again, with an operator that dies before it acts on any of them."""
    observed = replace(observed, edit=SpecEdit())
    for _ in range(3):  # its Jobs are still there
        decision = decide(SPEC, observed, persisted)
        assert exists(decision) == (False, False, False, None)
        assert (decision.phase, decision.persisted) == ("Pending", persisted)
    terminating = replace(observed, prepare=replace(observed.prepare, state=JobState.TERMINATING))
    assert exists(decide(SPEC, terminating, persisted)) == (False, False, False, None)
    return decide(SPEC, replace(observed, prepare=Job(), trainer=Job()), persisted)


def test_fixed_spec_continues_from_the_checkpoint() -> None:
    observed, persisted = held(edit=SpecEdit(("podTemplate.volumeMounts.0.mountPath",)))
    decision = decide(SPEC, observed, persisted)
    assert (decision.phase, exists(decision)) == ("Pending", (False, False, False, None))
    assert decision.persisted.outcome is None
    decision = until_started(observed, decision.persisted)
    assert (exists(decision), decision.persisted.resumed) == ((True, False, False, None), True)
    started = replace(observed, edit=SpecEdit(), prepare=DONE, trainer=Job())
    decision = decide(SPEC, started, decision.persisted)
    assert exists(decision) == (True, True, True, 1)


@pytest.mark.parametrize(
    "field", ["ttlSecondsAfterFinished", "storage.onDelete", "generator.replicas", "autoscaling.mode"]
)
def test_edit_that_fixes_nothing_starts_nothing(field: str) -> None:
    observed, persisted = held(edit=SpecEdit((field,), raises_limit=True))
    assert decide(SPEC, observed, persisted).persisted.outcome == persisted.outcome


def test_held_run_is_tried_again_by_suspending_and_resuming_it() -> None:
    observed, persisted = held(suspend=True, edit=SpecEdit(("suspend",)))
    decision = decide(SPEC, observed, persisted)
    assert (decision.phase, decision.persisted.outcome, decision.persisted.suspension) == (
        *("Suspended", None),
        Suspension.YES,
    )
    decision = decide(SPEC, replace(observed, prepare=Job(), edit=SpecEdit()), decision.persisted)
    assert (decision.phase, decision.again_seconds) == ("Suspended", None)
    decision = decide(SPEC, replace(observed, prepare=Job(), suspend=False), decision.persisted)
    assert (decision.phase, decision.wanted.prepare) == ("Pending", True)


def test_held_run_is_deleted_at_once() -> None:
    observed, persisted = held(deleting=True, edit=SpecEdit(FIELDS))
    assert decide(None, observed, persisted).release


def test_generator_failure_saves_the_training_first() -> None:
    """The coordinator answers; and an edit that is reverted meanwhile stops nothing."""
    bad = Service(bad_input=ContainerExit(2, "no such option"))
    observed = replace(LIVE, generators=bad, trainer=Job(JobState.ACTIVE, 1, ready=True))
    decision = decide(SPEC, observed, EDITED)
    assert (decision.phase, decision.request_stop, exists(decision)) == (
        *("Suspending", INTERRUPTED),
        (True, True, True, 1),
    )
    stopping = reported(CoordinatorPhase.FINISHING, INTERRUPTED)
    starting = replace(observed, generators=Service(starting=1), status=stopping)
    fixed = decide(SPEC, replace(starting, edit=SpecEdit(FIELDS)), decision.persisted)
    assert (fixed.phase, fixed.request_stop, fixed.persisted.drain_since) == ("Running", "", None)
    assert fixed.persisted.suspending_for is None
    left = replace(observed, trainer=Job(JobState.COMPLETE, 1), status=stopping)
    assert decide(SPEC, left, decision.persisted).phase == "Suspended"


@pytest.mark.parametrize("bad", ["generators", "coordinator"])
def test_drain_of_a_held_run_goes_on_until_a_user_ends_it(bad: str) -> None:
    """Also without an answer, and when what has failed starts again; through the run's status."""
    failed: dict[str, Any] = {bad: Service(bad_input=ContainerExit(2, "no such option"))}
    ready = replace(LIVE, trainer=Job(JobState.ACTIVE, 1, ready=True))
    persisted = decide(SPEC, replace(ready, **failed), EDITED).persisted
    assert persisted.suspending_for is not None
    assert (
        persisted_state(RunStatus().model_copy(update=persisted_fields(persisted))).suspending_for
        == persisted.suspending_for
    )
    later = replace(ready, unix_seconds=160.0)
    for change in ({"status": None, **failed}, {bad: Service(starting=1)}):
        decision = decide(SPEC, replace(later, **change), persisted)
        assert (decision.phase, decision.wanted.trainer, decision.persisted.drain_since) == (
            "Suspending",
            1,
            100.0,
        )
        assert decision.persisted.suspending_for == persisted.suspending_for
    ended = decide(SPEC, replace(later, trainer=Job(JobState.COMPLETE, 1)), persisted)
    assert (ended.phase, ended.persisted.outcome, ended.persisted.suspending_for) == (
        "Suspended",
        persisted.suspending_for,
        None,
    )


@pytest.mark.parametrize(
    ("saved", "lost"), [(120, "the last checkpoint has all steps"), (110, "the steps after 110")]
)
def test_limit_ends_a_run_whose_trainer_cannot_return(saved: int, lost: str) -> None:
    """Its pod waits for a node, so that the coordinator waits for it without end."""
    given = status(
        *([],),
        phase=CoordinatorPhase.FINISHING,
        stop_reason="maxSeconds",
        step=120,
        checkpoint_version=saved,
        wall_seconds=2000.0,
    )
    observed, persisted = replace(LIVE, status=given), replace(EDITED, ready_since=None)
    decision = decide(SPEC, observed, persisted)
    assert (decision.phase, decision.persisted.awaited_since) == ("Finishing", 100.0)
    early = replace(observed, unix_seconds=99.0 + DRAIN_SECONDS)
    assert decide(SPEC, early, decision.persisted).phase == "Finishing"
    back = replace(early, trainer=Job(JobState.ACTIVE, 1, ready=True))
    assert decide(SPEC, back, decision.persisted).persisted.awaited_since is None
    silent = decide(SPEC, replace(early, status=None), decision.persisted).persisted
    ended = decide(SPEC, replace(observed, unix_seconds=100.0 + DRAIN_SECONDS), silent)
    assert ended.persisted.outcome is not None
    assert (ended.phase, exists(ended)) == ("Completed", (True, False, False, None))
    assert lost in ended.persisted.outcome.message


def test_failed_run_that_was_suspended_before_stays_failed() -> None:
    failed = replace(FIRST, outcome=RunOutcome(OutcomeKind.FAILED, "BadInput", "x"))  # type: ignore[arg-type]
    observed = replace(LIVE, **NO_STATUS, suspend=True)
    assert decide(SPEC, observed, failed).phase == "Failed"
    assert decide(SPEC, replace(observed, edit=SpecEdit(("suspend",))), failed).phase == "Suspended"


def test_refused_publish_holds_the_run_whatever_it_has_trained() -> None:
    """A first publish, too; with the edited fields, if there are any."""
    failed = Job(JobState.FAILED, 1, (ContainerExit(5, "PUBLISH REFUSED: KL of generator-0 3 nats"),))
    observed = replace(RUNNING, trainer=failed)
    persisted = replace(FIRST, record=Record(publish_refused=True))
    decision = decide(SPEC, observed, persisted)
    outcome = decision.persisted.outcome
    assert outcome is not None
    assert (decision.phase, outcome.kind, outcome.reason) == (
        "Suspended",
        OutcomeKind.SUSPENDED,
        "PublishRefused",
    )
    assert outcome.message.endswith("KL of generator-0 3 nats")
    outcome = decide(SPEC, replace(observed, unproven=FIELDS), persisted).persisted.outcome
    assert outcome is not None
    assert (outcome.reason, outcome.message.endswith(SENTENCE)) == ("PublishRefused", True)
    fixed = replace(observed, edit=SpecEdit(("weightSync.probeLimit",)))
    decision = decide(SPEC, fixed, decision.persisted)
    decision = decide(SPEC, replace(fixed, edit=SpecEdit(), prepare=Job(), trainer=Job()), decision.persisted)
    assert (decision.wanted.prepare, decision.persisted.record.publish_refused) == (True, False)


# --- completed and failed runs -------------------------------------------------------------------

COMPLETED = replace(
    *(FIRST,),
    has_trained=True,
    outcome=RunOutcome(OutcomeKind.COMPLETED, "BudgetReached", "maxSteps"),  # type: ignore[arg-type]
)


@pytest.mark.parametrize("reason", ["maxSteps", "maxSeconds", FORECAST])
def test_raised_limit_continues_a_completed_run(reason: str) -> None:
    ended = replace(LIVE, status=None, trainer=Job(JobState.COMPLETE, 1))
    again = decide(SPEC, ended, COMPLETED)
    assert again.persisted.outcome == COMPLETED.outcome
    assert again.persisted == decide(SPEC, replace(ended, suspend=True), COMPLETED).persisted
    raised = replace(ended, edit=SpecEdit(("budget.maxSteps",), raises_limit=True))
    decision = decide(SPEC, raised, COMPLETED)
    assert (decision.phase, decision.persisted.outcome) == ("Pending", None)
    decision = until_started(replace(ended, prepare=DONE), decision.persisted)
    assert decision.persisted.resumed
    # The coordinator has the reason of the last end in its journal; its own ends are void by the new limit.
    phase = CoordinatorPhase.WAITING if reason == "maxSteps" else CoordinatorPhase.FINISHED
    stopping = replace(LIVE, status=reported(phase, reason), trainer=Job())
    decision = decide(SPEC, stopping, decision.persisted)
    assert decision.persisted.outcome is None
    assert (decision.wanted.trainer, decision.request_stop) == (1, None if reason == "maxSteps" else "")
    assert decision.phase == "Running"


def test_fixed_spec_continues_a_failed_run() -> None:
    failed = decide(SPEC, LifecycleInput(0.0, prepare=FAILED), PersistedState())
    assert failed.phase == "Failed"
    decision = decide(
        SPEC, LifecycleInput(0.0, prepare=FAILED, edit=SpecEdit(("podTemplate",))), failed.persisted
    )
    decision = until_started(LifecycleInput(0.0, prepare=FAILED), decision.persisted)
    assert (decision.wanted.prepare, decision.persisted.unproven_since) == (True, None)


def spec_of(**sections: Any) -> RunSpec:
    base = SPEC.model_dump(mode="json", by_alias=True, exclude_none=True)
    return RunSpec.model_validate(base | sections)


USED = RunStatus(
    step=10, usage=UsageStatus(device_hours="3.5000", elapsed_seconds="400", compute_tokens=1000)
)
LIMITS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"budget": {"maxSteps": 10}}, {"budget": {"maxSteps": 210}}, True),
    ({"budget": {"maxSteps": 10}}, {"budget": {"maxSeconds": 500}}, True),
    ({"budget": {"maxSteps": 210}}, {"budget": {"maxSteps": 100}}, False),
    ({"budget": {"maxSteps": 10}}, {"budget": {"maxSteps": 210, "maxSeconds": 400}}, False),
    ({"budget": {"maxDeviceHours": "3.5"}}, {"budget": {"maxDeviceHours": 10}}, True),
    ({"budget": {"maxDeviceHours": "3"}}, {"budget": {"maxDeviceHours": "3.4"}}, False),
    ({"budget": {"maxSeconds": 400}}, {"budget": {"maxSeconds": 401}}, True),
    ({"budget": {"maxComputeTokens": 1000}}, {"budget": {"maxComputeTokens": 1001}}, True),
    ({"trace": False}, {"trace": True}, False),
]
DEADLINE = {"mode": "Auto", "deadline": "2026-08-01T12:00:00Z"}
AUTOSCALING: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    (DEADLINE, DEADLINE | {"deadline": "2026-08-01T12:00:00+02:00"}, False),
    (DEADLINE, DEADLINE | {"deadline": "2026-08-01T12:00:01Z"}, True),
    (DEADLINE, {"mode": "Auto"}, True),
    ({"mode": "Auto"}, {"mode": "Advisory"}, True),
    ({"mode": "Auto"}, {"mode": "Auto", "onStop": "Complete"}, False),
]


@pytest.mark.parametrize(
    ("before", "after", "raised"),
    [
        *LIMITS,
        *(
            (
                {"budget": {"maxSteps": 99}, "autoscaling": old},
                {"budget": {"maxSteps": 99}, "autoscaling": new},
                to,
            )
            for old, new, to in AUTOSCALING
        ),
    ],
)
def test_limit_is_raised_if_none_is_reached(
    before: dict[str, Any], after: dict[str, Any], raised: bool
) -> None:
    edit = edit_between(spec_of(**before), spec_of(**after), USED)
    assert edit.raises_limit == raised
    assert edit.fields
    assert edit_between(spec_of(**after), spec_of(**after), USED) == SpecEdit()
