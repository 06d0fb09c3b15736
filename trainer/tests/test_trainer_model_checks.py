"""Folders of models that would end a run later: each is refused by name before it, from config and headers alone."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_families
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from scalerl_api.spec import RunSpec
from scalerl_trainer.errors import ModelError
from scalerl_trainer.model_checks import _structure, model_problems, spec_problems
from scalerl_trainer.models import load_model, open_model, served, vllm_architectures
from scalerl_trainer.models.structure import problems

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
Change = Callable[[Path], Any]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny_models.write(name, tmp_path_factory.mktemp("family") / name)
        return made[name]

    return get


@pytest.fixture
def folder(family: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(family("llama"), tmp_path / "model")


def spec_of(folder: Path, **changes: Any) -> RunSpec:
    spec: dict[str, Any] = {
        "model": {"path": str(folder), "contextTokens": 64, "dtype": "float32"},
        "task": {
            "reasoningGym": {"name": "chain_sum"},
            "verifier": {"name": "reasoning-gym"},
            "heldOut": {"size": 2},
        },
        "recipe": {"maxCompletionTokens": 8},
        "budget": {"maxSteps": 1},
    }
    for section, values in changes.items():
        spec[section] = spec.get(section, {}) | values
    return RunSpec.model_validate(spec)


def found(folder: Path, **changes: Any) -> list[str]:
    return [str(problem) for problem in model_problems(folder, spec_of(folder, **changes), structure=False)]


def config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(content))

    return change


def shard(folder: Path) -> dict[str, str]:
    """Split the weights into two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[:7], names[7:]), strict=True))
    for file, mine in parts.items():
        save_file({name: tensors[name] for name in mine}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, mine in parts.items() for name in mine}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def without_shards(folder: Path) -> None:
    shard(folder)
    for name in SHARDS:
        (folder / name).unlink()


def listed(**names: str) -> Change:
    def change(folder: Path) -> None:
        weight_map = shard(folder) | names
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return change


def not_listed(folder: Path) -> None:
    weight_map = shard(folder)
    del weight_map["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def without_index(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).unlink()


def both(folder: Path) -> None:
    weights = (folder / WEIGHTS).read_bytes()
    shard(folder)
    (folder / WEIGHTS).write_bytes(weights)


def cut(folder: Path) -> None:
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[:-100])


