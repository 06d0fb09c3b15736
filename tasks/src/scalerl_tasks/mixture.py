"""Divides a sequence among the tasks of a mix, in exact proportions."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class _Split:
    """Divides a sequence in two.

    Of the first n items, ⌊(n · numerator + offset) / denominator⌋ go left: a Sturmian sequence, in which every window of L
    items has its share of L or the whole number above or below (Morse and Hedlund, 1940).
    """

    numerator: int
    denominator: int
    offset: int
    left: _Split | int
    """A task, or what divides further."""
    right: _Split | int

    def before(self, n: int) -> int:
        """Of the first n items, how many go left."""
        return (n * self.numerator + self.offset) // self.denominator


class Mixture:
    """Which task a place of a sequence has. Follows from weights and seed alone, in integers: no state, no floats.

    The tasks are the leaves of a Huffman tree whose nodes divide what they get in two. In any window of L places, a task has
    L · weight of them, but for less than 1 for each node above it, and at most one node less than there are tasks.

    >>> of_two = Mixture([Fraction(3, 4), Fraction(1, 4)], seed=0)
    >>> [of_two.place(n)[0] for n in range(8)].count(0)
    6
    """

    def __init__(self, weights: Sequence[Fraction], seed: int) -> None:
        """weights: positive; they need not sum to 1. Raises ValueError for none, or one that is not positive."""
        if not weights or min(weights) <= 0:
            raise ValueError(f"a mix needs positive weights, got {list(map(str, weights))}")
        self.tasks = len(weights)
        nodes: list[tuple[Fraction, int, _Split | int]] = [(w, task, task) for task, w in enumerate(weights)]
        heapq.heapify(nodes)
        for number in range(len(weights), 2 * len(weights) - 1):
            light, _, right = heapq.heappop(nodes)
            heavy, _, left = heapq.heappop(nodes)
            share = heavy / (heavy + light)
            offset = _draw(f"mix/{seed}/{number}") % share.denominator
            node = _Split(share.numerator, share.denominator, offset, left, right)
            heapq.heappush(nodes, (heavy + light, number, node))
        self._root = nodes[0][2]

    def place(self, n: int) -> tuple[int, int]:
        """The task of place n, and how many of the places before it are the task's."""
        node = self._root
        while not isinstance(node, int):
            before = node.before(n)
            n, node = (before, node.left) if node.before(n + 1) > before else (n - before, node.right)
        return node, n

    def task(self, n: int) -> int:
        """The task of place n."""
        return self.place(n)[0]


def _draw(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:16])
