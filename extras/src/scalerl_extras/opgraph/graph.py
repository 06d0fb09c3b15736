"""Operation graphs: the parameters of a problem, their definitions and their values.

A parameter counts one kind of thing at one place (an instance), or all kinds at one place (a total). A sentence of the problem
defines an instance, from a constant or from other parameters. A total is the sum of the instances at its place; no sentence
defines it. (As in arXiv 2512.07783, §3, and the problems of arXiv 2407.20311; implemented here from the descriptions alone.)

Two numbers measure a graph, each summed over the definitions that the answer needs:

- operations: a sum of n parameters has n − 1, a multiple of a sum one more, every other definition one.
- edges: the operands, constants included: a sum of n has n, a multiple of a sum of n has n + 1, other definitions one or two.
  This is the *op* of arXiv 2512.07783 (``num_op`` in the authors' code).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class Form(StrEnum):
    """Form of a parameter's definition, with parents a, b, … and constant c."""

    CONSTANT = "c"
    EQUAL = "a"
    MORE = "a + c"
    LESS = "a - c"
    TIMES = "c * a"
    SUM = "a + b + …"
    DIFFERENCE = "a - b"
    MULTIPLE = "c * (a + b)"
    TOTAL = "the sum of all at a place"


@dataclass(frozen=True, slots=True)
class Node:
    """A parameter.

    Attributes:
        group: index of its place among those of the graph.
        form: form of its definition.
        constant: constant of the definition; 0 if the form has none.
        parents: positions of the parents in ``Graph.nodes``, in the order of the definition.
        slope: slope of the value as ``slope * x + offset``, where x is the unknown of a reverse problem; 0 in a forward one.
        offset: see ``slope``.
        value: the number.
    """

    group: int
    form: Form
    constant: int
    parents: tuple[int, ...]
    slope: int
    offset: int
    value: int


@dataclass(frozen=True, slots=True)
class Graph:
    """Parameters in topological order: each comes after its parents.

    Attributes:
        nodes: parameters that the answer needs, then distractors.
        top: position of the parameter that depends on all others: the answer of a forward problem.
        unknown: position of the parameter that is the answer of a reverse problem; None in a forward one.
        groups: number of places.
    """

    nodes: tuple[Node, ...]
    top: int
    unknown: int | None
    groups: int

    @property
    def needed(self) -> tuple[Node, ...]:
        """The parameters that the answer needs."""
        return self.nodes[: self.top + 1]

    @property
    def asked(self) -> int:
        """Position of the parameter that is the answer."""
        return self.top if self.unknown is None else self.unknown

    @property
    def operations(self) -> int:
        """Number of operations that the answer needs."""
        return sum(map(operations, self.needed))

    @property
    def edges(self) -> int:
        """Number of operands that the answer needs."""
        return sum(map(edges, self.needed))

    @property
    def key(self) -> str:
        """A hash, in hex, of all that the answer needs but names: equal for problems that differ in names, places, order and
        distractors."""
        keys: list[str] = []
        for at, node in enumerate(self.needed):
            parents = [keys[parent] for parent in node.parents]
            if node.form in (Form.SUM, Form.MULTIPLE, Form.TOTAL):
                parents.sort()
            # The value of an unknown follows from that of the top.
            what = ("x",) if at == self.unknown else (node.form.name, str(node.constant), *parents)
            keys.append(hashlib.blake2b("/".join(what).encode(), digest_size=8).hexdigest())
        if self.unknown is None:
            return keys[-1]
        return hashlib.blake2b(f"{keys[-1]}={self.nodes[self.top].value}".encode(), digest_size=8).hexdigest()


def operations(node: Node) -> int:
    """Number of operations of a definition."""
    if node.form is Form.MULTIPLE:
        return len(node.parents)
    return max(1, len(node.parents) - 1)


def edges(node: Node) -> int:
    """Number of operands of a definition; the value of an unknown counts as a constant."""
    return len(node.parents) + (node.form not in (Form.EQUAL, Form.SUM, Form.DIFFERENCE, Form.TOTAL))
