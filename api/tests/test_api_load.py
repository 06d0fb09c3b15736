from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from scalerl_api.load import SpecError, parse_run

GOOD: dict[str, Any] = {
    "apiVersion": "scalerl.dev/v1alpha1",
    "kind": "ScaleRLRun",
    "metadata": {"name": "a-run"},
    "spec": {
        "model": {"scratch": {}, "contextTokens": 64},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "reasoning-gym"}},
        "recipe": {"maxCompletionTokens": 16},
        "budget": {"maxSteps": 3},
    },
}


def with_field(path: str, value: Any) -> str:
    run = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    node = run
    for part in parents:
        node = node.setdefault(part, {})
    if value is None:
        node.pop(last, None)
    else:
        node[last] = value
    return yaml.safe_dump(run)


def problems(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_run(text, "run.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_defaults_survive_a_round_trip() -> None:
    run = parse_run(yaml.safe_dump(GOOD), "run.yaml")
    again = parse_run(yaml.safe_dump(run.to_manifest()), "again.yaml")
    assert again == run
    assert run.spec.recipe.optimizer.epsilon == "1e-15"


@pytest.mark.parametrize(
    ("path", "value", "where", "says"),
    [
        ("spec.model.scratch.layer", 3, "spec.model.scratch.layer", "did you mean layers?"),
        ("spec.recipe.maxStaleness", 3, "spec.recipe.maxStaleness", "did you mean maxStalenessSteps?"),
        ("spec.zzz", 3, "spec.zzz", "known here: autoscaling"),
        ("spec.model.dtype", "fp16", "spec.model.dtype", "'bfloat16' or 'float32'"),
        ("spec.recipe.temperature", 0.5, "spec.recipe.temperature", 'write it as a string: "0.5"'),
        ("spec.recipe.temperature", "-1", "spec.recipe.temperature", "greater than 0"),
        ("spec.recipe.temperature", "hot", "spec.recipe.temperature", "pattern"),
        ("spec.recipe.temperature", "0", "spec.recipe.temperature", "greater than 0"),
        ("spec.recipe.maxStalenessSteps", -1, "spec.recipe.maxStalenessSteps", "greater than or equal to 0"),
        ("spec.recipe.maxCompletionTokens", 64, "spec", "the prompt needs room too"),
        ("spec.trainer.microBatchTokens", 63, "spec.trainer.microBatchTokens", "greater than or equal to 64"),
        ("spec.model.path", "/m", "spec.model", "exactly one of hub, path, scratch (found path, scratch)"),
        ("spec.task.jsonl", {"path": "a"}, "spec.task", "exactly one of reasoningGym, jsonl"),
        ("spec.budget", {}, "spec.budget", "at least one of maxSteps"),
        ("spec.budget", None, "spec.budget", "required"),
        ("spec.weightSync.backend", "NCCL", "spec", "needs generator.devices"),
        ("spec.generator.kvCache", "2GB", "spec.generator.kvCache", "pattern"),
        ("spec.task.prompt", {"template": "x"}, "spec.task.prompt", "must contain {prompt}"),
        ("spec.task.prompt", {"system": "x"}, "spec.task.prompt", "format: Chat"),
        (
            "spec.model.scratch",
            {"hiddenSize": 100, "attentionHeads": 3},
            "spec.model.scratch",
            "even multiple",
        ),
        ("metadata.name", "A_b", "metadata.name", "pattern"),
        ("kind", "Run", "kind", "ScaleRLRun"),
        ("apiVersion", "scalerl.dev/v2", "apiVersion", "scalerl.dev/v1alpha1"),
    ],
)
def test_each_problem_names_the_field_and_what_to_do(path: str, value: Any, where: str, says: str) -> None:
    found = problems(with_field(path, value))
    assert any(line.startswith(f"{where}: ") and says in line for line in found), found


def test_all_problems_come_at_once() -> None:
    text = with_field("spec.recipe", {"temperature": 1.5, "promptsPerStep": 0, "typo": 1})
    assert len(problems(text)) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected one ScaleRLRun object, found 0 documents"),
        ("- a", "found list"),
        ("a: [", "line 1"),
        ("a: 1\na: 2", "key 'a' given twice (first on line 1)"),
        ("a: 1\n---\nb: 2", "found 2 documents"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_what_is_not_one_yaml_object(text: str, says: str) -> None:
    assert says in problems(text)[0]


def test_unreadable_files_are_named(tmp_path: Any) -> None:
    from scalerl_api.load import load_run

    with pytest.raises(SpecError, match=r"none\.yaml: file: No such file"):
        load_run(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="not UTF-8"):
        load_run(tmp_path / "b.yaml")
