"""``task.mix``: what is refused, by field and with a remedy, and what follows from it."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalerl_api.load import SpecError, load_run, parse_run
from scalerl_api.metrics_fields import TASK_FIGURES, by_task, task_key
from scalerl_api.spec import ScaleRLRun

EXAMPLE = Path(__file__).parents[2] / "examples/mix/run.yaml"
SETS = {"sets": [{"name": "a", "heldOutOf": "sums"}, {"name": "b", "heldOutOf": "programs"}]}


def changed(**changes: Any) -> ScaleRLRun:
    """The example with other values: of a task by its index, of the spec by section."""
    run = yaml.safe_load(EXAMPLE.read_text())
    for name, value in copy.deepcopy(changes).items():
        if name.startswith("task_"):
            run["spec"]["task"]["mix"][int(name[5:])].update(value)
        else:
            run["spec"][name].update(value)
    return parse_run(yaml.safe_dump(run), "test")


def test_example_has_two_tasks_and_follows_their_mean() -> None:
    spec = load_run(EXAMPLE).spec
    sums, programs = spec.task.tasks
    assert (sums.name, sums.weight, sums.field) == ("sums", Fraction(3, 4), "task.mix.0")
    assert (sums.max_completion_tokens, programs.max_completion_tokens) == (8, None)
    assert spec.completion_limits == [8, 32]
    assert [one.name for one in spec.evaluation_sets] == ["sums", "programs"]
    assert spec.forecast_set == "weighted-mean"
    assert changed(evaluation={"forecastSet": "sums"}).spec.forecast_set == "sums"
    assert changed(evaluation=SETS | {"forecastSet": None}).spec.forecast_set == "a", "the first of the sets"


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"task_0": {"weight": "0.7"}}, "spec.task", "weights of the tasks of mix must sum to 1"),
        ({"task_0": {"weight": 0.75}}, "spec.task.mix.0.weight", "write it as a string"),
        ({"task_0": {"weight": "0"}}, "spec.task.mix.0.weight", "greater than 0"),
        ({"task_1": {"name": "sums"}}, "spec.task.mix", "name sums is given twice"),
        ({"task_1": {"name": "weighted-mean"}}, "spec.task.mix.1", "choose another name"),
        ({"task_1": {"mix": []}}, "spec.task.mix.1.mix", "list its tasks in task.mix"),
        ({"task_1": {"maxCompletionTokens": 33}}, "spec", "at most recipe.maxCompletionTokens (32)"),
        ({"task": {"heldOut": {"size": 5}}}, "spec.task", "move them into the tasks of mix"),
        ({"task": {"verifier": {"name": "exact"}}}, "spec.task", "each of its tasks its own verifier"),
        ({"task": {"plugin": {"name": "opgraph"}}}, "spec.task", "exactly one of"),
        ({"evaluation": {"forecastSet": "other"}}, "spec", "evaluation.forecastSet (other) must be"),
        (
            {"evaluation": {"sets": [{"name": "a", "heldOutOf": "other"}], "forecastSet": "a"}},
            "spec",
            "heldOutOf of each of evaluation.sets must be the name of a task",
        ),
        (
            {"evaluation": {"sets": SETS["sets"][:1]}},
            "spec",
            "weighted-mean needs a set with heldOutOf for each task",
        ),
        (
            {"evaluation": {"sets": [{"name": "a"}], "forecastSet": "a"}},
            "spec",
            "needs task or heldOutOf",
        ),
        (
            {"evaluation": {"sets": [*SETS["sets"], {"name": "c", "heldOutOf": "sums"}]}},
            "spec.evaluation",
            "no two of sets may have the same heldOutOf",
        ),
        (
            {"recipe": {"length": {"interruption": {"maxTokens": 8}}}},
            "spec",
            "recipe.length.interruption.maxTokens (8) must be less than",
        ),
        (
            {"warmStart": {"jsonl": {"path": "a"}}, "task_0": {"prompt": {"template": "{prompt}?"}}},
            "spec",
            "warmStart.jsonl has prompts of one format",
        ),
        ({"task_0": {"prompt": {"chatTemplate": "x"}}}, "spec.task.mix.0.prompt", "needs format: Chat"),
    ],
)
def test_refusals_name_the_field_and_what_to_do(changes: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        changed(**changes)
    found = list(map(str, refused.value.problems))
    assert any(line.startswith(f"{where}: ") and says in line for line in found), found


def test_held_out_of_needs_a_mix() -> None:
    run = yaml.safe_load((EXAMPLE.parents[1] / "tiny/run.yaml").read_text())
    run["spec"]["evaluation"] |= {"sets": [{"name": "a", "heldOutOf": "main"}]}
    with pytest.raises(SpecError, match="heldOutOf of each of"):
        parse_run(yaml.safe_dump(run), "test")


def test_figures_of_tasks_are_found_again() -> None:
    row = {task_key(figure, task): 1.0 for figure in TASK_FIGURES for task in ("a", "b-2")}
    assert by_task(row | {"reward": 0.5, "step": 3}) == {
        t: dict.fromkeys(TASK_FIGURES, 1.0) for t in ("a", "b-2")
    }
