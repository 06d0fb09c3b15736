"""Prompts, sources of prompts, and templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from scalerl_tasks.errors import TemplateError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, with the data for grading an answer.

    Attributes:
        id: stable and unique within its source: the same source always gives the same prompt the same id.
        text: the user's message, without any chat template.
        answer: the reference answer; empty if a task has none (its scorer then uses ``metadata``).
        solution: a worked solution for a supervised warm start, if the source has one.
        difficulty: higher is harder, on the source's own scale (operations for arithmetic), if known.
        metadata: input of the task's scorer; picklable, not necessarily JSON.
        labels: names by which results are broken down, such as ``{"context": "zoo"}``.
        system: the prompt's own system message, in place of that of the spec.
        turns: role and text of earlier messages of a conversation, which ``text`` ends.
        graph: a hash, in hex, that is equal for problems that differ only in their names; empty if the source has none.
    """

    id: str
    text: str
    answer: str
    solution: str | None = None
    difficulty: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    graph: str = ""
    system: str | None = None
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def worked_solution(self) -> str:
        """The target of a supervised warm start: the solution, or the bare answer if there is none.

        Raises:
            ValueError: the prompt has neither.
        """
        target = self.solution if self.solution is not None else self.answer
        if not target:
            raise ValueError(
                f"prompt {self.id} has no solution and no answer: it cannot be a supervised example"
            )
        return target


class PromptSource(Protocol):
    """A fixed, finite sequence of prompts, read by index; safe to read from several threads."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that defines the sequence: equal digests mean equal prompts in equal order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt:
        """The prompt at ``index`` (0 ≤ index < len).

        Raises:
            IndexError: the index is negative or too large.
            SourceError: the file or task behind the source has changed or fails.
        """

    def difficulty(self, index: int, /) -> float | None:
        """The difficulty of the prompt at ``index``, if known; at most as expensive as reading the prompt.

        Raises:
            IndexError, SourceError: as when reading the prompt.
        """


def check_index(index: int, size: int) -> None:
    """Raise IndexError unless 0 ≤ index < size."""
    if not 0 <= index < size:
        raise IndexError(f"prompt index {index} is outside 0..{size - 1}")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt in its template, ready for a chat template or, without one, for the tokenizer."""

    user: str
    system: str | None = None
    turns: tuple[tuple[str, str], ...] = ()
    """Role and text of earlier messages."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages for a chat template."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        earlier = [{"role": role, "content": text} for role, text in self.turns]
        return [*head, *earlier, {"role": "user", "content": self.user}]


# Doubled braces are literal braces; a brace pair around a name is a placeholder; every other brace is literal, so
# "\boxed{}" needs no escape.
_BRACES = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_.\-]*)\}")


def check_template(template: str) -> None:
    """Check a template once, before any prompt is rendered.

    Raises:
        TemplateError: a placeholder other than ``{prompt}``, or no ``{prompt}`` at all.
    """
    names = [match[1] for match in _BRACES.finditer(template) if match[1] is not None]
    for name in names:
        if name != "prompt":
            raise TemplateError(
                f"template has the unknown placeholder {{{name}}}: only {{prompt}} is known; "
                f"write {{{{{name}}}}} for the literal text {{{name}}}"
            )
    if not names:
        raise TemplateError("template has no {prompt}: put {prompt} where the task's text goes")


def render_prompt(prompt: Prompt, template: str | None = None, system: str | None = None) -> RenderedPrompt:
    r"""Put a prompt's text into a template.

    Only ``{prompt}`` is replaced; the inserted text is not scanned again; ``{{`` and ``}}`` give literal braces;
    braces that enclose no name stay.

    Raises:
        TemplateError: see :func:`check_template`.

    >>> ask = Prompt(id="1", text="2 + {x}?", answer="4")
    >>> render_prompt(ask, "{prompt} Answer in \\boxed{}.").user
    '2 + {x}? Answer in \\boxed{}.'
    """
    system = prompt.system if prompt.system is not None else system
    if template is None:
        return RenderedPrompt(prompt.text, system, prompt.turns)
    check_template(template)

    def replace(match: re.Match[str]) -> str:
        return prompt.text if match[1] is not None else match[0][0]

    return RenderedPrompt(_BRACES.sub(replace, template), system, prompt.turns)
