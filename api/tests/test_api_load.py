from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from annotated_types import Le

from scalerl_api import load
from scalerl_api.coordinator_spec import LEASE_SECONDS
from scalerl_api.environment import EnvironmentSpec
from scalerl_api.load import (
    SpecError,
    accepted_run,
    load_accepted_run,
    lost_data_fields,
    parse_run,
    run_from_object,
    to_yaml,
)
from scalerl_api.spec import ScaleRLRun
from scalerl_api.verifier import VerifierSpec

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
        ("spec.recipe.promptsPerSteps", 3, "spec.recipe.promptsPerSteps", "did you mean promptsPerStep?"),
        ("spec.zzz", 3, "spec.zzz", "known here: autoscaling"),
        (
            "spec.evaluation.sets",
            [{"name": "a", "samplesPerPromt": 3}],
            "spec.evaluation.sets.0.samplesPerPromt",
            "did you mean samplesPerPrompt?",
        ),
        *(
            (path, 3, path, f"did you mean {' or '.join(meant)}?")
            for path, meant in {
                "spec.recipe.learningRate": ["spec.recipe.optimizer.learningRate"],
                "spec.learningRate": ["spec.recipe.optimizer.learningRate", "spec.warmStart.learningRate"],
                "spec.trainer.dtype": ["spec.model.dtype"],
            }.items()
        ),
        ("spec.model.dtype", "fp16", "spec.model.dtype", "'bfloat16' or 'float32'"),
        ("spec.recipe.temperature", 0.5, "spec.recipe.temperature", 'write it as a string: "0.5"'),
        ("spec.recipe.temperature", "-1", "spec.recipe.temperature", "greater than 0"),
        ("spec.recipe.temperature", "hot", "spec.recipe.temperature", 'like "0.1" or "3e-4"'),
        ("spec.recipe.temperature", "1e999", "spec.recipe.temperature", "its exponent of two digits at most"),
        (
            "spec.recipe.temperature",
            "1e-999",
            "spec.recipe.temperature",
            "its exponent of two digits at most",
        ),
        (
            "spec.recipe.completionsPerPrompt",
            1,
            "spec.recipe.completionsPerPrompt",
            "greater than or equal to 2",
        ),
        (
            "spec.recipe.optimizer.learningRate",
            "1e999",
            "spec.recipe.optimizer.learningRate",
            "its exponent of two digits at most",
        ),
        ("spec.recipe.optimizer.beta1", "1", "spec.recipe.optimizer.beta1", "must be less than 1"),
        ("spec.recipe.optimizer.beta2", "1.0", "spec.recipe.optimizer.beta2", "must be less than 1"),
        (
            "spec.recipe.optimizer.maxGradientNorm",
            "-1",
            "spec.recipe.optimizer.maxGradientNorm",
            "at least 0",
        ),
        ("spec.weightSync.bucket", "0", "spec.weightSync.bucket", "must be at least 1, got 0"),
        ("spec.generator.kvCache", "0Gi", "spec.generator.kvCache", "must be at least 1Mi, got 0Gi"),
        ("spec.generator.memoryFraction", "0", "spec.generator.memoryFraction", "greater than 0"),
        ("spec.generator.memoryFraction", "1.01", "spec.generator.memoryFraction", "at most 1"),
        ("spec.task.verifier.memory", "0", "spec.task.verifier.memory", "must be at least 64Mi, got 0"),
        ("spec.task.verifier.memory", "63Mi", "spec.task.verifier.memory", "must be at least 64Mi, got 63Mi"),
        (
            "spec.warmStart",
            {"steps": 1, "learningRate": "1e400"},
            "spec.warmStart.learningRate",
            "its exponent of two digits at most",
        ),
        (
            "spec.trainer.engine",
            "FSDP2",
            "spec",
            "trainer.engine FSDP2 partitions all state: set trainer.zeroStage: 3",
        ),
        ("spec.trainer.zeroStage", 0, "spec", "trainer.zeroStage 0 keeps no float32 copy"),
        (
            "spec.task.reasoningGym.parameters",
            {"a": 0.5},
            "spec.task.reasoningGym.parameters.a",
            'strings, like "0.5"',
        ),
        (
            "spec.task.reasoningGym.parameters",
            {"a": [1, 0.5]},
            "spec.task.reasoningGym.parameters.a",
            "write them as strings",
        ),
        (
            "spec.task.reasoningGym.parameters",
            {"a": {}},
            "spec.task.reasoningGym.parameters.a",
            "or a list of these",
        ),
        ("spec.recipe.temperature", "0", "spec.recipe.temperature", "greater than 0"),
        (
            "spec.recipe.offPolicy.pipeline.maxStalenessSteps",
            -1,
            "spec.recipe.offPolicy.pipeline.maxStalenessSteps",
            "greater than or equal to 0",
        ),
        ("spec.recipe.maxCompletionTokens", 64, "spec", "the prompt needs room too"),
        (
            "spec.trainer.export",
            {"to": "gs://bucket"},
            "spec.trainer.export.to",
            "must be an absolute path, hf://owner/name or s3://bucket/prefix",
        ),
        (
            "spec.trackers",
            {"mlflow": {}},
            "spec.trackers.mlflow.uri",
            "required",
        ),
        (
            "spec.trackers",
            {"mlflow": {"uri": "file:/data/mlruns"}},
            "spec.trackers.mlflow.uri",
            "must be http://host/…, https://host/… or sqlite:////absolute/path.db",
        ),
        (
            "spec.trackers",
            {"mlflow": {"uri": "https://me:password@mlflow"}},
            "spec.trackers.mlflow.uri",
            "without a password: that is the variable MLFLOW_TRACKING_PASSWORD",
        ),
        (
            "spec.trackers",
            {"mlflow": {"uri": "https://mlflow", "experiment": "/a"}},
            "spec.trackers.mlflow.experiment",
            "must be letters, digits, spaces, _, . and -",
        ),
        (
            "spec.trackers",
            {"wandb": {"project": "a/b"}},
            "spec.trackers.wandb.project",
            "must be letters, digits, spaces, _, . and -",
        ),
        (
            "spec.trackers",
            {"tensorBoard": {"directory": "logs"}},
            "spec.trackers.tensorBoard.directory",
            "must be an absolute path",
        ),
        (
            "spec.trackers",
            {"comet": {}},
            "spec.trackers.comet",
            "",
        ),
        ("spec.trainer.microBatchTokens", 63, "spec.trainer.microBatchTokens", "greater than or equal to 64"),
        ("spec.model.path", "/m", "spec.model", "exactly one of hub, path, scratch; given are path, scratch"),
        (
            "spec.task.jsonl",
            {"path": "a"},
            "spec.task",
            "exactly one of reasoningGym, jsonl, dataset, plugin, mix; given are reasoningGym, jsonl",
        ),
        ("spec.budget", {}, "spec.budget", "at least one of maxSteps"),
        ("spec.budget", None, "spec.budget", "required"),
        ("spec.weightSync.backend", "NCCL", "spec", "needs generator.devices"),
        ("spec.storage.size", "1", "spec.storage.size", "must be at least 64Mi, got 1"),
        ("spec.storage.size", "9999999Ti", "spec.storage.size", "must be at most 1024Ti, got 9999999Ti"),
        (
            "spec.recipe.optimizer.learningRate",
            "1e5",
            "spec.recipe.optimizer.learningRate",
            "must be at most 1, got 1e5",
        ),
        (
            "spec.recipe.promptsPerStep",
            65536 * 2,
            "spec.recipe.promptsPerStep",
            "less than or equal to 65536",
        ),
        (
            "spec.recipe",
            {"promptsPerStep": 65536, "completionsPerPrompt": 1024, "maxCompletionTokens": 16},
            "spec",
            "(1024) must be at most 1048576",
        ),
        (
            "spec.trainer.replicas",
            49,
            "spec",
            "(49) and trainer.devices (0) must be at most recipe.promptsPerStep (48): each rank takes a prompt or more",
        ),
        (
            "spec.trainer",
            {"replicas": 7, "devices": 7},
            "spec",
            "(7) and trainer.devices (7) must be at most recipe.promptsPerStep (48): each rank takes a prompt or more",
        ),
        (
            "spec.recipe.length",
            {"interruption": {"maxTokens": 14336}},
            "spec",
            "interruption.maxTokens (14336) must be less than recipe.maxCompletionTokens (16)",
        ),
        ("spec.trainer.devices", 9, "spec.trainer.devices", "less than or equal to 8"),
        ("spec.generator.kvCache", "2GB", "spec.generator.kvCache", "like 512Mi or 2Gi"),
        ("spec.task.prompt", {"template": "x"}, "spec.task.prompt", "must contain {prompt}"),
        ("spec.task.prompt", {"system": "x"}, "spec.task.prompt", "format: Chat"),
        (
            "spec.model.scratch",
            {"hiddenSize": 100, "attentionHeads": 3},
            "spec.model.scratch",
            "even multiple",
        ),
        ("metadata.name", "A_b", "metadata.name", "lower-case letters"),
        ("kind", "Run", "kind", "ScaleRLRun"),
        ("apiVersion", "scalerl.dev/v2", "apiVersion", "scalerl.dev/v1alpha1"),
    ],
)
def test_problem_names_the_field_and_what_to_do(path: str, value: Any, where: str, says: str) -> None:
    found = problems(with_field(path, value))
    assert any(line.startswith(f"{where}: ") and says in line for line in found), found


