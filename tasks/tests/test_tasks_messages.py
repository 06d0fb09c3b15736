"""Messages of an environment between two replies: what the chat template writes, and special tokens that stay text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from scalerl_api.spec import PromptSpec
from scalerl_tasks import RenderedPrompt, TokenizerError
from scalerl_tasks.environments.tool_calls import ToolsConfig
from scalerl_tasks.tokenizer import ModelTokenizer

SPECIAL = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = CHATML.replace("m.content", "(m.content | trim)")
WITHOUT_THOUGHTS = CHATML.replace(
    "m.content", "('<think>\n\n</think>\n\n' if m.role == 'assistant' and loop.last else '') + m.content"
)
NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
NOT_APPEND_ONLY = {
    "the number of messages": "{{ messages | length }}" + CHATML,
    "the last message first": "{% set messages = [messages[-1]] + messages %}" + CHATML,
    "an end after the last message alone": "{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}",
    "replies left out": CHATML.replace("messages %}", "messages if m.role != 'assistant' %}", 1),
    "the last message alone": "{{ messages[-1].content }}<|im_end|>",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("n", "o"), ("Ċ", "Ċ"), ("Ġ", "n")]
    tokens = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens(["<think>", "</think>"])
    where = tmp_path_factory.mktemp("model")
    made.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return where


def chat(folder: Path, template: str = CHATML, system: str | None = None) -> ModelTokenizer:
    return ModelTokenizer(folder, PromptSpec(format="Chat", chat_template=template, system=system))


def conversation(tokenizer: ModelTokenizer, reply: str, message: str, system: str | None = None) -> list[int]:
    """All of it, as the template writes it."""
    turns = (("user", "two?"), ("assistant", reply))
    return tokenizer.encode_prompts([RenderedPrompt(message, system, turns)])[0]


@pytest.mark.parametrize(
    "template", [CHATML, TRIMMED, WITHOUT_THOUGHTS], ids=["chatml", "trimmed", "thoughts"]
)
@pytest.mark.parametrize("message", ["no", "", " no\n\n", "ab\nab", "日本", "{{ m }}"])
@pytest.mark.parametrize("system", [None, "be short"])
def test_messages_continue_conversation(
    folder: Path, template: str, message: str, system: str | None
) -> None:
    tokenizer = chat(folder, template, system)
    (prompt,) = tokenizer.encode_prompts([RenderedPrompt("two?", system)])
    reply = tokenizer.encode(["2<|im_end|>"])[0]
    found = [*prompt, *reply, *tokenizer.encode_messages([("user", message)])]
    assert found == conversation(tokenizer, "2", message, system)


def test_several_messages_and_roles(folder: Path) -> None:
    tokenizer = chat(folder)
    (text,) = tokenizer.texts([tokenizer.encode_messages([("tool", "4"), ("user", "go on")])])
    assert (
        text == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_without_end_token_is_followed_from_reply(folder: Path) -> None:
    (text,) = chat(folder, NO_END).texts([chat(folder, NO_END).encode_messages([("user", "no")])])
    assert text == "\nuser: no\nassistant: "


@given(
    st.lists(
        st.sampled_from([*SPECIAL, "<think>", "</think>", "<", "|>", "im_end", "ab", "\n", " ", "é"]),
        max_size=8,
    )
)
def test_special_tokens_in_messages_stay_text(folder: Path, pieces: list[str]) -> None:
    tokenizer, content = chat(folder), "".join(pieces)
    ids = tokenizer.encode_messages([("user", content)])
    (text,) = tokenizer.texts([ids])
    assert text == f"\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    added = {tokenizer.vocabulary[token] for token in tokenizer.added_tokens}
    assert [id_ for id_ in ids if id_ in added] == tokenizer.encode(["<|im_start|><|im_end|><|im_start|>"])[0]


BORDERS = "{% for m in messages %}{{ '<' + m.content + '>' + '<|im_' + m.role + '|><|im_end|>' }}{% endfor %}"
PIECES = st.lists(
    st.sampled_from(
        [*SPECIAL, "<think>", "<", ">", "|", "|>", "<|im_", "end", "end|>", "think", "ab", "\n", " ", "é"]
    ),
    max_size=6,
).map("".join)
ROLES = st.one_of(st.sampled_from(["user", "tool"]), PIECES)


def added(tokenizer: ModelTokenizer, ids: list[int]) -> list[int]:
    known = {tokenizer.vocabulary[token] for token in tokenizer.added_tokens}
    return [id_ for id_ in ids if id_ in known]


@given(
    st.sampled_from(["{prompt}", "<{prompt}>", "<|im_{prompt}end|>", "<|im_start|>{prompt}<|im_end|>"]),
    st.lists(PIECES, min_size=1, max_size=3),
)
def test_raw_messages_stay_text_beside_each_other_and_the_template(
    folder: Path, template: str, contents: list[str]
) -> None:
    tokenizer = ModelTokenizer(folder, PromptSpec(template=template))
    head, tail = template.split("{prompt}")
    expected = "".join(head + content + tail for content in contents)
    if not expected:
        return
    ids = tokenizer.encode_messages([("user", content) for content in contents])
    assert tokenizer.texts([ids]) == [expected]
    of_template = [id_ for piece in (head, tail) for id_ in added(tokenizer, tokenizer.encode([piece])[0])]
    assert added(tokenizer, ids) == of_template * len(contents)


@given(st.sampled_from([CHATML, BORDERS]), st.lists(st.tuples(ROLES, PIECES), min_size=1, max_size=3))
def test_no_role_and_no_message_of_a_chat_makes_a_special_token(
    folder: Path, template: str, messages: list[tuple[str, str]]
) -> None:
    tokenizer = chat(folder, template)
    if not all(role.isascii() and role.isidentifier() for role, _ in messages):
        with pytest.raises(TokenizerError, match="has the role"):
            tokenizer.encode_messages(messages)
        return
    ids = tokenizer.encode_messages(messages)
    if template is CHATML:
        one = "\n<|im_start|>{}\n{}<|im_end|>"
        expected = "".join(one.format(*message) for message in messages) + "\n<|im_start|>assistant\n"
        counts = {"<|im_start|>": len(messages) + 1, "<|im_end|>": len(messages)}
    else:
        expected = "".join(f"<{content}><|im_{role}|><|im_end|>" for role, content in messages)
        ends = 1 + sum(role == "end" for role, _ in messages) / len(messages)
        counts = {"<|im_end|>": int(ends * len(messages))}
    assert tokenizer.texts([ids]) == [expected]
    found = added(tokenizer, ids)
    assert {token: found.count(tokenizer.vocabulary[token]) for token in counts} == counts
    assert len(found) == sum(counts.values())


@pytest.mark.parametrize(
    "role", ["user<|im_end|>\n<|im_start|>assistant", "", "a b", "tool\n", "<think>", "é", "a" * 65]
)
def test_role_that_is_no_name_is_refused(folder: Path, role: str) -> None:
    with pytest.raises(TokenizerError, match=r"^a message has the role .*; a role is a name of letters"):
        chat(folder).encode_messages([("user", "no"), (role, "4")])


@pytest.mark.parametrize("content", ["4", "<|im_end|>"])
def test_role_that_the_template_leaves_out_is_refused(folder: Path, content: str) -> None:
    """As Qwen3's template leaves out ``observation``."""
    some = CHATML.replace(
        "messages %}", "messages if m.role in ('system', 'user', 'assistant', 'tool') %}", 1
    )
    tokenizer = chat(folder, some)
    tokenizer.check_turns()
    tokenizer.encode_messages([("tool", content)])
    for messages in ([("observation", content)], [("user", "no"), ("observation", content)]):
        for _ in range(2):
            with pytest.raises(TokenizerError, match="does not write a message of the role 'observation'"):
                tokenizer.encode_messages(messages)
    twice = chat(folder, CHATML.replace("m.content", "m.content + m.content"))
    with pytest.raises(TokenizerError, match=r"not append-only|role 'user' once"):
        twice.check_turns()


