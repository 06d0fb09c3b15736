"""Exported models load in transformers, compute the same, and are written atomically."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from scalerl_api.load import SpecError, load_run
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec, ScratchModel
from scalerl_trainer.checkpoints.engine_files import EngineHeader, Piece, write_header, write_pieces
from scalerl_trainer.checkpoints.manifest import MANIFEST, Manifest
from scalerl_trainer.checkpoints.volume import CheckpointStore, files_in
from scalerl_trainer.export import ExportError, copy_run_file, export_checkpoint, main, write_model
from scalerl_trainer.models import load_model, write_scratch
from scalerl_trainer.models.lora import Adapters, Lora, is_adapter
from scalerl_trainer.tensor_files import TensorInfo

EXAMPLE = Path(__file__).parents[2] / "examples/tiny/run.yaml"


def spec(dtype: str = "float32", **recipe: Any) -> RunSpec:
    whole = load_run(EXAMPLE).spec.model_dump(by_alias=True, exclude_none=True)
    whole["model"]["dtype"] = dtype
    whole["recipe"] |= recipe
    return RunSpec.model_validate(whole)


def base(directory: Path, *, tied: bool = True, dtype: Any = "float32") -> Path:
    directory.mkdir(parents=True)
    sizes = ScratchModel(
        layers=2,
        hidden_size=32,
        attention_heads=2,
        intermediate_size=48,
        vocabulary_size=64,
        tied_embeddings=tied,
    )
    texts = [f"{i} + {i} = {2 * i}" for i in range(50)]
    write_scratch(directory, sizes, texts, seed=3, dtype=dtype, context_tokens=64)
    (directory / "prepared.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def trained(model: Path, dtype: Any) -> Any:
    """Weights that differ from the base model's."""
    network = load_model(str(model), dtype=dtype)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return network


def export(network: Any, model: Path, target: Path, dtype: str = "float32", **options: Any) -> None:
    named = [(n, p) for n, p in network.named_parameters()]
    infos = [TensorInfo(n, getattr(torch, dtype), tuple(p.shape)) for n, p in named]
    write_model(target, model, infos, (p for _, p in named), spec(dtype), **options)


def logprobs(network: Any) -> torch.Tensor:
    ids = torch.randint(3, 17, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return network.eval()(ids).logits.float().log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 20_000])
def test_exported_model_loads_in_transformers(tmp_path: Path, tied: bool, shard_bytes: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = base(tmp_path / "model", tied=tied)
    network = trained(model, "float32")
    export(network, model, tmp_path / "out", shard_bytes=shard_bytes)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), "nothing is missing, nothing is too much"
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(logprobs(loaded), logprobs(network), rtol=0, atol=1e-5)
    assert (tmp_path / "out/model.safetensors.index.json").exists() == (shard_bytes == 20_000)
    if shard_bytes == 20_000:
        files = sorted((tmp_path / "out").glob("model-*.safetensors"))
        assert len(files) > 2
        assert all(f.stat().st_size < 30_000 for f in files)
    texts = ["1 + 2 =", "unknown: é"]
    before, after = (AutoTokenizer.from_pretrained(d) for d in (model, tmp_path / "out"))
    assert before(texts) == after(texts)
    assert (before.eos_token_id, before.pad_token_id) == (after.eos_token_id, after.pad_token_id)
    assert after.chat_template == "{{ messages }}"
    for name in ("generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert not (tmp_path / "out/prepared.json").exists()


def test_export_bfloat16_config(tmp_path: Path) -> None:
    model = base(tmp_path / "model", dtype="bfloat16")
    network = trained(model, "bfloat16")
    export(network, model, tmp_path / "out", "bfloat16")
    weights = load_file(tmp_path / "out/model.safetensors")
    for name, parameter in network.named_parameters():
        assert weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name], parameter)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["dtype"], config["head_dtype"]) == ("bfloat16", "float32"), "as the generators compute"


def test_exported_adapters_name_the_revision_of_their_model(tmp_path: Path) -> None:
    whole = load_run(EXAMPLE).spec.model_dump(by_alias=True, exclude_none=True)
    whole["trainer"]["lora"] = {"export": "Adapter"}
    whole["model"] = {"hub": {"name": "org/model", "revision": "0123abc"}}
    of_hub = RunSpec.model_validate(whole)
    info = TensorInfo("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", torch.float32, (1, 2))
    write_model(tmp_path / "out", base(tmp_path / "model"), [info], [torch.ones(1, 2)], of_hub)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", "0123abc")


def checkpoint(root: Path, network: Any, ranks: int = 3, lora: Lora | None = None) -> RunPaths:
    """As ``ranks`` ranks would have written it, each a third of every parameter."""
    paths = RunPaths(root)
    store = CheckpointStore(paths, keep=2)
    staged = store.stage(12)
    named = {name.replace("/", "."): parameter for name, parameter in network.named_parameters()}
    for rank in range(ranks):
        pieces = []
        for name, parameter in named.items():
            flat = parameter.detach().float().view(-1)
            low, high = (flat.numel() * r // ranks for r in (rank, rank + 1))
            values = dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), flat[low:high])
            pieces.append(Piece(name, low, values))
        write_pieces(staged.directory, rank, pieces)
    write_header(staged.directory, EngineHeader(12, 12.0, {n: list(p.shape) for n, p in named.items()}, lora))
    store.commit(staged, b"", store.flush_and_hash(staged, files_in(staged.directory)), {"ranks": str(ranks)})
    (root / "run.yaml").write_text(EXAMPLE.read_text().replace("float32", "bfloat16"))
    return paths


