"""An environment in a grading process, which is asked for steps as a verifier is asked for scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from scalerl_tasks.environments.nim import Nim
from scalerl_tasks.environments.protocol import (
    Continued,
    Environment,
    checked_step,
    read_replies,
    write_replies,
)
from scalerl_tasks.environments.tool_environment import Tools
from scalerl_tasks.errors import VerifierError, did_you_mean
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.python_function import PythonFunction, described, imported
from scalerl_tasks.verdict import SCORE_RANGE, Verdict, declared_parts

ENVIRONMENTS: Final[Mapping[str, Callable[..., Environment]]] = {"nim": Nim, "tools": Tools}
"""Those of this project that make their steps in a process of a generator, by name. ``scalerl_api.built_in`` has all names, with
``retry``, whose steps the task's verifier makes (:mod:`.episodes`), and ``server``, whose steps are made elsewhere (:mod:`.server_grader`)."""


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """An environment by name, or a class of the user; picklable."""

    name: str = ""
    python: PythonFunction | None = None
    """The class as a function; in place of ``name``."""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The environment, for errors."""
        return self.name if self.python is None else self.python.label


class EnvironmentVerifier:
    """The environment of a config as a verifier; a completion is :func:`~.protocol.write_replies` of an episode's replies.

    Raises:
        VerifierError: there is no such environment, file, module or class, or it cannot be made with these parameters.
    """

    name = "environment"

    def __init__(self, config: EnvironmentConfig) -> None:
        self.label, self.trusted = config.label, config.python is not None
        self._file: str | None = None
        self._environment = self._opened(config)
        self.part_names: Sequence[str] = tuple(getattr(self._environment, "part_names", ()))
        self.range: tuple[float, float] = getattr(self._environment, "range", SCORE_RANGE)

    def _opened(self, config: EnvironmentConfig) -> Environment:
        if config.python is None:
            if config.name not in ENVIRONMENTS:
                raise VerifierError(
                    f"unknown environment {config.name!r}{did_you_mean(config.name, ENVIRONMENTS)}"
                )
            made: Any = ENVIRONMENTS[config.name]
        else:
            module = imported(config.python, "environment.python")
            self._file = getattr(module, "__file__", None)
            made = getattr(module, config.python.function, None)
            if not callable(made):
                raise VerifierError(
                    f"{self.label}: there is no such class; correct environment.python.className"
                )
        try:
            environment: Environment = made(**config.parameters)
        except VerifierError:
            raise
        except BaseException as error:
            raise VerifierError(
                f"{self.label} cannot be made with environment.parameters {dict(config.parameters)}: {described(error, self._file)}"
            ) from None
        if not callable(getattr(environment, "step", None)):
            raise VerifierError(f"{self.label} has no method step(prompt, replies); see docs/environments.md")
        return environment

    def open(self) -> None:
        """Start the sandboxes of this process, before its own limits.

        Raises:
            VerifierError: a sandbox cannot be set up.
        """
        if isinstance(self._environment, Tools):
            self._environment.open()

    def score(self, prompt: Prompt, completion: str, /) -> Verdict | Continued:
        """The step after the last reply.

        Raises:
            VerifierError: the environment failed, or what it returned is no step.
        """
        try:
            step = self._environment.step(prompt, read_replies(completion))
        except MemoryError:
            raise
        except BaseException as error:  # SystemExit included
            raise VerifierError(
                f"{self.label} raised {described(error, self._file)} for the prompt {prompt.id}"
            ) from None
        return checked_step(step, self.label, declared_parts(self), self.range)

    def check(self, prompt: Prompt, /) -> None:
        """Check that the environment makes a step after the reference answer, or an empty reply, and the same one again."""
        replies = write_replies([prompt.answer])
        try:
            if self.score(prompt, replies) != self.score(prompt, replies):
                raise VerifierError(
                    f"{self.label} answered the same replies in another way the second time, for the prompt {prompt.id}: a step "
                    "depends on the prompt and the replies alone; draw from a seed of prompt.id"
                )
        except (ArithmeticError, TypeError, ValueError) as error:
            raise VerifierError(f"{self.label}, for the prompt {prompt.id}: {error}") from None

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        return []
