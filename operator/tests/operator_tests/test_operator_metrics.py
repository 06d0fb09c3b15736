"""What the operator's metrics say of its runs."""

from __future__ import annotations

import pytest

from scalerl_api.conditions import ConditionType, Phase, Reason
from scalerl_api.status import Condition, RunStatus, TrainerStatus
from scalerl_operator.kube.cache import Cache
from scalerl_operator.metrics import Metrics, problems
from scalerl_operator.names import label_value

LONG = "a-very-long-name-of-a-run-that-no-label-can-hold-as-it-is-and-so-it-is-shortened"


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
    )
    text = shown.text().decode()
    run = f'namespace="team",run="{label_value(LONG)}"'
    assert 'scalerl_operator_runs{phase="Running"} 1.0' in text
    assert 'scalerl_operator_runs{phase="Pending"} 0.0' in text
    assert (
        f'scalerl_operator_run_problem{{condition="TrainerReady",{run.split(",")[0]},reason="BackOff",{run.split(",")[1]}}} 1.0'
        in text
    )
    assert f"scalerl_operator_run_trainer_restarts_total{{{run}}} 2.0" in text


def test_deleted_run_has_no_metrics():
    shown = metrics()
    shown.run(("team", "a"), RunStatus(phase=Phase.RUNNING))
    shown.run(("team", "a"), None)
    text = shown.text().decode()
    assert 'scalerl_operator_runs{phase="Running"} 0.0' in text
    assert "run_trainer_restarts_total{" not in text


def test_former_leader_reports_no_runs():
    shown = metrics()
    shown.run(("team", "a"), RunStatus(phase=Phase.RUNNING, trainer=TrainerStatus(restarts=1)))
    shown.forget_runs()
    text = shown.text().decode()
    assert 'scalerl_operator_runs{phase="Running"} 0.0' in text
    assert "run_trainer_restarts_total{" not in text
