"""Models from scratch and from folders, and the errors that stop a run before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from scalerl_api.memory import ModelSize
from scalerl_api.spec import ScratchModel
from scalerl_trainer.errors import ModelError, ModelNotFoundError
from scalerl_trainer.models import (
    Policy,
    load_model,
    write_scratch,
)
from scalerl_trainer.models.load import check_weights_are_parameters

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
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ModelError, match=r"final_logit_softcapping = 30\.0 are not supported"):
        Policy(model, fp32_head=True)


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
