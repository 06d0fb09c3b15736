"""Every kind of bad field and task of a run file: one clear error that names the field or line, and what to do; exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_tests.good_run import REMOVE, Check, changed
from scalerl_cli.inputs import load
from scalerl_cli.main import main
from scalerl_trainer.checks import PrepareError, check_tasks

pytestmark = pytest.mark.usefixtures("any_vllm", "without_the_check_in_torch")


def jsonl(**task: Any) -> dict[str, Any]:
    return {
        "spec__task": {
            "jsonl": {"path": "data.jsonl"},
            "verifier": {"name": "exact"},
            "heldOut": {"size": 1},
            **task,
        }
    }


LINES = '{"prompt": "1+1?", "answer": "2"}\n{"prompt": "1+2?", "answer": "3"}\n'
FIELDS: list[tuple[str, str, list[str]]] = [
    ("not yaml", "a: [1, 2", ["line 1"]),
    ("a tab", "a:\n\t- b", ["line 2, column 1"]),
    ("two documents", changed() + "---\n" + changed(), ["expected one ScaleRLRun object, found 2 documents"]),
    ("empty", "", ["expected one ScaleRLRun object, found 0 documents"]),
    ("a list", "- 1", ["expected one ScaleRLRun object, found list"]),
    ("key twice", "metadata: {name: a}\nmetadata: {name: b}", ["line 2", "given twice (first on line 1)"]),
    (
        "unknown field",
        changed(spec__recipe__promptsPerSteps=4),
        ["spec.recipe.promptsPerSteps", "did you mean promptsPerStep?"],
    ),
    ("unknown section", changed(spec__trainers={}), ["spec.trainers", "did you mean trainer?"]),
    ("wrong kind", changed(kind="Job"), ["kind", "'ScaleRLRun'", "got 'Job'"]),
    ("wrong version", changed(apiVersion="scalerl.dev/v2"), ["apiVersion", "'scalerl.dev/v1alpha1'"]),
    ("no name", changed(metadata={}), ["metadata.name: required, but not given"]),
    ("bad name", changed(metadata__name="My Run"), ["metadata.name", "got 'My Run'"]),
    ("no model", changed(spec__model=REMOVE), ["spec.model: required, but not given"]),
    (
        "two models",
        changed(spec__model__hub={"name": "a/b"}),
        ["spec.model", "exactly one of hub, path, scratch"],
    ),
    (
        "no source",
        changed(spec__task__reasoningGym=REMOVE),
        ["spec.task", "exactly one of reasoningGym, jsonl, dataset, plugin"],
    ),
    (
        "a float",
        changed(spec__recipe__temperature=0.7),
        ["spec.recipe.temperature", 'write it as a string: "0.7"'],
    ),
    ("not a number", changed(spec__recipe__temperature="hot"), ["spec.recipe.temperature", "got 'hot'"]),
    ("out of range", changed(spec__recipe__temperature="0"), ["spec.recipe.temperature", "greater than 0"]),
    (
        "wrong type",
        changed(spec__trainer__replicas="many"),
        ["spec.trainer.replicas", "integer", "got 'many'"],
    ),
    (
        "too small",
        changed(spec__trainer__replicas=0),
        ["spec.trainer.replicas", "greater than or equal to 1", "got 0"],
    ),
    ("bad stage", changed(spec__trainer__zeroStage=4), ["spec.trainer.zeroStage", "less than or equal to 3"]),
    (
        "an impossible date",
        changed() + "a: 2024-13-01\n",
        ["line 24, column 4", "'2024-13-01' is no timestamp", "put text in quotes"],
    ),
    (
        "too large",
        changed(spec__recipe__optimizer={"learningRate": "1e999"}),
        ["spec.recipe.optimizer.learningRate", "its exponent of two digits at most"],
    ),
    (
        "no memory to grade",
        changed(spec__task__verifier__memory="1Mi"),
        ["spec.task.verifier.memory", "at least 64Mi"],
    ),
    (
        "bare fraction",
        changed(spec__task__reasoningGym__parameters={"a": 0.5}),
        ["spec.task.reasoningGym.parameters.a", 'strings, like "0.5"'],
    ),
    ("bad quantity", changed(spec__generator__kvCache="lots"), ["spec.generator.kvCache", "got 'lots'"]),
    (
        "bad verifier",
        changed(spec__task__verifier__name="guess"),
        ["spec.task.verifier.name", "plugin 'guess'", "built in: reasoning-gym, exact, number, math-verify"],
    ),
    ("no limit", changed(spec__budget={}), ["spec.budget", "maxSteps, maxDeviceHours, maxSeconds"]),
    (
        "no room for the prompt",
        changed(spec__recipe__maxCompletionTokens=64),
        ["spec", "recipe.maxCompletionTokens (64)", "model.contextTokens (64)"],
    ),
    (
        "rows too short",
        changed(spec__model__contextTokens=100, spec__trainer__microBatchTokens=64),
        ["trainer.microBatchTokens (64)", "at least model.contextTokens (100)"],
    ),
    (
        "NCCL on CPU",
        changed(spec__weightSync={"backend": "NCCL"}),
        ["weightSync.backend NCCL needs", "devices above 0"],
    ),
    (
        "template",
        changed(spec__task__prompt={"template": "hello"}),
        ["spec.task.prompt", "template must contain {prompt}"],
    ),
    (
        "heads",
        changed(spec__model__scratch__hiddenSize=66),
        ["spec.model.scratch", "even multiple of attentionHeads"],
    ),
    (
        "foreign scorer",
        changed(**jsonl(verifier={"name": "reasoning-gym"})),
        ["spec.task", "use exact, number or math-verify"],
    ),
]
TASKS: list[tuple[str, str, str | None, list[str]]] = [
    ("unknown task", changed(spec__task__reasoningGym__name="chain_summ"), None, ["spec.task.reasoningGym.name", "chain_sum"]),
    ("unknown parameter", changed(spec__task__reasoningGym__parameters={"min_termz": 2}), None, ["spec.task.reasoningGym.parameters", "min_termz", "min_terms"]),
    ("bad parameter", changed(spec__task__reasoningGym__parameters={"min_terms": "two"}), None, ["spec.task.reasoningGym.parameters", "min_terms"]),
    ("held-out too large", changed(spec__task__heldOut__size=500), None, ["spec.task: heldOut.size (500) must be less than reasoningGym.size (500): problems to train on have to be left"]),
    ("strange placeholder", changed(spec__task__prompt={"template": "{prompt} {answer}"}), None, ["spec.task.prompt.template", "{answer}", "only {prompt} is known"]),
    ("no file", changed(**jsonl()), None, ["spec.task.jsonl.path", "data.jsonl", "o such file"]),
    ("bad line", changed(**jsonl()), LINES + "oops\n", ["spec.task.jsonl.path", "line 3"]),
    ("no answer", changed(**jsonl()), LINES + '{"prompt": "x"}\n', ["spec.task.jsonl.path", "line 3", "answer"]),
    ("number as answer", changed(**jsonl()), '{"prompt": "x", "answer": 2}\n' + LINES, ["spec.task.jsonl.path", "line 1", "answer"]),
    ("same id twice", changed(**jsonl()), '{"prompt": "x", "answer": "1", "id": "a"}\n{"prompt": "y", "answer": "1", "id": "a"}\n', ["spec.task.jsonl.path", "line 2", "id"]),
    ("not UTF-8", changed(**jsonl()), LINES + "\udcff\n", ["spec.task.jsonl.path", "line 3", "UTF-8"]),
    ("no difficulty", changed(**jsonl(), spec__recipe__curriculum={"sec": {"edges": [3]}}), LINES, ["spec.recipe.curriculum.sec", "difficulty", "edgeOfCompetence"]),
    ("ungradable", changed(**jsonl(verifier={"name": "number"})), LINES + '{"prompt": "x", "answer": "three"}\n{"prompt": "y", "answer": "three"}\n', ["spec.task.verifier.name", "three"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), [c[1:] for c in FIELDS], ids=[c[0] for c in FIELDS])
def test_fields(tmp_path: Path, check: Check, text: str, words: list[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    check(file, words)


def test_file_that_is_not_there(tmp_path: Path, check: Check) -> None:
    check(tmp_path / "none.yaml", ["none.yaml: file: No such file or directory (check the path)"])
    (tmp_path / "folder").mkdir()
    check(tmp_path / "folder", ["folder: file: Is a directory"])


# `run` leaves what takes the task's own libraries to its first step, prepare.
TASKS_AT_DOORS = [("validate", *case) for case in TASKS] + [
    ("run", *case) for case in TASKS if "jsonl" in case[1] and case[0] != "ungradable"
]


@pytest.mark.parametrize(
    ("check", "text", "data", "words"),
    [(door, *case) for door, _, *case in TASKS_AT_DOORS],
    indirect=["check"],
    ids=[f"{door}-{name}" for door, name, *_ in TASKS_AT_DOORS],
)
def test_tasks(tmp_path: Path, check: Check, text: str, data: str | None, words: list[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    if data is not None:
        (tmp_path / "data.jsonl").write_text(data, errors="surrogateescape")
    check(file, words)


def test_validate_and_prepare_find_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows of the file are read by both, by the same code, and those that cannot be used are listed with their line."""
    lines = [{"prompt": f"{i}+1?", "answer": "none" if i in (250, 299) else str(i + 1)} for i in range(300)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{}\n")
    file = tmp_path / "run.yaml"
    file.write_text(changed(**jsonl(verifier={"name": "number"})))
    assert main(["validate", str(file)]) == 2
    shown = capsys.readouterr().err.splitlines()
    data = tmp_path / "data.jsonl"
    assert f"{file}: spec.task.jsonl.path: {data}, line 301, field 'prompt': is missing" in shown
    for line in (251, 300):
        assert any(
            f"spec.task.verifier.name: {data}, line {line}, field 'answer': " in text for text in shown
        )
    assert any("2 of 301 rows cannot be used (2 answers that number cannot use)" in text for text in shown)
    with pytest.raises(PrepareError) as caught:
        check_tasks(load(file).spec)
    assert [f"{file}: spec.{problem}" for problem in caught.value.args] == shown
