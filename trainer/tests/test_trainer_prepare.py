"""Preparing a run's model: three sources, one folder, and all refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from scalerl_api.load import parse_run
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec, RunTaskSpec, WarmStartSpec
from scalerl_tasks import TokenizerError
from scalerl_trainer import checks
from scalerl_trainer.models import load_model
from scalerl_trainer.prepare import PrepareError, main, prepare

SCRATCH = {"layers": 2, "hiddenSize": 32, "attentionHeads": 1, "intermediateSize": 48, "vocabularySize": 300}


@pytest.fixture(autouse=True)
def without_the_check_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds a folder, and ``test_trainer_model_checks`` has it."""
    monkeypatch.setattr("scalerl_trainer.model_checks._structure", lambda *_: ())


def make(root: Path, model: dict[str, Any] | None = None, **sections: Any) -> tuple[RunPaths, RunSpec]:
    root.mkdir(exist_ok=True)
    jsonl = root / "task.jsonl"
    jsonl.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) + "\n" for i in range(40))
    )
    spec = {
        "model": {"dtype": "float32", "contextTokens": 64} | (model or {"scratch": SCRATCH}),
        "task": {"jsonl": {"path": str(jsonl)}, "verifier": {"name": "exact"}, "heldOut": {"size": 2}},
        "recipe": {"maxCompletionTokens": 8},
        "budget": {"maxSteps": 1},
    } | sections
    manifest = {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": "t"},
        "spec": spec,
    }
    (root / "run.yaml").write_text(yaml.safe_dump(manifest))
    (root / "token").write_text("secret")
    return RunPaths(root), parse_run((root / "run.yaml").read_text(), "run.yaml").spec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_prepare_scratch_loads_in_transformers(tmp_path: Path, dtype: Any, tied: bool) -> None:
    paths, spec = make(tmp_path, {"scratch": SCRATCH | {"tiedEmbeddings": tied}, "dtype": dtype})
    prepare(paths, spec, one_machine=True)
    model = load_model(str(paths.base_model), dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(paths.base_model)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    weight = model.model.layers[1].mlp.gate_proj.weight.float()
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.model.norm.weight.float(), torch.ones(32))
    assert not torch.equal(weight, model.model.layers[0].mlp.gate_proj.weight.float())
    text = "12+34=46 π"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    digits = [i for i in ids if tokenizer.decode([i]).isdigit()]
    assert [tokenizer.decode([i]) for i in digits] == list("123446")


def test_prepare_initializer_range(tmp_path: Path) -> None:
    paths, spec = make(tmp_path, {"scratch": SCRATCH | {"initializerRange": "0.15"}, "dtype": "bfloat16"})
    prepare(paths, spec, one_machine=True)
    model = load_model(str(paths.base_model), dtype="bfloat16")
    assert model.config.initializer_range == 0.15
    weights = [w.float() for w in model.parameters() if w.dim() == 2]
    assert [w.std().item() for w in weights] == pytest.approx([0.15] * len(weights), rel=0.1)


def test_prepare_is_deterministic(tmp_path: Path) -> None:
    for name in ("a", "b"):
        paths, spec = make(tmp_path / name)
        prepare(paths, spec, one_machine=True)
    for file in (tmp_path / "a" / "model").iterdir():
        if file.name != "prepared.json":  # the task's path is in the digest of its source
            assert file.read_bytes() == (tmp_path / "b" / "model" / file.name).read_bytes(), file.name


def test_prepare_vocabulary_is_upper_bound(tmp_path: Path) -> None:
    paths, spec = make(tmp_path, {"scratch": SCRATCH | {"vocabularySize": 64}})
    prepare(paths, spec, one_machine=True)
    tokenizer = AutoTokenizer.from_pretrained(paths.base_model)
    assert len(tokenizer) <= 64
    assert tokenizer.decode(tokenizer.encode("3+1=4")) == "3+1=4"
    assert tokenizer.encode("é") == [tokenizer.unk_token_id] * 2, "nothing is dropped silently"


def test_prepare_is_idempotent_and_refuses_other_model(tmp_path: Path) -> None:
    paths, spec = make(tmp_path)
    prepare(paths, spec, one_machine=True)
    before = {f: f.stat().st_mtime_ns for f in paths.base_model.iterdir()}
    prepare(paths, spec, one_machine=True)
    assert {f: f.stat().st_mtime_ns for f in paths.base_model.iterdir()} == before
    _, other = make(tmp_path, {"scratch": SCRATCH | {"layers": 3}})
    with pytest.raises(PrepareError, match="another run directory"):
        prepare(paths, other, one_machine=True)


