"""Reads by math-verify's LaTeX reader what the grammar of :mod:`.expression_reader` lacks, with exact numerals in place of its
``sympify``, which is ``eval``.
"""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import latex2sympy2  # type: ignore[import-untyped]

_MAX_LIBRARY_CHARACTERS = 256
_MAX_LIBRARY_DEPTH = 6


class _ExactReader(latex2sympy2._Latex2Sympy):  # type: ignore[misc]
    """math-verify's LaTeX reader, with numerals as exact rationals: its own passes them to ``sympify``, which is ``eval``."""

    def parse_number(self, text: str) -> Any:
        return sympy.Rational(text.replace(",", ""))


def _readable_by_library(latex: str) -> bool:
    """Whether the library can be expected to read a text in bounded time: its time doubles with each level of brackets."""
    depth = deepest = 0
    for character in latex:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return len(latex) <= _MAX_LIBRARY_CHARACTERS and deepest <= _MAX_LIBRARY_DEPTH


def read_by_library(latex: str) -> Any:
    """The sympy expression or matrix; None if the library cannot read it, or not in bounded time."""
    if not _readable_by_library(latex) or r"\text{" in latex or "'" in latex:
        return None
    try:
        value = _ExactReader(is_real=True).parse(latex.replace(r"\cr", "\\\\"))
    except Exception:  # whatever its grammar and sympy raise for text that they cannot read
        return None
    return value if isinstance(value, sympy.Expr | sympy.MatrixBase) else None
