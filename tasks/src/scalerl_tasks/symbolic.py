r"""Mathematical equality by math-verify, without its part that evaluates text as Python.

math-verify reads plain expressions (``1/2``, ``9**9``) with ``sympy.parse_expr``, which is ``eval``. Only
its LaTeX reader is used here, which has a grammar; plain text is read as LaTeX, or by :mod:`.number`. The LaTeX reader
evaluates numerals as source text that it creates itself, ``Integer (12 )``; :mod:`scalerl_tasks.grading.audit_guard`
allows exactly that.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import sympy  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify

from scalerl_tasks.number import last_number

# Suppressed: the library warns, once per process, that callers must set a time limit. The grading pool does.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]
_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")
_MAX_CHARACTERS = 4096  # of an answer, from its end: longer ones are prose that ends with the answer
_MAX_BARE_CHARACTERS = 256
_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}")
_STANDALONE_NUMBER = re.compile(r"[+\-\u2212]?[0-9][0-9.,]*(?:/[0-9][0-9.,]*)?")
_MAX_EXPONENT = 64


@functools.lru_cache(maxsize=256)
def parse_reference(answer: str) -> list[Any]:
    """A reference answer as math-verify's list of interpretations; empty if it cannot be parsed."""
    return _parse(answer)


def equivalent(reference: list[Any], answer: str) -> bool:
    """Whether ``answer`` is mathematically equal to an interpretation of the reference. It may not terminate."""
    given = _parse(answer[-_MAX_CHARACTERS:])
    return bool(given) and bool(verify(reference, given, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    if not text.strip():
        return []
    if any(delimiter in text for delimiter in _DELIMITERS):
        return _latex(text)
    if len(text) <= _MAX_BARE_CHARACTERS and not _WORD.search(text):
        return _latex(f"${text.strip()}$")
    return _last_standalone_number(text)


def _latex(text: str) -> list[Any]:
    # parse could otherwise only raise TimeoutException, and its timeout is off.
    readings: list[Any] = parse(text, extraction_config=_LATEX, parsing_timeout=None)
    return readings


def _last_standalone_number(text: str) -> list[Any]:
    """The last word with a digit in prose, if it is a number by itself ("so 2x+5" has none)."""
    for word in reversed(text.split()):
        if not any("0" <= character <= "9" for character in word):
            continue
        word = word.strip("*_()[]$€£:;!?%=").rstrip(".,")
        number = last_number(word) if _STANDALONE_NUMBER.fullmatch(word) else None
        if number is None or abs(number[2]) > _MAX_EXPONENT:
            return []
        numerator, denominator, exponent = number
        return [sympy.Rational(numerator, denominator) * sympy.Integer(10) ** exponent]
    return []