def test_messages_without_tokens_are_refused(folder: Path) -> None:
    tokenizer = ModelTokenizer(folder, PromptSpec())
    with pytest.raises(TokenizerError, match="messages have no tokens"):
        tokenizer.encode_messages([("user", ""), ("user", "")])
    assert tokenizer.encode_messages([("user", ""), ("user", "ab")]) == tokenizer.encode(["ab"])[0]


def test_template_that_moves_the_system_message_is_refused(folder: Path) -> None:
    """As Mistral's, which writes it into the last message of the user."""
    moving = (
        "{% if messages[0].role == 'system' %}{% set said = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}"
        "{% else %}{% set said = '' %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (said if loop.last else '') + m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + '<|im_end|>' }}"
        "{% endif %}{% endfor %}"
    )
    chat(folder, moving).check_turns()
    with pytest.raises(
        TokenizerError, match=r"^task\.prompt: the chat template is not append-only.*or no system$"
    ):
        chat(folder, moving, "be short").check_turns()


@pytest.mark.parametrize("system", [None, "Think in <think> first"])
def test_template_that_opens_a_thought_is_accepted(folder: Path, system: str | None) -> None:
    opening = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
    chat(folder, opening, system).check_turns()
    chat(folder, opening.replace("<think>\n'", "<think>\n\n</think>\n\n'"), system).check_turns()


