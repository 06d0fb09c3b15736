"""What ``spec.autoscaling`` takes and what it refuses, by field."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_api.load import SpecError, parse_run

RUN = """
metadata: {{name: scaled}}
spec:
  model: {{scratch: {{}}}}
  task: {{reasoningGym: {{name: chain_sum}}, verifier: {{name: reasoning-gym}}}}
  generator: {{replicas: 2}}
  budget: {{maxSteps: 9}}
  autoscaling: {autoscaling}
"""


def parsed(autoscaling: str) -> Any:
    return parse_run(RUN.format(autoscaling=autoscaling), "run.yaml")


def test_defaults_leave_a_run_alone() -> None:
    spec = parsed("{}").spec.autoscaling
    assert (spec.mode, spec.min_gain, spec.horizon, spec.stop_after, spec.cooldown_seconds) == (
        "Off",
        "0.04",
        "2",
        3,
        600,
    )
    assert (spec.on_stop, spec.target, spec.deadline, spec.generators) == ("Suspend", None, None, None)


def test_full_spec_round_trips_through_manifest() -> None:
    run = parsed(
        '{mode: Auto, minGain: "0.01", horizon: "4", target: "0.6", pricePerDeviceHour: "2.5", '
        'valuePerPoint: "100", maxDeviceHours: "1e3", deadline: 2026-08-01T12:00:00+02:00, '
        "generators: {min: 1, max: 4}, cooldownSeconds: 60, stopAfter: 5, onStop: Complete}"
    )
    manifest = run.to_manifest()
    assert type(run).model_validate(manifest) == run
    assert manifest["spec"]["autoscaling"]["deadline"] == "2026-08-01T12:00:00+02:00"
    assert parsed('{deadline: "2026-08-01T12:00:00Z"}').spec.autoscaling.deadline == "2026-08-01T12:00:00Z"


@pytest.mark.parametrize(
    ("autoscaling", "where", "says"),
    [
        ("{mode: On}", "spec.autoscaling.mode", "'Off', 'Advisory' or 'Auto'"),
        ('{minGain: "0"}', "spec.autoscaling.minGain", "greater than 0"),
        ("{minGain: 0.02}", "spec.autoscaling.minGain", "as a string"),
        ('{horizon: "1"}', "spec.autoscaling.horizon", "greater than 1"),
        ('{horizon: "17"}', "spec.autoscaling.horizon", "at most 16"),
        ('{target: "1"}', "spec.autoscaling.target", "less than 1"),
        ('{pricePerDeviceHour: "2"}', "spec.autoscaling", "needs valuePerPoint"),
        ('{valuePerPoint: "2"}', "spec.autoscaling", "needs pricePerDeviceHour"),
        ('{maxDeviceHours: "0"}', "spec.autoscaling.maxDeviceHours", "greater than 0"),
        ("{deadline: 2026-08-01T12:00:00}", "spec.autoscaling.deadline", "must be a time with its time zone"),
        ("{deadline: 2026-08-01}", "spec.autoscaling.deadline", "must be a time with its time zone"),
        ("{deadline: soon}", "spec.autoscaling.deadline", "like 2026-08-01T12:00:00Z"),
        ('{deadline: "2026-02-30T12:00:00Z"}', "spec.autoscaling.deadline", "a day that the calendar has"),
        ('{deadline: "2026-02-30 12:00:00Z"}', "spec.autoscaling.deadline", "with its time zone"),
        ("{generators: {min: 3, max: 2}}", "spec.autoscaling.generators", "at least min (3)"),
        ("{generators: {max: 1}}", "spec", "generator.replicas (2) must lie within autoscaling.generators"),
        ("{generators: {min: 3, max: 4}}", "spec", 'autoscaling.generators ({"min": 3, "max": 4})'),
        ("{generators: {min: 0, max: 4}}", "spec.autoscaling.generators.min", "greater than or equal to 1"),
        ("{cooldownSeconds: 0}", "spec.autoscaling.cooldownSeconds", "greater than or equal to 1"),
        ("{stopAfter: 0}", "spec.autoscaling.stopAfter", "greater than or equal to 1"),
        ("{onStop: Delete}", "spec.autoscaling.onStop", "'Suspend' or 'Complete'"),
        ("{coolDown: 5}", "spec.autoscaling.coolDown", "did you mean cooldownSeconds"),
    ],
)
def test_refusal_names_field(autoscaling: str, where: str, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        parsed(autoscaling)
    (problem,) = refused.value.problems
    assert problem.where == where
    assert says in str(problem)
