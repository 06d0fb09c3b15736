"""Policies that assign the open slots of the window to generators.

    open slots, generators with a lease request ─▶ SchedulingPolicy.assign ─▶ slots of each generator

An open slot is one that may be leased now. Its step, prompt and staleness bound are fixed before a policy sees it. Policies are pure:
equal views yield equal assignments, and they do no I/O. An assignment is not recorded; leases are journaled when they are
issued (:mod:`scalerl_coordinator.generator_requests`).

======================  ==========================================  ==================================================
policy                  order of the slots                         generator of each place
======================  ==========================================  ==================================================
:class:`LeastLoaded`    by slot                                     the one with the fewest groups
:class:`ByLength`       by latest start: step - expected duration   the one with the fewest expected tokens
======================  ==========================================  ==================================================
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
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


class LeastLoaded:
    """The default. Groups are spread over all generators that ask, because a decoding step takes longer with more sequences."""

    def assign(self, inputs: SchedulerInput) -> Assignment:
        return spread(inputs.slots, inputs, lambda generator: generator.groups, lambda slot: 1.0)


class ByLength:
    """Starts groups in the order of their latest start, and long groups on generators with little load.

    Within a step, the longest group comes first. A long group comes before short groups of earlier steps by as many steps as
    its generation takes.

    A decoding step takes longer with more sequences, so a generator with few others finishes a long group sooner. RhymeRL's
    HistoPipe (arXiv 2508.18588 [S]) uses the same history otherwise: it gives each generator a range of lengths, alternating by
    step, and long ranges more generators. In simulations that was slower than this (``benchmarks/README.md``).
    """

    def assign(self, inputs: SchedulerInput) -> Assignment:
        def due(slot: OpenSlot) -> tuple[float, float]:
            """Its latest start, in steps; of equal ones, the longer group comes first."""
            return slot.step - slot.tokens / inputs.tokens_per_step, -slot.tokens

        ordered = sorted(inputs.slots, key=due)
        return spread(ordered, inputs, lambda generator: generator.tokens, lambda slot: slot.tokens)


def spread(
    slots: Iterable[OpenSlot],
    inputs: SchedulerInput,
    load: Callable[[Generator], float],
    weight: Callable[[OpenSlot], float],
) -> Assignment:
    """Assign each of ``slots`` in turn to the generator with the least load among those below their capacity; of equal ones, to the first."""
    assigned: Assignment = {generator.name: [] for generator in inputs.generators}
    heap = [(load(generator), i) for i, generator in enumerate(inputs.generators) if generator.capacity > 0]
    heapq.heapify(heap)
    for slot in slots:
        if not heap:
            break
        least_load, i = heap[0]
        generator = inputs.generators[i]
        assigned[generator.name].append(slot)
        if len(assigned[generator.name]) < generator.capacity:
            heapq.heapreplace(heap, (least_load + weight(slot), i))
        else:
            heapq.heappop(heap)
    return assigned
