"""The inputs of a policy, and the interface of policies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

_TAIL_FACTOR = 2.0
"""A group that has run for the time of x tokens is expected to reach twice x: exact for a Pareto tail with exponent 2."""

_OF_GROUPS, _OF_STEPS = 0.05, 0.2
"""Weights of the newest measurement in the running means of groups and of steps."""


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """A slot of the window that may be leased now."""

    slot: int
    step: int
    tokens: float = 1.0
    """Expected tokens of a completion of its prompt."""


@dataclass(frozen=True, slots=True)
class Generator:
    """A generator whose lease request is open."""

    name: str
    """Its member id."""
    capacity: int
    """Number of groups that it requests."""
    groups: int = 0
    """Number of groups that it samples now."""
    tokens: float = 0.0
    """Expected tokens of these groups (:func:`expected_load`)."""


Assignment = dict[str, list[OpenSlot]]
"""The slots of each generator, by :attr:`Generator.name`, in the order in which to start them."""


@dataclass(frozen=True, slots=True)
class SchedulerInput:
    """The inputs of an assignment."""

    slots: Sequence[OpenSlot]
    """In slot order."""
    generators: Sequence[Generator]
    """In the order of their requests."""
    tokens_per_step: float = math.inf
    """Expected tokens (:attr:`OpenSlot.tokens`) of a group whose generation takes as long as a step of the run; infinite until both
    durations have been measured."""


_JUMP = 16
"""An increase by this many steps between two ticks is a restored checkpoint, not training."""


class Pace:
    """Measures the durations of groups and steps, as running means in seconds, from which :attr:`SchedulerInput.tokens_per_step` follows."""

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None
        self._seconds_per_step: float | None = None
        self._step: tuple[int, float] | None = None

    def observe_group(self, seconds: float, lengths: Sequence[int]) -> None:
        """Record the duration of a group's generation, and the tokens of its completions."""
        tokens = sum(lengths) / len(lengths)
        if tokens and 0 < seconds < math.inf:
            self._seconds_per_token = _mean(self._seconds_per_token, seconds / tokens, _OF_GROUPS)

    def observe_step(self, step: int, now: float) -> None:
        """Record that ``step`` is the next to be trained at ``now``."""
        if self._step is None or not 0 <= step - self._step[0] < _JUMP:
            self._step = step, now
        elif step > self._step[0]:
            seconds = (now - self._step[1]) / (step - self._step[0])
            self._seconds_per_step = _mean(self._seconds_per_step, seconds, _OF_STEPS)
            self._step = step, now

    def tokens(self, seconds: float) -> float:
        """Mean tokens of a group whose generation takes ``seconds``; 0 until a group was measured."""
        return seconds / self._seconds_per_token if self._seconds_per_token else 0.0

    @property
    def tokens_per_step(self) -> float:
        return (self.tokens(self._seconds_per_step) if self._seconds_per_step else 0.0) or math.inf


def _mean(before: float | None, value: float, smoothing: float) -> float:
    return value if before is None else before + smoothing * (value - before)


class SchedulingPolicy(Protocol):
    """Assigns slots to generators."""

    def assign(self, inputs: SchedulerInput) -> Assignment:
        """Assign slots to the generators of ``inputs``, to each at most its capacity.

        Afterwards all slots are assigned, or every generator has as many as its capacity: no slot is kept for a generator without a request.
        """
        ...


def expected_load(groups: Iterable[tuple[float, float]]) -> float:
    """Load of a generator, in expected tokens per completion, summed over its groups.

    ``groups`` has, for each, its expected tokens and the tokens for which it has had time since its lease
    (:meth:`Pace.tokens`).

    >>> expected_load([(500.0, 100.0), (500.0, 4000.0)])
    8500.0
    """
    return sum(max(expected, _TAIL_FACTOR * so_far) for expected, so_far in groups)
