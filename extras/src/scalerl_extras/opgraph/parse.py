"""Parses solutions into graphs, and compares a solution with the gold one, as in arXiv 2512.07783.

A node is a parameter, identified by its name; the letter that a solution assigns to it does not matter, and may be used again
for another one. Its value is the last one that the solution evaluates for it; an expression that is not evaluated has the value
that follows from those before it. Its parents are the parameters whose letters are on the right, directly or through
intermediates. With V the nodes of the gold solution::

    penalty = wrong values + wrong parents + missing nodes + min(extra nodes, |V|) + [the answer differs]
    process = max(0, 1 − penalty / |V|)

The text is untrusted: any string is parsed, in time linear in its length. A string longer than :data:`MAX_CHARACTERS` has no
nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MAX_CHARACTERS: Final = 1 << 15
"""Maximum length of a solution. A solution with 50 operations has about 6,000 characters."""

_MAX_EXPRESSION: Final = 400
_MAX_TOKENS: Final = 64
_MAX_NUMBER: Final = 10**15
_NUMBER = re.compile(r"-?[0-9]{1,15}")
_CLAUSES = re.compile(r"[;:,\n]|\.(?![0-9])")
_LETTERS = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_END = re.compile("</solution>|<answer>", re.IGNORECASE)
_STEPS = re.compile(r"\bdefine ", re.IGNORECASE)
_TOKENS = re.compile(r"\s*(?:([0-9]{1,15})|([A-Za-z])|([-+*()]))")

Value = tuple[int, int]
"""``(slope, offset)`` of a value ``slope * x + offset`` with the unknown x; a number has slope 0."""

UNDEFINED: Final = "?"
"""Parent in place of a letter that no step defines."""


@dataclass(slots=True)
class SolutionNode:
    """Value and parents of a parameter in a solution; ``value`` is None if it is neither a number nor a linear form."""

    value: Value | None = None
    parents: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A solution's differences from the gold one.

    Attributes:
        nodes: |V|, the number of nodes of the gold solution; 0 if there is none.
        values: nodes whose value differs.
        parents: nodes whose parents differ.
        missing: nodes that the solution does not have.
        extra: nodes that only the solution has.
        wrong_answer: the answer differs.
        parsed: the solution has at least one step.
    """

    nodes: int
    values: int
    parents: int
    missing: int
    extra: int
    wrong_answer: bool
    parsed: bool

    @property
    def penalty(self) -> int:
        """The penalty, as defined in the docstring of the module."""
        return self.values + self.parents + self.missing + min(self.extra, self.nodes) + self.wrong_answer

    @property
    def verified(self) -> bool:
        """Whether every node of the gold solution is there and right; the solution may have others."""
        return bool(self.nodes) and not (self.values or self.parents or self.missing)

    @property
    def process(self) -> float:
        """The process score, as defined in the docstring of the module; 0 without a gold graph or without a step."""
        return max(0.0, 1 - self.penalty / self.nodes) if self.nodes and self.parsed else 0.0


def compare(
    gold: Mapping[str, SolutionNode], found: Mapping[str, SolutionNode], *, wrong_answer: bool
) -> Comparison:
    """Compare two parsed solutions."""
    values = parents = missing = 0
    for name, node in gold.items():
        other = found.get(name)
        if other is None:
            missing += 1
        else:
            values += other.value is None or other.value != node.value
            parents += other.parents != node.parents
    extra = len(found) - (len(gold) - missing)
    return Comparison(len(gold), values, parents, missing, extra, wrong_answer, bool(found))


def parse(text: str) -> dict[str, SolutionNode]:
    """The nodes of a solution by name; empty if it has no step, or is too long.

    Text after ``</solution>`` or ``<answer>`` is ignored. If a name is defined twice, the last definition counts. A step also
    begins with ``define``, and gives its letter as in ``as variable b`` or ``a b``.

    >>> nodes = parse("Define red kayaks as a; so a = 3. Define total number of boats as b; c = a + a = 3 + 3 = 6; "
    ...               "so b = 2 * c = 2 * 6 = 12.")
    >>> nodes["total number of boats"]
    SolutionNode(value=(0, 12), parents={'red kayaks'})
    """
    end = _END.search(text)
    text = text[: end.start()] if end else text
    if len(text) > MAX_CHARACTERS:
        return {}
    reader = _Reader()
    for part in _STEPS.split(text)[1:]:
        reader.read(part)
    return reader.nodes


