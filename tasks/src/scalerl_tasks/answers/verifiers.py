"""The verifiers ``exact``, ``number`` and ``math-verify``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from scalerl_tasks.answers.extraction import extract, extract_answer
from scalerl_tasks.answers.quantity import Quantity, last_quantity, read_quantity, same_quantity
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import NO_ANSWER

_MATH_SAMPLES = (
    (r"\frac{1}{2}", "0.5"),
    (r"x^2-1", "(x-1)(x+1)"),
    (r"(1,2]", "(1,2]"),
    ("2", "x = 2"),
    (r"|x-1|", r"\boxed{|1-x|}"),
)


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
                f"prompt {prompt.id}: its answer {shown(prompt.answer)} is a solution with its result after ####, which no "
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


class MathVerifier:
    """1 when the answer is mathematically equal to the reference answer (:mod:`scalerl_tasks.answers.equivalence`); 0 otherwise."""

    name = "math-verify"
    finds_answers = True

    def __init__(self) -> None:
        # Imported here: it imports sympy and antlr, which no other verifier needs.
        from scalerl_tasks.answers import equivalence

        self._equivalence = equivalence

    def score(self, prompt: Prompt, completion: str, /) -> float:
        text, enclosed = extract(completion)
        equal = self._equivalence.equivalent(self._reference(prompt), text, enclosed)
        return NO_ANSWER if equal is None else float(equal)

    def check(self, prompt: Prompt, /) -> None:
        reference = self._reference(prompt)
        if not self._equivalence.can_be_met(reference):
            raise VerifierError(
                f"prompt {prompt.id}: its answer {shown(prompt.answer)}, read as {reference.text[:80]!r}, cannot be met by any "
                "reply; write it as LaTeX with balanced braces, or use the verifier exact"
            )

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        return [(Prompt("sample", "", answer), completion) for answer, completion in _MATH_SAMPLES]

    def _reference(self, prompt: Prompt) -> Any:
        reference = self._equivalence.read_reference(prompt.answer)
        if not reference.text:
            raise VerifierError(
                f"prompt {prompt.id}: math-verify cannot read its answer {shown(prompt.answer)}; "
                f"write it as LaTeX, or use the verifier exact"
            )
        return reference


def _check_reference(
    verifier: ExactVerifier | NumberVerifier, prompt: Prompt, reference: str | None = None
) -> None:
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
            f"prompt {prompt.id}: no reply can score with its answer {shown(prompt.answer)} and the verifier "
            f"{verifier.name!r}: of that text as a reply, {found[:80]!r} is compared; {fix}"
        )


def _after_mark(answer: str) -> str | None:
    """The result of a solution in the form of GSM8K, after ``####``; None if there is no such mark."""
    _, marked, final = answer.rpartition("####")
    return final.strip() if marked else None


@lru_cache(maxsize=4096)
def _reference_quantity(answer: str) -> Quantity | None:
    return read_quantity(extract(answer.rpartition("####")[2]).text)


def _no_number(prompt: Prompt) -> str:
    problem = "has no number" if not any("0" <= c <= "9" for c in prompt.answer) else "is not one number"
    return (
        f"prompt {prompt.id}: its answer {shown(prompt.answer)} {problem}; write only the number, or use the verifier exact or "
        "math-verify"
    )


def shown(answer: str) -> str:
    return repr(answer if len(answer) <= 80 else answer[:40] + " … " + answer[-40:])
