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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from scalerl_tasks.answers.extraction import extract, extract_answer
from scalerl_tasks.answers.quantity import Quantity, last_quantity, read_quantity, same_quantity
from scalerl_tasks.environments.protocol import Continued
from scalerl_tasks.environments.verifier import EnvironmentConfig, EnvironmentVerifier
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.gym import GymTask, ReasoningGymSource
from scalerl_tasks.plugins import Plugin, PluginVerifier
from scalerl_tasks.programs.verifier import CodeConfig, CodeVerifier
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.python_verifier import PythonFunction, PythonVerifier
from scalerl_tasks.verdict import NO_ANSWER, Verdict

_SAMPLES = 3
_MATH_SAMPLES = (
    (r"\frac{1}{2}", "0.5"),
    (r"x^2-1", "(x-1)(x+1)"),
    (r"(1,2]", "(1,2]"),
    ("2", "x = 2"),
    (r"|x-1|", r"\boxed{|1-x|}"),
)


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
        ...

    def check(self, prompt: Prompt, /) -> None:
        """Check, before training, that a prompt can be graded and that some reply can score 1. Takes milliseconds, whatever the answer.

        Raises:
            VerifierError: this verifier cannot use its answer; the message has it, what is compared, and the remedy.
        """
        ...

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        """Prompts with correct completions, to test the verifier before use. Grading them also imports and caches its
        dependencies.
        """
        ...


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
    if config.name not in VERIFIERS:
        return PluginVerifier(config.plugin or Plugin(config.name))
    if config.task is not None and config.name != "reasoning-gym":
        raise VerifierError(f"only the verifier 'reasoning-gym' takes a task, not {config.name!r}")
    return _OPENERS[config.name](config)


class ExactVerifier:
    """1 when the answer is the reference answer, both stripped; 0 otherwise."""

    name = "exact"
    finds_answers = True

    def score(self, prompt: Prompt, completion: str, /) -> float:
        reference = prompt.answer.strip()
        if not reference:
            raise VerifierError(f"prompt {prompt.id} has no answer for the verifier 'exact' to compare with")
        answer = extract_answer(completion)
        return float(answer == reference) if answer else NO_ANSWER

    def check(self, prompt: Prompt, /) -> None:
        _check_reference(self, prompt)
        final = _after_mark(prompt.answer)
        if final is not None:
            raise VerifierError(
                f"prompt {prompt.id}: its answer {_shown(prompt.answer)} is a solution with its result after ####, which no "
                f"reply is equal to; write only the result, {final[:80]!r}"
            )

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        return [(Prompt("sample", "", "1"), "1")]


class NumberVerifier:
    """1 when the number that the answer is equals the reference, exactly; 0 otherwise.

    In a box or answer tag, all of the content has to be one number (:func:`~scalerl_tasks.answers.quantity.read_quantity`). In prose, the
    last number is the answer (:func:`~scalerl_tasks.answers.quantity.last_quantity`).
    """

    name = "number"
    finds_answers = True

    def score(self, prompt: Prompt, completion: str, /) -> float:
        wanted = _reference_quantity(prompt.answer)
        if wanted is None:
            if any("0" <= character <= "9" for character in prompt.answer):
                return 0.0  # more than a number: nothing equals it
            raise VerifierError(_no_number(prompt))
        text, enclosed = extract(completion)
        given = read_quantity(text) if enclosed else last_quantity(text)
        return NO_ANSWER if given is None else float(same_quantity(wanted, given))

    def check(self, prompt: Prompt, /) -> None:
        if _reference_quantity(prompt.answer) is None:
            raise VerifierError(_no_number(prompt))
        _check_reference(self, prompt, _after_mark(prompt.answer))

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        return [(Prompt("sample", "", "1"), "1")]


class ReasoningGymVerifier:
    """The task's own scorer, with its own partial credit.

    The scorer that most tasks share scores a wrong answer that contains the right one with len(right)/len(given), and many
    scorers give 0.01 for any answer. ``exact`` and ``number`` score only the correct answer.
    """

    name = "reasoning-gym"
    finds_answers = True

    def __init__(self, task: GymTask) -> None:
        self._task = task
        self._data = task.create()

    def score(self, prompt: Prompt, completion: str, /) -> float:
        answer = extract_answer(completion)
        if not answer:
            return NO_ANSWER
        score = float(self._data.score_answer(answer, _entry(prompt)))
        if not math.isfinite(score):
            raise ValueError(f"the scorer of {self._task.name!r} gave {score}")
        return min(1.0, max(0.0, score))

    def check(self, prompt: Prompt, /) -> None:
        if prompt.answer and not self.score(prompt, prompt.answer) > 0:
            raise VerifierError(
                f"prompt {prompt.id}: the scorer of {self._task.name!r} gives its own answer {_shown(prompt.answer)} no score; "
                "use another verifier or task"
            )

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        source = ReasoningGymSource(self._task)
        prompts = [source[index] for index in range(min(_SAMPLES, len(source)))]
        return [(prompt, prompt.answer) for prompt in prompts if prompt.answer]


