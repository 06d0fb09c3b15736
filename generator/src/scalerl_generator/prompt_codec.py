"""Text to tokens and back, with the run's tokenizer and without importing torch.

The ``tokenizers`` library reads ``tokenizer.json`` in milliseconds. A chat template is rendered by transformers'
function, which is independent of its tokenizers; only a model without ``tokenizer.json`` needs those, and torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl_api.spec import PromptSpec
from scalerl_tasks.answer_extraction import ends_inside_thought
from scalerl_tasks.prompts import Prompt, RenderedPrompt, check_template, render_prompt

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

_CACHED_PROMPTS = 8192
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerProblem(Exception):
    """The model's tokenizer does not fit this run; the message says what is missing and where."""


class PromptTooLong(Exception):
    """A prompt leaves no room for its completion within ``model.contextTokens``."""


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a rendered prompt, for the server and for the wire."""

    token_ids: list[int]
    wire: bytes
    """The same ids as little-endian int32."""
    in_thought: bool = False
    """The template opens a thought that the completion continues."""


class PromptCodec:
    """The tokenizer of one run: prompts in, completion text out.

    Args:
        model: the directory with ``tokenizer.json``, ``tokenizer_config.json``, ``config.json`` and
            ``generation_config.json`` (each of the latter three may be absent).
        spec: the run's template and format.
        context_tokens: longest prompt + completion.

    Raises:
        TokenizerProblem: no tokenizer, no end token, or no chat template where one is asked for.
        TemplateError: a bad ``task.prompt.template``.
    """

    def __init__(self, model: Path, spec: PromptSpec, context_tokens: int) -> None:
        self._spec = spec
        self._context_tokens = context_tokens
        check_template(spec.template)
        self._tokenizer = _load_tokenizer(model)
        self.stop_token_ids = _stop_token_ids(model, self._tokenizer)
        """End-of-sequence ids, sorted: the tokenizer's, the model's and the generation config's."""
        self._stop = frozenset(self.stop_token_ids)
        self._chat = _chat_template(model) if spec.format == "Chat" else None
        self._encode = lru_cache(_CACHED_PROMPTS)(self._encode_text)

    def encode(self, prompt: Prompt, max_tokens: int) -> EncodedPrompt:
        """Tokens of a prompt in the run's template.

        ``Raw`` adds the special tokens that the tokenizer itself puts around a text (a BOS, where the model
        has one); ``Chat`` adds none beyond the template's own, as transformers does.

        Raises:
            PromptTooLong: prompt and ``max_tokens`` do not fit in the context.
        """
        rendered = render_prompt(prompt, self._spec.template, self._spec.system)
        encoded = self._encode(rendered)
        if len(encoded.token_ids) + max_tokens > self._context_tokens:
            raise PromptTooLong(
                f"prompt {prompt.id!r} has {len(encoded.token_ids)} tokens; with {max_tokens} for the completion it "
                f"exceeds model.contextTokens ({self._context_tokens}): raise contextTokens to at least "
                f"{len(encoded.token_ids) + max_tokens}, lower recipe.maxCompletionTokens, or drop the prompt"
            )
        return encoded

    def texts(self, completions: Sequence[NDArray[np.int32]]) -> list[str]:
        """Each completion's text for the verifier, without its end token; other special tokens stay visible."""
        stripped = [ids[:-1] if len(ids) and int(ids[-1]) in self._stop else ids for ids in completions]
        texts: list[str] = self._tokenizer.decode_batch(
            [ids.tolist() for ids in stripped], skip_special_tokens=False
        )
        return texts

    def exact_ids(self, text: str) -> list[int] | None:
        """Token ids of a text by itself, without special tokens around it; None if they do not decode to it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False)
        return ids if "".join(decoded.split()) == "".join(text.split()) else None

    def _encode_text(self, rendered: RenderedPrompt) -> EncodedPrompt:
        if self._chat is None:
            ids = self._tokenizer.encode(rendered.user, add_special_tokens=True).ids
            added = self._spec.template.rpartition("{prompt}")[2]
        else:
            text, added = self._chat(rendered.messages)
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        # Only the text after the question counts: a question may contain <think>.
        return EncodedPrompt(ids, np.asarray(ids, dtype="<i4").tobytes(), ends_inside_thought(added))


def _load_tokenizer(model: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if file.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerProblem(f"{file}: not a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    from transformers import AutoTokenizer  # imports torch: seconds, which models with a tokenizer.json save

    try:
        converted: Tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True).backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:
        raise TokenizerProblem(
            f"{model}: no tokenizer.json, and transformers cannot make one: {error}"
        ) from error
    return converted


def _chat_template(model: Path) -> Callable[[list[dict[str, str]]], tuple[str, str]]:
    """Renders as ``AutoTokenizer.apply_chat_template``, without loading its tokenizer (and torch).

    The function returns the text, and the part that the generation prompt adds to it.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    file, config = model / "chat_template.jinja", _json(model / "tokenizer_config.json")
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str) or not template:
        raise TokenizerProblem(f"{model}: the tokenizer has no chat template; use task.prompt.format: Raw")
    special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}

    def render(messages: list[dict[str, str]]) -> tuple[str, str]:
        (bare,), _ = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=False, **special
        )
        (text,), _ = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True, **special
        )
        return text, text[len(os.path.commonprefix([bare, text])) :]  # noqa: RUF071 - of texts, not paths

    return render


def _token_text(token: object) -> str | None:
    """A special token as ``tokenizer_config.json`` writes it: a string, or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _stop_token_ids(model: Path, tokenizer: Tokenizer) -> list[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(model / name).get("eos_token_id")
        ids.update(_integers(value))
    text = _token_text(_json(model / "tokenizer_config.json").get("eos_token"))
    if text is not None and (token_id := tokenizer.token_to_id(text)) is not None:
        ids.add(token_id)
    if not ids:
        raise TokenizerProblem(
            f"{model}: no end-of-sequence token: give eos_token in tokenizer_config.json or eos_token_id in "
            "generation_config.json"
        )
    return sorted(ids)


def _integers(value: object) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return (v for v in values if isinstance(v, int))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerProblem(f"{path}: not JSON: {error}") from error
    return loaded if isinstance(loaded, dict) else {}
