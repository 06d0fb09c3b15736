"""Sources and verifiers of installed packages, by their entry points.

::

    [project.entry-points."scalerl.sources"]       a class or function that returns a PromptSource
    [project.entry-points."scalerl.verifiers"]     a class or function that returns an object with ``score(prompt, completion)``

It is called with ``plugin.parameters``. A verifier may also have what :class:`~scalerl_tasks.Verifier` has: ``check``, ``part_names``,
``range``, ``whole`` and ``score_group``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from scalerl_tasks.code_digest import keep_code
from scalerl_tasks.errors import SourceError, TaskError, VerifierError, did_you_mean
from scalerl_tasks.prompts import Prompt, PromptSource
from scalerl_tasks.verdict import SCORE_RANGE, Verdict, as_verdict, declared_parts

SOURCES = "scalerl.sources"
VERIFIERS = "scalerl.verifiers"


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point, and the arguments of its class; picklable."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    range: tuple[float, float] = SCORE_RANGE
    """Lowest and highest reward of a verifier."""
    digest: str = ""
    """Of its code; other code is refused. Empty: any."""


def entry_point(group: str, name: str) -> EntryPoint:
    """The entry point of a name.

    Raises:
        TaskError: no package has it, or several have.
    """
    known = entry_points(group=group)
    found = [one for one in known if one.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        values = ", ".join(sorted(one.value for one in found))
        raise TaskError(f"plugin {name!r}: several packages have it in {group}: {values}; uninstall one")
    installed = sorted({one.name for one in known})
    raise TaskError(
        f"plugin {name!r}: no installed package has it in the entry points {group}{did_you_mean(name, installed)} (installed: "
        f"{', '.join(installed) or 'none'}); install it in this environment, on a cluster in the images"
    )


def _made(group: str, plugin: Plugin) -> Any:
    entry = entry_point(group, plugin.name)
    if plugin.digest:
        keep_code(plugin.digest, module=entry.module)
    try:
        return entry.load()(**plugin.parameters)
    except TaskError:
        raise
    except BaseException as error:
        raise TaskError(f"plugin {plugin.name!r} ({entry.value}): {type(error).__name__}: {error}") from error


class PluginVerifier:
    """A verifier of a package, with defaults for what it does not have.

    Raises:
        VerifierError: it cannot be made.
    """

    name = "plugin"
    trusted = True

    def __init__(self, plugin: Plugin) -> None:
        try:
            own = _made(VERIFIERS, plugin)
        except TaskError as error:
            raise VerifierError(str(error)) from error
        self.whole = bool(getattr(own, "whole", False))
        wanted = "score_group" if self.whole else "score"
        if not callable(getattr(own, wanted, None)):
            raise VerifierError(f"plugin {plugin.name!r}: {type(own).__name__} has no method {wanted}")
        self.label, self.part_names = plugin.name, tuple(getattr(own, "part_names", ()))
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
        source = _made(SOURCES, plugin)
    except TaskError as error:
        raise SourceError(str(error)) from error
    for name in ("__len__", "__getitem__", "digest"):
        if not hasattr(source, name):
            raise SourceError(
                f"plugin {plugin.name!r}: {type(source).__name__} has no {name}; see PromptSource in docs/tasks.md"
            )
    if len(source) and not isinstance(source[0], Prompt):
        raise SourceError(
            f"plugin {plugin.name!r}: its item 0 is {type(source[0]).__name__}, not scalerl_tasks.Prompt"
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