def test_every_rank_takes_an_example_of_a_warm_start() -> None:
    run = copy.deepcopy(GOOD)
    run["spec"] |= {"trainer": {"replicas": 4}, "warmStart": {"steps": 1, "batchSize": 3}}
    assert problems(yaml.safe_dump(run)) == [
        "spec: warmStart.batchSize (3) must be at least the ranks of trainer.replicas (4) and trainer.devices (0): each rank takes an example or more"
    ]
    run["spec"]["warmStart"]["batchSize"] = 4
    parse_run(yaml.safe_dump(run), "run.yaml")
    run["spec"]["trainer"] = {"replicas": 2, "devices": 3}
    assert any("(2) and trainer.devices (3)" in line for line in problems(yaml.safe_dump(run)))
    run["spec"]["warmStart"]["batchSize"] = 6
    parse_run(yaml.safe_dump(run), "run.yaml")


def test_lease_outlives_one_grading_and_all_attempts_of_a_publish() -> None:
    most: Any = max(
        bound.le
        for model in (VerifierSpec, EnvironmentSpec)
        for name in ("timeout_seconds", "turn_timeout_seconds")
        for bound in getattr(model.model_fields.get(name), "metadata", ())
        if isinstance(bound, Le)
    )
    assert most * 3 == LEASE_SECONDS
    run = copy.deepcopy(GOOD)
    assert parse_run(yaml.safe_dump(run), "run.yaml").spec.lease_seconds == LEASE_SECONDS
    run["spec"] |= {"weightSync": {"timeoutSeconds": 3600}}
    assert parse_run(yaml.safe_dump(run), "run.yaml").spec.lease_seconds == 4 * 3600


