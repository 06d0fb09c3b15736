"""What the operator's metrics say of its runs, and one line about a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.reasons import Reason
from scalerl_api.status import Condition, OutlookStatus, RunStatus, TrainerStatus
from scalerl_operator.controller.report import RunFigures
from scalerl_operator.kube.cache import Cache
from scalerl_operator.names import label_value
from scalerl_operator.process_metrics import Metrics
from scalerl_operator.run_metrics import problems

LONG = "a-very-long-name-of-a-run-that-no-label-can-hold-as-it-is-and-so-it-is-shortened"

OUTLOOK = OutlookStatus(
    tokens=2_000_000,
    median="0.6123",
    low="0.5800",
    high="0.6400",
    asymptote="0.6400",
    asymptote_low="0.6100",
    asymptote_high="0.7000",
    gain="0.0110",
    gain_low="-0.0020",
    gain_high="0.0400",
    gain_probability="0.1500",
)
FIGURES = RunFigures(
    max_steps=160,
    budget_used={"maxSteps": 0.3125, "maxSeconds": 0.95},
    estimated_end=1.9e9,
    deadline=1.8e9,
    stop_after=3,
)


def said(type_: ConditionType, value: bool, reason: Reason) -> Condition:
    return Condition(
        type=type_,
        status="True" if value else "False",
        reason=reason,
        last_transition_time="2026-01-01T00:00:00Z",
    )


@pytest.mark.parametrize(
    ("type_", "value", "reason", "problem"),
    [
        (ConditionType.ACCEPTED, True, Reason.ACCEPTED, False),
        (ConditionType.ACCEPTED, False, Reason.SPEC_INVALID, True),
        (ConditionType.ADMITTED, False, Reason.WAITING_FOR_QUOTA, False),
        (ConditionType.ADMITTED, False, Reason.REFERENCE_NOT_FOUND, True),
        (ConditionType.PREPARED, False, Reason.WAITING_FOR_QUOTA, False),
        (ConditionType.GENERATORS_READY, False, Reason.WAITING_FOR_QUOTA, False),
        (ConditionType.GENERATORS_READY, True, Reason.READY, False),
        (ConditionType.GENERATORS_READY, False, Phase.PENDING, False),
        (ConditionType.GENERATORS_READY, False, Phase.PREPARING, False),
        (ConditionType.GENERATORS_READY, False, Reason.STARTING, True),
        (ConditionType.GENERATORS_READY, False, Reason.UNSCHEDULABLE, True),
        (ConditionType.PREPARED, False, Phase.PENDING, False),
        (ConditionType.PREPARED, False, Phase.PREPARING, True),
        (ConditionType.PREPARED, False, Reason.PREPARE_FAILED, True),
        (ConditionType.PROGRESSING, False, Phase.SUSPENDING, False),
        (ConditionType.PROGRESSING, False, Reason.STALLED, True),
        (ConditionType.FORECAST_READY, False, Reason.AUTOSCALING_OFF, False),
        (ConditionType.FORECAST_READY, False, Reason.NO_FORECAST, False),
        (ConditionType.FORECAST_READY, False, Reason.SIDECAR_UNREACHABLE, True),
        (ConditionType.FORECAST_READY, False, Reason.BROKEN, True),
        (ConditionType.DEGRADED, False, Reason.HEALTHY, False),
        (ConditionType.DEGRADED, True, Reason.CHECKPOINT_FAILED, True),
        (ConditionType.TRAINING_HEALTHY, True, Reason.HEALTHY, False),
        (ConditionType.TRAINING_HEALTHY, False, Reason.HEALTH_RULE, True),
        (ConditionType.TRAINING_HEALTHY, False, Phase.SUSPENDED, False),
        (ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_SPEC, False),
        (ConditionType.SUSPENDED, True, Reason.STOPPED_BY_FORECAST, False),
        (ConditionType.SUSPENDED, True, Reason.BROKEN, True),
        (ConditionType.SUSPENDED, False, Phase.RUNNING, False),
        (ConditionType.COMPLETED, False, Phase.RUNNING, False),
        (ConditionType.FAILED, False, Phase.RUNNING, False),
        (ConditionType.FAILED, True, Reason.BACKOFF_LIMIT_EXCEEDED, True),
    ],
)
def test_problem_needs_attention(type_, value, reason, problem):
    status = RunStatus(conditions=[said(type_, value, reason)])
    assert problems(status) == (((type_, reason),) if problem else ())


def metrics() -> Metrics:
    class Idle:
        depth = in_work = failing = staticmethod(lambda: 0)
        is_leader = staticmethod(lambda: True)

    made = Metrics()
    made.watch(Idle(), Cache(lambda key: None), Idle())
    return made


def test_run_metrics_have_the_run_label_of_the_pods():
    shown = metrics()
    shown.run(
        ("team", LONG),
        RunStatus(
            phase=Phase.RUNNING,
            conditions=[said(ConditionType.TRAINER_READY, False, Reason.BACK_OFF)],
            trainer=TrainerStatus(attempt=3, restarts=2),
        ),
        RunFigures(),
    )
    text = shown.text().decode()
    run = f'namespace="team",run="{label_value(LONG)}"'
    assert 'scalerl_operator_runs{phase="Running"} 1.0' in text
    assert 'scalerl_operator_runs{phase="Pending"} 0.0' in text
    assert f'scalerl_operator_run_problem{{{run},condition="TrainerReady",reason="BackOff"}} 1.0' in text
    assert f"scalerl_operator_run_trainer_restarts_total{{{run}}} 2.0" in text


def test_deleted_run_has_no_metrics():
    shown = metrics()
    shown.run(("team", "a"), RunStatus(phase=Phase.RUNNING, outlook=OUTLOOK, decision="STOP"), FIGURES)
    assert 'run="a"' in shown.text().decode()
    shown.run(("team", "a"), None, RunFigures())
    text = shown.text().decode()
    assert 'scalerl_operator_runs{phase="Running"} 0.0' in text
    assert 'run="a"' not in text


def test_former_leader_reports_no_runs():
    shown = metrics()
    shown.run(("team", "a"), RunStatus(phase=Phase.RUNNING, trainer=TrainerStatus(restarts=1)), FIGURES)
    shown.runs.clear()
    text = shown.text().decode()
    assert 'scalerl_operator_runs{phase="Running"} 0.0' in text
    assert "run_trainer_restarts_total{" not in text


def series(shown: Metrics) -> dict[tuple[str, ...], float]:
    """All series of runs: name, then the label values besides namespace and run, and the value."""
    return {
        (sample.name.removeprefix("scalerl_operator_run_"), *list(sample.labels.values())[2:]): sample.value
        for family in text_string_to_metric_families(shown.text().decode())
        for sample in family.samples
        if sample.labels.get("run") == "a"
    }


def test_run_metrics_have_forecast_budget_and_eta():
    shown = metrics()
    status = RunStatus(
        phase=Phase.RUNNING, reason="Stalled", step=50, outlook=OUTLOOK, decision="STOP", stop_votes=4
    )
    shown.run(("team", "a"), status, FIGURES)
    assert series(shown) == {
        ("phase", "Running", "Stalled"): 1,
        ("trainer_restarts_total",): 0,
        ("step",): 50,
        ("max_steps",): 160,
        ("budget_used_ratio", "maxSteps"): 0.3125,
        ("budget_used_ratio", "maxSeconds"): 0.95,
        ("estimated_end_timestamp_seconds",): 1.9e9,
        ("deadline_timestamp_seconds",): 1.8e9,
        ("decision", "STOP"): 1,
        ("stop_votes",): 4,
        ("stop_votes_needed",): 3,
        ("forecast_reward", "median"): 0.6123,
        ("forecast_reward", "low"): 0.58,
        ("forecast_reward", "high"): 0.64,
        ("forecast_asymptote", "median"): 0.64,
        ("forecast_asymptote", "low"): 0.61,
        ("forecast_asymptote", "high"): 0.7,
        ("forecast_gain", "median"): 0.011,
        ("forecast_gain", "low"): -0.002,
        ("forecast_gain", "high"): 0.04,
        ("forecast_gain_probability",): 0.15,
        ("forecast_tokens",): 2e6,
    }


def test_a_new_state_replaces_the_series_of_the_old_one():
    shown = metrics()
    shown.run(("team", "a"), RunStatus(phase=Phase.RUNNING, reason="Healthy", decision="CONTINUE"), FIGURES)
    shown.run(("team", "a"), RunStatus(phase=Phase.FAILED, reason="Diverged", decision="STOP"), FIGURES)
    found = series(shown)
    assert [name for name in found if name[0] in ("phase", "decision")] == [
        ("phase", "Failed", "Diverged"),
        ("decision", "STOP"),
    ]


def test_series_are_bounded():
    """At most 24 series of a run, besides its problems, whatever its status holds: a thousand runs have 24,000."""
    shown = metrics()
    limits = dict.fromkeys(("maxSteps", "maxSeconds", "maxDeviceHours", "maxComputeTokens"), 1.0)
    status = RunStatus(phase=Phase.RUNNING, reason="x" * 128, outlook=OUTLOOK, decision="STOP")
    shown.run(("team", "a"), status, replace(FIGURES, budget_used=limits))
    assert len(series(shown)) == 24
    status = status.model_copy(update={"decision": "of another release", "reason": 'a"b\\c\nd'})
    shown.run(("team", "a"), status, replace(FIGURES, budget_used=limits))
    found = series(shown)
    assert ("phase", "Running", 'a"b\\c\nd') in found
    assert not [name for name in found if name[0] == "decision"], "states are those of the autoscaler"


def test_numbers_of_another_writer_are_left_out():
    shown = metrics()
    odd = OUTLOOK.model_copy(update={"median": "many", "gain": "nan"})
    shown.run(("team", "a"), RunStatus(phase=Phase.RUNNING, outlook=odd), FIGURES)
    found = series(shown)
    assert ("forecast_reward", "median") not in found
    assert found["forecast_reward", "low"] == 0.58