def test_prepare_refuses_sec_without_difficulties(tmp_path: Path) -> None:
    curriculum = {"curriculum": {"sec": {"edges": [3]}}, "maxCompletionTokens": 8}
    paths, spec = make(tmp_path, recipe=curriculum)
    with pytest.raises(PrepareError, match=r"recipe\.curriculum\.sec: .* no difficulty.* edgeOfCompetence"):
        prepare(paths, spec, one_machine=True)
    assert not paths.base_model.exists()


def test_prepare_path(tmp_path: Path) -> None:
    source, spec = make(tmp_path / "source")
    prepare(source, spec, one_machine=True)
    paths, spec = make(tmp_path / "run", {"path": str(source.base_model)})
    prepare(paths, spec, one_machine=True)
    weights = "model.safetensors"
    assert (paths.base_model / weights).samefile(source.base_model / weights)
    prepare(paths, spec, one_machine=True)


def test_prepare_crash_leaves_no_model(tmp_path: Path) -> None:
    paths, spec = make(tmp_path)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("scalerl_trainer.prepare._check", crash)
        with pytest.raises(KeyboardInterrupt):
            prepare(paths, spec, one_machine=True)
        assert not paths.base_model.exists()
    killed = paths.base_model.with_name(".model-1")
    killed.mkdir()
    (killed / "model.safetensors").touch()
    prepare(paths, spec, one_machine=True)
    assert [path.name for path in paths.root.glob("*model*")] == ["model"]


def broken(tmp_path: Path, change: Any) -> dict[str, Any]:
    source, spec = make(tmp_path / "source")
    prepare(source, spec, one_machine=True)
    change(source.base_model)
    return {"path": str(source.base_model)}


def edit(name: str, **values: Any) -> Any:
    def change(directory: Path) -> None:
        data = json.loads((directory / name).read_text()) | values
        (directory / name).write_text(json.dumps({k: v for k, v in data.items() if v is not None}))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "^model.path.*config.json"),
        (lambda d: (d / "model.safetensors").unlink(), r"^model.path.*safetensors"),
        (edit("config.json", max_position_embeddings=32), r"^model.contextTokens: 64 is more than .* 32"),
        (lambda d: (d / "config.json").write_text("{"), r"^model.path: .*config.json: it is not JSON"),
        (
            lambda d: (d / "model.safetensors").write_bytes(b"not one"),
            r"^model.path: .*model.safetensors is not a safetensors",
        ),
    ],
)
def test_prepare_incomplete_folder_raises(tmp_path: Path, change: Any, message: str) -> None:
    paths, spec = make(tmp_path / "run", broken(tmp_path, change))
    with pytest.raises(PrepareError, match=message):
        prepare(paths, spec, one_machine=True)
    assert not paths.base_model.exists()


@pytest.mark.parametrize(
    ("interruption", "longest", "message"),
    [
        ({"phrase": "the end"}, 32, "'the end' does not end the thought"),
        (
            {"phrase": "1 2 3 4 5 </think>", "maxTokens": 12},
            24,
            r"maxTokens \(12\) .*recipe\.maxCompletionTokens \(24\)",
        ),
    ],
)
def test_prepare_interruption_that_does_not_fit_raises(
    tmp_path: Path, interruption: dict[str, Any], longest: int, message: str
) -> None:
    recipe = {"maxCompletionTokens": longest, "length": {"interruption": interruption}}
    paths, spec = make(tmp_path, recipe=recipe)
    with pytest.raises(TokenizerError, match=r"^recipe\.length\.interruption\.phrase .*" + message):
        prepare(paths, spec, one_machine=True)
    assert not paths.base_model.exists()


def test_prepare_model_without_end_token_raises(tmp_path: Path) -> None:
    def change(directory: Path) -> None:
        edit("tokenizer_config.json", eos_token=None)(directory)
        edit("config.json", eos_token_id=None)(directory)
        (directory / "generation_config.json").unlink()

    paths, spec = make(tmp_path / "run", broken(tmp_path, change))
    with pytest.raises(PrepareError, match="no end-of-sequence token"):
        prepare(paths, spec, one_machine=True)
    assert not paths.base_model.exists()


def test_prepare_chat_needs_template(tmp_path: Path) -> None:
    paths, spec = make(tmp_path)
    task = spec.task.model_copy(update={"prompt": spec.task.prompt.model_copy(update={"format": "Chat"})})
    with pytest.raises(PrepareError, match=r"task\.prompt\.format"):
        prepare(paths, spec.model_copy(update={"task": task}), one_machine=True)


