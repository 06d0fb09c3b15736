"""The interface of a sampler (``recipe.curriculum``), the inputs of its choices, and seeded random numbers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

from scalerl_coordinator.prompt_history import KnownHistory
from scalerl_coordinator.prompt_sequence import SeededEpochs

MAX_WALK = 256
"""Maximum number of prompts passed over in one choice; each takes about 25 µs of the event loop. If one prompt in twenty is
eligible, one choice in 500,000 reaches this limit; if one in a hundred is, one in 13."""


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
