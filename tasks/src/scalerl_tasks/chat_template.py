"""A chat template: the text of prompts, and of an environment's messages after a reply.

transformers renders it without its tokenizers, which import torch; it is imported on first use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from scalerl_tasks.errors import TokenizerError
from scalerl_tasks.prompts import RenderedPrompt
from scalerl_tasks.thoughts import THOUGHT, ends_inside_thought

if TYPE_CHECKING:
    from scalerl_tasks.environments.tool_calls import ToolsConfig

_ROLES_CACHED = 256
_MARK = "\ue000"
"""A private character in place of a text."""
_CALL = "<tool_call>"
_ARGUMENT = "argument-7"
"""In place of a call's argument."""
_THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


class ChatTemplate:
    """A chat template with a run's system message and tools.

    Args:
        special: text of each special token, by name.
        ends: texts of the tokens that end a reply.
        tools: the tools of the task's environment, which the template describes to the model.
        field: the path of the prompt format in the spec, for messages.
    """

    def __init__(
        self,
        text: str,
        *,
        special: Mapping[str, str],
        ends: Sequence[str],
        system: str | None,
        tools: ToolsConfig | None,
        field: str,
    ) -> None:
        self._text, self._special, self._ends = text, special, ends
        self._system, self._tools, self._field = system, tools, field
        self.around = lru_cache(_ROLES_CACHED)(self._written_around)
        """What the template writes before, between and after messages of these roles."""

    def render(self, prompt: RenderedPrompt, *, generation_prompt: bool) -> str:
        """The text of a prompt's messages.

        Raises:
            TokenizerError: the template refuses them.
        """
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
                chat_template=self._text,
                add_generation_prompt=generation_prompt,
                tools=self._tools.schemas if self._tools is not None and tools else None,
                **self._special,
            )
        except TemplateError as error:
            raise TokenizerError(
                f"{self._field}: the chat template refuses the prompt: {error}: use another system or format"
            ) from error
        return str(text)

    def opens_thought(self, prompt: RenderedPrompt) -> bool:
        """Whether the chat template opens a thought that the completion continues.

        Only the text after the question counts: a question may contain ``<think>``.
        """
        bare, text = (self.render(prompt, generation_prompt=added) for added in (False, True))
        return ends_inside_thought(text[len(os.path.commonprefix([bare, text])) :])  # noqa: RUF071 - of texts, not paths

    def between(self, messages: Sequence[tuple[str, str]]) -> str:
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

    def _written_around(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        """What the chat template writes before, between and after messages of these roles."""
        marks = [f"{_MARK}{at}{_MARK}" for at in range(len(roles))]
        text, pieces = self.between(list(zip(roles, marks, strict=True))), []
        for role, mark in zip(roles, marks, strict=True):
            before, found, text = text.partition(mark)
            if not found or mark in text:
                raise TokenizerError(
                    f"{self._field}: the chat template does not write a message of the role {role!r} once, in order, after a reply; "
                    "give a chatTemplate that does, or the message a role that it knows"
                )
            pieces.append(before)
        return (*pieces, text)

    def check_turns(self) -> None:
        """Check that messages of an environment can follow a reply.

        Raises:
            TokenizerError: messages after a reply change what the template writes before them. Or it does not describe the
                environment's tools, or writes or asks for calls in another format.
        """
        self._check_tools()
        prompt = RenderedPrompt("a", self._system)
        first = self.render(prompt, generation_prompt=True)
        if self.opens_thought(prompt):
            first = first[: first.rindex(THOUGHT)]
        turns = (("user", "a"), ("assistant", _MARK))
        later = self.render(RenderedPrompt("a", self._system, turns), generation_prompt=True)
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
        elif (self._tools.format == "Hermes") != (_CALL in text):
            wanted = "Hermes" if _CALL in text else "Llama3, or Text"
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


def _reads(tools: ToolsConfig, reply: str) -> bool:
    """Whether a reply has the call of :meth:`ChatTemplate._written_call` in the tools' format."""
    return [getattr(call, "argument", None) for call in tools.read_calls(reply)] == [_ARGUMENT]
