"""Counts the tokens of prompts without importing torch.

The ``tokenizers`` library reads ``tokenizer.json`` in milliseconds, and transformers renders a chat template without its
tokenizers (which import torch, five seconds). ``AutoTokenizer`` opens only a folder without ``tokenizer.json`` or whose
config has no end token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scalerl_tasks import RenderedPrompt
from scalerl_trainer.errors import TokenizerError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenCounter:
    """Counts tokens with the tokenizer of a model folder, as the generator does.

    Raises:
        TokenizerError: there is no tokenizer, no end token, or, with ``chat``, no chat template.
        ModelNotFoundError: transformers cannot open it either.
    """

    def __init__(self, directory: Path, *, chat: bool) -> None:
        config = _json(directory / "tokenizer_config.json")
        tokenizer = _from_file(directory / "tokenizer.json")
        end = _text(config.get("eos_token"))
        if tokenizer is None or end is None or tokenizer.token_to_id(end) is None:
            tokenizer = _from_transformers(directory, tokenizer)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._render = _chat_template(directory, config) if chat else None

    def prompts(self, prompts: Sequence[RenderedPrompt]) -> list[int]:
        """Tokens of each prompt: with the tokenizer's special tokens, or only those of the chat template."""
        if self._render is None:
            return self._count([prompt.user for prompt in prompts], special=True)
        return self._count([self._render(prompt.messages) for prompt in prompts], special=False)

    def completions(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without the end token."""
        return self._count(list(texts), special=False)

    def _count(self, texts: list[str], special: bool) -> list[int]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        return [len(one.ids) for one in encoded]


def _from_file(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{file.name} is not a tokenizer: {error}") from error


def _from_transformers(directory: Path, own: Any) -> Any:
    from scalerl_trainer.models.load import load_tokenizer

    found = load_tokenizer(str(directory))
    backend = own or getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(
            "the model has no tokenizer.json, and transformers cannot make one: save its fast tokenizer with it"
        )
    return backend


def _chat_template(directory: Path, config: dict[str, Any]) -> Callable[[list[dict[str, str]]], str]:
    file = directory / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str) or not template:
        raise TokenizerError(
            "the tokenizer has no chat template: use prompt format Raw, or add chat_template.jinja"
        )
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {name: text for name in _SPECIAL if (text := _text(config.get(name))) is not None}

    def render(messages: list[dict[str, str]]) -> str:
        texts: list[str]
        texts, _ = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True, **special
        )
        return texts[0]

    return render


def _text(token: object) -> str | None:
    """A special token of ``tokenizer_config.json``: a string, or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file.name} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
