"""The model's tokenizer with a run's prompt format: what prompts, completions and messages are as tokens.

The length check of prompts, the warm start, sampling and grading must agree on all of these, so each is defined only here.

``tokenizers`` reads ``tokenizer.json`` in milliseconds, and transformers renders a chat template without its tokenizers
(which import torch, five seconds). Both are imported on first use: a process that opens no tokenizer needs neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl_tasks.chat_template import ChatTemplate
from scalerl_tasks.errors import TokenizerError
from scalerl_tasks.prompts import RenderedPrompt
from scalerl_tasks.thoughts import ends_inside_thought
from scalerl_tasks.tokenizer_config import TokenizerConfig, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from scalerl_api.spec import PromptSpec
    from scalerl_tasks.environments.tool_calls import ToolsConfig

_CONTROL = re.compile(r"<\|[^|<>\s{}]+\|>")
"""Text like ``<|im_start|>``, which is a single token in a chat template."""
_REPLACEMENT = "\ufffd"
"""In place of bytes that are no UTF-8."""
_MAX_CHARACTERS = 2**16 - 1
"""Of a token, as the wire has them."""
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


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
        found, special, ends = _opened(model, config)
        self._tokenizer: Tokenizer = found
        self._field, self._tools, self._template = field, tools, prompt.template
        self.unknown_token_id: int | None = _token_id(found, special.get("unk_token"))
        """Token in place of text that the tokenizer cannot encode; None if there is no such token."""
        self.end_token_id: int = ends[0]
        """Last token of a worked solution in training: the tokenizer's end token, else the first one of the configs."""
        self.stop_token_ids: list[int] = sorted(set(ends))
        """Tokens that end a completion, sorted: the end tokens of the tokenizer, the generation config and the model."""
        self._chat: ChatTemplate | None = None
        if (text := _chat_template(found, prompt, config, field)) is not None:
            end_texts = [text for text in self.texts([[id_] for id_ in self.stop_token_ids]) if text]
            self._chat = ChatTemplate(
                text, special=special, ends=end_texts, system=prompt.system, tools=tools, field=field
            )
        padded = read_json(model / "config.json").get("vocab_size")
        self.vocabulary_size: int = max(found.get_vocab_size(), padded if isinstance(padded, int) else 0)
        """Exclusive upper bound of token ids: the size of the tokenizer's vocabulary, or of the model's if it is padded."""

    def encode_prompts(self, prompts: Sequence[RenderedPrompt]) -> list[list[int]]:
        """Token ids of each prompt.

        ``Raw`` adds the special tokens that the tokenizer itself puts around a text (a BOS, if the model has one). ``Chat`` adds
        none besides those of the template, as transformers does.

        Raises:
            TokenizerError: the chat template rejects the messages.
        """
        if self._chat is None:
            return self._encode([prompt.user for prompt in prompts], special=True)
        return self.encode([self._chat.render(prompt, generation_prompt=True) for prompt in prompts])

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
        if self._chat is None:
            return ends_inside_thought(self._template.rpartition("{prompt}")[2])
        return self._chat.opens_thought(prompt)

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
        if self._chat is None:
            head, _, tail = self._template.rpartition("{prompt}")
            ids = [i for one in contents for i in self._encode_apart((head, tail), [one], head + one + tail)]
        else:
            around = self._chat.around(tuple(role for role, _ in messages))
            ids = self._encode_apart(around, contents, self._chat.between(messages))
        if not ids:
            raise TokenizerError(
                "the environment's messages have no tokens; return a text, or end the episode (done=True)"
            )
        return ids

    def check_turns(self) -> None:
        """Check that messages of an environment can follow a reply.

        Raises:
            TokenizerError: see :meth:`encode_messages` and :meth:`.ChatTemplate.check_turns`.
        """
        if self._chat is None:  # a small vocabulary may have no text but the task's
            return
        self.encode_messages([("user" if self._tools is None else "tool", "a")])
        self._chat.check_turns()

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

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [one.ids for one in encoded]


def _opened(model: Path, config: TokenizerConfig) -> tuple[Any, dict[str, str], list[int]]:
    """The tokenizer, the text of each special token, and the end tokens.

    Raises:
        TokenizerError: there is no tokenizer, or no end token.
    """
    special = config.special
    found = _from_file(model / "tokenizer.json")
    end = _token_id(found, special.get("eos_token"))
    if found is None or (end is None and not config.end_token_ids):
        theirs = _from_transformers(model)
        found = theirs.backend_tokenizer if found is None else found
        # The tokenizer class has default special tokens, for a folder that names none.
        special = theirs.special_tokens_map | special
        end = _token_id(found, special.get("eos_token"))
    ends = config.end_token_ids if end is None else [end, *config.end_token_ids]
    if not ends:
        raise TokenizerError(
            "model: the tokenizer has no end-of-sequence token, so no completion could end: set eos_token in "
            "tokenizer_config.json, or eos_token_id in generation_config.json"
        )
    found.no_truncation()
    found.no_padding()
    return found, special, ends


def _chat_template(tokenizer: Any, prompt: PromptSpec, config: TokenizerConfig, field: str) -> str | None:
    """The chat template of a run; None with the format Raw.

    Raises:
        TokenizerError: there is none, or the spec's is for another tokenizer.
    """
    text = prompt.chat_template or config.chat_template
    if prompt.format == "Chat" and text is None:
        raise TokenizerError(
            f"{field}.format: the tokenizer has no chat template: use Raw, give {field}.chatTemplate, or add "
            "chat_template.jinja to the model"
        )
    controls = _CONTROL.findall(prompt.chat_template or "")
    foreign = [control for control in controls if _token_id(tokenizer, control) is None]
    if foreign:
        raise TokenizerError(
            f"{field}.chatTemplate: {foreign[0]} is no token of the model's tokenizer, so the template is for another one, "
            "and all tasks of a run share the model's: write it with the model's tokens, or train this task in another run"
        )
    return text if prompt.format == "Chat" else None


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
