"""Tokens of prompts and solutions, end tokens, chat templates, thoughts and the interruption phrase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from scalerl_api.recipe.presets import INTERRUPTION_PHRASE
from scalerl_api.recipe.spec import InterruptionSpec
from scalerl_api.spec import PromptSpec
from scalerl_tasks import RenderedPrompt, TokenizerError
from scalerl_tasks.interruption import check_interruption
from scalerl_tasks.thoughts import THOUGHT, ends_inside_thought
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_tasks.tokenizer_config import TokenizerConfig

CHARACTERS = "0123456789+=(). abcdefghijklmnopqrstuvwxyz<>?!/\n_"
END = 1
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = PromptSpec(format="Chat")
PHRASE = " time is up.</think>"


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(c) + 2 for c in text]


def save(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    set_json(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **config)
    return folder


def set_json(folder: Path, name: str, **changes: object) -> None:
    file = folder / name
    found = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(found | changes))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tokenizer of characters that puts nothing around a text."""
    vocabulary = {"<pad>": 0, "<eos>": END} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return save(tmp_path, tokenizer, eos_token="<eos>", pad_token="<pad>")


def encoded(model: Path, spec: PromptSpec, text: str = "1+2", system: str | None = None) -> list[int]:
    (found,) = ModelTokenizer(model, spec).encode_prompts([RenderedPrompt(text, system)])
    return found


# --- prompts --------------------------------------------------------------------------------------


def test_chat_template(model: Path) -> None:
    set_json(model, "tokenizer_config.json", chat_template=CHAT_TEMPLATE, bos_token={"content": "!"})
    expected = [*ids("!<system>be short"), END, *ids("<user>1+2"), END, *ids("<assistant>")]
    assert encoded(model, CHAT, system="be short") == expected
    set_json(model, "tokenizer_config.json", chat_template=[{"name": "default", "template": CHAT_TEMPLATE}])
    assert encoded(model, CHAT, system="be short") == expected
    set_json(model, "tokenizer_config.json", bos_token=None)
    assert encoded(model, CHAT, system="be short") == expected[1:], "a tokenizer without BOS"
    (model / "chat_template.jinja").write_text("({{ messages[0].content }})")
    assert encoded(model, CHAT) == ids("(1+2)"), "the file goes before the config"


def test_raw_prompts_have_tokenizers_own_special_tokens(model: Path) -> None:
    assert encoded(model, PromptSpec()) == ids("1+2")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="! $A", pair="! $A ! $B", special_tokens=[("!", ids("!")[0])]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    save(model, tokenizer)
    assert encoded(model, PromptSpec()) == ids("!1+2")
    assert ModelTokenizer(model, PromptSpec()).encode(["34"]) == [ids("34")], "a solution continues a prompt"
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert encoded(model, CHAT) == ids("1+2"), "no second BOS beside the template's"


@pytest.mark.slow
def test_tokenizer_equals_transformers(model: Path) -> None:
    from transformers import AutoTokenizer

    set_json(model, "tokenizer_config.json", bos_token="!")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    text, theirs = "what is 12(3+4)?", AutoTokenizer.from_pretrained(model)
    assert encoded(model, PromptSpec(), text) == theirs(text)["input_ids"]
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": text}]
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encoded(model, CHAT, text, "be short") == chat


def test_missing_chat_template_raises(model: Path) -> None:
    set_json(model, "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": CHAT_TEMPLATE}])
    with pytest.raises(TokenizerError, match=r"^task\.prompt\.format: .* no chat template"):
        ModelTokenizer(model, CHAT)


def test_chat_template_that_refuses_system_message_raises(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}hi"
    )
    assert encoded(model, CHAT) == ids("hi")
    with pytest.raises(TokenizerError, match=r"^task\.prompt: .*no system role"):
        encoded(model, CHAT, system="be short")


def test_opens_thought(model: Path) -> None:
    def opens(template: str, generation_prompt: str | None = None, text: str = "1+2") -> bool:
        if generation_prompt is not None:
            chat = CHAT_TEMPLATE.replace("<assistant>", generation_prompt)
            set_json(model, "tokenizer_config.json", chat_template=chat)
        spec = PromptSpec(template=template, format="Raw" if generation_prompt is None else "Chat")
        return ModelTokenizer(model, spec).opens_thought(RenderedPrompt(template.replace("{prompt}", text)))

    assert opens("{prompt}<think>\n")
    assert not opens("{prompt}=")
    assert not opens("say <think> first: {prompt}", text="what does <think> mean")
    assert opens("{prompt}", "<a><think>\n")
    assert not opens("{prompt}", "<a><think>\n\n</think>\n")
    assert not opens("write <think> first: {prompt}", "<a>")


# --- ends -----------------------------------------------------------------------------------------


def test_stop_ids_are_of_all_files(model: Path) -> None:
    set_json(model, "generation_config.json", eos_token_id=[7, 5])
    set_json(model, "config.json", eos_token_id=9)
    tokenizer = ModelTokenizer(model, PromptSpec())
    assert (tokenizer.end_token_id, tokenizer.stop_token_ids) == (END, [END, 5, 7, 9])


