"""Text and tokens: the model's tokenizer, its chat template and end tokens, thoughts, and the interruption phrase.

The length check of prompts, the warm start, sampling and grading must agree on all of these, so each is defined only here.

``tokenizers`` reads ``tokenizer.json`` in milliseconds, and transformers renders a chat template without its tokenizers
(which import torch, five seconds). Both are imported on first use: a process that opens no tokenizer needs neither.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from scalerl_tasks.errors import TokenizerError
from scalerl_tasks.prompts import RenderedPrompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from scalerl_api.recipe.spec import InterruptionSpec
    from scalerl_api.spec import PromptSpec
    from scalerl_tasks.environments.tool_calls import ToolsConfig

_CONTROL = re.compile(r"<\|[^|<>\s{}]+\|>")
"""Text like ``<|im_start|>``, which is a single token in a chat template."""
_REPLACEMENT = "\ufffd"
"""In place of bytes that are no UTF-8."""
_MAX_CHARACTERS = 2**16 - 1
"""Of a token, as the wire has them."""
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_ROLES_CACHED = 256
_MARK = "\ue000"
"""A private character in place of a text."""
THOUGHT = "<think>"
THOUGHT_END = "</think>"
CALL = "<tool_call>"
_ARGUMENT = "argument-7"
"""In place of a call's argument."""

_THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def ends_inside_thought(text: str) -> bool:
    """Whether ``text`` ends inside a thought.

    >>> ends_inside_thought("<|assistant|><think>\\n"), ends_inside_thought("<think>\\n\\n</think>\\n\\n")
    (True, False)
    """
    return THOUGHT in text.rpartition(THOUGHT_END)[2]


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer settings in the JSON files of a model folder, read without opening the tokenizer."""

    special: dict[str, str]
    """Text of each special token, by its name in ``tokenizer_config.json`` (``bos_token``, ``eos_token``, …)."""
    end_token_ids: list[int]
    """``eos_token_id`` of ``generation_config.json``, then of ``config.json``."""
    chat_template: str | None

    @classmethod
    def read(cls, model: Path) -> Self:
        """Read the files of ``model``, each of which may be absent.

        Raises:
            TokenizerError: a file is not JSON, or the chat template not text.
        """
        config = _json(model / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # transformers, too, reads the older file only then
            config |= _json(model / "special_tokens_map.json")
        tokens = {name: _token_text(config.get(name)) for name in _SPECIAL}
        ends = []
        for name in ("generation_config.json", "config.json"):
            value = _json(model / name).get("eos_token_id")
            ends += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
        file = model / "chat_template.jinja"
        try:
            template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
            if isinstance(template, list):
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"model: {file.name} is not UTF-8: {error}") from error
        except (KeyError, TypeError) as error:
            raise TokenizerError(
                "model: chat_template in tokenizer_config.json is a list without names and templates"
            ) from error
        return cls(
            {name: text for name, text in tokens.items() if text is not None},
            ends,
            template if isinstance(template, str) and template else None,
        )


class ModelTokenizer:
    """The tokenizer of a model folder with a run's prompt format.

    Args:
        model: the folder with ``tokenizer.json``, or with files from which transformers creates one.
        prompt: ``task.prompt``, or that of a task of a mix or of an evaluation set.
        field: its path in the spec, for messages.
        tools: the tools of the task's environment, which a chat template describes to the model.

    Raises:
        TokenizerError: there is no tokenizer or no end token, or with the format ``Chat`` no chat template, or the spec's
            chat template is for another tokenizer.
    """

    def __init__(
        self,
        model: Path,
        prompt: PromptSpec,
        field: str = "task.prompt",
        tools: ToolsConfig | None = None,
    ) -> None:
        config = TokenizerConfig.read(model)
        self._special = config.special
        found = _from_file(model / "tokenizer.json")
        end = _token_id(found, self._special.get("eos_token"))
        if found is None or (end is None and not config.end_token_ids):
            theirs = _from_transformers(model)
            found = theirs.backend_tokenizer if found is None else found
            # The tokenizer class has default special tokens, for a folder that names none.
            self._special = theirs.special_tokens_map | self._special
            end = _token_id(found, self._special.get("eos_token"))
        ends = config.end_token_ids if end is None else [end, *config.end_token_ids]
        if not ends:
            raise TokenizerError(
                "model: the tokenizer has no end-of-sequence token, so no completion could end: set eos_token in "
                "tokenizer_config.json, or eos_token_id in generation_config.json"
            )
        chat_template = prompt.chat_template or config.chat_template
        if prompt.format == "Chat" and chat_template is None:
            raise TokenizerError(
                f"{field}.format: the tokenizer has no chat template: use Raw, give {field}.chatTemplate, or add "
                "chat_template.jinja to the model"
            )
        foreign = [
            text for text in _CONTROL.findall(prompt.chat_template or "") if _token_id(found, text) is None
        ]
        if foreign:
            raise TokenizerError(
                f"{field}.chatTemplate: {foreign[0]} is no token of the model's tokenizer, so the template is for another one, "
                "and all tasks of a run share the model's: write it with the model's tokens, or train this task in another run"
            )
        self._field, self._tools = field, tools
        found.no_truncation()
        found.no_padding()
        self._tokenizer: Tokenizer = found
        self.unknown_token_id: int | None = _token_id(found, self._special.get("unk_token"))
        """Token in place of text that the tokenizer cannot encode; None if there is no such token."""
        self._chat_template = chat_template if prompt.format == "Chat" else None
        self._template, self._system = prompt.template, prompt.system
        self._around = lru_cache(_ROLES_CACHED)(self._written_around)
        self._after_question = prompt.template.rpartition("{prompt}")[2]
        self.end_token_id: int = ends[0]
        """Last token of a worked solution in training: the tokenizer's end token, else the first one of the configs."""
        self.stop_token_ids: list[int] = sorted(set(ends))
        """Tokens that end a completion, sorted: the end tokens of the tokenizer, the generation config and the model."""
        padded = _json(model / "config.json").get("vocab_size")
        self.vocabulary_size: int = max(found.get_vocab_size(), padded if isinstance(padded, int) else 0)
        """Exclusive upper bound of token ids: the size of the tokenizer's vocabulary, or of the model's if it is padded."""

    def encode_prompts(self, prompts: Sequence[RenderedPrompt]) -> list[list[int]]:
        """Token ids of each prompt.

        ``Raw`` adds the special tokens that the tokenizer itself puts around a text (a BOS, if the model has one). ``Chat`` adds
        none besides those of the template, as transformers does.

        Raises:
            TokenizerError: the chat template rejects the messages.
        """
        if self._chat_template is None:
            return self._encode([prompt.user for prompt in prompts], special=True)
        return self.encode([self._render(prompt, generation_prompt=True) for prompt in prompts])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens around it."""
        return self._encode(texts, special=False)

    def decode(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Each completion's text, without its end token; other special tokens stay visible."""
        stripped = [ids[:-1] if len(ids) and ids[-1] in self.stop_token_ids else ids for ids in completions]
        return self.texts(stripped)

    def characters(self, ids: Sequence[int], text: str) -> list[int] | None:
        """The number of characters that each token of a completion adds to its ``text``, as :meth:`decode` gives it; the token
        that completes a character of several tokens counts as all of it. None if ``text`` is not that of the tokens."""
        own = ids[:-1] if len(ids) and ids[-1] in self.stop_token_ids else ids
        alone = self.texts([[i] for i in own])
        if "".join(alone) == text and _REPLACEMENT not in text:
            lengths = [len(piece) for piece in alone]
        else:  # in context: a character is at most four tokens, and a first token may lose its space
            begins = [max(0, at - 4) for at in range(len(own))]
            whole = self.texts([own[begin : at + 1] for at, begin in enumerate(begins)])
            before = self.texts([own[begin:at] for at, begin in enumerate(begins)])
            lengths = [len(a) - len(b) for a, b in zip(whole, before, strict=True)]
        if (
            sum(lengths) != len(text)
            or min(lengths, default=0) < 0
            or max(lengths, default=0) > _MAX_CHARACTERS
        ):
            return None
        return [*lengths, *([0] * (len(ids) - len(own)))]

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added tokens included."""
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return ids

    @property
    def tokens(self) -> int:
        """Exclusive upper bound of the tokenizer's token ids, added tokens included."""
        return 1 + max(self.vocabulary.values())

    @property
    def added_tokens(self) -> list[str]:
        """Text of each added token, special or not, by id."""
        return [token.content for _, token in sorted(self._tokenizer.get_added_tokens_decoder().items())]

    def texts(self, chunks: Sequence[Sequence[int]]) -> list[str]:
        """The text of each chunk of tokens, including all special tokens."""
        texts: list[str] = self._tokenizer.decode_batch(chunks, skip_special_tokens=False)
        return texts

    def exact_ids(self, text: str) -> list[int] | None:
        """Token ids of ``text``, as from :meth:`encode`; None if they contain the unknown token or decode to another text."""
        (ids,) = self.encode([text])
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False)
        # Many tokenizers add or drop a space at the beginning of what they encode or decode by itself.
        return ids if self.unknown_token_id not in ids and decoded.lstrip() == text.lstrip() else None

    def opens_thought(self, prompt: RenderedPrompt) -> bool:
        """Whether the template or the chat template opens a thought that the completion continues.

        Only the text after the question counts: a question may contain ``<think>``.
        """
        if self._chat_template is None:
            return ends_inside_thought(self._after_question)
        bare, text = (self._render(prompt, generation_prompt=added) for added in (False, True))
        return ends_inside_thought(text[len(os.path.commonprefix([bare, text])) :])  # noqa: RUF071 - of texts, not paths

    def encode_messages(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of an environment's messages between two replies of the model, up to the start of the next reply.

        They follow the end token of a reply, whose tokens are not encoded again. In a chat, they are what the chat template writes
        there; without one, each message in ``prompt.template``, encoded by itself. Special tokens in the messages are encoded as text.

        Args:
            messages: role and content of each.

        Raises:
            TokenizerError: the chat template refuses them or leaves one out, or what it writes before them depends on them; a
                role is not a name; they have no tokens.
        """
        for role, _ in messages:
            self._check_role(role)
        contents = [content for _, content in messages]
        if self._chat_template is None:
            head, _, tail = self._template.rpartition("{prompt}")
            ids = [i for one in contents for i in self._encode_apart((head, tail), [one], head + one + tail)]
        else:
            around = self._around(tuple(role for role, _ in messages))
            ids = self._encode_apart(around, contents, self._between(messages))
        if not ids:
            raise TokenizerError(
                "the environment's messages have no tokens; return a text, or end the episode (done=True)"
            )
        return ids

    def check_turns(self) -> None:
        """Check that messages of an environment can follow a reply.

        Raises:
            TokenizerError: the chat template is not append-only: messages after a reply change what it writes before them. Or it does
                not describe the environment's tools, or writes or asks for calls in another format.
        """
        if self._chat_template is None:  # a small vocabulary may have no text but the task's
            return
        self.encode_messages([("user" if self._tools is None else "tool", "a")])
        self._check_tools()
        prompt = RenderedPrompt("a", self._system)
        first = self._render(prompt, generation_prompt=True)
        if self.opens_thought(prompt):
            first = first[: first.rindex(THOUGHT)]
        turns = (("user", "a"), ("assistant", _MARK))
        later = self._render(RenderedPrompt("a", self._system, turns), generation_prompt=True)
        if not _THOUGHTS.sub("", later.partition(_MARK)[0]).startswith(_THOUGHTS.sub("", first)):
            raise TokenizerError(
                f"{self._field}: the chat template is not append-only: it writes a first prompt otherwise once a message follows "
                "its reply, so the conversation is not the one that was sampled; give a chatTemplate that writes each message in "
                "order" + ("" if self._system is None else ", or no system")
            )

    def _check_tools(self) -> None:
        if self._tools is None:
            return
        messages = RenderedPrompt("a", self._system).messages
        text = self._render_messages(messages, generation_prompt=True)
        if text == self._render_messages(messages, generation_prompt=True, tools=False):
            raise TokenizerError(
                f"{self._field}: the chat template does not describe tools: use a model whose template does, give a chatTemplate that "
                "writes them, or set format: Raw and describe them in template"
            )
        if self._tools.format == "Text":
            return
        if (written := self._written_call(self._tools)) is not None:
            if not _reads(self._tools, written):
                fits = [
                    one for one in ("Hermes", "Llama3") if _reads(replace(self._tools, format=one), written)
                ]
                raise TokenizerError(
                    f"{self._field}: the chat template writes a call as {written[:200]!r}, which environment.parameters.format, "
                    f"{self._tools.format}, does not read: "
                    + (
                        f"set it to {fits[0]}"
                        if fits
                        else "give a chatTemplate that writes JSON, or set it to Text"
                    )
                )
        elif (self._tools.format == "Hermes") != (CALL in text):
            wanted = "Hermes" if CALL in text else "Llama3, or Text"
            raise TokenizerError(
                f"{self._field}: the chat template asks for calls in another format than environment.parameters.format, "
                f"{self._tools.format}: set it to {wanted}, or give a chatTemplate that asks for {self._tools.format}"
            )

    def _written_call(self, tools: ToolsConfig) -> str | None:
        """A reply that calls the first tool, as the chat template writes it; None if it writes no calls."""
        function = {"name": tools.tools[0].name, "arguments": {tools.tools[0].parameter: _ARGUMENT}}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }
        question: dict[str, Any] = {"role": "user", "content": "a"}
        plain, calling = [question, {"role": "assistant", "content": _MARK}], [question, call]
        try:
            head = self._render_messages(plain, generation_prompt=False).partition(_MARK)[0]
            text = self._render_messages(calling, generation_prompt=False)
        except TokenizerError:
            return None
        reply = text[len(os.path.commonprefix([head, text])) :]  # noqa: RUF071 - of texts, not paths
        ends = [found for end in self._ends if (found := reply.find(end)) >= 0]
        reply = reply[: min(ends, default=None)]
        return reply if _ARGUMENT in reply else None

    def _check_role(self, role: str) -> None:
        # A prompt has the role user too, whatever tokens its name has.
        if role != "user" and (not _ROLE.fullmatch(role) or self._added.search(role)):
            raise TokenizerError(
                f"a message has the role {role[:80]!r}; a role is a name of letters, digits, - and _, without special tokens"
            )

    def _encode_apart(self, around: Sequence[str], contents: Sequence[str], text: str) -> list[int]:
        """Token ids of a text whose added tokens are those of ``around``, the texts before, between and after the contents."""
        wanted = [i for ids in self.encode([piece for piece in around if piece]) for i in ids]
        found = self.encode([text])[0]
        if self._added_of(found) == self._added_of(wanted):
            return found
        pieces = [around[0]]
        for content, after in zip(contents, around[1:], strict=True):
            pieces += [*self._split_special(content), after]
        found = [i for ids in self.encode([piece for piece in pieces if piece]) for i in ids]
        if self._added_of(found) != self._added_of(wanted):
            raise TokenizerError(
                f"{self._field}: the model's tokenizer makes a special token of an environment's text, which cannot be kept as text"
            )
        return found

    def _added_of(self, ids: Sequence[int]) -> list[int]:
        # The unknown token is what other text is encoded as: it ends no turn.
        return [id_ for id_ in ids if id_ in self._added_ids and id_ != self.unknown_token_id]

    def _written_around(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        """What the chat template writes before, between and after messages of these roles."""
        marks = [f"{_MARK}{at}{_MARK}" for at in range(len(roles))]
        text, pieces = self._between(list(zip(roles, marks, strict=True))), []
        for role, mark in zip(roles, marks, strict=True):
            before, found, text = text.partition(mark)
            if not found or mark in text:
                raise TokenizerError(
                    f"{self._field}: the chat template does not write a message of the role {role!r} once, in order, after a reply; "
                    "give a chatTemplate that does, or the message a role that it knows"
                )
            pieces.append(before)
        return (*pieces, text)

    def _split_special(self, text: str) -> list[str]:
        """The text in pieces, none of which has an added token."""
        pieces, start = [], 0
        while found := self._added.search(text, start):
            pieces.append(text[start : found.start() + 1])
            start = found.start() + 1
        return [*pieces, text[start:]]

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """Added tokens of several characters, which can be split."""
        texts = sorted((text for text in self.added_tokens if len(text) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        """Ids of :attr:`_added`."""
        return frozenset(self.vocabulary[text] for text in self.added_tokens if len(text) > 1)

    @cached_property
    def _ends(self) -> list[str]:
        """Texts of the end tokens."""
        return [text for text in self.texts([[id_] for id_ in self.stop_token_ids]) if text]

    def _between(self, messages: Sequence[tuple[str, str]]) -> str:
        """What the chat template writes between the end token of a reply and the next reply."""
        turns = (("user", "a"), ("assistant", _MARK))
        earlier = RenderedPrompt("", self._system, turns)
        before = self._render_messages(earlier.messages[:-1], generation_prompt=False)
        given = [{"role": role, "content": content} for role, content in messages]
        text = self._render_messages([*earlier.messages[:-1], *given], generation_prompt=True)
        (head, found, closing), (head_then, _, rest) = before.partition(_MARK), text.partition(_MARK)
        if (
            not found
            or _THOUGHTS.sub("", head) != _THOUGHTS.sub("", head_then)
            or not rest.startswith(closing)
        ):
            raise TokenizerError(
                f"{self._field}: the chat template is not append-only: a message after a reply changes the text before it, so the "
                "tokens of a conversation are not those that were sampled; give a chatTemplate that writes each message in order"
            )
        ends = [closing.find(end) + len(end) for end in self._ends if end in closing]
        return rest[min(ends, default=0) :]

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [one.ids for one in encoded]

    def _render(self, prompt: RenderedPrompt, *, generation_prompt: bool) -> str:
        return self._render_messages(prompt.messages, generation_prompt=generation_prompt)

    def _render_messages(
        self, messages: Sequence[dict[str, Any]], *, generation_prompt: bool, tools: bool = True
    ) -> str:
        """The same result as ``AutoTokenizer.apply_chat_template``, without importing its tokenizers and torch."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), _ = render_jinja_template(
                [list(messages)],
                chat_template=self._chat_template,
                add_generation_prompt=generation_prompt,
                tools=self._tools.schemas if self._tools is not None and tools else None,
                **self._special,
            )
        except TemplateError as error:
            raise TokenizerError(
                f"{self._field}: the chat template refuses the prompt: {error}: use another system or format"
            ) from error
        return str(text)


