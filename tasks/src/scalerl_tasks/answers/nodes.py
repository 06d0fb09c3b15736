"""What answers consist of: values, times, numbers in a base, groups and relations.

Expressions stay LaTeX here; :mod:`.expression_equality` reads and compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from scalerl_tasks.answers.quantity import Quantity

WHOLE_TEXT = re.compile(r"\s*\(?\s*\\text\{([^{}]*)\}\s*\)?\s*")
SYMBOL = re.compile(
    r"\s*(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\{[^{}]*\}|[A-Za-z0-9]))?'*(?:\s*\^\s*\{\s*-1\s*\})?"
    r"(?:\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\))?\s*"
)
_GEOMETRIC_NAME = re.compile(
    r"(?:m\s*)?(?:\\(?:angle|triangle|overline)\s*)?\{?[A-Z]{1,4}\}?|\|[A-Z]{2}\||\[[A-Z]{3,6}\]"
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value.

    Attributes:
        latex: the expression, without its unit; empty for words.
        quantity: the value, if it is a number.
        unit: canonical unit; empty without a known one.
        words: the words in lower case, if there is nothing else.
    """

    latex: str
    quantity: Quantity | None = None
    unit: str = ""
    words: str = ""


@dataclass(frozen=True, slots=True)
class Time:
    """A time of day, or a duration: hours, minutes, seconds, and ``a`` or ``p`` if given."""

    parts: tuple[int, int, int]
    half: str


@dataclass(frozen=True, slots=True)
class Based:
    """A number in a base: ``101_2``."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Group:
    """Several values.

    Attributes:
        kind: ``list`` (without brackets), ``set``, ``tuple`` (in brackets), ``union``, ``ratio``, ``compound`` (``5 h 20 min``),
            ``matrix`` (rows are tuples), ``and`` or ``or`` (of relations), ``difference`` (of two sets).
        members: the values.
        brackets: of a tuple; of a list that only "or" joins, ``or``.
    """

    kind: Literal["list", "set", "tuple", "union", "ratio", "compound", "matrix", "and", "or", "difference"]
    members: tuple[Node, ...]
    brackets: str = ""


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain ``parts[0] operators[0] parts[1] …`` of ``=``, ``<``, ``>``, ``\\leq``, ``\\geq``, ``\\neq``."""

    parts: tuple[Node, ...]
    operators: tuple[str, ...]
    latex: tuple[str, ...]

    @property
    def is_equation(self) -> bool:
        return all(operator == "=" for operator in self.operators)

    @property
    def name(self) -> str | None:
        """The left side if it is a symbol, a function of symbols, or words; None otherwise."""
        first = self.latex[0].strip()
        if SYMBOL.fullmatch(first) or WHOLE_TEXT.fullmatch(first):
            return re.sub(r"\s+", "", first).lower()
        if _GEOMETRIC_NAME.fullmatch(first) or re.fullmatch(r"\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)", first):
            return re.sub(r"\s+", "", first).lower()
        return None


Node = Leaf | Time | Based | Group | Relation


@dataclass(frozen=True, slots=True)
class Answer:
    """All readings of an answer, with its normalized text.

    Attributes:
        choice: the letter of an option that stands before its content, as in ``(C) 12``, in lower case; empty without one.
        content: what follows that letter.
    """

    text: str
    readings: tuple[Node, ...]
    choice: str = ""
    content: str = ""