class _Reader:
    """Parses steps in order.

    Attributes:
        nodes: nodes of the steps so far.
        names: names of the nodes, by letter.
        through: parents of each intermediate, by letter.
        values: values of nodes and intermediates, by letter.
        unknown: letter of the node that has no number until the end.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, SolutionNode] = {}
        self.names: dict[str, str] = {}
        self.through: dict[str, set[str]] = {}
        self.values: dict[str, Value] = {}
        self.unknown = ""

    def read(self, part: str) -> None:
        """Parse a step: the text from one ``Define`` to the next."""
        head, _, body = part.partition(";")
        *words, letter = head.split() or [""]
        if words and words[-1] == "variable":
            words.pop()
        if len(words) < 2 or words.pop() not in ("as", "a") or not _is_letter(letter):
            return
        name = " ".join(words)
        node = self.nodes[name] = SolutionNode()
        # Of the parameter or intermediate that had this letter before: "a = a + 1" has it as a parent.
        before = self.through.pop(letter, None) or ({self.names[letter]} if letter in self.names else set())
        self.names[letter] = name
        evaluated = False
        for clause in _CLAUSES.split(body):
            left, *right = clause.split("=")
            if right and (target := _assigned(left)):
                evaluated |= self._assign(node, letter, target, right, before)
        if not evaluated:
            self.unknown, node.value = letter, (1, 0)

    def _assign(
        self, node: SolutionNode, letter: str, target: str, right: list[str], before: set[str]
    ) -> bool:
        """Process ``target = right[0] = …`` in the step of ``letter``; returns whether it evaluates that letter.

        Args:
            before: parents that ``letter`` stands for on the right, as it had a meaning before this step.
        """
        last = right[-1].strip()
        if last == target and not before:
            return False  # "so x = x": an unknown
        if target == self.unknown and target != letter:
            if _NUMBER.fullmatch(last):
                self.nodes[self.names[target]].value = (0, int(last))
            return False
        # After the first sign, an unknown is part of a value, not a parameter.
        letters = set(_LETTERS.findall(right[0]))
        letters.update(set(_LETTERS.findall("=".join(right[1:]))) - {self.unknown})
        parents: set[str] = set()
        for used in letters:
            if used == letter:
                parents |= before
            elif used != target:
                between = self.through.get(used)
                parents |= {self.names.get(used, UNDEFINED)} if between is None else between
        value = _value(last, self.unknown, self.values)
        self.values.pop(target, None)
        if value is not None:
            self.values[target] = value
        if target != letter:
            self.through[target] = parents
            return False
        node.parents |= parents
        node.value = value
        return True


def _assigned(left: str) -> str:
    """The letter to which an equation with this left side assigns a value; empty if the side is an expression."""
    *before, last = left.split() or [""]
    expression = before and before[-1][-1] in "+-*/("
    return last if _is_letter(last) and not expression else ""


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text.isalpha()


def _value(text: str, unknown: str, values: Mapping[str, Value]) -> Value | None:
    """A number, a linear form of the unknown, or an expression of letters with ``values``; None for anything else."""
    if _NUMBER.fullmatch(text):
        return 0, int(text)
    if len(text) > _MAX_EXPRESSION:
        return None
    known = {**values, unknown: (1, 0)}
    tokens: list[str] = []
    at = 0
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None or len(tokens) >= _MAX_TOKENS:
            return None
        tokens.append(match[1] or match[2] or match[3])
        at = match.end()
    try:
        value, rest = _sum(tokens, 0, known)
    except _NotLinearError:
        return None
    return value if rest == len(tokens) else None


class _NotLinearError(Exception):
    pass


def _sum(tokens: list[str], at: int, known: Mapping[str, Value]) -> tuple[Value, int]:
    (slope, offset), at = _product(tokens, at, known)
    while at < len(tokens) and tokens[at] in "+-":
        sign = 1 if tokens[at] == "+" else -1
        (more_slope, more_offset), at = _product(tokens, at + 1, known)
        slope, offset = slope + sign * more_slope, offset + sign * more_offset
    return (slope, offset), at


def _product(tokens: list[str], at: int, known: Mapping[str, Value]) -> tuple[Value, int]:
    (slope, offset), at = _factor(tokens, at, known)
    while at < len(tokens) and (tokens[at] in "*(" or tokens[at] in known):
        (a, b), at = _factor(tokens, at + (tokens[at] == "*"), known)
        if slope and a:
            raise _NotLinearError
        slope, offset = slope * b + offset * a, offset * b
        if abs(slope) > _MAX_NUMBER or abs(offset) > _MAX_NUMBER:
            raise _NotLinearError
    return (slope, offset), at


def _factor(tokens: list[str], at: int, known: Mapping[str, Value]) -> tuple[Value, int]:
    if at >= len(tokens):
        raise _NotLinearError
    token = tokens[at]
    if token in known:
        return known[token], at + 1
    if token.isdigit():
        return (0, int(token)), at + 1
    if token == "-":
        (slope, offset), at = _factor(tokens, at + 1, known)
        return (-slope, -offset), at
    if token == "(":
        value, at = _sum(tokens, at + 1, known)
        if at < len(tokens) and tokens[at] == ")":
            return value, at + 1
    raise _NotLinearError
