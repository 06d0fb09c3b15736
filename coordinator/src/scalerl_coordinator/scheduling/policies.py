"""The scheduling policies.

======================  ==========================================  ==================================================
policy                  order of the slots                         generator of each place
======================  ==========================================  ==================================================
:class:`LeastLoaded`    by slot                                     the one with the fewest groups
:class:`ByLength`       by latest start: step - expected duration   the one with the fewest expected tokens
======================  ==========================================  ==================================================
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from scalerl_coordinator.scheduling.interface import Assignment, Generator, OpenSlot, SchedulerInput


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
