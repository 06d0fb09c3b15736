"""Whatever the API server refuses, the door for a cluster's objects refuses too, and names the same field."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from invalid_specs import Case, Warned, cases, warned

from operator_tests.test_operator_condition_messages import conditions
from scalerl_api.conditions import Phase
from scalerl_api.load import SpecError, load_run, run_from_object
from scalerl_api.spec_warnings import past_deadline, warnings_of

SERVER = cases("schema", "cel")
NEW = [case for case in SERVER if case.changed is None]
CHANGES = [case for case in SERVER if case.changed is not None]
OPERATOR = cases("operator")
PAST_DEADLINE = next(case for case in OPERATOR if case.name == "a deadline that is over")


def near(one: str, other: str) -> bool:
    """Whether one path is the other, or lies in it."""
    one, other = (path.replace("[", ".").replace("]", "") for path in (one, other))
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def test_invalid_table_names_each_row_once() -> None:
    names = [case.name for case in (*SERVER, *OPERATOR)]
    assert len(names) == len(set(names))
    assert len(SERVER) >= 60
    for case in SERVER:
        assert case.field, case.name


@pytest.mark.parametrize("case", NEW, ids=lambda case: case.name)
def test_file_is_held_to_the_servers_rules(case: Case) -> None:
    with pytest.raises(SpecError) as refused:
        run_from_object(case.run)
    assert any(near(problem.where, case.field) for problem in refused.value.problems), str(refused.value)


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.name)
def test_only_the_change_of_a_fixed_field_is_invalid(case: Case) -> None:
    assert case.changed is not None
    assert case.changed != case.run
    for run in (case.run, case.changed):
        run_from_object(copy.deepcopy(run))


@pytest.mark.parametrize("case", OPERATOR, ids=lambda case: case.name)
def test_models_refuse_only_what_they_check(case: Case) -> None:
    if case.reason == "SpecInvalid" and case is not PAST_DEADLINE:
        with pytest.raises(SpecError) as refused:
            run_from_object(case.run)
        assert case.says in str(refused.value)
    else:
        run_from_object(case.run)


@pytest.mark.parametrize("row", warned(), ids=lambda row: row.name)
def test_unusual_setting_is_a_warning_and_a_condition(row: Warned) -> None:
    run = run_from_object(row.run)
    assert any(
        warning.where == row.field and row.says in warning.message for warning in warnings_of(run.spec)
    )
    accepted = conditions(Phase.PREPARING, run=run)["Accepted"]
    assert (accepted.status, accepted.reason) == ("True", "AcceptedWithWarnings")
    assert row.field in accepted.message
    assert row.says in accepted.message


EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*/run*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_example_has_a_warning(example: Path) -> None:
    run = load_run(example)
    assert warnings_of(run.spec) == []
    if "kubernetes" in example.name:
        assert conditions(Phase.PREPARING, run=run)["Accepted"].reason == "Accepted"


def test_path_without_a_volume_is_a_warning() -> None:
    run = load_run(next(path for path in EXAMPLES if path.match("tiny/run-kubernetes.yaml")))
    assert run.spec.pod_template is not None
    without = run.spec.pod_template.model_copy(update={"volume_mounts": []})
    spec = run.spec.model_copy(update={"pod_template": without})
    accepted = conditions(Phase.PREPARING, run=run.model_copy(update={"spec": spec}))["Accepted"]
    assert accepted.reason == "AcceptedWithWarnings"
    assert "spec.task.jsonl.path: /data/" in accepted.message
    assert "lies in no volume that a podTemplate mounts" in accepted.message


def test_deadline_counts_where_forecasts_are_acted_on() -> None:
    spec = run_from_object(PAST_DEADLINE.run).spec
    assert past_deadline(spec, 1577836799.0) is None
    late = past_deadline(spec, 1577836800.0)
    assert late is not None
    assert late.where == "spec.autoscaling.deadline"
    off = spec.model_copy(update={"autoscaling": spec.autoscaling.model_copy(update={"mode": "Off"})})
    assert past_deadline(off, 2e9) is None