@pytest.mark.parametrize("eos", [None, "<no token of the vocabulary>"])
def test_taught_end_without_tokenizers_is_first_of_generation_config(model: Path, eos: str | None) -> None:
    set_json(model, "tokenizer_config.json", eos_token=eos)
    set_json(model, "generation_config.json", eos_token_id=[7, 5])
    set_json(model, "config.json", eos_token_id=9)
    tokenizer = ModelTokenizer(model, PromptSpec())
    assert (tokenizer.end_token_id, tokenizer.stop_token_ids) == (7, [5, 7, 9])


def test_special_tokens_of_older_file(model: Path) -> None:
    """As transformers: only beside a ``tokenizer_config.json`` without ``added_tokens_decoder``."""
    set_json(model, "tokenizer_config.json", eos_token=None)
    set_json(model, "special_tokens_map.json", eos_token={"content": "<eos>"})
    assert ModelTokenizer(model, PromptSpec()).stop_token_ids == [END]
    set_json(model, "tokenizer_config.json", eos_token="<eos>", added_tokens_decoder={})
    set_json(model, "special_tokens_map.json", eos_token="<pad>")
    assert ModelTokenizer(model, PromptSpec()).stop_token_ids == [END]


@pytest.mark.slow
@pytest.mark.parametrize("converted", [False, True])
def test_class_of_tokenizers_has_end_token(model: Path, converted: bool) -> None:
    """A folder that names no end token, as GPT-2's; with ``converted`` also without ``tokenizer.json``."""
    vocabulary = {"1": 0, "+": 1, "<|endoftext|>": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    save(model, tokenizer)
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    if converted:
        (model / "tokenizer.json").unlink()
        (model / "vocab.json").write_text(json.dumps(vocabulary))
        (model / "merges.txt").write_text("#version: 0.2\n")
    found = ModelTokenizer(model, PromptSpec())
    assert found.encode(["1+1"]) == [[0, 1, 0]]
    assert (found.end_token_id, found.stop_token_ids) == (2, [2])


def test_missing_end_token_raises(model: Path) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(TokenizerError, match=r"^model: .* no end-of-sequence token"):
        ModelTokenizer(model, PromptSpec())


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer.json", "{}"), ("tokenizer_config.json", "{"), ("config.json", "[")]
)
def test_damaged_file_raises(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text)
    with pytest.raises(TokenizerError, match=rf"^model: {name} is not"):
        ModelTokenizer(model, PromptSpec())


@pytest.mark.slow
def test_missing_tokenizer_raises(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"^model: "):
        ModelTokenizer(model, PromptSpec())


def test_config_reads_without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    set_json(model, "tokenizer_config.json", chat_template="")
    assert TokenizerConfig.read(model) == TokenizerConfig(
        {"eos_token": "<eos>", "pad_token": "<pad>"}, [], None
    )


def test_decode_strips_only_last_end_token(model: Path) -> None:
    set_json(model, "generation_config.json", eos_token_id=[7, END])
    tokenizer = ModelTokenizer(model, PromptSpec())
    completions = [
        [*ids("3"), END],
        [*ids("34"), 7],
        ids("34"),
        [END],
        [],
        [*ids("1"), END, 0, *ids("2"), END],
    ]
    assert tokenizer.decode(completions) == ["3", "34", "34", "", "", "1<eos><pad>2"]


# --- the interruption -----------------------------------------------------------------------------


def test_default_phrase_ends_thought() -> None:
    assert not ends_inside_thought(THOUGHT + INTERRUPTION_PHRASE)


@pytest.mark.parametrize(
    ("phrase", "max_tokens", "message"),
    [
        ("Time is up.</think>", 9, "the tokenizer of the model cannot encode it"),
        ("<pad></think>", 9, "the tokenizer of the model cannot encode it"),
        ("time is up.", 9, "does not end the thought: add </think>"),
        ("</think> or <think>", 9, "does not end the thought"),
        ("</think><eos>", 9, r"has end tokens of the model in it: \[1\]"),
        (
            PHRASE,
            80,
            r"its 20 tokens after recipe\.length\.interruption\.maxTokens \(80\) leave no room for an answer within "
            r"recipe\.maxCompletionTokens \(100\)",
        ),
        ("a" * 200 + "</think>", 1, r"208 tokens .* no room .*recipe\.maxCompletionTokens \(100\)"),
    ],
)
def test_interruption_that_does_not_fit_raises(
    model: Path, phrase: str, max_tokens: int, message: str
) -> None:
    set_json(model, "tokenizer_config.json", unk_token="<pad>")
    tokenizer = ModelTokenizer(model, PromptSpec())
    with pytest.raises(TokenizerError, match=r"^recipe\.length\.interruption\.phrase .*" + message):
        check_interruption(InterruptionSpec(phrase=phrase, max_tokens=max_tokens), tokenizer, 100)


def test_interruption_that_just_fits(model: Path) -> None:
    tokenizer = ModelTokenizer(model, PromptSpec())
    assert check_interruption(InterruptionSpec(phrase=PHRASE, max_tokens=79), tokenizer, 100) == ids(PHRASE)


def test_short_budget_has_no_interruption_unless_the_spec_gives_a_range(model: Path) -> None:
    tokenizer = ModelTokenizer(model, PromptSpec())
    assert check_interruption(InterruptionSpec(phrase=PHRASE), tokenizer, 1000) == ids(PHRASE)
    assert check_interruption(InterruptionSpec(phrase=PHRASE), tokenizer, 100) is None
    with pytest.raises(TokenizerError, match="leave no room for an answer"):
        check_interruption(InterruptionSpec(phrase=PHRASE, max_tokens=89), tokenizer, 100)


def test_no_interruption_where_tokenizer_cannot_end_thought(model: Path) -> None:
    vocabulary = {"<pad>": 0, "<eos>": END} | {c: i + 2 for i, c in enumerate("0123456789+=")}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    save(model, tokenizer, eos_token="<eos>")
    assert check_interruption(InterruptionSpec(phrase=PHRASE), ModelTokenizer(model, PromptSpec()), 6) is None


def metaspace() -> Tokenizer:
    """Puts a space before a text, and takes one from what it decodes; as Llama 2."""
    vocabulary = {c: i for i, c in enumerate("▁" + CHARACTERS.replace(" ", ""))} | {"</s>": 99}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def byte_level(prefix: bool) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(letters)} | {"</s>": 999}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def lossy() -> Tokenizer:
    """Writes a line break as a space."""
    tokenizer = metaspace()
    tokenizer.normalizer = normalizers.Replace("\n", " ")
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "phrase", "exact"),
    [
        (metaspace(), "time is up. </think>", True),
        (metaspace(), " time is up.</think>", True),
        (byte_level(prefix=False), INTERRUPTION_PHRASE, True),
        (byte_level(prefix=True), "Zeit — um\n\n</think>\n", True),
        (lossy(), "time is up.</think>", True),
        (lossy(), "time is up.\n</think>", False),
    ],
)
def test_phrase_has_to_decode_to_itself(
    tmp_path: Path, tokenizer: Tokenizer, phrase: str, exact: bool
) -> None:
    found = ModelTokenizer(save(tmp_path, tokenizer, eos_token="</s>"), PromptSpec())
    if exact:
        ids = check_interruption(InterruptionSpec(phrase=phrase), found, 1000)
        assert ids is not None
        assert found.decode([ids])[0].strip() == phrase.strip()
    else:
        with pytest.raises(TokenizerError, match="cannot encode it"):
            check_interruption(InterruptionSpec(phrase=phrase), found, 1000)


