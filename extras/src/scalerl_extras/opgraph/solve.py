"""Worked solutions: one step for each parameter that the answer needs, each after the steps of its parents.

A step names its parameter, assigns a letter to it, and evaluates it. A sum of more than two terms, or one that is multiplied,
has intermediates with their own letters::

    Define tame cranes in Onyx Vale as d; e = a + b = 3 + 4 = 7; so d = 2 * e = 2 * 7 = 14.

In a reverse problem the unknown is ``x``, values are linear forms in it (``2 * x + 4``), and the last sentence solves for it.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from scalerl_extras.opgraph.graph import Form, Node
from scalerl_extras.opgraph.render import Problem

LETTERS = [letter for letter in string.ascii_letters if letter != "x"]
"""Letters of parameters and intermediates, in order of use."""
UNKNOWN = "x"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a solution.

    Attributes:
        name: name of the parameter.
        letter: letter of the parameter.
        equations: equations of the intermediates, then of the parameter, without ``so`` and separators.
        parents: names of the parameters on the right.
        value: result of the step, as ``(slope, offset)`` of a value ``slope * x + offset``.
    """

    name: str
    letter: str
    equations: tuple[str, ...]
    parents: tuple[str, ...]
    value: tuple[int, int]

    @property
    def text(self) -> str:
        """The step as a sentence."""
        *before, last = self.equations
        return f"Define {self.name} as {self.letter}; {''.join(f'{e}; ' for e in before)}so {last}."


@dataclass(frozen=True, slots=True)
class Solution:
    """A worked solution.

    Attributes:
        steps: one for each parameter that the answer needs.
        closing: the sentence that solves for the unknown; empty in a forward problem.
        answer: the answer.
    """

    steps: tuple[Step, ...]
    closing: str
    answer: int

    @property
    def text(self) -> str:
        """The solution as text, to be appended to the prompt."""
        sentences = [*(step.text for step in self.steps), *([self.closing] if self.closing else [])]
        return f"{' '.join(sentences)} </solution> <answer> {self.answer} </answer>"


def solve(problem: Problem) -> Solution:
    """The worked solution of a problem."""
    graph = problem.graph
    letters = iter(LETTERS)
    letter_of: list[str] = []
    steps = []
    for at, node in enumerate(graph.needed):
        given = [(letter_of[parent], _linear(graph.nodes[parent])) for parent in node.parents]
        equations: list[str] = []
        letter = UNKNOWN if at == graph.unknown else next(letters)
        while len(given) > 2 or (node.form is Form.MULTIPLE and len(given) == 2):
            between, total = next(letters), _add(given[0][1], given[1][1])
            equations.append(f"{between} = {_chain('{} + {}', given[:2], total)}")
            given[:2] = [(between, total)]
        equations.append(f"{letter} = {_evaluation(node, at == graph.unknown, given)}")
        letter_of.append(letter)
        names = tuple(problem.names[parent] for parent in node.parents)
        steps.append(Step(problem.names[at], letter, tuple(equations), names, _linear(node)))
    closing = "" if graph.unknown is None else _closing(graph.nodes[graph.top])
    return Solution(tuple(steps), closing, problem.answer)


def linear_text(slope: int, offset: int) -> str:
    """``slope * x + offset`` in the notation of solutions.

    >>> linear_text(2, -4), linear_text(1, 0), linear_text(0, 7)
    ('2 * x - 4', 'x', '7')
    """
    if slope == 0:
        return str(offset)
    text = UNKNOWN if slope == 1 else f"{slope} * {UNKNOWN}"
    return text if offset == 0 else f"{text} {'+' if offset > 0 else '-'} {abs(offset)}"


def _linear(node: Node) -> tuple[int, int]:
    return node.slope, node.offset


def _add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def _evaluation(node: Node, unknown: bool, given: list[tuple[str, tuple[int, int]]]) -> str:
    if unknown:
        return UNKNOWN
    c = node.constant
    match node.form:
        case Form.CONSTANT:
            return str(c)
        case Form.EQUAL:
            pattern = "{}"
        case Form.MORE:
            pattern = f"{{}} + {c}"
        case Form.LESS:
            pattern = f"{{}} - {c}"
        case Form.TIMES | Form.MULTIPLE:
            pattern = f"{c} * {{}}"
        case Form.DIFFERENCE:
            pattern = "{} - {}"
        case _:
            pattern = "{} + {}"
    return _chain(pattern, given, _linear(node))


def _chain(pattern: str, given: list[tuple[str, tuple[int, int]]], value: tuple[int, int]) -> str:
    """``a + b = 3 + 4 = 7``: the pattern with letters, with values, and evaluated, without equal neighbours."""
    product, difference = "*" in pattern, pattern == "{} - {}"
    values = []
    for rank, (_, (slope, offset)) in enumerate(given):
        text = linear_text(slope, offset)
        if " " in text and (product or (difference and rank == 1)):
            text = f"({text})"
        values.append(text)
    parts = [pattern.format(*(letter for letter, _ in given)), pattern.format(*values), linear_text(*value)]
    return " = ".join(part for rank, part in enumerate(parts) if part not in parts[:rank])


def _closing(top: Node) -> str:
    """The sentence that solves ``slope * x + offset = value``."""
    parts = [f"{linear_text(top.slope, top.offset)} = {top.value}"]
    if top.offset:
        parts.append(f"{linear_text(top.slope, 0)} = {top.value - top.offset}")
    x = (top.value - top.offset) // top.slope
    if top.slope != 1:
        parts.append(f"{UNKNOWN} = {x}")
    return f"Solve {', '.join(parts)}."
