"""Models from scratch and from folders, and the errors that stop a run before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from scalerl_api.memory.model_size import ModelSize
from scalerl_api.spec import ScratchModel
from scalerl_trainer.errors import ModelError, ModelNotFoundError
from scalerl_trainer.models import (
    Policy,
    load_model,
    write_scratch,
)
from scalerl_trainer.models.files import WEIGHTS, weights_digest
from scalerl_trainer.models.load import check_weights_are_parameters
from scalerl_trainer.models.logits import PLAIN

TEXTS = [f"State the answer: {i} + {i} = {2 * i}" for i in range(100)]
SIZES = ScratchModel(layers=2, hidden_size=32, attention_heads=2, intermediate_size=48, vocabulary_size=300)


def make(path: Path, sizes: ScratchModel, texts: list[str], seed: int) -> None:
    path.mkdir(parents=True)
    write_scratch(path, sizes, texts, seed=seed, dtype="float32", context_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "deep" / "tiny"
    make(path, SIZES, TEXTS, seed=1)
    return path


def test_scratch_model_has_files_for_servers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (folder / "model.safetensors").is_file()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer.eos_token_id == config["eos_token_id"] == 1
    assert tokenizer.pad_token_id == config["pad_token_id"] == 0
    assert config["vocab_size"] == len(tokenizer)


def test_tokenizer_single_digits_and_round_trip(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer.tokenize("123 + 45")[:3] == ["1", "2", "3"]
    for text in ("State the answer: 999 + 1 =", " 1000", "çé \n\t 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_scratch_model_is_deterministic(folder: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    make(tmp_path / "again", SIZES, TEXTS, seed=1)
    make(tmp_path / "other", SIZES, TEXTS, seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_tokenizer_small_vocabulary(tmp_path: Path) -> None:
    small = ScratchModel(
        layers=1, hidden_size=16, attention_heads=1, intermediate_size=16, vocabulary_size=64
    )
    make(tmp_path / "small", small, TEXTS, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "small"))
    assert len(tokenizer) <= 64
    assert tokenizer.decode(tokenizer.encode(TEXTS[7])) == TEXTS[7]
    assert tokenizer.unk_token_id in tokenizer.encode("State the @nswer")


def test_tokenizer_vocabulary_below_alphabet_raises(tmp_path: Path) -> None:
    letters = ["".join(chr(code) for code in range(48, 123))]
    with pytest.raises(ModelError, match="a vocabulary of 64 is too small, take at least 78"):
        make(tmp_path / "m", ScratchModel(vocabulary_size=64), letters, seed=0)


def test_loading_and_counting(folder: Path) -> None:
    model = load_model(str(folder), dtype="bfloat16")
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    filled = SIZES.model_copy(update={"vocabulary_size": model.config.vocab_size})
    assert ModelSize.of_scratch(filled).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [("/no/such/folder", "is not a folder"), ("./neither", "is not a folder")],
)
def test_load_model_missing_folder_raises(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        load_model(name)


def test_load_model_empty_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        load_model(str(tmp_path))


def test_load_model_offline_names_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"nobody/nothing at revision main.*HF_HUB_OFFLINE is set"):
        load_model("nobody/nothing")


def test_policy_transformed_logits_raise(folder: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    own = model.forward

    def shifted(*given: Any, **named: Any) -> Any:
        output = own(*given, **named)
        output.logits = output.logits + torch.arange(output.logits.shape[-1]) / 100
        return output

    Policy(model, fp32_head=True)
    model.forward = shifted
    with pytest.raises(
        ModelError, match=r"llama: the model computes its logits in a way .* differ by 0\.\d+"
    ):
        Policy(model, fp32_head=True)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0, "head_dim": 16, "num_key_value_heads": 2}),
        ("cohere", {"logit_scale": 0.0625}),
        ("granite", {"logits_scaling": 8.0}),
        ("phi", {}),
    ],
)
def test_policy_transforms_logits(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale, cap or bias of the logits is the head's, and a head without it is refused."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=90, pad_token_id=0, **sizes, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    ids = torch.randint(0, 90, (1, 12))
    expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    at = torch.arange(11)
    got, _ = Policy(model, fp32_head=True)(ids, at[None].new_tensor([list(range(12))]), at, ids[0, 1:])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1
    output = model.get_output_embeddings()
    if output.bias is None:
        monkeypatch.setattr("scalerl_trainer.models.policy.logit_transform", lambda _: PLAIN)
        with pytest.raises(
            ModelError, match=f"{kind}: the model computes its logits in a way that is not supported"
        ):
            Policy(model, fp32_head=True)
    assert model.get_output_embeddings() is output
    torch.testing.assert_close(
        model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0], expected
    )


def test_load_model_buffer_weights_raise(folder: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    model.model.register_buffer("table", torch.ones(2), persistent=False)
    model.model.register_buffer("counts", torch.ones(2, dtype=torch.int64))
    check_weights_are_parameters(model, "it")
    model.model.register_buffer("e_score_correction_bias", torch.ones(2))
    with pytest.raises(
        ModelError, match=r"of it has weights that are buffers .*: model.e_score_correction_bias; "
    ):
        check_weights_are_parameters(model, "it")


def test_load_model_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("flash_attn seems to be not installed")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", missing)
    with pytest.raises(ModelError, match=r"flash_attention_2 needs a package.*flash_attn") as caught:
        load_model(str(folder), attention="flash_attention_2")
    assert "check the folder" not in str(caught.value)


def test_digest_sees_the_same_matrix_of_every_layer(tmp_path: Path) -> None:
    """Of which there are more than are read: a training of adapters changes those of some names alone."""
    found = set()
    for trained in range(5):
        tensors = {
            f"layers.{layer}.{at}": torch.full((2,), float(at == trained))
            for layer in range(200)
            for at in range(4)
        }
        save_file(tensors, tmp_path / WEIGHTS)
        found.add(weights_digest(tmp_path))
    assert len(found) == 5