def dangling(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../../blobs/0")


def as_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def other_format(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / name)

    return change


def header(change_entries: Callable[[dict[str, Any]], Any]) -> Change:
    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        change_entries(entries)
        text = json.dumps(entries).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return change


def tensors(change_tensors: Callable[[Tensors], Tensors]) -> Change:
    def change(folder: Path) -> None:
        changed = change_tensors(load_file(folder / WEIGHTS))
        save_file(
            {name: tensor.contiguous() for name, tensor in changed.items()},
            folder / WEIGHTS,
            {"format": "pt"},
        )

    return change


def vocabulary(*, token: str, special: bool) -> Change:
    """Add a token with the first id that the model has no embedding for."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        more = {"id": tiny_models.VOCABULARY, "content": token, "special": special}
        more |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        filler = [
            {**more, "id": id_, "content": f"filler {id_}"}
            for id_ in range(1 + max(content["model"]["vocab"].values()), tiny_models.VOCABULARY)
        ]
        content["added_tokens"] += [*filler, more]
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return change


def write(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


REFUSED: list[tuple[str, Change, str]] = [
    ("absent shards", without_shards, f"2 of 2 weights files are missing: {SHARDS[0]}, {SHARDS[1]}"),
    ("a shard that lacks a tensor", listed(more=SHARDS[0]), f"lists are not in {SHARDS[0]}: more"),
    (
        "a shard with more",
        not_listed,
        f"1 tensors of {SHARDS[1]} are not listed there by {INDEX}: model.norm",
    ),
    ("a path in the index", listed(more="../x.safetensors"), "the file of more is not a file name"),
    ("an index without names", lambda f: (shard(f), write(INDEX, b"{}")(f)), f"{INDEX} has no weight_map"),
    ("shards without index", without_index, f"neither {WEIGHTS} nor {INDEX}, only {SHARDS[0]}"),
    ("two sets of weights", both, f"it has both {WEIGHTS} and {INDEX}"),
    ("weights in LFS", write(WEIGHTS, LFS), f"{WEIGHTS} is a Git LFS pointer, not the file itself"),
    ("config in LFS", write("config.json", LFS), "config.json is a Git LFS pointer"),
    ("tokenizer in LFS", write("tokenizer.json", LFS), "tokenizer.json is a Git LFS pointer"),
    ("a truncated file", cut, f"{WEIGHTS} is truncated: it has"),
    ("a truncated header", write(WEIGHTS, (99).to_bytes(8, "little") + b"{"), "ends within its header"),
    ("an empty file", write(WEIGHTS, b""), "not a safetensors file: it has no header"),
    ("a pickle", write(WEIGHTS, b"PK\3\4" + bytes(100)), "not a safetensors file"),
    ("a header of a list", write(WEIGHTS, (2).to_bytes(8, "little") + b"[]"), "its header is not an object"),
    ("bytes at the end", lambda f: write(WEIGHTS, (f / WEIGHTS).read_bytes() + b"!")(f), "1 bytes follow"),
    (
        "a shape that does not fit its bytes",
        header(lambda e: e["model.norm.weight"].update(shape=[65])),
        "model.norm.weight of shape [65] and dtype F32",
    ),
    ("an unknown dtype", header(lambda e: e["model.norm.weight"].update(dtype="F31")), "F31"),
    ("GPTQ", config(quantization_config={"quant_method": "gptq", "bits": 4}), "is quantised (gptq, by"),
    (
        "bitsandbytes",
        config(quantization_config={"load_in_4bit": True}),
        "quantization_config in config.json",
    ),
    ("compressed tensors", config(compression_config={"quant_method": "compressed-tensors"}), "compressed-t"),
    ("a nested quantisation", config(text_config={"quantization_config": {"quant_method": "fp8"}}), "fp8"),
    ("AWQ of earlier days", write("quant_config.json", b"{}"), "is quantised (by quant_config.json)"),
    (
        "FP8 without a word of it",
        tensors(lambda t: t | {"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
        "is quantised (F8_E4M3, the dtype of model.norm.weight)",
    ),
    (
        "pickles only",
        other_format("pytorch_model.bin"),
        "only pytorch_model.bin: convert them to safetensors",
    ),
    ("GGUF only", other_format("model.gguf"), "only model.gguf: convert them"),
    ("an adapter", write("adapter_config.json", b"{}"), "this is an adapter, not a model (merge it"),
    ("images", config(vision_config={}), "has a part for other media than text (vision_config)"),
    ("an encoder", config(is_encoder_decoder=True), "llama is an encoder-decoder model"),
    ("a classifier", config(architectures=["LlamaForSequenceClassification"]), "has no output of tokens"),
    ("a translator", config(architectures=["T5ForConditionalGeneration"]), "for other inputs than a text"),
    ("config of a list", write("config.json", b"[]"), "no readable config.json: it is not an object"),
    ("no tokenizer", lambda f: (f / "tokenizer.json").unlink(), "no tokenizer (tokenizer.json"),
    ("half a tokenizer", write("tokenizer.json", b'{"version": "1.0"'), "tokenizer.json is not a tokenizer"),
    ("half its config", write("tokenizer_config.json", b"{"), "tokenizer_config.json is not JSON"),
    (
        "a small embedding",
        config(vocab_size=200),
        "the tokenizer has 87 tokens beyond the 200 of the model's embedding",
    ),
    (
        "a token too many",
        vocabulary(token="<think>", special=True),
        "has 1 tokens beyond the 300 of the model's embedding (vocab_size in config.json): '<think>' (300)",
    ),
    (
        "no architecture",
        config(architectures=None),
        "config.json has no list of architectures, by which vLLM",
    ),
    ("an architecture by itself", config(architectures="LlamaForCausalLM"), "has no list of architectures"),
    ("a link to nothing", dangling, f"{WEIGHTS} is a link to a file that does not exist (download it again"),
    ("a folder of weights", as_folder, "no weights (*.safe"),
    (
        "latent attention",
        config(kv_lora_rank=512),
        "multi-head latent attention (kv_lora_rank in config.json)",
    ),
    (
        "latent attention of a part",
        config(text_config={"kv_lora_rank": 512}),
        "multi-head latent attention (kv_lora_rank",
    ),
    ("a dropped family", config(architectures=["PersimmonForCausalLM"]), "vLLM no longer serves PersimmonForCausalLM, which it had until 0.25.0 (choose"),
    ("no layers", config(num_hidden_layers=0), "num_hidden_layers is 0, not a whole number from 1 to 10,000 (correct"),
    ("200,000 layers", config(num_hidden_layers=200_000), "num_hidden_layers is 200000, not a whole number from 1 to 10,000"),
    ("layers of words", config(num_hidden_layers="2"), "num_hidden_layers is '2', not a whole number"),
    ("9,000 layers", config(num_hidden_layers=9000), "num_hidden_layers is 9000, and the weights have 2 layers"),
    ("a negative width", config(hidden_size=-64), "hidden_size is -64, not a whole number"),
    ("a huge width", config(hidden_size=10**12), "hidden_size is 1000000000000, not a whole number from 1 to 1,048,576"),
    ("an endless width", config(intermediate_size=10**50), "intermediate_size is 1000000000000000000000000000000000000000..., not"),
    ("half a vocabulary", config(vocab_size=1.5), "vocab_size is 1.5, not a whole number"),
    ("no heads", config(num_attention_heads=0), "num_attention_heads is 0, not a whole number from 1"),
    ("no key heads", config(num_key_value_heads=0), "num_key_value_heads is 0, not a whole number from 1"),
    ("a head too many", config(num_key_value_heads=4), "num_attention_heads is 2, no multiple of num_key_value_heads (4)"),
    ("heads that divide nothing", config(num_attention_heads=3, num_key_value_heads=3, head_dim=None), "hidden_size is 64, no multiple of num_attention_heads (3)"),
    ("experts too few", config(num_local_experts=4, num_experts_per_tok=9), "num_experts_per_tok is 9, and there are 4 experts (num_local_experts)"),
    ("no expert chosen", config(num_experts=4, num_experts_per_tok=0), "num_experts_per_tok is 0, and there are 4 experts"),
    ("no context", config(max_position_embeddings=-1), "max_position_embeddings is -1, not a whole number"),
    ("a negative epsilon", config(rms_norm_eps=-1e-6), "rms_norm_eps is -1e-06, not a positive number"),
    ("an epsilon of nothing", config(rms_norm_eps=float("nan")), "rms_norm_eps is nan, not a positive number"),
    ("a rotation beyond all", config(rotary_pct=7.0), "rotary_pct is 7.0, not a number above 0 and up to 1"),
    ("a negative scale", config(rope_scaling={"rope_type": "linear", "factor": -1}), "factor of rope_scaling is -1, not a positive number"),
    ("a nested scale", config(rope_parameters={"full_attention": {"rope_theta": 0}}), "rope_theta of rope_parameters is 0, not"),
    ("heads of GPT-2's names", config(hidden_size=None, num_attention_heads=None, num_key_value_heads=None, head_dim=None, n_embd=66, n_head=2), "its attention heads have 33 dimensions each"),
    ("capped attention", config(attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0), which sdpa"),
    ("a short context", config(max_position_embeddings=63), "contextTokens: 64 is more than the model's 63"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_folder_is_refused(folder: Path, change: Change, message: str) -> None:
    assert found(folder) == []
    change(folder)
    (problem,) = found(folder)
    assert message in problem
    assert "\n" not in problem
    assert problem.startswith("spec.model.")


@pytest.mark.parametrize(
    "change",
    [
        shard,
        config(quantization_config=None),
        config(num_experts=0, num_experts_per_tok=0, n_inner=None),
        config(kv_lora_rank=None, vision_config=None, _attn_implementation="sdpa"),
        config(architectures=["llamaforcausallm", "LlamaForCausalLM"]),
        vocabulary(token="<image_soft_token>", special=True),
        lambda folder: save_file({"a": torch.zeros(2)}, folder / "consolidated.safetensors"),
        lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"),
    ],
    ids=[
        "shards",
        "no quantisation",
        "no experts",
        "nothing of null",
        "two names",
        "a place for images",
        "another copy",
        "pickles too",
    ],
)
def test_folder_is_accepted(folder: Path, change: Change) -> None:
    change(folder)
    assert found(folder) == []


def test_folder_that_cannot_be_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(folder / WEIGHTS) == [
        f"spec.model.path: {folder / WEIGHTS}: not a folder (a relative path starts at the run file's folder)"
    ]
    assert "cannot be read: File name too long (check path" in found(folder / ("x" * 300))[0]

    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    assert found(folder) == [
        f"spec.model.path: {folder}: cannot be read: Permission denied (check path and permissions)"
    ]


@pytest.mark.parametrize(
    ("heads", "keys", "generator", "numbers"),
    [
        (32, 8, {"devices": 3}, "1 or 2"),
        (32, 8, {"cpuWorkers": 3}, "1 or 2"),
        (32, 8, {"devices": 16}, ""),
        (24, 8, {"devices": 12}, "1 or 2 or 4 or 8"),
        (32, None, {"devices": 8}, ""),
    ],
)
def test_heads_are_divided_among_workers(
    folder: Path, heads: int, keys: int | None, generator: dict[str, int], numbers: str
) -> None:
    """As vLLM's layers are, which would end each server at its start."""
    config(num_attention_heads=heads, num_key_value_heads=keys, head_dim=32)(folder)
    ((field, workers),) = generator.items()
    problem = (
        f"vLLM cannot divide the model's {heads} attention heads ({keys} for keys) among {workers} workers"
    )
    expected = [f"spec.generator.{field}: {problem} (choose {numbers})"] if numbers else []
    assert found(folder, generator=generator) == expected


def test_attention_caps_are_for_flash_attention(folder: Path) -> None:
    config(attn_logit_softcapping=50.0)(folder)
    flash = {"model": {"attention": "flash_attention_2"}}
    assert "needs an accelerator" in found(folder, **flash)[0]
    assert found(folder, **flash, trainer={"devices": 1}) == []


# --- what transformers makes of the files ----------------------------------------------------------------


def drop(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def again(part: str, to: str) -> Callable[[Tensors], Tensors]:
    """Store copies of all tensors with ``part`` in the name under ``to``."""
    return lambda t: t | {n.replace(part, to): tensor.clone() for n, tensor in t.items() if part in n}


EXPERT = "model.layers.1.block_sparse_moe.experts"
NORM = "model.norm.weight"
STRUCTURES: list[tuple[str, str, Callable[[Tensors], Tensors], list[str]]] = [
    ("complete", "llama", drop(), []),
    ("complete MoE", "mixtral", drop(), []),
    ("complete Pythia", "pythia", drop(), []),
    ("a tied head that is stored too", "llama-tied", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()}, []),
    ("saved rotary frequencies", "llama", lambda t: t | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(16) for i in (0, 1)}, []),
    ("saved masks", "pythia", lambda t: t | {f"gpt_neox.layers.{i}.attention.{name}": torch.ones(1) for i in (0, 1) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")}, []),
    ("a lost projection", "llama", drop("model.layers.1.mlp.down_proj.weight"), ["1 tensor is missing: model.layers.1.mlp.down_proj.weight"]),
    ("a lost head", "llama", drop("lm_head.weight"), ["1 tensor is missing: lm_head.weight"]),
    ("a lost head of another name", "pythia", drop("embed_out.weight"), ["1 tensor is missing: embed_out.weight"]),
    ("lost embeddings", "llama-tied", drop("model.embed_tokens.weight"), ["2 tensors are missing: lm_head.weight, model.embed_tokens.weight"]),
    ("a lost expert matrix", "mixtral", drop(f"{EXPERT}.3.w2.weight"), [f"1 tensor is missing: {EXPERT}.3.w2.weight"]),
    ("a lost half of a fused one", "mixtral", drop(f"{EXPERT}.3.w1.weight"), [f"1 tensor is missing: {EXPERT}.3.w1.weight"]),
    ("a lost kind of matrix", "mixtral", drop(*(f"{EXPERT}.{i}.w2.weight" for i in range(4))), [f"4 tensors are missing: {EXPERT}.0.w2.weight, {EXPERT}.1.w2.weight, {EXPERT}.2.w2.weight and 1 more"]),
    ("an expert too many", "mixtral", again(f"{EXPERT}.3.", f"{EXPERT}.4."), [f"3 tensors are not part of the model: {EXPERT}.4.w1.weight, {EXPERT}.4.w2.weight, {EXPERT}.4.w3.weight"]),
    ("a layer too many", "llama", again("layers.1.", "layers.2."), ["9 tensors are not part of the model: model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, model.layers.2.mlp.gate_proj.weight and 6 more"]),
    ("a bias of the head", "llama", lambda t: t | {"lm_head.bias": torch.zeros(300)}, ["1 tensor is not part of the model: lm_head.bias"]),
    ("another name", "llama", lambda t: drop(NORM)(t) | {"model.final.weight": t[NORM]}, [f"1 tensor is missing: {NORM}", "1 tensor is not part of the model: model.final.weight"]),
    ("a name of two lines", "llama", lambda t: t | {"a\nb": torch.zeros(1)}, ["1 tensor is not part of the model: 'a\\nb'"]),
    ("another shape", "llama", lambda t: t | {NORM: torch.zeros(63)}, [f"1 tensor is of the wrong shape: {NORM} is [63], not [64]"]),
    ("an expert of another shape", "mixtral", lambda t: t | {f"{EXPERT}.2.w1.weight": torch.zeros(40, 64)}, [f"1 tensor is of the wrong shape: {EXPERT}.2.w1.weight is [40, 64], not [128, 64]"]),
    ("a smaller embedding", "llama-tied", lambda t: t | {"model.embed_tokens.weight": t["model.embed_tokens.weight"][:200]}, ["1 tensor is of the wrong shape: model.embed_tokens.weight is [200, 64], not [300, 64]"]),
    ("whole numbers", "llama", lambda t: t | {NORM: t[NORM].to(torch.int8)}, [f"1 tensors have a dtype that cannot be trained: {NORM} (I8)"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "messages"), [c[1:] for c in STRUCTURES], ids=[c[0] for c in STRUCTURES]
)
def test_structure(
    family: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    change: Callable[[Tensors], Tensors],
    messages: list[str],
) -> None:
    """The names are those of the files; the trainer's own loading agrees on whether the model can be used."""
    folder = shutil.copytree(family(name), tmp_path / "model")
    tensors(change)(folder)
    assert problems(folder, "float32", "sdpa") == messages
    if "dtype" in str(messages):
        return
    for load in (
        lambda: load_model(str(folder), dtype="float32"),
        lambda: open_model(folder, dtype="float32"),
    ):
        if messages:
            with pytest.raises(ModelError):
                load()
        else:
            load()


def test_scratch_model_has_no_chat_template(tmp_path: Path) -> None:
    chat = {"prompt": {"format": "Chat"}}
    own = {
        "reasoningGym": {"name": "chain_sum", "seed": 7},
        "size": 2,
        "verifier": {"name": "reasoning-gym"},
        **chat,
    }
    sets = {"evaluation": {"sets": [{"name": "held-out"}, {"name": "own", "task": own}]}}
    scratch = {"model": {"path": None, "scratch": {}}}
    says = "prompt.format: a scratch model has no chat template (use Raw, or give "
    assert [str(one) for one in spec_problems(spec_of(tmp_path, **scratch, task=chat, **sets))] == [
        f"spec.{field}.{says}{field}.prompt.chatTemplate)" for field in ("task", "evaluation.sets.1.task")
    ]
    chat["prompt"]["chatTemplate"] = own["prompt"]["chatTemplate"] = "{{ messages[0].content }}"
    assert list(spec_problems(spec_of(tmp_path, **scratch, task=chat, **sets))) == []


def test_router_replay(family: Callable[[str], Path], tmp_path: Path) -> None:
    replay = {"trainer": {"routerReplay": True}, "generator": {"devices": 1}}
    dense = "spec.trainer.routerReplay: the model is dense: no router chooses experts (leave it out)"
    assert dense in found(family("llama"), **replay)
    scratch = {"model": {"path": None, "scratch": {}}}
    assert dense in map(str, spec_problems(spec_of(tmp_path, **scratch, **replay)))
    assert not found(family("qwen3-moe"), **replay)
    assert problems(family("qwen3-moe"), "float32", "sdpa", replay=True) == []
    folder = shutil.copytree(family("qwen3-moe"), tmp_path / "model")
    config(num_local_experts=300, num_experts=300, num_experts_per_tok=300, num_hidden_layers=60)(folder)
    assert any(
        "routerReplay: the experts of a token take 36000 bytes" in one for one in found(folder, **replay)
    )


def test_loader_names_what_is_missing(folder: Path) -> None:
    """transformers draws missing tensors at random."""
    tensors(drop("model.layers.1.mlp.down_proj.weight", NORM))(folder)
    with pytest.raises(
        ModelError, match=r"2 missing \(model.layers.1.mlp.down_proj.weight, model.norm.weight\)"
    ):
        load_model(str(folder), dtype="float32")
    tensors(lambda t: t | {NORM: torch.zeros(63), "x": torch.zeros(1)})(folder)
    with pytest.raises(
        ModelError, match=r"1 not part of .* \(x\); 1 of the wrong shape \(model.norm.weight is \[63\]"
    ):
        load_model(str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "nothing"}, "transformers cannot use config.json: "),
        (
            {"model_type": "nothing", "auto_map": {"AutoConfig": "configuration.Config"}},
            "model_type 'nothing' needs code from the model's repository (auto_map in config.json), which is never run",
        ),
        ({"auto_map": {"AutoConfig": "configuration.Config"}}, ""),
        ({"model_type": "t5", "architectures": None}, "model_type 't5' is not a causal language model"),
        (
            {"architectures": ["MiniCPMForCausalLM"]},
            "its architecture is MiniCPMForCausalLM, and the causal language model of 'llama' is LlamaForCausalLM",
        ),
        ({"hidden_size": 63}, "transformers cannot "),
        (
            {"num_hidden_layers": "2"},
            "transformers cannot use config.json: Validation error for field 'num_hidden_layers': TypeError: ",
        ),
    ],
)
def test_structure_of_config(folder: Path, values: dict[str, Any], message: str) -> None:
    config(**values)(folder)
    said = problems(folder, "float32", "sdpa")
    assert bool(said) == bool(message)
    assert all(one.startswith(message) and "\n" not in one for one in said)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("mpt", {"d_model": 64, "n_heads": 2, "n_layers": 2}, "vLLM cannot serve MptForCausalLM: it has no class for it, and that of"),
        ("llama4_text", {"num_local_experts": 4}, "llama4_text: transformers does not say which part of the model has the layers"),
    ],
)  # fmt: skip
def test_family_is_refused_by_its_class(
    tmp_path: Path, kind: str, settings: dict[str, Any], message: str
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "intermediate_size_mlp": 128,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    values = settings if kind == "mpt" else sizes | heads | settings
    folder = model_families._write(model_families._config(kind, values), tmp_path / "model")
    (problem,) = problems(folder, "float32", "sdpa")
    assert problem.startswith(message)


def test_registry_of_vllm_is_used_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of the image without vLLM gives the verdicts of the registry."""
    installed = served.registry_path()
    assert installed is not None
    found = served.read_registry(installed)
    assert (found.served, found.dropped) == (vllm_architectures.SERVED, vllm_architectures.DROPPED)
    assert {"LlamaForCausalLM", "GPTNeoXForCausalLM"} <= found.served
    other = tmp_path / "registry.py"
    text = installed.read_text().replace('"LlamaForCausalLM": (', '"AnotherForCausalLM": (')
    other.write_text(text.replace('"BambaForCausalLM": "0.23.0"', '"LlamaForCausalLM": "0.31.0"'))
    for path in (other, None):
        monkeypatch.setattr(served, "registry_path", lambda path=path: path)
        served.registry.cache_clear()
        said = served.serving_problem(["LlamaForCausalLM"])
        assert said == (path and "vLLM no longer serves LlamaForCausalLM, which it had until 0.31.0")
    served.registry.cache_clear()


@pytest.mark.slow
def test_structure_is_checked_in_another_process(folder: Path) -> None:
    _structure.cache_clear()
    spec = spec_of(folder)
    assert list(model_problems(folder, spec)) == []
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"silu"', '"nothing"'))
    _structure.cache_clear()
    (problem,) = model_problems(folder, spec)
    assert "spec.model.path: " in str(problem)
    assert "'nothing'" in str(problem)


def test_template_of_an_evaluation_set_with_an_environment_is_checked(folder: Path) -> None:
    moving = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = {"jsonl": {"path": "/data/a.jsonl"}, "environment": {"name": "nim"}}
    chat = {"prompt": {"format": "Chat", "chatTemplate": moving}}
    sets = {"sets": [{"name": "held-out"}, {"name": "games", "task": rows | chat}]}
    (problem,) = found(folder, evaluation=sets)
    assert problem.startswith("spec.evaluation.sets.1.task.prompt: the chat template is not append-only")