def check_interruption(
    interruption: InterruptionSpec, tokenizer: ModelTokenizer, max_completion_tokens: int
) -> list[int] | None:
    """Token ids of the phrase of a forced interruption; None if no thought is interrupted, because the tokenizer cannot encode
    the end of a thought, or because the spec sets no range and the default range is impossible for the length budget.

    Args:
        max_completion_tokens: length budget of a completion, in tokens.

    Raises:
        TokenizerError: the phrase does not close the thought, the tokenizer cannot encode it exactly or encodes a part of it as
            an end token, or it leaves no token of the budget for an answer.
    """
    phrase, (_, last) = interruption.phrase, interruption.range(max_completion_tokens)
    field = f"recipe.length.interruption.phrase {phrase!r}"
    if tokenizer.exact_ids(THOUGHT_END) is None:
        return None
    if ends_inside_thought(THOUGHT + phrase):
        raise TokenizerError(f"{field} does not end the thought: add {THOUGHT_END}")
    ids = tokenizer.exact_ids(phrase)
    if ids is None:
        raise TokenizerError(f"{field}: the tokenizer of the model cannot encode it: use other words")
    if ended := sorted(set(ids) & set(tokenizer.stop_token_ids)):
        raise TokenizerError(f"{field} has end tokens of the model in it: {ended}: use other words")
    if last + len(ids) >= max_completion_tokens:
        if interruption.max_tokens is None:
            return None
        raise TokenizerError(
            f"{field}: its {len(ids)} tokens after recipe.length.interruption.maxTokens ({last}) leave no room for an "
            f"answer within recipe.maxCompletionTokens ({max_completion_tokens}): raise that, lower maxTokens, or choose "
            "a shorter phrase or another recipe.length"
        )
    return ids


def _reads(tools: ToolsConfig, reply: str) -> bool:
    """Whether a reply has the call of :meth:`ModelTokenizer._written_call` in the tools' format."""
    return [getattr(call, "argument", None) for call in tools.read_calls(reply)] == [_ARGUMENT]


def _from_file(file: Path) -> Any:
    from tokenizers import Tokenizer

    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"model: {file.name} is not a tokenizer: {error}") from error


def _from_transformers(model: Path) -> Any:
    from transformers import AutoTokenizer  # imports torch: seconds, which models with complete files save

    try:
        found = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"model: transformers cannot load the tokenizer: {error}") from error
    if getattr(found, "backend_tokenizer", None) is None:
        raise TokenizerError(
            "model: it has no tokenizer.json, and transformers cannot make one: save its fast tokenizer with it"
        )
    return found


def _token_id(tokenizer: Any, text: str | None) -> int | None:
    return None if tokenizer is None or text is None else tokenizer.token_to_id(text)


def _token_text(token: object) -> str | None:
    """A special token in a JSON file: a string, or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"model: {file.name} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
