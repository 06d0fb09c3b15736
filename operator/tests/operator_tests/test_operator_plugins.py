"""Names of installed packages in a spec, before its run is started."""

from __future__ import annotations

from typing import Any

import pytest

from operator_tests.children import run_spec
from scalerl_api.conditions import Reason
from scalerl_operator.controller.refusals import plugin_problem

TASK = {"verifier": {"name": "exact"}}


@pytest.mark.parametrize(
    ("section", "where", "group"),
    [
        ({"task": {"plugin": {"name": "x"}} | TASK}, "spec.task.plugin", "sources"),
        (
            {"task": {"jsonl": {"path": "/a"}, "verifier": {"name": "x"}}},
            "spec.task.verifier.name",
            "verifiers",
        ),
        ({"schedule": {"plugin": {"name": "x"}}}, "spec.schedule.plugin", "schedules"),
        ({"trackers": {"plugin": {"name": "x"}}}, "spec.trackers.plugin", "trackers"),
    ],
)
def test_name_that_the_coordinators_image_does_not_have(
    section: dict[str, Any], where: str, group: str
) -> None:
    problem = plugin_problem(run_spec(**section).spec)
    assert problem is not None
    assert problem.reason is Reason.REFERENCE_NOT_FOUND
    start = f"{where}: plugin 'x': no installed package has it in the entry points scalerl.{group}"
    assert problem.message.startswith(start)
    assert "installed: " in problem.message


def test_names_that_are_there_or_of_other_images_are_no_problem() -> None:
    assert plugin_problem(run_spec().spec) is None
    extras = {"plugin": {"name": "opgraph", "parameters": {"operations": [2, 3]}}}
    assert plugin_problem(run_spec(task=extras | {"verifier": {"name": "opgraph-blend"}}).spec) is None
    assert plugin_problem(run_spec(recipe={"loss": {"plugin": {"name": "x"}}}).spec) is None
    own = run_spec(schedule={"plugin": {"name": "x"}}, images={"coordinator": "team/own:1"})
    assert plugin_problem(own.spec) is None


def test_name_of_a_task_of_a_mix_is_found() -> None:
    mix = [{"name": n, "weight": "0.5", "plugin": {"name": "x"}} | TASK for n in ("a", "b")]
    problem = plugin_problem(run_spec(task={"mix": mix}).spec)
    assert problem is not None
    assert problem.message.startswith("spec.task.mix[0].plugin: ")
