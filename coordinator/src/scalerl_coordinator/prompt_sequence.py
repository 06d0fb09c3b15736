"""What all samplers share: the sequence of prompts, what a choice may rest on, and chances that follow from the seed."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

from scalerl_coordinator.prompt_history import KnownHistory

_ROUNDS = 6
LONGEST_WALK = 256
"""Prompts passed over in one choice, of about 25 µs each, while the event loop waits. Where one of twenty is left, one choice in
500,000 ends here; where one of a hundred, one in 13."""


@dataclass(frozen=True, slots=True)
class View:
    """What a choice may rest on."""

    cursor: int
    """Place in the sequence of epochs."""
    history: KnownHistory


class Sampler(ABC):
    """Chooses prompts. Equal views have equal choices, in every process."""

    def __init__(self, prompts: int, seed: int) -> None:
        self._prompts, self._seed = prompts, seed
        self._epochs = SeededEpochs(prompts, seed)

    @abstractmethod
    def choose(self, view: View) -> tuple[int, int]:
        """Index into the training split, and the cursor after it, which is greater."""

    def refill(self, slot: int, tries: int, history: KnownHistory) -> int:
        """Another prompt for a slot, after ``tries`` prompts. Drawn by seed, slot and tries, and not the next of the
        sequence: which slot is refilled first depends on timing. A prompt may so be repeated within an epoch.
        """
        drawn = hashlib.blake2b(f"{self._seed}/{slot}/{tries}/refill".encode(), digest_size=6).digest()
        return self.choose(View(int.from_bytes(drawn, "little"), history))[0]

    def _chance(self, cursor: int, purpose: str) -> float:
        """Of the choice at ``cursor``: a number in [0, 1) that follows from the seed."""
        drawn = hashlib.blake2b(f"{self._seed}/{cursor}/{purpose}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "little") / 2**64


class SeededEpochs:
    """The sequence of prompts: each once an epoch, in an order of its own that the seed sets.

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
