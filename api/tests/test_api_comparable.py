"""Which finished runs may serve as a prior: the same model and task, whatever else they differ in."""

from pathlib import Path
from typing import Any

import pytest

from scalerl_api.comparable import MAY_DIFFER, comparable
from scalerl_api.edits import EDITS
from scalerl_api.load import load_run
from scalerl_api.spec import RunSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny" / "run.yaml"


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return load_run(EXAMPLE).spec


def changed(spec: RunSpec, path: str, value: Any) -> RunSpec:
    dumped = spec.model_dump(by_alias=True)
    *outer, last = path.split(".")
    inner = dumped
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return RunSpec.model_validate(dumped)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("recipe.temperature", "0.9"),
        ("recipe.promptsPerStep", 7),
        ("seed", 5),
        ("generator.replicas", 2),
        ("model.dtype", "bfloat16"),
        ("model.contextTokens", 64),
        ("task.verifier.workers", 2),
        ("budget.maxSteps", 3),
    ],
)
def test_recipe_seed_and_sizes_may_differ(spec: RunSpec, path: str, value: Any) -> None:
    assert comparable(changed(spec, path, value), spec) == ""


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model.scratch.layers", 9, "model.scratch.layers is 9, this run's is "),
        ("task.jsonl.path", "other.jsonl", "task.jsonl.path is 'other.jsonl', this run's is "),
        ("task.prompt.template", "Q: {prompt}", "task.prompt.template is 'Q: {prompt}', this run's is "),
        ("task.heldOut.size", 3, "task.heldOut.size is 3"),
        ("warmStart", {"steps": 77}, "warmStart.steps is 77, this run's is "),
    ],
)
def test_model_task_and_warm_start_must_agree(spec: RunSpec, path: str, value: Any, said: str) -> None:
    assert comparable(changed(spec, path, value), spec).startswith(said)
    assert comparable(spec, changed(spec, path, value)).startswith(path.split(".")[0])


def test_another_source_of_the_model_is_named(spec: RunSpec) -> None:
    hub = spec.model_dump(by_alias=True)
    hub["model"] |= {"scratch": None, "hub": {"name": "owner/model"}}
    found = comparable(RunSpec.model_validate(hub), spec)
    assert found == "model.hub.name is 'owner/model', this run's is not set"


def test_fields_that_may_differ_exist() -> None:
    known = set(EDITS)
    assert all(any(path == k or path.startswith(k + ".") for k in known) for path in MAY_DIFFER)


def test_split_of_compute_must_agree(spec: RunSpec) -> None:
    """It says how long the weights are trained before RL; without it, maxComputeTokens only ends the run."""
    limited = changed(spec, "budget", {"maxComputeTokens": 2000})
    assert comparable(limited, spec) == ""
    spec = changed(spec, "warmStart", {"steps": 77})
    split = changed(spec, "budget", {"maxComputeTokens": 1000, "split": {"beta": "0.2"}})
    assert comparable(split, split) == ""
    other = changed(split, "budget.split.beta", "0.5")
    assert comparable(other, split) == "budget.split.beta is '0.5', this run's is '0.2'"
    more = changed(split, "budget.maxComputeTokens", 3000)
    assert comparable(split, more) == "budget.maxComputeTokens is 1000, this run's is 3000"
    assert comparable(spec, split) == "budget.maxComputeTokens is not set, this run's is 1000"
