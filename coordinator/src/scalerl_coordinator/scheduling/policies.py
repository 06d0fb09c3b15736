"""The scheduling policies.

======================  ==========================================  ==================================================
policy                  order of the places                         generator of each place
======================  ==========================================  ==================================================
:class:`LeastLoaded`    by slot                                     the one with the fewest groups
:class:`ByLength`       by latest start: step - expected duration   the one with the fewest expected tokens
======================  ==========================================  ==================================================
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from scalerl_coordinator.scheduling.view import Assignment, Generator, Place, View


class LeastLoaded:
    """The default. Groups are spread over all generators that ask, because a decoding step takes longer with more sequences."""

    def assign(self, view: View) -> Assignment:
        return spread(view.places, view, lambda generator: generator.groups, lambda place: 1.0)


class ByLength:
    """Starts groups in the order of their latest start, and long groups on generators with little load.

    Within a step, the longest group comes first. A long group comes before short groups of earlier steps by as many steps as
    its generation takes.

    A decoding step takes longer with more sequences, so a generator with few others finishes a long group sooner. RhymeRL's
    HistoPipe (arXiv 2508.18588 [S]) also predicts lengths from history, but splits the ranked prompts of a step into a range per
    worker, ascending in odd steps and descending in even ones, and migrates stragglers; this policy has neither.
    """

    def assign(self, view: View) -> Assignment:
        def due(place: Place) -> tuple[float, float]:
            """Its latest start, in steps; of equal ones, the longer group comes first."""
            return place.step - place.tokens / view.tokens_per_step, -place.tokens

        ordered = sorted(view.places, key=due)
        return spread(ordered, view, lambda generator: generator.tokens, lambda place: place.tokens)


def spread(
    places: Iterable[Place],
    view: View,
    load: Callable[[Generator], float],
    weight: Callable[[Place], float],
) -> Assignment:
    """Assign each of ``places`` in turn to the generator with the least load that has room; of equal ones, to the first."""
    assigned: Assignment = {generator.name: [] for generator in view.generators}
    heap = [(load(generator), i) for i, generator in enumerate(view.generators) if generator.room > 0]
    heapq.heapify(heap)
    for place in places:
        if not heap:
            break
        least_load, i = heap[0]
        generator = view.generators[i]
        assigned[generator.name].append(place)
        if len(assigned[generator.name]) < generator.room:
            heapq.heapreplace(heap, (least_load + weight(place), i))
        else:
            heapq.heappop(heap)
    return assigned
