"""Models that a run cannot use: one clear error that names the field, and what to do; and what the memory of roles is."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hub_server import HubModels
from safetensors.torch import load_file, save_file

from cli_tests.good_run import GOOD, ROOT, Check, changed
from scalerl_api.spec import RunSpec, ScratchModel
from scalerl_cli.main import main
from scalerl_cli.validate import problems
from scalerl_trainer.model_checks import _structure, head_problem, spec_problems
from scalerl_trainer.models.scratch import write_scratch

pytestmark = pytest.mark.usefixtures("any_vllm", "without_the_check_in_torch")


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


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "head_dim": 128,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def _sparse_model(folder: Path, config: dict[str, Any]) -> Path:
    """A config, and a weights file with its header alone: the tensors are a hole."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries = config.get("head_dim", 128) * config["num_attention_heads"]
    keys = config.get("head_dim", 128) * config["num_key_value_heads"]
    norms = ("self_attn.q_norm", "self_attn.k_norm") if config["model_type"] == "qwen3" else ()
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("self_attn.q_proj", (queries, hidden)), ("self_attn.k_proj", (keys, hidden)), ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, queries)), ("mlp.gate_proj", (wide, hidden)), ("mlp.up_proj", (wide, hidden)),
            ("mlp.down_proj", (hidden, wide)), ("input_layernorm", (hidden,)), ("post_attention_layernorm", (hidden,)),
            *((norm, (128,)) for norm in norms),
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


@pytest.mark.parametrize(
    ("example", "config"),
    [
        ("qwen3-8b/run.yaml", QWEN3_8B),
        ("llama-70b/run-lora.yaml", LLAMA_70B),
        ("llama-70b/run-kubernetes.yaml", LLAMA_70B),
    ],
)
def test_large_example_fits_by_the_memory_plan(
    example: str, config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the lowest stage that does, in what its comment says."""
    text = (ROOT / "examples" / example).read_text()
    run = yaml.safe_load(text)
    run["spec"]["model"].pop("hub")
    run["spec"]["model"]["path"] = str(_sparse_model(tmp_path / "model", config))
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    assert main(["validate", str(file), "--memory", "--any-machine"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "no tokenizer" in printed.err
    (chosen,) = re.findall(r"([\d.]+)  fits  \(trainer.zeroStage\)", printed.out)
    assert f"the lowest stage that fits: {run['spec']['trainer']['zeroStage']}" in printed.out
    assert f"a rank of the trainer needs {math.ceil(float(chosen))} GiB of its GPU" in text


def test_memory_plan_of_70b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed although the run is refused; docs/models.md shows it."""
    file = tmp_path / "run.yaml"
    file.write_text(
        changed(
            spec__model={"path": str(_sparse_model(tmp_path / "llama", LLAMA_70B)), "contextTokens": 4096},
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


def plan_by_command(file: Path, endpoint: str) -> str:
    """What ``scalerl validate --memory`` prints in a process of its own, whose hub is at ``endpoint``."""
    own = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(file.parent / "home")}
    argv = [sys.executable, "-m", "scalerl_cli.main", "validate", str(file), "--memory", "--any-machine"]
    done = subprocess.run(argv, env=os.environ | own, capture_output=True, text=True, timeout=300)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("in_shards", [False, True])
def test_memory_plan_of_a_hubs_model_downloads_no_weights(tmp_path: Path, in_shards: bool) -> None:
    """It is that of the same model in a folder; also beside a cache that has its config alone, as after the first time."""
    folder = model_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    padding = torch.zeros(400, 400, dtype=torch.bfloat16)  # more than what is fetched with a header
    first = {name: tensors.pop(name) for name in list(tensors)[:2]} if in_shards else {}
    save_file({**tensors, "model.layers.0.unused.weight": padding}, folder / "model.safetensors")
    if in_shards:
        weights = {
            "model-1.safetensors": first,
            "model-2.safetensors": load_file(folder / "model.safetensors"),
        }
        (folder / "model.safetensors").unlink()
        for name, part in weights.items():
            save_file(part, folder / name)
        where = {tensor: name for name, part in weights.items() for tensor in part}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": where})
        )
    by_path, by_hub = tmp_path / "path.yaml", tmp_path / "hub.yaml"
    sources: dict[Path, dict[str, Any]] = {
        by_path: {"path": str(folder)},
        by_hub: {"hub": {"name": "team/model", "revision": "main"}},
    }
    gpu = {"devices": 1, "deviceMemory": "80Gi"}
    for file, source in sources.items():
        model = {**source, "contextTokens": 64}
        file.write_text(changed(spec__model=model, spec__trainer=gpu, spec__generator=gpu))
    hub = HubModels("team/model", {file.name: file.read_bytes() for file in folder.iterdir()})
    try:
        plans = [plan_by_command(file, hub.url) for file in (by_path, by_hub, by_hub)]
    finally:
        hub.close()
    (expected, *found) = ([line for line in plan.splitlines() if line[:1] == " "] for plan in plans)
    assert "memory of a trainer rank" in expected[0]
    assert found == [expected, expected]
    assert not [name for name in hub.downloads if name.endswith(".safetensors")]


@pytest.mark.slow
def test_memory_plan_of_a_model_that_no_hub_has(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        changed(spec__model={"hub": {"name": "team/other", "revision": "main"}, "contextTokens": 64})
    )
    hub = HubModels("team/model", {"config.json": b"{}"})
    try:
        printed = plan_by_command(file, hub.url)
    finally:
        hub.close()
    assert "memory: the model's size is not known: team/other at revision main: " in printed
    assert "check name, revision, network and access token (HF_TOKEN)" in printed
    assert "is not known: team/other" in plan_by_command(file, "http://127.0.0.1:9")
