"""Prompts and completions of a run as tokens and text, for the server and the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalerl_api.spec import PromptSpec
from scalerl_api.wire import prompt_digest
from scalerl_tasks.prompts import Prompt, RenderedPrompt, check_template, render_prompt
from scalerl_tasks.text import ModelTokenizer

_CACHED_PROMPTS = 8192


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

    @cached_property
    def key(self) -> str:
        """The prompt's digest in hex, which its requests are named by."""
        return prompt_digest(self.wire).hex()


class PromptCodec:
    """The tokenizer of one run: prompts in, completion text out.

    Args:
        model: see :class:`scalerl_tasks.text.ModelTokenizer`.
        spec: the run's template and format.
        context_tokens: longest prompt + completion.
        field: path of ``spec`` in the run's.

    Raises:
        TokenizerError: no tokenizer, no end token, or no chat template where one is asked for.
        TemplateError: a bad ``task.prompt.template``.
    """

    def __init__(
        self, model: Path, spec: PromptSpec, context_tokens: int, field: str = "task.prompt"
    ) -> None:
        self._spec = spec
        self._context_tokens = context_tokens
        check_template(spec.template)
        self.tokenizer = ModelTokenizer(model, spec, field)
        self._encode = lru_cache(_CACHED_PROMPTS)(self._encode_rendered)

    def encode(self, prompt: Prompt, max_tokens: int) -> EncodedPrompt:
        """Tokens of a prompt in the run's template.

        Raises:
            PromptTooLong: prompt and ``max_tokens`` do not fit in the context.
            TokenizerError: the chat template refuses the prompt.
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
        return self.tokenizer.decode([ids.tolist() for ids in completions])

    def _encode_rendered(self, rendered: RenderedPrompt) -> EncodedPrompt:
        (ids,) = self.tokenizer.encode_prompts([rendered])
        wire = np.asarray(ids, dtype="<i4").tobytes()
        return EncodedPrompt(ids, wire, self.tokenizer.opens_thought(rendered))
