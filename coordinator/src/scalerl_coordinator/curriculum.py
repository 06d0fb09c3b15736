"""Chooses the prompt of a slot.

The choice is made once, when a slot is first issued, and journaled: a restart, a re-issue or a rollback does not choose
again. So a curriculum may depend on anything known at that moment (No-Positive-Resampling: the history of pass rates),
and a resumed run still equals an uninterrupted one. :class:`SeededEpochs` needs only the slot.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

_ROUNDS = 6


class Curriculum(Protocol):
    """Chooses the training prompt of a slot that is issued for the first time."""

    def choose(self, slot: int) -> int:
        """Index into the training split."""
        ...


class SeededEpochs:
    """Every prompt once an epoch; the seed sets the order of each epoch.

    The order is a keyed permutation computed point by point (a Feistel network on the next even number of bits, repeated
    until the result is inside the range): 10⁸ prompts need no memory, and slot 10⁹ costs no more than slot 0.
    """

    def __init__(self, prompts: int, seed: int) -> None:
        if prompts < 1:
            raise ValueError(f"a curriculum needs at least one training prompt, got {prompts}")
        self._prompts = prompts
        self._seed = seed
        self._half_bits = max(1, ((prompts - 1).bit_length() + 1) // 2)
        self._epoch = -1
        self._keys: list[bytes] = []

    def choose(self, slot: int) -> int:
        epoch, position = divmod(slot, self._prompts)
        if epoch != self._epoch:
            self._keys = [f"{self._seed}/{epoch}/{i}/".encode() for i in range(_ROUNDS)]
            self._epoch = epoch
        while True:
            position = self._permute(position)
            if position < self._prompts:
                return position

    def _permute(self, value: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for key in self._keys:
            digest = hashlib.blake2b(right.to_bytes(8, "little"), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return (left << self._half_bits) | right