# --- characters of tokens ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[ModelTokenizer]:
    folders = [tmp_path_factory.mktemp("tokenizer") for _ in range(3)]
    made = (byte_level(prefix=False), byte_level(prefix=True), metaspace())
    return [
        ModelTokenizer(save(folder, one, eos_token="</s>"), PromptSpec())
        for folder, one in zip(folders, made, strict=True)
    ]


@given(st.text(st.sampled_from("ab 7.é—€字😀\n"), max_size=30), st.booleans())
def test_characters_of_tokens_are_those_of_the_text(
    tokenizers: list[ModelTokenizer], text: str, ended: bool
) -> None:
    """A character of several tokens is with its last one; the end token has none."""
    for tokenizer in tokenizers[:2]:
        (ids,) = tokenizer.encode([text])
        ids = [*ids, tokenizer.end_token_id] if ended else ids
        (decoded,) = tokenizer.decode([ids])
        characters = tokenizer.characters(ids, decoded)
        assert characters is not None
        assert (len(characters), sum(characters)) == (len(ids), len(decoded))
        end = 0
        for at, count in enumerate(characters):
            (begun,) = tokenizer.texts([ids[: at + 1]]) if at < len(ids) - ended else (decoded,)
            end += count
            if not begun.endswith("\ufffd"):
                assert begun == decoded[:end]


@given(st.lists(st.integers(0, 255), max_size=40))
def test_characters_of_bytes_that_are_no_text(tokenizers: list[ModelTokenizer], ids: list[int]) -> None:
    for tokenizer in tokenizers[:2]:
        (decoded,) = tokenizer.decode([ids])
        characters = tokenizer.characters(ids, decoded)
        assert characters is not None
        assert sum(characters) == len(decoded)


@given(st.lists(st.integers(0, len(CHARACTERS) - 1), max_size=20))
def test_first_token_may_lose_its_space(tokenizers: list[ModelTokenizer], ids: list[int]) -> None:
    tokenizer = tokenizers[2]
    (decoded,) = tokenizer.decode([ids])
    characters = tokenizer.characters(ids, decoded)
    assert characters is None or sum(characters) == len(decoded)


def test_no_characters_of_another_text(tokenizers: list[ModelTokenizer]) -> None:
    (ids,) = tokenizers[0].encode(["abc"])
    assert tokenizers[0].characters(ids, "ab") is None