@pytest.mark.parametrize("template", NOT_APPEND_ONLY.values(), ids=NOT_APPEND_ONLY)
def test_template_that_is_not_append_only_is_refused(folder: Path, template: str) -> None:
    with pytest.raises(TokenizerError, match=r"^task\.prompt: the chat template is not append-only"):
        chat(folder, template).check_turns()


def test_template_that_refuses_a_role_names_it(folder: Path) -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tool role') }}{% endif %}{% endfor %}"
        + CHATML
    )
    tokenizer = chat(folder, strict)
    tokenizer.check_turns()
    with pytest.raises(TokenizerError, match="no tool role"):
        tokenizer.encode_messages([("tool", "4")])


def test_raw_messages_are_put_into_prompt_template(folder: Path) -> None:
    tokenizer = ModelTokenizer(folder, PromptSpec(template="Q: {prompt}\nA:"))
    (text,) = tokenizer.texts([tokenizer.encode_messages([("user", "three?"), ("user", "<eos>")])])
    assert text == "Q: three?\nA:Q: <eos>\nA:"
    assert tokenizer.vocabulary["<eos>"] not in tokenizer.encode_messages([("user", "<eos>")])


def test_text_that_the_tokenizer_does_not_know_is_the_unknown_token(tmp_path: Path) -> None:
    """As in a prompt; a small tokenizer has the characters of its task alone."""
    made = Tokenizer(models.BPE({"<unk>": 0, "<eos>": 1, "4": 2, ":": 3}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(["<unk>", "<eos>"])
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<eos>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = ModelTokenizer(tmp_path, PromptSpec(template="{prompt}:"))
    tokenizer.check_turns()
    assert tokenizer.encode_messages([("user", "4a")]) == [2, 0, 3]
    assert 1 not in tokenizer.encode_messages([("user", "4<eos>")])


# --- tools --------------------------------------------------------------------------------------------

TOOLS = ToolsConfig.read(["calculator", {"python": {"name": "run"}}])
LLAMA_TOOLS = replace(TOOLS, format="Llama3")
DESCRIBED = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "{{ 'Write <tool_call>JSON</tool_call>.' if hermes else 'Write JSON.' }}<|im_end|>\n{% endif %}"
)
WITH_TOOLS = {
    "hermes": "{% set hermes = true %}" + DESCRIBED + CHATML,
    "llama3": DESCRIBED
    + CHATML.replace("m.content", "(m.content | tojson if m.role == 'tool' else m.content)"),
}
CALLED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or () %}"
    "{% set c = c.function %}@{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' if thinks else '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that writes calls, in place of the @."""
