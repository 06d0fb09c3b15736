"""Models from nothing, from folders, and the errors that stop a run before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scalerl_api.spec import ScratchModel
from scalerl_trainer.errors import ModelError, ModelNotFoundError, ModelTooLargeError, TokenizerError
from scalerl_trainer.models import (
    Policy,
    check_tokenizer,
    estimate_memory_bytes,
    load_model,
    load_tokenizer,
    parameter_count,
    write_scratch,
)
from scalerl_trainer.models.load import load_config

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


def test_the_folder_is_what_servers_load(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (folder / "model.safetensors").is_file()
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.eos_token_id == config["eos_token_id"] == 1
    assert tokenizer.pad_token_id == config["pad_token_id"] == 0
    assert config["vocab_size"] == len(tokenizer)


def test_digits_stand_alone_and_every_text_comes_back(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.tokenize("123 + 45")[:3] == ["1", "2", "3"]
    for text in ("State the answer: 999 + 1 =", " 1000", "çé \n\t 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_same_seed_gives_the_same_bytes_and_moves_no_one_elses(folder: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    make(tmp_path / "again", SIZES, TEXTS, seed=1)
    make(tmp_path / "other", SIZES, TEXTS, seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_small_vocabulary_spells_the_task_and_marks_the_rest(tmp_path: Path) -> None:
    small = ScratchModel(
        layers=1, hidden_size=16, attention_heads=1, intermediate_size=16, vocabulary_size=64
    )
    make(tmp_path / "small", small, TEXTS, seed=0)
    tokenizer = load_tokenizer(str(tmp_path / "small"))
    assert len(tokenizer) <= 64
    assert tokenizer.decode(tokenizer.encode(TEXTS[7])) == TEXTS[7]
    assert tokenizer.unk_token_id in tokenizer.encode("State the @nswer")


def test_a_vocabulary_below_the_alphabet_is_refused(tmp_path: Path) -> None:
    letters = ["".join(chr(code) for code in range(48, 123))]
    with pytest.raises(TokenizerError, match="a vocabulary of 64 is too small, take at least 78"):
        make(tmp_path / "m", ScratchModel(vocabulary_size=64), letters, seed=0)


def test_loading_and_counting(folder: Path) -> None:
    model = load_model(str(folder), dtype="bfloat16")
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert parameter_count(model.config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [("/no/such/folder", "is not a folder"), ("./neither", "is not a folder")],
)
def test_a_missing_folder_is_said(name: str, message: str) -> None:
    for load in (load_model, load_tokenizer, load_config):
        with pytest.raises(ModelNotFoundError, match=message):
            load(name)


def test_an_empty_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        load_model(str(tmp_path))


def test_offline_names_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"nobody/nothing at revision main.*HF_HUB_OFFLINE is set"):
        load_model("nobody/nothing")


def test_a_tokenizer_without_an_end_or_a_chat_template_is_refused(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    with pytest.raises(TokenizerError, match="no chat template"):
        check_tokenizer(tokenizer, "tiny", chat=True)
    tokenizer.eos_token = None
    with pytest.raises(TokenizerError, match="no end-of-sequence token"):
        check_tokenizer(tokenizer, "tiny")


def test_logits_that_are_more_than_a_product_are_refused(folder: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ModelError, match=r"final_logit_softcapping = 30\.0 are not supported"):
        Policy(model, fp32_head=True)


class TestMemory:
    def estimate(self, folder: Path, stage: int, world: int, dtype: str = "bfloat16") -> tuple[int, int, int]:
        config = load_config(str(folder))
        got = estimate_memory_bytes(config, dtype=dtype, zero_stage=stage, world=world, micro_batch_tokens=64)  # type: ignore[arg-type]
        return got.parameters, got.gradients, got.optimizer

    def test_stages_divide_what_they_partition(self, folder: Path) -> None:
        count = parameter_count(load_config(str(folder)))
        assert count % 4 == 0
        assert self.estimate(folder, 0, 4, "float32") == (4 * count, 4 * count, 8 * count)
        assert self.estimate(folder, 1, 4) == (2 * count, 4 * count, 3 * count)
        assert self.estimate(folder, 2, 4) == (2 * count, count, 3 * count)
        parameters, gradients, optimizer = self.estimate(folder, 3, 4)
        assert (gradients, optimizer) == (count, 3 * count)
        assert count / 2 < parameters <= 2.5 * count

    def test_what_is_too_large_is_refused_with_advice(self, folder: Path) -> None:
        config = load_config(str(folder))
        got = estimate_memory_bytes(config, dtype="float32", zero_stage=1, world=1, micro_batch_tokens=64)
        got.require(got.total)
        with pytest.raises(ModelTooLargeError, match=r"on rank 0 .* choose a smaller model"):
            got.require(got.total - 1, "rank 0")
