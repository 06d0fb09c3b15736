"""Rows that repeat the prompt of an earlier one: sources of files leave them out and count them, whatever the format."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from scalerl_tasks.split import text_key


class Repeats:
    """Finds rows with the prompt of an earlier row, in 32 to 96 bytes a row.

    Args:
        solutions: only rows that also have its solution are repeats: a warm start trains on several solutions of a prompt.
    """

    def __init__(self, solutions: bool = False) -> None:
        self._solutions = solutions
        self._prompts, self._pairs, self._ids = _KeySet(), _KeySet(), _KeySet()
        self._count = self._conflicting = 0

    def is_repeat(
        self, prompt: str, turns: Sequence[tuple[str, str]], answer: str, solution: str | None
    ) -> bool:
        """Counts the row if it is one, and whether it has another answer than the row that is kept."""
        key, text = text_key(prompt, turns), solution or answer if self._solutions else answer
        is_new = self._prompts.add(key)
        pair = key + text.encode("utf-8", "surrogatepass")
        is_new_pair = self._pairs.add(pair, store=is_new or self._solutions)
        if is_new or (self._solutions and is_new_pair):
            return False
        self._count += 1
        self._conflicting += is_new_pair
        return True

    def is_new_id(self, given: str) -> bool:
        """Whether no earlier row has this id."""
        return self._ids.add(given.encode("utf-8", "surrogatepass"))

    @property
    def dropped(self) -> dict[str, int]:
        """Number of rows by what is said about them."""
        found = {
            "dropped as duplicates of an earlier prompt": self._count,
            "of these with another answer": self._conflicting,
        }
        return {reason: count for reason, count in found.items() if count}


class _KeySet:
    """A set of keys by their 8-byte digests: an open-addressed table, 16 to 32 bytes a key."""

    def __init__(self) -> None:
        self._slots, self._count, self._mask = array("Q", bytes(8 << 12)), 0, (1 << 12) - 1

    def add(self, key: bytes, *, store: bool = True) -> bool:
        """Add a key, unless it is not to be stored; returns whether it is new."""
        value = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) or 1
        slots, mask = self._slots, self._mask
        at = value & mask
        while slots[at]:
            if slots[at] == value:
                return False
            at = (at + 1) & mask
        if not store:
            return True
        slots[at] = value
        self._count += 1
        if 2 * self._count > mask:
            self._grow()
        return True

    def _grow(self) -> None:
        self._mask = 2 * self._mask + 1
        slots = array("Q", [0]) * (self._mask + 1)
        for value in self._slots:
            if not value:
                continue
            at = value & self._mask
            while slots[at]:
                at = (at + 1) & self._mask
            slots[at] = value
        self._slots = slots
