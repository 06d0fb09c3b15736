"""Models that are loaded one parameter at a time, against transformers' own loading."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from free_port import free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from scalerl_trainer.errors import ModelError
from scalerl_trainer.models import WeightStream, load_model, open_model
from scalerl_trainer.models.checkpoint_names import CheckpointNames, stored_names

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")
    return lambda name: root / name if (root / name).exists() else tiny_models.write(name, root / name)


def filled(folder: Path, **options: Any) -> Any:
    model, weights = open_model(folder, **options)
    for _ in weights.parameters(CPU, reads=True):
        pass
    return model


@pytest.mark.parametrize("name", sorted(tiny_models.FAMILIES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_model_equals_loaded_one(family: Callable[[str], Path], name: str, dtype: Any) -> None:
    folder = family(name)
    theirs, ours = load_model(str(folder), dtype=dtype), filled(folder, dtype=dtype)
    for kind in ("named_parameters", "named_buffers"):
        expected, found = (dict(getattr(model, kind)()) for model in (theirs, ours))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
    assert ours.training
    assert not ours.config.use_cache
    shapes = [(n, tuple(p.shape)) for n, p in ours.named_parameters()]
    names = CheckpointNames(ours, shapes, stored_names(folder))
    published = {t for group in names.groups for t in group.tensors}
    assert published == stored_names(folder)
    ids_bt = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(
            ours.eval()(ids_bt, use_cache=False).logits, theirs.eval()(ids_bt, use_cache=False).logits
        )


def test_parameters_are_not_touched_before_they_are_read(family: Callable[[str], Path]) -> None:
    model, weights = open_model(family("llama"), dtype="float32")
    steps = weights.parameters(CPU, reads=True)
    first = next(steps)
    assert len(first) == 1
    again = dict(model.named_parameters())
    assert any(first[0] is parameter for parameter in again.values()), "the same objects"


def test_values_reach_parameters_that_were_wrapped_since(family: Callable[[str], Path]) -> None:
    """As the layers of an adapter are put around them."""
    model, weights = open_model(family("llama"), dtype="float32")
    layer = model.model.layers[0]
    layer.mlp.up_proj = torch.nn.Sequential(layer.mlp.up_proj)
    for _ in weights.parameters(CPU, reads=True):
        pass
    file = load_file(family("llama") / "model.safetensors")
    assert torch.equal(layer.mlp.up_proj[0].weight, file["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("equal", [True, False])
def test_tied_parameter_that_files_have_twice(
    family: Callable[[str], Path], tmp_path: Path, equal: bool
) -> None:
    folder = shutil.copytree(family("llama-tied"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(
        tensors | {"lm_head.weight": embedding.clone() if equal else embedding + 1},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    theirs, ours = load_model(str(folder), dtype="float32"), filled(folder, dtype="float32")
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == equal
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)


def sharded(family: Callable[[str], Path], folder: Path) -> Path:
    load_model(str(family("mixtral")), dtype="float32").save_pretrained(folder, max_shard_size="200KB")
    return folder


def test_shard_that_disappears_while_loading(family: Callable[[str], Path], tmp_path: Path) -> None:
    """All parameters are yielded, for the other ranks' collectives, then one error names the file."""
    folder = sharded(family, tmp_path / "model")
    assert len(sorted(folder.glob("*.safetensors"))) > 2
    whole = sum(1 for _ in open_model(folder, dtype="float32")[1].parameters(CPU, reads=True))
    for damage, message in (
        (lambda shard: shard.unlink(), r"cannot be read \(.*\): No such file or directory"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-50_000]), "was truncated while .* was read"),
    ):
        folder = sharded(family, tmp_path / message[:6])
        _, weights = open_model(folder, dtype="float32")
        steps = weights.parameters(CPU, reads=True)
        next(steps)
        damage(sorted(folder.glob("*.safetensors"))[-1])  # type: ignore[no-untyped-call]
        yielded: list[Any] = []
        with pytest.raises(ModelError, match=rf"-of-.*safetensors {message}.*restore the file"):
            yielded.extend(steps)
        assert len(yielded) + 1 == whole


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: sorted(f.glob("*.safetensors"))[1].unlink(), "1 of .* weights files are missing"),
        (lambda f: sorted(f.glob("*.safetensors"))[1].write_bytes(b"\x10"), "has no header"),
        (lambda f: (f / "config.json").unlink(), "holds no config"),
    ],
)
def test_files_that_are_missing_or_torn_before(
    family: Callable[[str], Path], tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = sharded(family, tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelError, match=message):
        open_model(folder, dtype="float32")


def test_tensor_of_another_shape(family: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(family("llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.zeros(63)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[63\], not \[64\]"):
        open_model(folder, dtype="float32")
    model, _ = open_model(family("llama"), dtype="float32")
    with pytest.raises(ModelError, match=r"model\.norm\.weight would have the shape \[63\], not \[64\]"):
        WeightStream.of_file(model, folder / "model.safetensors")


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400_000), at=st.integers(0, 400_000), byte=st.integers(0, 255))
def test_garbage_raises_one_kind_of_error(
    family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, byte: int
) -> None:
    folder = shutil.copytree(family("llama"), tmp_path_factory.mktemp("garbage") / "model")
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[at % len(data) % 4000] = byte  # mostly in the header
    file.write_bytes(data[: len(data) - (cut if cut % 2 else 0)])
    with contextlib.suppress(ModelError):  # a byte of a tensor is no error
        filled(folder, dtype="float32")


@pytest.mark.slow
def test_shard_that_disappears_ends_the_load_on_all_ranks(
    family: Callable[[str], Path], tmp_path: Path, processes: Any
) -> None:
    folders = {stage: str(sharded(family, tmp_path / str(stage))) for stage in (1, 3, "FSDP2")}
    port, pipes = free_port(), []
    for rank in range(2):
        ours, theirs = multiprocessing.Pipe()
        given = {"pipe": theirs, "rank": rank, "port": port, "folders": folders}
        processes.run("stream_worker.py", STREAM=given)
        theirs.close()
        pipes.append(ours)
    assert all(pipe.poll(240) for pipe in pipes)
    errors = [pipe.recv() for pipe in pipes]
    assert len(errors[0]) == 3
    assert all("cannot be read" in error and "restore the file" in error for error in errors[0])
    assert errors[1] == ["rank 0 cannot read the model's weights: see its log"] * 3
