"""Verifiers of solutions in the notation of op-graph problems (arXiv 2512.07783, §3 and the authors' defaults [P])."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from scalerl_extras.opgraph.parse import Comparison, SolutionNode, compare, parse
from scalerl_tasks.answers.extraction import after_thought
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import Verdict

OUTCOME_WEIGHT: Final = 0.2
PROCESS_WEIGHT: Final = 0.8

_ANSWER = re.compile("<answer>([^<]*)", re.IGNORECASE)
_SAMPLE = "Define red kayaks by Gull Pier as a; so a = 3. </solution> <answer> 3 </answer>"


class OpGraphVerifier:
    """Scores a solution by its answer, its steps, or both; the parts of the verdict are the same for all.

    ========================  =====================================================================================
    ``opgraph-outcome``       1 if the answer is right
    ``opgraph-blend``         .2 · outcome + .8 · process if the answer is right, else 0
    ``opgraph-strict``        1 if the answer is right and process is 1: all steps are right, and there are no others
    ``opgraph-verified``      1 if the answer is right and all steps of the prompt's solution are there and right
    ========================  =====================================================================================

    *process* is the score of :mod:`scalerl_extras.opgraph.parse`, compared with the prompt's solution. Any prompt with a solution
    in this notation can be graded, including prompts from a file. As in the authors' code, the answer is the text of the first
    ``<answer>``, closed or not, without a full stop at its end; a reply without one has no answer.
    """

    part_names = ("outcome", "process", "wrong_values", "wrong_parents", "missing_steps", "extra_steps")

    def __init__(self, name: str) -> None:
        self.name = name

    def score(self, prompt: Prompt, completion: str, /) -> Verdict:
        right, found = self.compare(prompt, completion)
        answered = right or _answer(after_thought(completion)) is not None
        process = found.process
        if self.name == "opgraph-blend":
            score = OUTCOME_WEIGHT + PROCESS_WEIGHT * process if right else 0.0
        else:
            enough = {"opgraph-outcome": True, "opgraph-verified": found.verified}.get(
                self.name, process == 1
            )
            score = float(right and enough)
        counts = found.values, found.parents, found.missing, found.extra
        parts = dict(zip(self.part_names, (float(right), process, *counts), strict=True))
        return Verdict(score, parts, answered)

    def compare(self, prompt: Prompt, completion: str) -> tuple[bool, Comparison]:
        """Whether the answer is right, and how the steps differ from the prompt's solution."""
        text = after_thought(completion)
        right = _answer(text) == prompt.answer.strip()
        steps = parse(text)
        return right, compare(_gold(prompt.solution or ""), steps, wrong_answer=not right)

    def check(self, prompt: Prompt, /) -> None:
        gold = _gold(prompt.solution or "")
        if not gold or any(node.value is None for node in gold.values()):
            raise VerifierError(
                f"prompt {prompt.id} has no solution that {self.name!r} can compare steps with, such as {_SAMPLE!r}: "
                "write it so, or use the verifier exact or number"
            )
        if self.score(prompt, prompt.solution or "").score < 1:
            raise VerifierError(
                f"prompt {prompt.id}: its own solution does not score 1 with {self.name!r}: it answers "
                f"{(_answer(prompt.solution or '') or '')[:80]!r}, the field answer is {prompt.answer[:80]!r}; write the same in both"
            )

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        return [(Prompt("sample", "", "3", solution=_SAMPLE), _SAMPLE)]


def _answer(text: str) -> str | None:
    """The first answer of a reply; None without one."""
    found = _ANSWER.search(text)
    return found[1].strip().removesuffix(".").rstrip() if found else None


@lru_cache(maxsize=64)
def _gold(solution: str) -> Mapping[str, SolutionNode]:
    return parse(solution)


def outcome() -> OpGraphVerifier:
    """``verifier: {name: opgraph-outcome}``."""
    return OpGraphVerifier("opgraph-outcome")


def blend() -> OpGraphVerifier:
    """``verifier: {name: opgraph-blend}``."""
    return OpGraphVerifier("opgraph-blend")


def strict() -> OpGraphVerifier:
    """``verifier: {name: opgraph-strict}``."""
    return OpGraphVerifier("opgraph-strict")


def verified() -> OpGraphVerifier:
    """``verifier: {name: opgraph-verified}``."""
    return OpGraphVerifier("opgraph-verified")
