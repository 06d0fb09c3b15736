"""What a policy sees, and the interface of policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

_TAIL_FACTOR = 2.0
"""A completion that has run for x tokens is expected to end at twice x: exact for a Pareto tail of exponent 2."""


@dataclass(frozen=True, slots=True)
class Place:
    """A slot of the window that may be leased now."""

    slot: int
    step: int
    tokens: float = 1.0
    """Expected tokens of a completion; of a prompt without history, the mean of all prompts."""


@dataclass(frozen=True, slots=True)
class Generator:
    """A generator whose lease request is open."""

    name: str
    room: int
    """Groups that it asks for."""
    groups: int = 0
    """Groups that it holds."""
    tokens: float = 0.0
    """The same in tokens: :func:`expected_load`."""


@dataclass(frozen=True, slots=True)
class View:
    """What a choice rests on."""

    places: Sequence[Place]
    """In slot order."""
    asking: Generator
    others: Sequence[Generator] = ()
    """Further generators that these places could be leased to now."""
    oldest_step: int = 0
    """The first step that is not trained."""
    window_steps: int = 1
    """Steps that the window spans: k + 1."""


class Policy(Protocol):
    """The choice."""

    def choose(self, view: View) -> list[Place]:
        """Places of ``view`` for ``view.asking``, at most as many as it has room for, in the order in which they are to start.

        Without others, ``asking`` gets all that it has room for: no place waits for a generator that does not ask.
        """
        ...


def expected_load(groups: Iterable[tuple[float, float]]) -> float:
    """Load of a generator, from the expected tokens of each group that it holds and the tokens that the group's first
    completions had time for since it was leased.

    >>> expected_load([(500.0, 100.0), (500.0, 4000.0)])
    8500.0
    """
    return sum(max(expected, _TAIL_FACTOR * so_far) for expected, so_far in groups)
