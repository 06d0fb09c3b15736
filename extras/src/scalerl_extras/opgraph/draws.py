"""Draws of a problem, which come from a hash of (seed, index), so that a problem has the same cost at any index."""

from __future__ import annotations

import hashlib
from typing import Any


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
