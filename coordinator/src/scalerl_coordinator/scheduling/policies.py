"""The policies.

======================  ==========================================  ==================================================
policy                  order                                       generator
======================  ==========================================  ==================================================
:class:`LeastLoaded`    slots                                       each place to the generator with the fewest groups
:class:`ByLength`       latest start: step less expected duration   each place to the generator with the fewest tokens
======================  ==========================================  ==================================================
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from scalerl_coordinator.scheduling.view import Assignment, Generator, Place, View


class LeastLoaded:
    """The default. A decoding step takes longer the more sequences run, so groups are spread over all that ask."""

    def assign(self, view: View) -> Assignment:
        return spread(view.places, view, lambda generator: generator.groups, lambda place: 1.0)


class ByLength:
    """By when a group has to start for its step, and long groups where little else runs.

    The longest group of a step is first; a long group is before short ones of earlier steps by as many steps as it takes.

    After RhymeRL's HistoPipe (arXiv 2508.18588 [S]), which ranks prompts by historic length and gives long ones more workers. A
    decoding step takes longer the more sequences run, so a generator that holds few others finishes a long group sooner.
    """

    def assign(self, view: View) -> Assignment:
        def due(place: Place) -> tuple[float, float]:
            """When it has to start at the latest, in steps; then the longer one."""
            return place.step - place.tokens / view.tokens_per_step, -place.tokens

        ordered = sorted(view.places, key=due)
        return spread(ordered, view, lambda generator: generator.tokens, lambda place: place.tokens)


def spread(
    places: Iterable[Place],
    view: View,
    load: Callable[[Generator], float],
    weight: Callable[[Place], float],
) -> Assignment:
    """Each of ``places`` in turn to the generator with the least load that has room; of equal ones, to the one that asked first."""
    assigned: Assignment = {one.name: [] for one in view.generators}
    heap = [(load(one), at) for at, one in enumerate(view.generators) if one.room > 0]
    heapq.heapify(heap)
    for place in places:
        if not heap:
            break
        loaded, at = heap[0]
        generator = view.generators[at]
        assigned[generator.name].append(place)
        if len(assigned[generator.name]) < generator.room:
            heapq.heapreplace(heap, (loaded + weight(place), at))
        else:
            heapq.heappop(heap)
    return assigned
