"""Names of installed packages in a spec, before its run is started."""

from __future__ import annotations

import json
from typing import Any

import pytest
from minimal_run import run_spec

from scalerl_api.reasons import Reason
from scalerl_api.spec import API_VERSION, KIND
from scalerl_api.status import RunStatus
from scalerl_operator.controller.check import plugin_problem
from scalerl_operator.controller.parts import Run
from scalerl_operator.controller.reconcile import accept

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


def test_edit_of_a_started_run_to_a_name_that_is_not_there_is_refused() -> None:
    """The run continues with its spec, instead of waiting for a schedule that no image has."""
    before = run_spec()
    obj = before.model_dump(mode="json", by_alias=True, exclude_none=True)
    obj |= {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "test", "namespace": "n", "uid": "u"},
    }
    text = json.dumps(obj["spec"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    edited = obj | {"spec": obj["spec"] | {"schedule": {"plugin": {"name": "typo"}}}}
    started = accept(Run(edited, {}, 100.0, RunStatus(accepted_spec=text, start_time="2026-01-01T00:00:00Z")))
    assert started.invalid is not None
    assert started.invalid.message.startswith("spec.schedule.plugin: plugin 'typo': no installed package")
    assert started.invalid.message.endswith("; the run continues with the spec accepted before")
    assert started.text == text
    assert started.found is not None
    assert started.found.spec == before.spec
    assert accept(Run(edited, {}, 100.0, RunStatus(accepted_spec=text))).invalid is None, "preflight says it"
