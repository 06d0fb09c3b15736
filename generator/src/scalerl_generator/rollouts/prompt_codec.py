"""Encodes prompts to tokens for the server and the wire, and decodes completions to text for the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalerl_api.spec import PromptSpec
from scalerl_api.wire import prompt_digest
from scalerl_tasks.environments.protocol import Message
from scalerl_tasks.environments.tool_calls import ToolsConfig
from scalerl_tasks.prompts import Prompt, RenderedPrompt, check_template, render_prompt
from scalerl_tasks.tokenizer import ModelTokenizer

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
    """Whether the template opens a thought that the completion continues."""

    @cached_property
    def key(self) -> str:
        """The prompt's digest in hex, which is part of its request ids."""
        return prompt_digest(self.wire).hex()


class PromptCodec:
    """The tokenizer of a run with one prompt format.

    Args:
        model: see :class:`scalerl_tasks.tokenizer.ModelTokenizer`.
        spec: template and format of the prompts.
        context_tokens: maximum length of prompt plus completion.
        field: path of ``spec`` in the run's spec, for errors.
        tools: as for :class:`scalerl_tasks.tokenizer.ModelTokenizer`.

    Raises:
        TokenizerError: the model has no tokenizer, no end token, or no chat template although the format needs one.
        TemplateError: ``task.prompt.template`` is invalid.
    """

    def __init__(
        self,
        model: Path,
        spec: PromptSpec,
        context_tokens: int,
        field: str = "task.prompt",
        tools: ToolsConfig | None = None,
    ) -> None:
        self.tools = tools
        self._spec = spec
        self._context_tokens = context_tokens
        check_template(spec.template)
        self.tokenizer = ModelTokenizer(model, spec, field, tools)
        self._encode = lru_cache(_CACHED_PROMPTS)(self._encode_rendered)

    def encode(self, prompt: Prompt, max_tokens: int) -> EncodedPrompt:
        """Render a prompt in the template, and encode it.

        Raises:
            PromptTooLong: the prompt and ``max_tokens`` of completion do not fit in the context.
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

    def messages(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Token ids of an environment's messages after a reply, shape ``[tokens]``.

        Raises:
            TokenizerError: the chat template refuses the messages.
        """
        return np.array(self.tokenizer.encode_messages([(m.role, m.content) for m in messages]), np.int32)

    def texts(self, completions: Sequence[NDArray[np.int32]]) -> list[str]:
        """The text of each completion for the verifier, without the end token but with other special tokens."""
        return self.tokenizer.decode([ids.tolist() for ids in completions])

    def _encode_rendered(self, rendered: RenderedPrompt) -> EncodedPrompt:
        (ids,) = self.tokenizer.encode_prompts([rendered])
        wire = np.asarray(ids, dtype="<i4").tobytes()
        return EncodedPrompt(ids, wire, self.tokenizer.opens_thought(rendered))
