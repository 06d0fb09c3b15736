"""Draws a graph.

A graph is drawn downwards from its top, the parameter that depends on all others: first a definition, then those of its
parents, with the remaining number of operations. Values are computed upwards; the operators are drawn at the same time, so
that every value is a positive integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scalerl_extras.opgraph.draws import Draws
from scalerl_extras.opgraph.graph import Form, Graph, Node

MIN_OPERATIONS = 2
MAX_OPERATIONS = 50
"""Maximum number of operations. A solution uses one letter for each parameter and each intermediate, and has at most as many of
them as operations."""
MAX_DISTRACTORS = 10
"""Maximum number of distractors. With the other parameters they are fewer than the kinds of one place."""
_LARGE = 100
"""Maximum product of two parameters; above it, a difference is preferred to a sum."""
_UNKNOWN = range(2, 21)
"""Possible values of the unknown of a reverse problem."""
_CONSTANTS = range(1, 6)


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