REMOVED: dict[str, Any] = {
    "generator": {
        "leaseSeconds": 120,
        "speculation": {"history": {"maxDraftTokens": 4, "memoryTokens": 65_536, "storeSize": "1Gi"}},
    },
    "recipe": {
        "maxCompletionTokens": 16,
        "loss": {"gspo": {"dualClip": "3"}},
        "advantage": {"batchDeviation": "BeforeFilter"},
        "length": {"penalty": {"maxTokens": 8, "bufferTokens": 4}},
        "curriculum": {"sec": {"edges": [3], "learningRate": "0.25"}},
        "refill": {"maxTries": 3},
    },
    "weightSync": {"probeSequences": 0},
    "task": {
        "verifier": {"code": {"language": "python"}},
        "dataset": {"files": ["/data/a.csv"], "filter": {"duplicates": "Keep"}},
        "heldOut": {"seed": 7},
    },
    "evaluation": {
        "sets": [{"name": "a", "task": {"seed": 1, "jsonl": {"path": "/b"}, "verifier": {"name": "exact"}}}]
    },
}


def test_accepted_spec_with_removed_fields_is_read_without_them() -> None:
    """What an operator, or a run's directory, has stored before the upgrade; of a file that a person wrote, each is named."""
    obj = copy.deepcopy(GOOD) | {"spec": {**GOOD["spec"], **copy.deepcopy(REMOVED)}}
    obj["metadata"] = {"name": "a"}
    with pytest.raises(SpecError) as refused:
        run_from_object(obj)
    unknown = {one.where for one in refused.value.problems if one.message == "unknown field"}
    assert len(unknown) == len(refused.value.problems) == 14
    spec = accepted_run(obj).spec
    for path in unknown:
        section: Any = obj["spec"]
        *sections, last = path.removeprefix("spec.").split(".")
        for part in sections:
            section = section[int(part)] if part.isdecimal() else section[part]
        del section[last]
    assert spec == run_from_object(obj).spec


def test_removed_fields_that_chose_other_data_are_named() -> None:
    found = [(one.where, one.message.split(",")[0], one.hint) for one in lost_data_fields(REMOVED)]
    what = "finish it with the release that began it, or start a new run"
    assert found == [
        ("spec.task.dataset.filter.duplicates", "is 'Keep'", what),
        ("spec.task.heldOut.seed", "is 7", what),
        ("spec.evaluation.sets.0.task.seed", "is 1", what),
    ]
    mix = [{"name": "a", "heldOut": {"seed": 3}, "dataset": {"filter": {"duplicates": "Keep"}}}]
    own = {"dataset": {"filter": {"duplicates": "Keep"}}}
    assert len(lost_data_fields({"task": {"mix": mix}, "warmStart": own})) == 3
    same: Any = {
        "seed": 5,
        "task": {
            "heldOut": {"seed": 0},
            "dataset": {"filter": {"duplicates": "Drop"}},
            "reasoningGym": {"seed": 9},
            "environment": {"parameters": {"heldOut": {"seed": 4}}},
        },
        "evaluation": {"sets": [{"task": {"seed": 0}}]},
    }
    assert lost_data_fields(same) == []