def test_prepare_model_larger_than_memory_raises(tmp_path: Path) -> None:
    huge = {"layers": 64, "hiddenSize": 8192, "attentionHeads": 64, "intermediateSize": 65536}
    paths, spec = make(tmp_path, {"scratch": huge})
    with pytest.raises(PrepareError, match=r"model.scratch: 120,\d+ M parameters: .* GiB"):
        prepare(paths, spec, one_machine=True)
    assert not paths.base_model.exists()


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_is_at_most_the_limit_of_the_container(tmp_path: Path, name: str) -> None:
    machine = checks.memory_bytes(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for content, expected in (("4096", 4096), ("max", machine), ("9223372036854771712", machine)):
        (tmp_path / name).write_text(f"{content}\n")
        assert checks.memory_bytes(tmp_path) == expected


def test_check_memory_of_all_roles_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = {"replicas": 8, "zeroStage": 1, "microBatchTokens": 64}
    monkeypatch.setattr("scalerl_trainer.checks.memory_bytes", lambda: 100 << 20)
    paths, spec = make(tmp_path, trainer=trainer)
    with pytest.raises(PrepareError, match="8 trainer ranks"):
        prepare(paths, spec, one_machine=True)
    prepare(paths, spec, one_machine=False)


def graphics(root: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An ``nvidia-smi`` that is first on the PATH."""
    program = root / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


ON_GPUS = {"trainer": {"devices": 1, "microBatchTokens": 64}, "generator": {"devices": 1}}
BIG = {"scratch": SCRATCH | {"hiddenSize": 256, "intermediateSize": 4096}}  # 7 M parameters


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trainer": ON_GPUS["trainer"]}, r"one trainer rank needs about .* on its GPU"),
        ({"generator": ON_GPUS["generator"]}, r"generator's share of the weights .*memoryFraction \(0.9\)"),
    ],
)
def test_check_memory_model_larger_than_gpu_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], message: str
) -> None:
    graphics(tmp_path, monkeypatch, "echo 16; echo 20")
    paths, spec = make(tmp_path / "run", BIG, **sections)
    with pytest.raises(PrepareError, match=message):
        prepare(paths, spec, one_machine=True)


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_check_memory_of_device_memory_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On a cluster, where no GPU is found here, and before what is found."""
    monkeypatch.setattr("scalerl_trainer.checks.gpu_memory_bytes", lambda: None)
    sections = {name: dict(section) for name, section in ON_GPUS.items()}
    other = {"trainer": "generator", "generator": "trainer"}[role]
    sections[role]["deviceMemory"] = "12Mi"
    paths, spec = make(tmp_path / "run", BIG, **sections)
    with pytest.raises(PrepareError, match=r"there are 0\.0 on its GPU|of 0\.0 GiB is less"):
        prepare(paths, spec, one_machine=False)
    monkeypatch.setattr("scalerl_trainer.checks.gpu_memory_bytes", lambda: 80 << 30)
    with pytest.raises(PrepareError):
        prepare(paths, spec, one_machine=False)
    sections[role]["deviceMemory"] = "80Gi"
    monkeypatch.setattr("scalerl_trainer.checks.gpu_memory_bytes", lambda: None)
    paths, spec = make(tmp_path / "larger", BIG, **sections)
    caplog.clear()
    prepare(paths, spec, one_machine=False)
    unchecked = {r.getMessage() for r in caplog.records if "is not checked" in r.getMessage()}
    assert unchecked == {
        f"{other}.deviceMemory is not set and there is no GPU here: its memory is not checked"
    }


@pytest.mark.parametrize("script", ["echo 16; echo 81559", "exit 9", "echo N/A", "exit 0"])
def test_check_memory_large_or_unknown_gpu_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    graphics(tmp_path, monkeypatch, script)
    paths, spec = make(tmp_path / "run", BIG, **ON_GPUS)
    prepare(paths, spec, one_machine=True)


def jsonl(root: Path, *rows: dict[str, str]) -> None:
    text = "".join(json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) + "\n\n" for i in range(40))
    (root / "task.jsonl").write_text(text + "".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("source", ["scratch", "path"])
def test_check_prompts_too_long_raises(tmp_path: Path, source: str) -> None:
    model = None if source == "scratch" else broken(tmp_path, lambda _: None)
    paths, spec = make(tmp_path / "run", model)
    words = " ".join(str(n) for n in range(1000, 1100))
    jsonl(paths.root, {"prompt": "7+1 =", "answer": "8"}, {"prompt": words, "answer": "8", "id": "long"})
    with pytest.raises(
        PrepareError,
        match=r"line 82: prompt 'long' has \d+ tokens.*\(64\).*\(8\) leaves 56; 1 of 42 prompts are too long",
    ) as caught:
        prepare(paths, spec, one_machine=True)
    if source == "scratch":
        assert not paths.base_model.exists()
    (wanted,) = re.findall(r"raise contextTokens to (\d+)", str(caught.value))
    paths, spec = make(tmp_path / "again", {"scratch": SCRATCH, "contextTokens": int(wanted)})
    jsonl(paths.root, {"prompt": words, "answer": "8", "id": "long"})
    prepare(paths, spec, one_machine=True)


def test_check_prompts_few_too_long_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths, spec = make(tmp_path / "run", None)
    words = " ".join(str(n) for n in range(1000, 1100))
    jsonl(paths.root, {"prompt": words, "answer": "8", "id": "long"})
    more = "".join(json.dumps({"prompt": f"{i}+2=", "answer": f"{i + 2}"}) + "\n" for i in range(100))
    with (paths.root / "task.jsonl").open("a") as file:
        file.write(more)
    prepare(paths, spec, one_machine=True)
    (warning,) = [m for m in caplog.messages if "too long" in m]
    assert "prompt 'long' has" in warning
    assert "1 of 141 prompts are too long" in warning
    assert warning.endswith("The run skips them.")


def test_prepare_checks_prompts_again_on_resume(tmp_path: Path) -> None:
    paths, spec = make(tmp_path)
    prepare(paths, spec, one_machine=True)
    recipe = spec.recipe.model_copy(update={"max_completion_tokens": 63})
    with pytest.raises(PrepareError, match=r"line 1: prompt .* has \d tokens"):
        prepare(paths, spec.model_copy(update={"recipe": recipe}), one_machine=True)


def test_prepare_checks_answers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take minutes: a resumed run checks them again only with other data or another verifier."""
    paths, spec = make(tmp_path)
    prepare(paths, spec, one_machine=True)
    asked: list[bool] = []

    def note(spec: RunSpec, directory: Path, *, answers: bool) -> None:
        asked.append(answers)

    monkeypatch.setattr("scalerl_trainer.prepare.check_tasks", note)
    prepare(paths, spec, one_machine=True)
    number = spec.task.model_copy(
        update={"verifier": spec.task.verifier.model_copy(update={"name": "number"})}
    )
    prepare(paths, spec.model_copy(update={"task": number}), one_machine=True)
    jsonl(paths.root, {"prompt": "7+1 =", "answer": "8"})
    with pytest.raises(PrepareError, match="was made from another model, task or seed"):
        prepare(paths, spec, one_machine=True)
    assert asked == [False, True, True]


@pytest.mark.parametrize("source", ["scratch", "path"])
def test_check_prompts_warm_start_without_solutions_raises(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalerl_tasks import ReasoningGymSource

    model = (
        None if source == "scratch" else broken(tmp_path, edit("config.json", max_position_embeddings=256))
    )
    task = {"reasoningGym": {"name": "chain_sum", "size": 50}, "verifier": {"name": "reasoning-gym"}} | {
        "heldOut": {"size": 2}
    }
    paths, spec = make(tmp_path / "run", (model or {"scratch": SCRATCH}) | {"contextTokens": 256}, task=task)
    with_answer = ReasoningGymSource.__getitem__

    def without(self: Any, index: int) -> Any:
        return dataclasses.replace(with_answer(self, index), answer="", solution=None)

    monkeypatch.setattr(ReasoningGymSource, "__getitem__", without)
    prepare(paths, spec, one_machine=True)
    warm = spec.model_copy(update={"warm_start": WarmStartSpec(steps=1)})
    for directory in (paths, RunPaths(tmp_path / "other")):
        directory.root.mkdir(exist_ok=True)
        with pytest.raises(PrepareError, match=r"warmStart: prompt .* has no solution and no answer"):
            prepare(directory, warm, one_machine=True)


def test_mid_training_file_without_solution_raises(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(
        '{"prompt": "1+1 =", "answer": "2", "solution": "2"}\n\n{"prompt": "1+2 =", "answer": "3"}\n'
    )
    paths, spec = make(tmp_path / "run", warmStart={"steps": 1, "jsonl": {"path": str(own)}})
    with pytest.raises(PrepareError, match=r"warmStart.jsonl.path: .*own.jsonl, line 3 has no solution"):
        prepare(paths, spec, one_machine=True)


def test_check_prompts_long_solution_raises(tmp_path: Path) -> None:
    paths, spec = make(tmp_path, warmStart={"steps": 1}, trainer={"microBatchTokens": 64})
    jsonl(paths.root, {"prompt": "7+1 =", "answer": "8", "solution": "1 2 3 " * 40})
    with pytest.raises(
        PrepareError, match=r"warmStart: .*line 81: .* more than trainer.microBatchTokens \(64\)"
    ):
        prepare(paths, spec, one_machine=True)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            {"verifier": {"name": "number"}},
            r"task.verifier.name: .*task.jsonl, line 81, field .answer.: .* has no number",
        ),
        (
            {"reasoningGym": {"name": "countdown", "size": 50}, "jsonl": None}
            | {"verifier": {"name": "reasoning-gym"}},
            "task.verifier.name: .*countdown.* evaluates answers as Python code",
        ),
    ],
)
def test_check_grading_raises(tmp_path: Path, task: dict[str, Any], message: str) -> None:
    paths, spec = make(tmp_path)
    jsonl(paths.root, {"prompt": "seven", "answer": "eight"})
    changed = RunTaskSpec.model_validate(spec.task.model_dump(by_alias=True) | task)
    with pytest.raises(PrepareError, match=message):
        prepare(paths, spec.model_copy(update={"task": changed}), one_machine=True)
    assert not paths.base_model.exists()


@pytest.mark.parametrize(
    ("prompt", "answer", "vocabulary", "message"),
    [
        (
            "77+1=",
            "none",
            300,
            r"evaluation.sets.1.task.verifier.name: .*line 1, field .answer.: .* has no number",
        ),
        ("3+1=", "4", 300, "evaluation.sets.1.task: 1 training prompts of task.jsonl.path"),
        ("1+1=" * 30, "4", 300, "evaluation.sets.1.task: 1 of 1 prompts have more than the 56 tokens"),
        ("é+1=", "4", 64, "evaluation.sets.1.task: prompt .* the model's tokenizer has no tokens for"),
    ],
)
def test_evaluation_set_that_cannot_work_raises(
    tmp_path: Path, prompt: str, answer: str, vocabulary: int, message: str
) -> None:
    file = tmp_path / "hard.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    hard = {"jsonl": {"path": str(file)}, "verifier": {"name": "number"}}
    sets = {"sets": [{"name": "all"}, {"name": "hard", "task": hard}]}
    scratch = {"scratch": SCRATCH | {"vocabularySize": vocabulary}}
    paths, spec = make(tmp_path, scratch, evaluation=sets)
    with pytest.raises(PrepareError, match=message):
        prepare(paths, spec, one_machine=True)
    assert not paths.base_model.exists()


@pytest.mark.parametrize(("devices", "message"), [(0, "needs an accelerator"), (1, "package flash-attn")])
def test_check_model_flash_attention(tmp_path: Path, devices: int, message: str) -> None:
    if devices and importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("needs a GPU to be a mistake")
    paths, spec = make(tmp_path)
    given = spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"attention": "flash_attention_2"}),
            "trainer": spec.trainer.model_copy(update={"devices": devices}),
        }
    )
    with pytest.raises(PrepareError, match=f"model.attention: .*{message}"):
        prepare(paths, given, one_machine=True)


def test_prepare_grader_failure_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scalerl_tasks import GradingError

    paths, _ = make(tmp_path)
    for name, value in {
        "SCALERL_DIR": str(tmp_path),
        "SCALERL_NAME": "prepare",
        "SCALERL_COORDINATOR_URL": "http://127.0.0.1:9",
        "SCALERL_TOKEN_FILE": str(paths.token),
    }.items():
        monkeypatch.setenv(name, value)

    def refuse(*_: object, **__: object) -> None:
        raise GradingError("no process could be forked")

    monkeypatch.setattr("scalerl_trainer.prepare.check_tasks", refuse)
    assert main() == 1


def test_prepare_bad_input_exits_with_2(tmp_path: Path) -> None:
    paths, _ = make(tmp_path, {"path": str(tmp_path / "nowhere")})
    environ = {
        "SCALERL_DIR": str(tmp_path),
        "SCALERL_NAME": "prepare",
        "SCALERL_COORDINATOR_URL": "http://127.0.0.1:9",
        "SCALERL_TOKEN_FILE": str(paths.token),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, scalerl_trainer.prepare as p; c = p.main(); assert 'torch' not in sys.modules; sys.exit(c)",
        ],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert "model.path" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_prepare_hub_model_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    paths, spec = make(tmp_path / "run", {"hub": {"name": "nobody/nothing"}})
    with pytest.raises(PrepareError, match=r"model\.hub: nobody/nothing at revision main"):
        prepare(paths, spec, one_machine=True)