class MathVerifier:
    """1 when the answer is mathematically equal to the reference answer (:mod:`scalerl_tasks.answers.node_equality`); 0 otherwise."""

    name = "math-verify"
    finds_answers = True

    def __init__(self) -> None:
        # Imported here: it imports sympy and antlr, which no other verifier needs.
        from scalerl_tasks.answers import node_equality

        self._symbolic = node_equality

    def score(self, prompt: Prompt, completion: str, /) -> float:
        text, enclosed = extract(completion)
        equal = self._symbolic.equivalent(self._reference(prompt), text, enclosed)
        return NO_ANSWER if equal is None else float(equal)

    def check(self, prompt: Prompt, /) -> None:
        reference = self._reference(prompt)
        if not self._symbolic.can_be_met(reference):
            raise VerifierError(
                f"prompt {prompt.id}: its answer {_shown(prompt.answer)}, read as {reference.text[:80]!r}, cannot be met by any "
                "reply; write it as LaTeX with balanced braces, or use the verifier exact"
            )

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        return [(Prompt("sample", "", answer), completion) for answer, completion in _MATH_SAMPLES]

    def _reference(self, prompt: Prompt) -> Any:
        reference = self._symbolic.read_reference(prompt.answer)
        if not reference.text:
            raise VerifierError(
                f"prompt {prompt.id}: math-verify cannot read its answer {_shown(prompt.answer)}; "
                f"write it as LaTeX, or use the verifier exact"
            )
        return reference


def _check_reference(verifier: Verifier, prompt: Prompt, reference: str | None = None) -> None:
    """Grade a prompt's reference as a reply: alone, in a box and in an answer tag.

    Raises:
        VerifierError: none of them scores 1.
    """
    answer = prompt.answer if reference is None else reference
    replies = (answer, f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>")
    if not any(verifier.score(prompt, reply) == 1 for reply in replies):
        found = extract_answer(answer)
        fix = (
            f"write it as {found[:80]!r}"
            if found and found != answer.strip()
            else "write only the final answer"
        )
        raise VerifierError(
            f"prompt {prompt.id}: no reply can score with its answer {_shown(prompt.answer)} and the verifier "
            f"{verifier.name!r}: of that text as a reply, {found[:80]!r} is compared; {fix}"
        )


def _after_mark(answer: str) -> str | None:
    """The result of a solution in the form of GSM8K, after ``####``; None if there is no such mark."""
    _, marked, final = answer.rpartition("####")
    return final.strip() if marked else None


@lru_cache(maxsize=4096)
def _reference_quantity(answer: str) -> Quantity | None:
    final = _after_mark(answer)
    return read_quantity(extract(answer if final is None else final).text)


def _no_number(prompt: Prompt) -> str:
    problem = "has no number" if not any("0" <= c <= "9" for c in prompt.answer) else "is not one number"
    return (
        f"prompt {prompt.id}: its answer {_shown(prompt.answer)} {problem}; write only the number, or use the verifier exact or "
        "math-verify"
    )


def _shown(answer: str) -> str:
    return repr(answer if len(answer) <= 80 else answer[:40] + " … " + answer[-40:])


def _entry(prompt: Prompt) -> dict[str, Any]:
    return {"question": prompt.text, "answer": prompt.answer or None, "metadata": dict(prompt.metadata)}


def _open_reasoning_gym(config: VerifierConfig) -> Verifier:
    if config.task is None:
        raise VerifierError("the verifier 'reasoning-gym' needs a reasoning-gym task as its source")
    return ReasoningGymVerifier(config.task)


_OPENERS: dict[str, Callable[[VerifierConfig], Verifier]] = {
    "exact": lambda config: ExactVerifier(),
    "number": lambda config: NumberVerifier(),
    "math-verify": lambda config: MathVerifier(),
    "reasoning-gym": _open_reasoning_gym,
}
VERIFIERS = tuple(_OPENERS)
"""Names of the verifiers of this package."""
