"""Operation graphs: the parameters of a problem, their definitions and their values.

A parameter counts one kind of thing at one place (an instance), or all kinds at one place (a total). A sentence of the problem
defines an instance, from a constant or from other parameters. A total is the sum of the instances at its place; no sentence
defines it. (As in arXiv 2512.07783, §3, and the problems of arXiv 2407.20311; implemented here from the descriptions alone.)

Two numbers measure a graph, each summed over the definitions that the answer needs:

- operations: a sum of n parameters has n − 1, a multiple of a sum one more, every other definition one.
- edges: the operands, constants included: a sum of n has n, a multiple of a sum of n has n + 1, other definitions one or two.
  This is the *op* of arXiv 2512.07783 (``num_op`` in the authors' code).

A graph is drawn downwards from its top, the parameter that depends on all others: first a definition, then those of its
parents, with the remaining number of operations. Values are computed upwards; the operators are drawn at the same time, so
that every value is a positive integer.

All draws of a problem come from a hash of (seed, index), so that a problem has the same cost at any index. Two indices never
give the same problem: see :func:`draw_names`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from scalerl_extras.opgraph.contexts import KINDS, PLACES

MIN_OPERATIONS = 2
MAX_OPERATIONS = 50
"""Maximum number of operations. A solution uses one letter for each parameter and each intermediate, and has at most as many of
them as operations."""
MAX_DISTRACTORS = 10
"""Maximum number of distractors. With the other parameters they are fewer than the kinds of one place."""
MAX_PROBLEMS = PLACES * (PLACES - 1) * KINDS
"""Number of different problems of one seed: see :func:`draw_names`."""

_LARGE = 100
"""Maximum product of two parameters; above it, a difference is preferred to a sum."""
_UNKNOWN = range(2, 21)
"""Possible values of the unknown of a reverse problem."""
_CONSTANTS = range(1, 6)


class Draws:
    """Uniform draws from a hash, not from ``random``, because a problem must not change with the Python release."""

    __slots__ = ("_bits", "_block", "_key", "_pool")

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._block = self._pool = self._bits = 0

    def below(self, n: int) -> int:
        """A number from 0 to n − 1 (n ≤ 2**32); its distribution differs from uniform by less than 2**-64."""
        if self._bits < 96:
            block = self._block.to_bytes(4, "little")
            self._pool = int.from_bytes(hashlib.blake2b(self._key + block, digest_size=64).digest(), "little")
            self._block, self._bits = self._block + 1, 512
        self._pool, pick = divmod(self._pool, n)
        self._bits -= n.bit_length()
        return pick

    def shuffle(self, items: list[Any]) -> None:
        for last in range(len(items) - 1, 0, -1):
            pick = self.below(last + 1)
            items[last], items[pick] = items[pick], items[last]


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


def draw_graph(
    draws: Draws, size: int, *, reverse: bool, distractors: int, count_edges: bool = False
) -> Graph:
    """Draw a graph.

    Args:
        draws: source of randomness.
        size: exact number of operations that the answer needs (2 to 50).
        count_edges: ``size`` is the exact number of edges instead.
        reverse: one constant is unknown, and the value of the top is given.
        distractors: number of parameters that the answer does not need.
    """
    while True:
        top = _draw_definitions(draws, size, int(count_edges))
        graph = _evaluated(draws, top, reverse, distractors)
        # In a reverse problem, x must not cancel. draw_names() needs two places.
        if graph.groups >= 2 and (graph.unknown is None or graph.nodes[graph.top].slope):
            return graph


class _Slot:
    """A parameter during the downward draw.

    Attributes:
        group: its place; :data:`_FREE` for an instance at a place without a total.
        shape: its form, or a set of forms from which the value selects later: ``pair`` is a sum or a difference, ``step`` any
            definition from one parent, ``change`` one with a constant.
        parents: slots that are defined after it.
    """

    __slots__ = ("group", "parents", "shape")

    def __init__(self, group: int) -> None:
        self.group = group
        self.shape = "constant"
        self.parents: list[_Slot] = []


_FREE = 0


def _draw_definitions(draws: Draws, size: int, more: int) -> _Slot:
    """Draw definitions downwards with exactly this number of operations or edges; returns the top.

    An undefined slot costs at least one, so what is left is never less than the number of undefined slots. The
    parents of a slot are undefined when it is defined, so that no parameter depends on itself.

    Args:
        draws: source of randomness.
        size: number of operations, or of edges.
        more: edges of a definition with several operands, less its operations: 1 if ``size`` is in edges, else 0.
    """
    below = draws.below
    top = _Slot(_FREE)
    waiting, left, totals = [top], size, 0
    while waiting:
        pick = below(len(waiting))
        slot = waiting[pick]
        waiting[pick] = waiting[-1]
        waiting.pop()
        others = len(waiting)
        spare = left - others - 1
        parents, fresh = 0, 0
        kind = below(16)
        if spare == 0:
            # One is left for each slot: no parameter can be added, but an undefined one can be a parent.
            if others >= 2 and kind < 3 and not more:
                slot.shape, parents = "pair", 2
            elif others and kind < 8:
                slot.shape, parents = "equal" if more else "step", 1
            cost = 1
        elif others and kind == 0:
            cost = 1
        elif kind < 3 and spare >= 2 + more and slot.group == _FREE:
            parents = fresh = min(2 + below(3), (spare - more) // 2 + 1)
            slot.shape, cost = "total", parents - 1 + more
            totals += 1
            slot.group = totals
        elif kind < 6 and spare >= 3 + more:
            slot.shape, parents = "multiple", 2
            fresh, cost = 2 - (others > 0 and below(3) == 0), 2 + more
        elif kind < 8 and spare >= 4 + more:
            slot.shape, parents = "sum", 3
            fresh, cost = 3 - (others > 0 and below(3) == 0), 2 + more
        elif kind < 12 and spare >= 2 + more:
            slot.shape, parents = "pair", 2
            fresh, cost = 2 - (others > 0 and below(3) == 0), 1 + more
        elif more and (spare == 1 or below(8) == 0):
            slot.shape, parents = "equal", 1
            fresh, cost = 1, 1
        else:
            slot.shape, parents = "change" if more else "step", 1
            fresh, cost = 1, 1 + more
        left -= cost
        group = slot.group if slot.shape == "total" else _FREE
        for parent in range(parents - fresh):
            other = parent + below(others - parent)
            waiting[parent], waiting[other] = waiting[other], waiting[parent]
            slot.parents.append(waiting[parent])
        for _ in range(fresh):
            new = _Slot(group)
            slot.parents.append(new)
            waiting.append(new)
    return top


def _evaluated(draws: Draws, top: _Slot, reverse: bool, distractors: int) -> Graph:
    """Draw places, operators and distractors for drawn definitions, and compute the values."""
    below = draws.below
    slots = _parents_first(top)
    position = {id(slot): at for at, slot in enumerate(slots)}
    leaves = [at for at, slot in enumerate(slots) if not slot.parents]
    unknown = leaves[below(len(leaves))] if reverse else None
    open_places = 2 + below(2)
    # Index of each place: by the group of its slots, or by −1, −2, … for places without a total.
    numbers: dict[int, int] = {}
    free = [slot for slot in reversed(slots) if slot.group == _FREE]
    for rank, slot in enumerate(free):
        # The first two slots are at different places.
        slot.group = -1 - (rank if rank < 2 else below(open_places))
    for slot in slots:
        numbers.setdefault(slot.group, len(numbers))
    nodes: list[Node] = []
    for at, slot in enumerate(slots):
        parents = tuple(position[id(parent)] for parent in slot.parents)
        if at == unknown:
            value = _UNKNOWN[below(len(_UNKNOWN))]
            nodes.append(Node(numbers[slot.group], Form.CONSTANT, value, (), 1, 0, value))
        else:
            nodes.append(_defined(below, nodes, numbers[slot.group], slot.shape, parents))
    groups = len(numbers)
    # A distractor is never at a place with a total, because the total would count it.
    open_groups = [number for key, number in numbers.items() if key < 0]
    for _ in range(distractors):
        pick = below(len(open_groups) + 1)
        if pick == len(open_groups):
            open_groups.append(groups)
            groups += 1
        constant = below(3) == 0
        parents = () if constant else (below(len(nodes)),)
        nodes.append(_defined(below, nodes, open_groups[pick], "constant" if constant else "step", parents))
    return Graph(tuple(nodes), len(slots) - 1, unknown, groups)


def _parents_first(top: _Slot) -> list[_Slot]:
    """All slots below ``top``, each after its parents and close to its first child: the order of a solution."""
    order: dict[int, _Slot] = {}

    def visit(slot: _Slot) -> None:
        for parent in slot.parents:
            if id(parent) not in order:
                visit(parent)
        order[id(slot)] = slot

    visit(top)
    return list(order.values())


def _defined(
    below: Callable[[int], int], nodes: Sequence[Node], group: int, shape: str, parents: tuple[int, ...]
) -> Node:
    """A definition of the shape, with an operator and a constant that keep its value positive and small."""
    given = [nodes[parent] for parent in parents]
    constant = 0
    if shape == "constant":
        form, constant = Form.CONSTANT, _CONSTANTS[below(len(_CONSTANTS))]
    elif shape == "equal":
        form = Form.EQUAL
    elif shape in ("step", "change"):
        form, constant = _step(below, given[0].value, equal=shape == "step")
    elif shape == "total":
        form = Form.TOTAL
    elif shape == "sum":
        form = Form.SUM
    elif shape == "multiple":
        form, constant = Form.MULTIPLE, 2 + below(2)
    else:
        a, b = given
        form = Form.SUM
        if a.value != b.value and (below(2) or a.value + b.value > _LARGE):
            form = Form.DIFFERENCE
            if a.value < b.value:
                parents = parents[1], parents[0]
                given = [b, a]
    slope, offset, value = (
        _apply(form, constant, [getattr(node, part) for node in given], constant_term)
        for part, constant_term in (("slope", 0), ("offset", constant), ("value", constant))
    )
    return Node(group, form, constant, parents, slope, offset, value)


def _step(below: Callable[[int], int], value: int, *, equal: bool) -> tuple[Form, int]:
    pick = below(8) if equal else 1 + below(7)
    if pick == 0:
        return Form.EQUAL, 0
    factor, change = 2 + below(3), 1 + below(5)
    if pick < 4 and factor * value <= _LARGE:
        return Form.TIMES, factor
    if (pick < 6 or value > _LARGE) and change < value:
        return Form.LESS, change
    return Form.MORE, change


def _apply(form: Form, constant: int, given: list[int], constant_term: int) -> int:
    """Evaluate a definition for numbers; ``constant_term`` is the constant in additions, ``constant`` in multiplications."""
    match form:
        case Form.CONSTANT | Form.MORE:
            return sum(given) + constant_term
        case Form.LESS:
            return given[0] - constant_term
        case Form.TIMES | Form.MULTIPLE:
            return constant * sum(given)
        case Form.DIFFERENCE:
            return given[0] - given[1]
    return sum(given)


@dataclass(frozen=True, slots=True)
class Names:
    """Indices of names in a context's lists.

    Attributes:
        places: index of each group's place.
        kinds: index of each node's kind; None for a total.
    """

    places: tuple[int, ...]
    kinds: tuple[int | None, ...]


def draw_names(draws: Draws, graph: Graph, number: int) -> Names:
    """Draw the names of all parameters so that they encode ``number`` (0 ≤ number < :data:`MAX_PROBLEMS`).

    The number has three mixed-radix digits: the place of the top; the sum of the distances of all other places from it, modulo
    the number of places (never 0); and the kind of the top, or, for a total, the sum of the kinds at its place. All three follow
    from the names in a problem in any order of its sentences, so two numbers never give the same problem.
    """
    below = draws.below
    rest, kind_digit = divmod(number, KINDS)
    distance, top_place = divmod(rest, PLACES)
    top = graph.nodes[graph.top]
    while True:
        others = list({below(PLACES): None for _ in range(graph.groups - 2)})
        others.append((top_place + distance + 1 - sum(other - top_place for other in others)) % PLACES)
        if len({top_place, *others}) == graph.groups:
            break
    draws.shuffle(others)
    ranks: list[int | None] = [None] * len(graph.nodes)
    taken: list[set[int]] = [set() for _ in range(graph.groups)]
    if top.form is Form.TOTAL:
        members = top.parents
        while True:
            kinds = [below(KINDS) for _ in members[1:]]
            kinds.append((kind_digit - sum(kinds)) % KINDS)
            if len(set(kinds)) == len(kinds):
                break
        for member, kind in zip(members, kinds, strict=True):
            ranks[member] = kind
        taken[top.group].update(kinds)
    else:
        ranks[graph.top] = kind_digit
        taken[top.group].add(kind_digit)
    for at, node in enumerate(graph.nodes):
        if ranks[at] is None and node.form is not Form.TOTAL:
            kind = below(KINDS)
            while kind in taken[node.group]:
                kind = below(KINDS)
            taken[node.group].add(kind)
            ranks[at] = kind
    place_of = [*others[: top.group], top_place, *others[top.group :]]
    return Names(tuple(place_of), tuple(ranks))


def permuted(index: int, seed: int) -> int:
    """Value at ``index`` of a permutation of 0..MAX_PROBLEMS − 1, by seed, so that neighbouring problems get different names."""
    draws = Draws(f"names/{seed}")
    factor = draws.below(MAX_PROBLEMS)
    while math.gcd(factor, MAX_PROBLEMS) != 1:
        factor = draws.below(MAX_PROBLEMS)
    return (index * factor + draws.below(MAX_PROBLEMS)) % MAX_PROBLEMS
