"""The interface of a sampler (``recipe.curriculum``), the inputs of its choices, the sequence of prompts, and seeded random numbers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

from scalerl_coordinator.prompt_history import KnownHistory

_ROUNDS = 6
MAX_WALK = 256
"""Maximum number of prompts passed over in one choice; each takes about 25 µs of the event loop. If one prompt in twenty is
eligible, one choice in 500,000 reaches this limit; if one in a hundred is, one in 13."""


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


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """The inputs of a choice."""

    cursor: int
    """Position in the sequence of epochs (for some samplers, with other bits)."""
    history: KnownHistory


class Sampler(ABC):
    """Chooses prompts. Equal views yield equal choices, in every process."""

    def __init__(self, prompts: int, seed: int) -> None:
        self._prompts, self._seed = prompts, seed
        self._epochs = SeededEpochs(prompts, seed)

    @abstractmethod
    def choose(self, inputs: SamplerInput) -> tuple[int, int]:
        """Choose a prompt: its index in the training split, and the next cursor, which is greater than that of ``inputs``."""

    def refill(self, slot: int, tries: int, history: KnownHistory) -> int:
        """Choose another prompt for a slot that had ``tries`` prompts.

        It depends on seed, slot and tries, and is not the next of the sequence, because the order in which slots are refilled
        depends on timing. Therefore a prompt may be repeated within an epoch.
        """
        drawn = hashlib.blake2b(f"{self._seed}/{slot}/{tries}/refill".encode(), digest_size=6).digest()
        return self.choose(SamplerInput(int.from_bytes(drawn, "little"), history))[0]


def chance(seed: int, cursor: int, purpose: str) -> float:
    """A uniform random number in [0, 1) for the choice at ``cursor``, determined by the seed."""
    drawn = hashlib.blake2b(f"{seed}/{cursor}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "little") / 2**64
