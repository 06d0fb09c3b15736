"""Verifiers: a verdict on a completion, with a score in [0, 1].

========================  ===================================================================================
``exact``                 the answer as text, stripped, case-sensitive
``number``                one number, compared exactly as a rational: all of a box or answer tag, or the last one in prose
``math-verify``           mathematical equality: LaTeX with units, lists, sets, intervals, equations, matrices, words
``reasoning-gym``         the task's own scorer, with its partial credit
other names               of installed packages (:mod:`.plugins`)
========================  ===================================================================================

docs/tasks.md has the rules form by form. All score :func:`~scalerl_tasks.answers.extraction.extract_answer` of the
completion. They do not limit the time or memory of grading a completion; :class:`~scalerl_tasks.GradingPool` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scalerl_tasks.answers.verifiers import ExactVerifier, MathVerifier, NumberVerifier
from scalerl_tasks.environments.environment_verifier import EnvironmentConfig, EnvironmentVerifier
from scalerl_tasks.environments.protocol import Continued
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.gym import GymTask, ReasoningGymVerifier
from scalerl_tasks.plugins import Plugin, PluginVerifier
from scalerl_tasks.programs.verifier import CodeConfig, CodeVerifier
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.python_function import PythonFunction
from scalerl_tasks.python_verifier import PythonVerifier
from scalerl_tasks.verdict import Verdict


class Verifier(Protocol):
    """Scores completions of one task.

    A verifier whose verdicts have parts declares them in an attribute ``part_names: Sequence[str]``; one with rewards outside
    [0, 1], their ``range: tuple[float, float]``. One that scores the completions of a prompt together has ``whole = True`` and a
    method ``score_group(prompt, completions)``, which returns a list. With ``trusted = True`` it has no audit guard. With
    ``finds_answers = True``, its scores of completions without an answer are :data:`~scalerl_tasks.verdict.NO_ANSWER`.
    """

    @property
    def name(self) -> str: ...

    def score(self, prompt: Prompt, completion: str, /) -> Verdict | Continued | float | None:
        """The completion's verdict, or, without parts, its score in [0, 1] as a number or bool; None if the verifier does not apply
        to the prompt. Of an environment, also a step after which the episode goes on.

        Raises:
            VerifierError: this verifier cannot use the prompt's answer.
            Exception: any exception of a task's scorer.
        """

    def check(self, prompt: Prompt, /) -> None:
        """Check, before training, that a prompt can be graded and that some reply can score 1. Takes milliseconds, whatever the answer.

        Raises:
            VerifierError: this verifier cannot use its answer; the message has it, what is compared, and the remedy.
        """

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        """Prompts with correct completions, to test the verifier before use. Grading them also imports and caches its
        dependencies.
        """


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """A verifier by name; small and picklable, so that a grading process can open it.

    Attributes:
        name: one of :data:`VERIFIERS`, or of an installed package.
        task: for ``reasoning-gym``: the task with the scorer.
        python: a function of the user, in place of one of :data:`VERIFIERS`.
        code: settings of programs, in place of one of :data:`VERIFIERS`.
        plugin: the verifier of an installed package; default: that of the name, without parameters.
        environment: an environment, in place of one of :data:`VERIFIERS`; it is asked for steps.
    """

    name: str
    task: GymTask | None = None
    python: PythonFunction | None = None
    code: CodeConfig | None = None
    plugin: Plugin | None = None
    environment: EnvironmentConfig | None = None


def open_verifier(config: VerifierConfig) -> Verifier:
    """Open a verifier.

    Raises:
        VerifierError: unknown name, or an option that this verifier does not have.
        SourceError: ``reasoning-gym``: its task cannot be opened.
    """
    if config.python is not None:
        return PythonVerifier(config.python)
    if config.code is not None:
        return CodeVerifier(config.code)
    if config.environment is not None:
        return EnvironmentVerifier(config.environment)
    if config.name == "reasoning-gym":
        if config.task is None:
            raise VerifierError("the verifier 'reasoning-gym' needs a reasoning-gym task as its source")
        return ReasoningGymVerifier(config.task)
    if config.name not in _OPENERS:
        return PluginVerifier(config.plugin or Plugin(config.name))
    if config.task is not None:
        raise VerifierError(f"only the verifier 'reasoning-gym' takes a task, not {config.name!r}")
    return _OPENERS[config.name]()


_OPENERS: dict[str, Callable[[], Verifier]] = {
    one.name: one for one in (ExactVerifier, NumberVerifier, MathVerifier)
}
VERIFIERS = (*_OPENERS, "reasoning-gym")
"""Names of the verifiers of this package."""
