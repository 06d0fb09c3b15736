"""Verifiers: a verdict on a completion, with a score in [0, 1].

========================  ===================================================================================
``exact``                 the answer as text, stripped, case-sensitive
``number``                the last number, compared exactly as a rational
``math-verify``           mathematical equality by the math-verify package (LaTeX, sets, intervals, matrices)
``reasoning-gym``         the task's own scorer, with its partial credit
``opgraph-outcome``       the answer of an op-graph problem; the steps are compared and reported
``opgraph-blend``         the answer and the steps of its solution; 0 if the answer is wrong
``opgraph-strict``        the answer; 0 unless all steps are right too, and there are no others
``opgraph-verified``      the answer; 0 unless all steps of the prompt's solution are right too
========================  ===================================================================================

All score :func:`~scalerl_tasks.answer_extraction.extract_answer` of the completion. They do not limit the time or memory of
grading a completion; :class:`~scalerl_tasks.GradingPool` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scalerl_tasks.answer_extraction import extract_answer
from scalerl_tasks.errors import VerifierError, did_you_mean
from scalerl_tasks.gym import GymTask, ReasoningGymSource
from scalerl_tasks.number import equal, last_number
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import Verdict

_SAMPLES = 3
_MATH_SAMPLES = ((r"\frac{1}{2}", "0.5"), (r"x^2-1", "(x-1)(x+1)"), (r"(1,2]", "(1,2]"), ("2", "x = 2"))


class Verifier(Protocol):
    """Scores completions of one task.

    A verifier whose verdicts have parts declares them in an attribute ``part_names: Sequence[str]``.
    """

    @property
    def name(self) -> str: ...

    def score(self, prompt: Prompt, completion: str, /) -> Verdict | float:
        """The completion's verdict, or, without parts, its score in [0, 1] as a number or bool.

        Raises:
            VerifierError: this verifier cannot use the prompt's answer.
            Exception: any exception of a task's scorer.
        """
        ...

    def check(self, prompt: Prompt, /) -> None:
        """Check, before training, that a prompt can be graded.

        Raises:
            VerifierError: this verifier cannot use its answer.
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
        name: one of :data:`VERIFIERS`.
        task: for ``reasoning-gym``: the task with the scorer.
    """

    name: str
    task: GymTask | None = None


def open_verifier(config: VerifierConfig) -> Verifier:
    """Open a verifier.

    Raises:
        VerifierError: unknown name, or an option that this verifier does not have.
        SourceError: ``reasoning-gym``: its task cannot be opened.
    """
    if config.name not in VERIFIERS:
        raise VerifierError(
            f"unknown verifier {config.name!r}{did_you_mean(config.name, VERIFIERS)} (known: {', '.join(VERIFIERS)})"
        )
    if config.task is not None and config.name != "reasoning-gym":
        raise VerifierError(f"only the verifier 'reasoning-gym' takes a task, not {config.name!r}")
    return _OPENERS[config.name](config)


class ExactVerifier:
    """1 when the answer is the reference answer, both stripped; 0 otherwise."""

    name = "exact"

    def score(self, prompt: Prompt, completion: str, /) -> float:
        self.check(prompt)
        return float(extract_answer(completion) == prompt.answer.strip())

    def check(self, prompt: Prompt, /) -> None:
        if not prompt.answer.strip():
            raise VerifierError(f"prompt {prompt.id} has no answer for the verifier 'exact' to compare with")

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        return [(Prompt("sample", "", "1"), "1")]


class NumberVerifier:
    """1 when the last number in the answer equals that in the reference answer, exactly; 0 otherwise."""

    name = "number"

    def score(self, prompt: Prompt, completion: str, /) -> float:
        self.check(prompt)
        wanted, given = last_number(prompt.answer), last_number(extract_answer(completion))
        return float(wanted is not None and given is not None and equal(wanted, given))

    def check(self, prompt: Prompt, /) -> None:
        if last_number(prompt.answer) is None:
            raise VerifierError(
                f"prompt {prompt.id}: its answer {prompt.answer[:80]!r} has no number; "
                f"use the verifier exact or math-verify"
            )

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        return [(Prompt("sample", "", "1"), "1")]


class ReasoningGymVerifier:
    """The task's own scorer, with its own partial credit.

    The scorer that most tasks share scores a wrong answer that contains the right one with len(right)/len(given), and many
    scorers give 0.01 for any answer. ``exact`` and ``number`` score only the correct answer.
    """

    name = "reasoning-gym"

    def __init__(self, task: GymTask) -> None:
        self._task = task
        self._data = task.create()

    def score(self, prompt: Prompt, completion: str, /) -> float:
        answer = extract_answer(completion)
        if not answer:
            return 0.0
        score = float(self._data.score_answer(answer, _entry(prompt)))
        if not math.isfinite(score):
            raise ValueError(f"the scorer of {self._task.name!r} gave {score}")
        return min(1.0, max(0.0, score))

    def check(self, prompt: Prompt, /) -> None:
        """Accept every prompt: the task's scorer can grade any prompt of its task."""

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        source = ReasoningGymSource(self._task)
        prompts = [source[index] for index in range(min(_SAMPLES, len(source)))]
        return [(prompt, prompt.answer) for prompt in prompts if prompt.answer]


class MathVerifier:
    """1 when math-verify finds the answer equal to the reference answer; 0 otherwise."""

    name = "math-verify"

    def __init__(self) -> None:
        # Imported here: it imports sympy and antlr, which no other verifier needs.
        from scalerl_tasks import symbolic

        self._symbolic = symbolic

    def score(self, prompt: Prompt, completion: str, /) -> float:
        return float(self._symbolic.equivalent(self._gold(prompt), extract_answer(completion)))

    def check(self, prompt: Prompt, /) -> None:
        self._gold(prompt)

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        return [(Prompt("sample", "", answer), completion) for answer, completion in _MATH_SAMPLES]

    def _gold(self, prompt: Prompt) -> Any:
        gold = self._symbolic.parse_reference(prompt.answer)
        if not gold:
            raise VerifierError(
                f"prompt {prompt.id}: math-verify cannot read its answer {prompt.answer[:80]!r}; "
                f"write it as LaTeX, or use the verifier exact"
            )
        return gold


def _entry(prompt: Prompt) -> dict[str, Any]:
    return {"question": prompt.text, "answer": prompt.answer or None, "metadata": dict(prompt.metadata)}


def _open_op_graph(config: VerifierConfig) -> Verifier:
    from scalerl_tasks.opgraph.verifier import OpGraphVerifier

    return OpGraphVerifier(config.name)


def _open_reasoning_gym(config: VerifierConfig) -> Verifier:
    if config.task is None:
        raise VerifierError("the verifier 'reasoning-gym' needs a reasoning-gym task as its source")
    return ReasoningGymVerifier(config.task)


_OPENERS: dict[str, Callable[[VerifierConfig], Verifier]] = {
    "exact": lambda config: ExactVerifier(),
    "number": lambda config: NumberVerifier(),
    "math-verify": lambda config: MathVerifier(),
    "reasoning-gym": _open_reasoning_gym,
    "opgraph-outcome": _open_op_graph,
    "opgraph-blend": _open_op_graph,
    "opgraph-strict": _open_op_graph,
    "opgraph-verified": _open_op_graph,
}
VERIFIERS = tuple(_OPENERS)
"""The names that :func:`open_verifier` accepts."""
