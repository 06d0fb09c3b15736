"""Published and exported tensors have names, layouts and bytes of the model's own files, in every family."""

from __future__ import annotations

import json
import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from free_port import free_port
from safetensors.torch import load_file, save_file
from test_trainer_export import checkpoint, logprobs

from scalerl_trainer.errors import ModelError
from scalerl_trainer.export import export_checkpoint
from scalerl_trainer.models import load_model
from scalerl_trainer.models.checkpoint_names import CheckpointNames, skeleton, stored_names

FAMILIES = sorted(tiny_models.FAMILIES)
HUB_NAMES = {
    "mixtral": r"model\.layers\.\d+\.block_sparse_moe\.(experts\.\d+\.w[123]|gate)\.weight",
    "pythia": r"embed_out\.weight",
    "qwen3-moe": r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight",
    "olmoe": r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight",
}
"""Names of the published checkpoints that transformers 5 does not have in memory."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: tiny_models.write(family, root / family) for family in FAMILIES}


def names_of(network: Any, folder: Path) -> CheckpointNames:
    shapes = [(name, tuple(p.shape)) for name, p in network.named_parameters()]
    return CheckpointNames(network, shapes, stored_names(folder))


def converted(names: CheckpointNames, network: Any) -> dict[str, torch.Tensor]:
    parameters = dict(network.named_parameters())
    return {
        name: tensor
        for group in names.groups
        for name, tensor in zip(group.tensors, names.convert(group, parameters), strict=True)
    }


def assert_equal(found: dict[str, torch.Tensor], file: dict[str, torch.Tensor]) -> None:
    assert found.keys() == file.keys()
    for name, tensor in file.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_weights_equal_the_files(folders: dict[str, Path], family: str) -> None:
    file = load_file(folders[family] / "model.safetensors")
    if family in HUB_NAMES:
        assert any(re.fullmatch(HUB_NAMES[family], name) for name in file)
    network = load_model(str(folders[family]), dtype="float32")
    names = names_of(network, folders[family])
    assert_equal(converted(names, network), file)
    assert max(len(group.parameters) for group in names.groups) == 1, "memory: one parameter at a time"


@pytest.mark.parametrize("family", FAMILIES)
def test_export_of_a_checkpoint_has_the_original_names(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "run").mkdir()
    (tmp_path / "run/model").symlink_to(folders[family])
    network = load_model(str(folders[family]), dtype="float32")
    tiny_models.randomize(network, 7)
    paths = checkpoint(tmp_path / "run", network)
    paths.run_file.write_text(paths.run_file.read_text().replace("bfloat16", "float32"))
    export_checkpoint(paths, tmp_path / "out")
    original = load_file(folders[family] / "model.safetensors")
    assert {n: t.shape for n, t in load_file(tmp_path / "out/model.safetensors").items()} == {
        n: t.shape for n, t in original.items()
    }
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), "nothing is missing, nothing is too much"
    torch.testing.assert_close(logprobs(loaded), logprobs(network), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "pythia"])
def test_names_of_files_saved_under_module_names_are_kept(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    """A folder that transformers 5 wrote with its own names loads without a conversion, so none is reverted."""
    network = load_model(str(folders[family]), dtype="float32")
    network.save_pretrained(tmp_path, save_original_format=False)
    file = load_file(tmp_path / "model.safetensors")
    assert file.keys() == dict(network.named_parameters()).keys()
    for again in (load_model(str(tmp_path), dtype="float32"), skeleton(tmp_path)):
        assert_equal(converted(names_of(again, tmp_path), network), file)


def test_files_without_the_base_model_prefix_keep_their_names(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for path in folders["llama-tied"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = load_file(folders["llama-tied"] / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in file.items()}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    network = load_model(str(tmp_path), dtype="float32")
    assert_equal(converted(names_of(network, tmp_path), network), bare)
    names = CheckpointNames(skeleton(tmp_path), [(n, tuple(p.shape)) for n, p in network.named_parameters()])
    with pytest.raises(ModelError, match="has another name in the model's files"):
        CheckpointNames(network, [(n, tuple(p.shape)) for n, p in network.named_parameters()], ["other"])
    assert names.groups


def test_sharded_files_are_read_from_their_index(folders: dict[str, Path], tmp_path: Path) -> None:
    network = load_model(str(folders["mixtral"]), dtype="float32")
    network.save_pretrained(tmp_path, max_shard_size="200KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert stored_names(tmp_path) == index["weight_map"].keys()
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match="the names of its tensors cannot be read"):
        stored_names(tmp_path)
    assert stored_names(tmp_path / "absent") is None


@pytest.mark.slow
def test_gathered_weights_equal_the_files_on_two_ranks(folders: dict[str, Path], processes: Any) -> None:
    families = ("mixtral", "pythia", "qwen2", "qwen2-moe")
    port, pipes = free_port(), []
    for rank in range(2):
        ours, theirs = multiprocessing.Pipe()
        folders_given = {family: str(folders[family]) for family in families}
        given = {"pipe": theirs, "rank": rank, "world": 2, "port": port, "folders": folders_given}
        processes.run("names_worker.py", NAMES=given)
        theirs.close()
        pipes.append(ours)
    answers = []
    for pipe in pipes:
        assert pipe.poll(240)
        answers.append(pipe.recv())
    for family in families:
        file = load_file(folders[family] / "model.safetensors")
        for stage in (1, 3):
            shapes, gathered = answers[0][family, stage]
            assert [(n, tuple(t.shape)) for n, t in gathered] == shapes == answers[1][family, stage][0]
            assert_equal({n: torch.from_numpy(t) for n, t in gathered}, file)
            assert answers[1][family, stage][1] == []
