"""Which prompt a slot has: the samplers of ``recipe.curriculum``.

The choice is made once, when a slot is first issued, and journaled with the cursor that follows it: a restart, a re-issue
or a rollback does not choose again. It rests on the seed, the cursor and the history up to a step that does not depend
on timing (:mod:`.prompt_history`), so a resumed run has the prompts of an uninterrupted one.

All samplers walk one sequence, :class:`SeededEpochs`, and differ in what they pass over. To add one: a class with
``passes_over``, a model in ``CurriculumSpec``, a case in :func:`make_sampler`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from scalerl_api.recipe import CurriculumSpec
from scalerl_coordinator.prompt_history import KnownHistory

_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class View:
    """What a choice may rest on."""

    cursor: int
    """Place in the sequence of epochs."""
    history: KnownHistory


class Rule(Protocol):
    """What a sampler passes over."""

    def passes_over(self, prompt: int, cursor: int, history: KnownHistory) -> bool: ...


class Sampler:
    """The next prompt of the sequence that ``rule`` does not pass over.

    Where it passes over a whole epoch, the next prompt is taken all the same: a run continues with all prompts rather than
    with none.
    """

    def __init__(self, prompts: int, seed: int, rule: Rule) -> None:
        self._prompts, self._epochs, self._rule = prompts, SeededEpochs(prompts, seed), rule

    def choose(self, view: View) -> tuple[int, int]:
        """Index into the training split, and the cursor after it."""
        for cursor in range(view.cursor, view.cursor + self._prompts):
            prompt = self._epochs.choose(cursor)
            if not self._rule.passes_over(prompt, cursor, view.history):
                return prompt, cursor + 1
        return self._epochs.choose(view.cursor), view.cursor + 1


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every prompt once an epoch."""

    def passes_over(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class NoPositiveResampling:
    """Prompts whose historic pass rate is at least ``pass_rate`` leave all later epochs (ScaleRL [P])."""

    pass_rate: float

    def passes_over(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        rate = history.pass_rate(prompt)
        return rate is not None and rate >= self.pass_rate


@dataclass(frozen=True, slots=True)
class PassRateBand:
    """Prompts whose historic pass rate is outside [low, high] wait; prompts that were never tried do not."""

    low: float
    high: float

    def passes_over(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        rate = history.pass_rate(prompt)
        return rate is not None and not self.low <= rate <= self.high


@dataclass(frozen=True, slots=True)
class DifficultyPools:
    """A prompt is taken with the probability of its pool's weight over the largest weight.

    ``edges`` divide pass rates into pools; the chance is drawn by seed and cursor. Prompts that were never tried are in
    the middle pool.
    """

    edges: tuple[float, ...]
    weights: tuple[float, ...]
    seed: int

    def passes_over(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        rate = history.pass_rate(prompt)
        pool = len(self.weights) // 2 if rate is None else sum(rate >= edge for edge in self.edges)
        drawn = hashlib.blake2b(f"{self.seed}/{cursor}/pool".encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "little") / 2**64 >= self.weights[pool] / max(self.weights)


def make_sampler(spec: CurriculumSpec, prompts: int, seed: int) -> Sampler:
    """The sampler of ``recipe.curriculum``."""
    rule: Rule = Uniform()
    if spec.no_positive_resampling is not None:
        rule = NoPositiveResampling(float(spec.no_positive_resampling.pass_rate))
    elif spec.pass_rate_band is not None:
        rule = PassRateBand(float(spec.pass_rate_band.low), float(spec.pass_rate_band.high))
    elif spec.difficulty_pools is not None:
        pools = spec.difficulty_pools
        rule = DifficultyPools(tuple(map(float, pools.edges)), tuple(map(float, pools.weights)), seed)
    return Sampler(prompts, seed, rule)


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