def test_a_typo_of_an_environment_beside_a_verifier_is_named() -> None:
    environment: dict[str, Any] = {"name": "tool", "parameters": {"tools": ["calculator"]}}
    (found,) = problems(with_field("spec.task.environment", environment))
    assert "environment.name is 'tool': did you mean 'tools'?" in found
    (found,) = problems(with_field("spec.task.environment", {"name": "nim"}))
    assert "did you mean" not in found


def test_names_of_code_are_no_fields() -> None:
    """Admission policies read the names of YAML alone, and nothing else checks this ``podTemplate``."""
    run = yaml.safe_load(with_field("spec.environment", {"image": "game:1"}))
    run["spec"]["environment"]["podTemplate"] = {"service_account_name": "admin", "env_from": []}
    found = problems(yaml.safe_dump(run))
    for name in ("service_account_name", "env_from"):
        assert any(f"spec.environment.podTemplate.{name}" in one for one in found), found


def test_written_values_parse_alike_in_every_reader() -> None:
    manifest = parse_run(yaml.safe_dump(GOOD), "run.yaml").to_manifest()
    text = to_yaml(manifest)
    assert "epsilon: '1e-15'" in text
    assert "learningRate: '5e-7'" in text
    assert yaml.safe_load(text) == manifest


@pytest.mark.parametrize("value", [1, True, "0.5", [1, 2], ["0.5", "a"], []])
def test_parameters_of_a_task_keep_their_type(value: Any) -> None:
    run = parse_run(with_field("spec.task.reasoningGym.parameters", {"a": value}), "run.yaml")
    assert run.spec.task.reasoning_gym is not None
    kept = run.spec.task.reasoning_gym.parameters["a"]
    assert (kept, type(kept)) == (value, type(value))


def test_all_problems_are_reported_together() -> None:
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
        ("a: 2024-99-99", "line 1, column 4: '2024-99-99' is no timestamp; put text in quotes"),
        ("a:\n  b: !!int abc", "line 2, column 6: 'abc' is no int"),
        ("a: !!float abc", "line 1, column 4: 'abc' is no float"),
        ("a: !!bool abc", "line 1, column 4: 'abc' is no bool"),
        ("a: !!timestamp abc", "line 1, column 4: 'abc' is no timestamp"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ('a: "b\\0c"', "line 1, column 4: 'b\\x00c' has the character NUL"),
    ],
)
def test_file_must_hold_one_yaml_object(text: str, says: str) -> None:
    assert says in problems(text)[0]


def test_unreadable_files_are_named(tmp_path: Any) -> None:
    from scalerl_api.load import load_run

    with pytest.raises(SpecError, match=r"none\.yaml: file: No such file"):
        load_run(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="not UTF-8"):
        load_run(tmp_path / "b.yaml")


@pytest.mark.parametrize("name", ["examples/tiny/run-kubernetes.yaml", "examples/tiny/run.yaml"])
def test_accepted_spec_is_read_despite_newer_rules(name: str) -> None:
    obj = yaml.safe_load((Path(__file__).parents[2] / name).read_text())
    obj["metadata"]["namespace"] = "a"
    obj["spec"]["task"]["jsonl"]["path"] = "/data/data.jsonl"
    assert load._as_it_is(ScaleRLRun, obj) == run_from_object(obj)
    obj["spec"]["recipe"]["maxCompletionTokens"] = 10**6
    obj["spec"]["storage"] = {"size": 5}
    with pytest.raises(SpecError):
        run_from_object(obj)
    spec = accepted_run(obj).spec
    assert (spec.recipe.max_completion_tokens, spec.storage.size) == (10**6, "5")


@pytest.mark.parametrize("part", ["metadata", "spec"])
def test_accepted_run_without_a_part_is_refused(part: str, tmp_path: Path) -> None:
    obj = yaml.safe_load((Path(__file__).parents[2] / "examples/tiny/run.yaml").read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(obj | {part: None}))
    with pytest.raises(SpecError, match=part):
        load_accepted_run(tmp_path / "run.yaml")
