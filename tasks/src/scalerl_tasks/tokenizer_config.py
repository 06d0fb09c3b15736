"""Tokenizer settings in the JSON files of a model folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from scalerl_tasks.errors import TokenizerError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerConfig:
    """What the files say, read without opening the tokenizer."""

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
        config = read_json(model / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # transformers, too, reads the older file only then
            config |= read_json(model / "special_tokens_map.json")
        tokens = {name: _token_text(config.get(name)) for name in _SPECIAL}
        ends = []
        for name in ("generation_config.json", "config.json"):
            value = read_json(model / name).get("eos_token_id")
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


def _token_text(token: object) -> str | None:
    """A special token in a JSON file: a string, or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file, or something else in it.

    Raises:
        TokenizerError: it is not JSON.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"model: {file.name} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
