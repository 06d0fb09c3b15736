"""The sequence of prompts over all epochs, of which samplers choose."""

from __future__ import annotations

import hashlib

_ROUNDS = 6


class SeededEpochs:
    """The sequence of prompts: every epoch has each prompt once, in an order determined by the seed.

    The order is a keyed permutation that is computed for single positions (a Feistel network on the next even number of bits,
    repeated until the result is in range), so it needs no memory for 10⁸ prompts, and position 10⁹ costs as much as 0.
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
