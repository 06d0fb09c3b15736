"""One line about a run: its reason, progress, ETA and budget."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from coordinator_statuses import EVERY, TOKENS, evaluations, status
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from operator_tests.manifests import cluster_run, findings
from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.spec import BudgetSpec
from scalerl_api.status import Condition, RunStatus, UsageStatus
from scalerl_api.wire import Status
from scalerl_lifecycle.budget import Rates, coarse, eta_seconds, recent_rates, used_fractions
from scalerl_lifecycle.lifecycle_types import LifecycleDecision, PersistedState, Problem
from scalerl_lifecycle.status_fields import waits_for_progress_only
from scalerl_operator.controller.report import RunFigures, figures, report, shown_reason

TRUE, FALSE = "True", "False"
INVALID = Problem(Reason.SPEC_INVALID, "model: missing")
HEALTHY = [
    (ConditionType.ACCEPTED, TRUE, Reason.ACCEPTED),
    (ConditionType.ADMITTED, TRUE, Reason.NO_QUEUE),
    (ConditionType.PREPARED, TRUE, Reason.READY),
    (ConditionType.COORDINATOR_READY, TRUE, Reason.READY),
    (ConditionType.GENERATORS_READY, TRUE, Reason.READY),
    (ConditionType.TRAINER_READY, TRUE, Reason.READY),
    (ConditionType.PROGRESSING, TRUE, Reason.HEALTHY),
    (ConditionType.FORECAST_READY, FALSE, Reason.NO_FORECAST),
    (ConditionType.DEGRADED, FALSE, Reason.HEALTHY),
    (ConditionType.SUSPENDED, FALSE, Phase.RUNNING),
    (ConditionType.COMPLETED, FALSE, Phase.RUNNING),
    (ConditionType.FAILED, FALSE, Phase.RUNNING),
]


def changed(*changes: tuple[str, str, str]) -> list[Condition]:
    by_type = {type_: (value, reason) for type_, value, reason in HEALTHY}
    by_type |= {ConditionType(type_): (value, reason) for type_, value, reason in changes}
    return [
        Condition.model_validate(
            {"type": t, "status": v, "reason": r, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        )
        for t, (v, r) in by_type.items()
    ]


@pytest.mark.parametrize(
    ("phase", "changes", "reason"),
    [
        (Phase.RUNNING, [], "Healthy"),
        (Phase.RUNNING, [("Accepted", TRUE, "AcceptedWithWarnings")], "Healthy"),
        (Phase.RUNNING, [("Accepted", FALSE, "SpecInvalid"), ("Degraded", TRUE, "StepSkipped")], "SpecInvalid"),
        (Phase.RUNNING, [("Degraded", TRUE, "CheckpointFailed")], "CheckpointFailed"),
        (Phase.RUNNING, [("TrainerReady", FALSE, "BackOff"), ("Progressing", FALSE, "Stalled")], "BackOff"),
        (Phase.RUNNING, [("Progressing", FALSE, "Stalled")], "Stalled"),
        (Phase.PENDING, [("Admitted", FALSE, "WaitingForQuota"), ("Prepared", FALSE, "Pending")], "WaitingForQuota"),
        (Phase.PENDING, [("Accepted", FALSE, "ReferenceNotFound")], "ReferenceNotFound"),
        (Phase.PREPARING, [("Prepared", FALSE, "Preparing"), ("Progressing", FALSE, "Preparing")], ""),
        (Phase.SUSPENDING, [("Progressing", FALSE, "Suspending")], ""),
        (Phase.SUSPENDED, [("Suspended", TRUE, "StoppedByForecast")], "StoppedByForecast"),
        # Why it has no pods matters less than why it ended.
        (Phase.FAILED, [("Failed", TRUE, "Diverged"), ("Degraded", TRUE, "StepSkipped")], "Diverged"),
        (Phase.COMPLETED, [("Completed", TRUE, "BudgetReached")], "BudgetReached"),
        # A run that was completed, and whose claim is lost.
        (Phase.PENDING, [("Accepted", FALSE, "VolumeNotReady"), ("Suspended", TRUE, "SuspendedBySpec")], "VolumeNotReady"),
    ],
)  # fmt: skip
def test_reason_is_that_of_the_condition_that_matters_most(phase, changes, reason):
    assert shown_reason(phase, changed(*changes)) == reason


def test_reason_of_a_run_without_conditions():
    for phase in Phase:
        assert shown_reason(phase, []) == ""


def of(
    phase: Phase = Phase.RUNNING,
    coordinator: Status | None = None,
    before: RunStatus | None = None,
    **spec: Any,
) -> RunStatus:
    decision = LifecycleDecision(phase, PersistedState(attempt=1))
    return report(findings(cluster_run(**spec), before, coordinator=coordinator, decision=decision))


def test_columns_of_a_run_that_trains():
    points = evaluations([0.2, 0.3, 0.4, 0.5, 0.5])
    now = status(points, step=50, wall_seconds=5 * EVERY, device_seconds=20 * EVERY, waiting_seconds=30.0)
    found = of(coordinator=now, budget={"maxSteps": 160, "maxSeconds": 100_000})
    assert found.progress == "50/160"
    assert found.eta == coarse(110 * EVERY / 10)
    assert found.budget == "31% of maxSteps"
    assert of(coordinator=now, budget={"maxSeconds": 100_000}).progress == "50"
    later = of(Phase.SUSPENDED, None, found, budget={"maxSteps": 160})
    assert (later.progress, later.eta, later.budget) == ("50/160", None, "31% of maxSteps")
    assert of(before=found, budget={"maxSteps": 160}).eta == found.eta, "kept while it does not respond"
    # A budget that is raised shows at once.
    assert of(Phase.COMPLETED, None, found, budget={"maxSteps": 500}).progress == "50/500"


def test_columns_of_a_run_that_never_started():
    found = of(Phase.PENDING, budget={"maxSteps": 160})
    assert (found.progress, found.eta, found.budget) == ("0/160", None, "0% of maxSteps")
    rejected = report(
        findings(None, invalid=INVALID, decision=LifecycleDecision(Phase.PENDING, PersistedState()))
    )
    assert (rejected.progress, rejected.budget) == (None, None)


def test_figures_are_of_the_accepted_spec():
    points = evaluations([0.2, 0.3, 0.4])
    made = findings(
        cluster_run(
            budget={"maxSteps": 160},
            autoscaling={"mode": "Advisory", "stopAfter": 4, "deadline": "2001-09-09T01:46:41Z"},
        ),
        coordinator=status(points),
        decision=LifecycleDecision(Phase.RUNNING, PersistedState(attempt=1)),
    )
    assert figures(made, report(made)) == RunFigures(
        max_steps=160,
        budget_used={"maxSteps": 0.125},
        estimated_end=1e9 + 140 * EVERY / 10,
        deadline=1e9 + 1,
        stop_after=4,
    )
    rejected = findings(None, invalid=INVALID, decision=LifecycleDecision(Phase.PENDING, PersistedState()))
    assert figures(rejected, report(rejected)) == RunFigures()


def test_eta_alone_is_not_written_at_once():
    """It is put off with the other fields of the progress, and written with the step."""
    before = RunStatus(phase=Phase.RUNNING, step=50, progress="50/160", eta="2h", budget="31% of maxSteps")
    after = before.model_copy(update={"eta": "1h55m", "progress": "51/160", "budget": "32% of maxSteps"})
    assert waits_for_progress_only(before, after)
    assert not waits_for_progress_only(before, after.model_copy(update={"reason": "Stalled"}))


@pytest.mark.parametrize(("hours", "most"), [(1, 25), (10, 60), (100, 170)])
def test_eta_changes_rarely(hours, most):
    """A run of ten hours with a step each ten seconds has 3,600 steps and shows few different times."""
    shown = [coarse(3600 * hours - 10 * step) for step in range(360 * hours)]
    assert sum(a != b for a, b in pairwise(shown)) < most


@given(st.floats(0, 1e8))
@example(7201.0)
@example(21601.0)
@example(12601.0)
def test_coarse_time_is_near_and_not_too_early(seconds):
    units = {"d": 86400, "h": 3600, "m": 60}
    number, total = "", 0
    for character in coarse(seconds):
        if character in units:
            number, total = "", total + int(number) * units[character]
        else:
            number += character
    assert seconds <= total <= max(seconds * 1.5, seconds + 60)
    assert total <= max(1.126 * seconds, seconds + 300)


def test_rates_ignore_what_evaluations_wait():
    """Steps trained while an evaluation was in progress do not count as pace, and neither do restarts long ago."""
    points = evaluations([0.2] * 8)
    expected = Rates(None, TOKENS, EVERY / 10, TOKENS * 2)
    assert recent_rates(status(points, step=79), 2.0) == expected
    # The first half of the run was slower.
    slow = [*evaluations([0.2] * 4), *evaluations([0.2] * 8, wall_seconds=0)[4:]]
    late = [
        p if i < 4 else type(p)(**{f: getattr(p, f) for f in p.__struct_fields__} | {"wall_seconds": 9999 + EVERY * i})
        for i, p in enumerate(slow)
    ]  # fmt: skip
    assert recent_rates(status(late), 2.0) == expected


def test_rates_before_the_second_evaluation_are_since_the_first_lease():
    first = evaluations([0.2])
    now = status(first, step=4, wall_seconds=40.0, tokens_trained=80, compute_tokens=160.0)
    assert recent_rates(now, 2.0) == Rates(None, 2.0, 10.0, 4.0)
    assert recent_rates(status([], wall_seconds=0.0), 2.0) == Rates()
    trained_before = status(first, step=4, wall_seconds=40.0, supervised_steps=3)
    assert recent_rates(trained_before, 2.0).seconds_per_step is None


@given(
    st.integers(2, 60), st.floats(0.01, 1e5), st.integers(1, 10**6), st.integers(0, 9)
)  # fmt: skip
def test_eta_of_a_constant_pace_is_exact(count, step_seconds, ahead, since):
    """Whatever the pace, ETA is what is left times a step, at any time between two evaluations."""
    points = [
        type(p)(**{f: getattr(p, f) for f in p.__struct_fields__} | {"wall_seconds": step_seconds * p.version})
        for p in evaluations([0.2] * count)
    ]  # fmt: skip
    step = points[-1].version + since
    now = status(points, step=step, wall_seconds=step_seconds * step)
    left = eta_seconds(BudgetSpec(max_steps=step + ahead), now, recent_rates(now, 1.0))
    assert left == pytest.approx(ahead * step_seconds)


def test_used_fractions():
    budget = {"maxSteps": 200, "maxSeconds": 1000, "maxDeviceHours": "2.5", "maxComputeTokens": 10**15}
    usage = UsageStatus(seconds="400", elapsed_seconds="500", device_hours="1.0", compute_tokens=10**14)
    shown = RunStatus(step=50, usage=usage)
    assert used_fractions(BudgetSpec.model_validate(budget), shown) == {
        "maxSteps": 0.25, "maxSeconds": 0.5, "maxDeviceHours": 0.4, "maxComputeTokens": 0.1,
    }  # fmt: skip
    for odd in ("", "many", "nan", "inf", "1e999"):
        shown = RunStatus(step=50, usage=UsageStatus(seconds=odd, device_hours=odd))
        used = used_fractions(BudgetSpec.model_validate(budget), shown)
        assert (used["maxSeconds"], used["maxDeviceHours"]) == (0.0, 0.0)


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan"), 1e308, -1.0])
def test_numbers_of_a_coordinator_break_no_reconcile(odd):
    budget = {"maxSteps": 160, "maxSeconds": 1000, "maxDeviceHours": "1", "maxComputeTokens": 1000}
    for name in ("wall_seconds", "waiting_seconds", "device_seconds", "compute_tokens"):
        found = of(coordinator=status([], step=5, **{name: odd}), budget=budget)
        assert 0 <= found.usage.compute_tokens <= 2**63 - 1
        assert RunStatus.read(found.to_object()).progress == "5/160"
    points = evaluations([0.2, 0.3, 0.4])
    points[-1] = replace(points[-1], wall_seconds=odd)
    assert of(coordinator=status(points), budget={"maxSteps": 160}).progress == "20/160"
