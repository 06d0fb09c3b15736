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

    Of the first n items, ⌊(n · numerator + offset) / denominator⌋ go to the left: a Sturmian sequence, in which the number of
    left items in every window of L items is L · numerator / denominator rounded up or down (Morse and Hedlund, 1940).
    """

    numerator: int
    denominator: int
    offset: int
    """Phase of the sequence: 0 ≤ offset < denominator."""
    left: _Split | int
    """A task, or a split of the left items."""
    right: _Split | int
    """A task, or a split of the right items."""

    def before(self, n: int) -> int:
        """Number of the first n items that go to the left."""
        return (n * self.numerator + self.offset) // self.denominator


class Mixture:
    """Assigns a task to each position of a sequence, from weights and seed alone, in integer arithmetic without state.

    The tasks are the leaves of a Huffman tree whose nodes each divide a sequence in two. In any window of L positions, the
    number of a task's positions differs from L · weight by less than 1 per node above the task; with T tasks, there are at
    most T − 1 such nodes.

    >>> of_two = Mixture([Fraction(3, 4), Fraction(1, 4)], seed=0)
    >>> [of_two.place(n)[0] for n in range(8)].count(0)
    6
    """

    def __init__(self, weights: Sequence[Fraction], seed: int) -> None:
        """Build the tree.

        Args:
            weights: positive weights; they need not sum to 1.
            seed: determines the phases of the splits.

        Raises:
            ValueError: there is no weight, or one is not positive.
        """
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
        """The task of position n, and the number of earlier positions of that task."""
        node = self._root
        while not isinstance(node, int):
            before = node.before(n)
            n, node = (before, node.left) if node.before(n + 1) > before else (n - before, node.right)
        return node, n

    def task(self, n: int) -> int:
        return self.place(n)[0]


def _draw(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:16])
