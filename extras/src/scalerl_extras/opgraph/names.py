"""Draws the names of a problem's parameters: two indices never give the same problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalerl_extras.opgraph.contexts import KINDS, PLACES
from scalerl_extras.opgraph.draws import Draws
from scalerl_extras.opgraph.graph import Form, Graph

MAX_PROBLEMS = PLACES * (PLACES - 1) * KINDS
"""Number of different problems of one seed: see :func:`draw_names`."""


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
