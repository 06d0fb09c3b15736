"""What a policy sees, and the interface of policies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

_TAIL_FACTOR = 2.0
"""A group that has run as long as one of x tokens takes is expected to have twice x: exact for a Pareto tail of exponent 2."""

_OF_GROUPS, _OF_STEPS = 0.05, 0.2
"""Weights of the newest in running means."""


@dataclass(frozen=True, slots=True)
class Place:
    """A slot of the window that may be leased now."""

    slot: int
    step: int
    tokens: float = 1.0
    """Expected tokens of a completion; of a prompt without history, the mean of its task."""


@dataclass(frozen=True, slots=True)
class Generator:
    """A generator whose lease request is open."""

    name: str
    room: int
    """Groups that it asks for."""
    groups: int = 0
    """Groups that it holds."""
    tokens: float = 0.0
    """Tokens that they are expected to need: :func:`expected_load`."""


Assignment = dict[str, list[Place]]
"""The places of each generator, by its name, in the order in which they are to start."""


@dataclass(frozen=True, slots=True)
class View:
    """What an assignment rests on."""

    places: Sequence[Place]
    """In slot order."""
    generators: Sequence[Generator]
    """In the order in which they asked."""
    tokens_per_step: float = math.inf
    """Expected tokens (:attr:`Place.tokens`) of a group that takes as long to generate as the run takes for a step; infinite until
    both were measured."""


_JUMP = 16
"""So many steps from one tick to the next were not trained, but restored from a checkpoint."""


class Pace:
    """Measures :attr:`View.tokens_per_step`, and how long groups take: running means, in seconds."""

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None
        self._seconds_per_step: float | None = None
        self._step: tuple[int, float] | None = None

    def observe_group(self, seconds: float, lengths: Sequence[int]) -> None:
        """A group of completions with these tokens took so many seconds."""
        tokens = sum(lengths) / len(lengths)
        if tokens and 0 < seconds < math.inf:
            self._seconds_per_token = _mean(self._seconds_per_token, seconds / tokens, _OF_GROUPS)

    def observe_step(self, step: int, now: float) -> None:
        """``step`` is the next to be trained."""
        if self._step is None or not 0 <= step - self._step[0] < _JUMP:
            self._step = step, now
        elif step > self._step[0]:
            seconds = (now - self._step[1]) / (step - self._step[0])
            self._seconds_per_step = _mean(self._seconds_per_step, seconds, _OF_STEPS)
            self._step = step, now

    def tokens(self, seconds: float) -> float:
        """Mean tokens of a group that takes so long; 0 until a group was measured."""
        return seconds / self._seconds_per_token if self._seconds_per_token else 0.0

    @property
    def tokens_per_step(self) -> float:
        return (self.tokens(self._seconds_per_step) if self._seconds_per_step else 0.0) or math.inf


def _mean(before: float | None, value: float, smoothing: float) -> float:
    return value if before is None else before + smoothing * (value - before)


class Policy(Protocol):
    """Assigns places to generators."""

    def assign(self, view: View) -> Assignment:
        """Places for all generators of ``view``, for each at most as many as it has room for.

        All places are assigned, or no generator has room left: no place waits for a generator that does not ask.
        """
        ...


def expected_load(groups: Iterable[tuple[float, float]]) -> float:
    """Load of a generator, from the expected tokens of each group that it holds and those that it had time for since it was
    leased (:meth:`Pace.tokens`).

    >>> expected_load([(500.0, 100.0), (500.0, 4000.0)])
    8500.0
    """
    return sum(max(expected, _TAIL_FACTOR * so_far) for expected, so_far in groups)
