"""Sources and verifiers of installed packages, which :mod:`scalerl_api.registry` finds.

A verifier may also have what :class:`~scalerl_tasks.verifiers.Verifier` has: ``check``, ``part_names``, ``range``, ``whole`` and ``score_group``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

from scalerl_api.registry import Kind, PluginError, entry_point, make
from scalerl_tasks.code_digest import keep_code
from scalerl_tasks.errors import SourceError, TaskError, VerifierError
from scalerl_tasks.prompts import Prompt, PromptSource
from scalerl_tasks.verdict import SCORE_RANGE, Verdict, as_verdict, declared_parts


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point, and the arguments of its class; picklable."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    range: tuple[float, float] = SCORE_RANGE
    """Lowest and highest reward of a verifier."""
    digest: str = ""
    """Of its code; other code is refused. Empty: any."""


def entry_of(kind: Kind, name: str) -> EntryPoint:
    """The entry point of an installed verifier or environment.

    Raises:
        VerifierError: see :func:`~scalerl_api.registry.entry_point`.
    """
    try:
        return entry_point(kind, name)
    except PluginError as error:
        raise VerifierError(str(error)) from error


def _made(kind: Kind, plugin: Plugin) -> Any:
    try:
        if plugin.digest:
            keep_code(plugin.digest, module=entry_point(kind, plugin.name).module)
        return make(kind, plugin.name, plugin.parameters)
    except PluginError as error:
        raise error.__cause__ if isinstance(error.__cause__, TaskError) else TaskError(str(error)) from error


class PluginVerifier:
    """A verifier of a package, with defaults for what it does not have.

    Raises:
        VerifierError: it cannot be made.
    """

    trusted = True

    def __init__(self, plugin: Plugin) -> None:
        try:
            own = _made(Kind.VERIFIER, plugin)
        except TaskError as error:
            raise VerifierError(str(error)) from error
        self.whole = bool(getattr(own, "whole", False))
        wanted = "score_group" if self.whole else "score"
        if not callable(getattr(own, wanted, None)):
            raise VerifierError(f"plugin {plugin.name!r}: {type(own).__name__} has no method {wanted}")
        self.name = self.label = plugin.name
        self.part_names = tuple(getattr(own, "part_names", ()))
        self.range = getattr(own, "range", plugin.range)
        self.finds_answers = bool(getattr(own, "finds_answers", False))
        self._own = own

    def score(self, prompt: Prompt, completion: str, /) -> Verdict | float | None:
        found: Verdict | float | None = (
            self.score_group(prompt, [completion])[0] if self.whole else self._own.score(prompt, completion)
        )
        return found

    def score_group(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[Any]:
        found: Sequence[Any] = self._own.score_group(prompt, completions)
        if len(found) != len(completions):
            raise VerifierError(
                f"{self.label} returned {len(found)} rewards for {len(completions)} completions of the prompt {prompt.id}"
            )
        return found

    def check(self, prompt: Prompt, /) -> None:
        if hasattr(self._own, "check"):
            self._own.check(prompt)
            return
        try:
            found = self.score(prompt, prompt.answer)
            if found is not None:
                as_verdict(found, declared_parts(self), self.range)
        except TaskError:
            raise
        except Exception as error:
            raise VerifierError(
                f"{self.label}, for the prompt {prompt.id}: {type(error).__name__}: {error}"
            ) from None

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        samples: Sequence[tuple[Prompt, str]] = self._own.samples() if hasattr(self._own, "samples") else []
        return samples


def open_plugin_source(plugin: Plugin) -> PromptSource:
    """The source of a package.

    Raises:
        SourceError: it cannot be made, or lacks a method.
    """
    try:
        source = _made(Kind.SOURCE, plugin)
    except SourceError:
        raise
    except TaskError as error:
        raise SourceError(str(error)) from error
    for name in ("__len__", "__getitem__", "digest"):
        if not hasattr(source, name):
            raise SourceError(
                f"plugin {plugin.name!r}: {type(source).__name__} has no {name}; see PromptSource in docs/tasks.md"
            )
    try:
        first = [source[0]] if len(source) else []
    except (Exception, SystemExit) as error:
        raise SourceError(f"plugin {plugin.name!r}: its item 0: {type(error).__name__}: {error}") from error
    if first and not isinstance(first[0], Prompt):
        raise SourceError(
            f"plugin {plugin.name!r}: its item 0 is {type(first[0]).__name__}, not scalerl_tasks.Prompt"
        )
    made: PromptSource = source if hasattr(source, "difficulty") else _WithoutDifficulty(source)
    return made


class _WithoutDifficulty:
    def __init__(self, source: Any) -> None:
        self._source = source
        self.digest: str = source.digest

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> Prompt:
        prompt: Prompt = self._source[index]
        return prompt

    def difficulty(self, index: int, /) -> float | None:
        return self[index].difficulty
