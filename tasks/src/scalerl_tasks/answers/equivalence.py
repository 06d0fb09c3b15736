r"""Mathematical equality of a reply and a reference, without evaluating any text as Python.

Both are read by :mod:`.reader`; they are equal if a reading of one equals a reading of the other.
"""

from __future__ import annotations

import contextlib
import functools
import re

from scalerl_tasks.answers.extraction import extract
from scalerl_tasks.answers.node_equality import equal
from scalerl_tasks.answers.nodes import Answer, Time
from scalerl_tasks.answers.reader import read_answer, read_reply

_MAX_WORDS = 12  # of a reference; one with more is a solution, not an answer


@functools.lru_cache(maxsize=256)
def read_reference(answer: str) -> Answer:
    """A reference answer; without readings and text if it is empty. Of a GSM8K solution, what follows ``####``."""
    return read_answer(extract(answer.rpartition("####")[2]).text, is_reference=True)


def equivalent(reference: Answer, text: str, enclosed: bool) -> bool | None:
    """Whether a reply equals a reading of the reference; None if the reply has no answer. It may not terminate."""
    given = read_reply(text, enclosed)
    return _answers_equal(reference, given) if given.text else None


def can_be_met(reference: Answer) -> bool:
    """Whether a reply with the text of the reference would be equal to it; nothing is evaluated, so it takes bounded time."""
    text = reference.text
    if text.count("{") != text.count("}") or (not any(map(str.isalnum, text)) and r"\{" not in text):
        return False
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)
    return bool(reference.readings) and len(words) <= _MAX_WORDS


def _answers_equal(reference: Answer, given: Answer) -> bool:
    if _same_text(reference.text, given.text):
        return True
    if reference.choice and given.choice:
        return reference.choice == given.choice and _answers_equal(
            read_answer(reference.content, is_reference=True),
            read_answer(given.content),
        )
    times = any(isinstance(a, Time) for a in reference.readings) and any(
        isinstance(b, Time) for b in given.readings
    )
    for a in reference.readings:
        for b in given.readings:
            if times and not isinstance(a, Time):
                continue  # 9:30 and 3:10 are not two ratios
            # Whatever sympy raises for expressions that it cannot compare: then they are not equal.
            with contextlib.suppress(
                ArithmeticError,
                AttributeError,
                LookupError,
                NotImplementedError,
                RecursionError,
                TypeError,
                ValueError,
            ):
                if equal(a, b):
                    return True
    return False


def _same_text(a: str, b: str) -> bool:
    a, b = (
        re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", re.sub(r"\\text\{([^{}]*)\}", r"\1", text))
        for text in (a, b)
    )
    return a == b and bool(a)
