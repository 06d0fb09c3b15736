"""Whatever the API server refuses, the door for a cluster's objects refuses too, and names the same field."""

from __future__ import annotations

import copy

import pytest
from invalid_runs import Case, cases

from scalerl_api.load import SpecError, run_from_object

SERVER = cases("schema", "cel")
NEW = [case for case in SERVER if case.changed is None]
CHANGES = [case for case in SERVER if case.changed is not None]
OPERATOR = cases("operator")


def near(one: str, other: str) -> bool:
    """Whether one path is the other, or lies in it."""
    one, other = (path.replace("[", ".").replace("]", "") for path in (one, other))
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def test_the_table_is_large_and_names_each_row_once() -> None:
    names = [case.name for case in (*SERVER, *OPERATOR)]
    assert len(names) == len(set(names))
    assert len(SERVER) >= 60
    for case in SERVER:
        assert case.field, case.name


@pytest.mark.parametrize("case", NEW, ids=lambda case: case.name)
def test_a_file_is_held_to_the_servers_rules(case: Case) -> None:
    with pytest.raises(SpecError) as refused:
        run_from_object(case.run)
    assert any(near(problem.where, case.field) for problem in refused.value.problems), str(refused.value)


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.name)
def test_only_the_change_is_wrong_with_what_cannot_change(case: Case) -> None:
    assert case.changed is not None
    assert case.changed != case.run
    for run in (case.run, case.changed):
        run_from_object(copy.deepcopy(run))


@pytest.mark.parametrize("case", OPERATOR, ids=lambda case: case.name)
def test_what_only_python_can_check_is_refused_by_its_models_and_nothing_else(case: Case) -> None:
    if case.reason == "SpecInvalid":
        with pytest.raises(SpecError) as refused:
            run_from_object(case.run)
        assert case.says in str(refused.value)
    else:
        run_from_object(case.run)