def test_export_checkpoint_uses_run_dtype(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    network = trained(base(tmp_path / "run/model"), "float32")
    paths = checkpoint(tmp_path / "run", network)
    dtype = getattr(torch, load_run(paths.run_file).spec.model.dtype)
    with caplog.at_level("INFO"):
        assert main([str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert f"step 12 is in {tmp_path / 'out'}" in caplog.text
    weights = load_file(tmp_path / "out/model.safetensors")
    for name, parameter in network.named_parameters():
        assert torch.equal(weights[name], parameter.to(dtype)), name
    assert main([str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 2
    assert "exists already: choose a new folder, or remove it" in caplog.text


def test_export_of_bfloat16_adapters_is_what_was_published(tmp_path: Path) -> None:
    """The trainer merges adapters in bfloat16; the checkpoint has them in float32."""
    model = base(tmp_path / "run/model", dtype="bfloat16")
    network = load_model(str(model), dtype="bfloat16")
    settings = Lora(4, 8)
    adapters = Adapters(network, settings)
    torch.manual_seed(5)
    saved = nn.Module()
    for name, parameter in network.named_parameters():
        if is_adapter(name):
            exact = torch.randn(parameter.shape) / 30
            saved.register_parameter(name.replace(".", "/"), nn.Parameter(exact))
            parameter.data = exact.to(torch.bfloat16)
    paths = checkpoint(tmp_path / "run", saved, lora=settings)
    run = yaml.safe_load(paths.run_file.read_text())
    run["spec"]["trainer"] = run["spec"].get("trainer", {}) | {"lora": {"rank": 4, "alpha": 8}}
    paths.run_file.write_text(yaml.safe_dump(run))
    export_checkpoint(paths, tmp_path / "out")
    weights = load_file(tmp_path / "out/model.safetensors")
    merged = 0
    for name, weight in weights.items():
        layer = adapters.of(name)
        expected = network.get_parameter(name) if layer is None else layer.merged(torch.bfloat16)
        assert torch.equal(weight, expected), name
        merged += layer is not None
    assert merged == 14


def test_export_cluster_volume_with_copied_run_file(tmp_path: Path, caplog: Any) -> None:
    """The spec is in a ConfigMap there; the trainer writes a copy to the volume."""
    paths = checkpoint(tmp_path / "run", trained(base(tmp_path / "run/model"), "float32"))
    mounted = paths.run_file.rename(tmp_path / "mounted.yaml")
    command = [str(tmp_path / "run"), "--to", str(tmp_path / "out")]
    assert main(command) == 2
    assert "run/run.yaml" in caplog.text
    copy_run_file(RunPaths(paths.root, mounted))
    assert main(command) == 0
    before = {p: p.read_bytes() for p in paths.root.iterdir() if p.is_file()}
    copy_run_file(paths)
    assert {p: p.read_bytes() for p in paths.root.iterdir() if p.is_file()} == before
    paths.run_file.unlink()
    paths.run_file.mkdir()
    copy_run_file(RunPaths(paths.root, mounted))
    assert "`scalerl export` of this volume needs it" in caplog.text, "and the run continues"


def test_export_does_not_validate_spec(tmp_path: Path) -> None:
    paths = checkpoint(tmp_path / "run", trained(base(tmp_path / "run/model"), "float32"))
    run = yaml.safe_load(paths.run_file.read_text())
    run["spec"]["recipe"]["optimizer"] = {"learningRate": "1e5"}
    paths.run_file.write_text(yaml.safe_dump(run))
    with pytest.raises(SpecError, match="learningRate"):
        load_run(paths.run_file)
    assert export_checkpoint(paths, tmp_path / "out") == 12
    weights = load_file(tmp_path / "out/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_export_errors(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="checkpoints holds no checkpoint"):
        export_checkpoint(RunPaths(tmp_path), tmp_path / "out")
    paths = checkpoint(tmp_path / "run", trained(base(tmp_path / "run/model"), "float32"))
    with pytest.raises(ExportError, match=r"holds no checkpoint of step 13, only of 12: choose"):
        export_checkpoint(paths, tmp_path / "out", 13)
    folder = paths.checkpoint(12)
    manifest = Manifest.decode((folder / MANIFEST).read_bytes())
    other = Manifest(1, 12, manifest.shape, manifest.files)
    (folder / MANIFEST).write_bytes(other.encode())
    with pytest.raises(ExportError, match=r"manifest\.json has format 1, but this trainer reads 2"):
        export_checkpoint(paths, tmp_path / "out")
    (folder / MANIFEST).write_bytes(manifest.encode())
    (folder / "rank-00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(ExportError, match=r"rank-00001.safetensors has 7 bytes, but \d+ in the manifest"):
        export_checkpoint(paths, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_export_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A real short write: the kernel refuses more than 30,000 bytes a file to the process."""
    model = base(tmp_path / "model")
    script = (
        "import sys; from pathlib import Path; import signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from scalerl_trainer.export import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    checkpoint(tmp_path / "run", trained(model, "float32"))
    model.rename(tmp_path / "run/model")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run"), "--to", str(tmp_path / "out")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_export_replaces_earlier_one(tmp_path: Path) -> None:
    model = base(tmp_path / "model")
    export(load_model(str(model), dtype="float32"), model, tmp_path / "out")
    network = trained(model, "float32")
    export(network, model, tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("model.norm.weight"), network.model.norm.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]