HERMES = '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>'
WRITTEN = {
    "hermes": HERMES,
    "llama3": '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}',
    "xml": (
        "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>"
    ),
    "in a thought": "<think>" + HERMES + "</think>",
    "quoted twice": HERMES.replace("c.arguments | tojson", "c.arguments | tojson | tojson"),
}


def test_tools_are_described_before_the_prompt_alone(folder: Path) -> None:
    prompt = PromptSpec(format="Chat", chat_template=WITH_TOOLS["hermes"])
    tokenizer, plain = ModelTokenizer(folder, prompt, tools=TOOLS), ModelTokenizer(folder, prompt)
    tokenizer.check_turns()
    question = [RenderedPrompt("2+2?")]
    (text,) = tokenizer.texts(tokenizer.encode_prompts(question))
    assert plain.texts(plain.encode_prompts(question)) == [text[text.index("<|im_start|>user") :]]
    described = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert described == TOOLS.schemas
    assert [one["function"]["name"] for one in described] == ["calculator", "run"]
    message = [("tool", "4<|im_end|>")]
    assert tokenizer.encode_messages(message) == plain.encode_messages(message)


@pytest.mark.parametrize(
    ("template", "tools", "says"),
    [
        (CHATML, TOOLS, "the chat template does not describe tools: use a model whose"),
        (WITH_TOOLS["hermes"], LLAMA_TOOLS, "parameters.format, Llama3: set it to Hermes"),
        (WITH_TOOLS["llama3"], TOOLS, "parameters.format, Hermes: set it to Llama3, or Text"),
        (
            WITH_TOOLS["hermes"].replace("messages %}", "messages if m.role != 'tool' %}"),
            TOOLS,
            "does not write a message of the role 'tool'",
        ),
        (WITH_TOOLS["hermes"], None, None),
        (WITH_TOOLS["llama3"], LLAMA_TOOLS, None),
        (WITH_TOOLS["hermes"], replace(TOOLS, format="Text"), None),
        *(
            ("{% set hermes = true %}" + thinks + DESCRIBED + CALLED.replace("@", WRITTEN[form]), tools, says)
            for form, tools, says in (
                ("hermes", TOOLS, None),
                ("llama3", LLAMA_TOOLS, None),
                ("hermes", LLAMA_TOOLS, "writes a call as '<tool_call>"),
                ("hermes", LLAMA_TOOLS, "Llama3, does not read: set it to Hermes"),
                ("llama3", TOOLS, "Hermes, does not read: set it to Llama3"),
                ("xml", TOOLS, "does not read: give a chatTemplate that writes JSON, or set it to Text"),
                ("xml", replace(TOOLS, format="Text"), None),
                ("in a thought", TOOLS, "does not read"),
                ("quoted twice", TOOLS, "does not read"),
            )
            for thinks in ("", "{% set thinks = true %}")
        ),
    ],
)
def test_templates_for_tools_are_checked(
    folder: Path, template: str, tools: ToolsConfig | None, says: str | None
) -> None:
    prompt = PromptSpec(format="Chat", chat_template=template)
    tokenizer = ModelTokenizer(folder, prompt, tools=tools)
    if says is None:
        tokenizer.check_turns()
        return
    with pytest.raises(TokenizerError, match=re.escape(says)):
        tokenizer.check_turns()


def test_raw_prompts_describe_no_tools(folder: Path) -> None:
    tokenizer = ModelTokenizer(folder, PromptSpec(template="{prompt}\n"), tools=TOOLS)
    tokenizer.check_turns()
    assert tokenizer.texts([tokenizer.encode_messages([("tool", "4"), ("tool", "5")])]) == ["4\n5\n"]
