"""The policies.

======================  ==========================================  ==================================================
policy                  order                                       generator
======================  ==========================================  ==================================================
:class:`SlotOrder`      slots                                       whoever asks first gets all that it asks for
:class:`RoundRobin`     slots                                       all that ask get equally many
:class:`LeastLoaded`    slots                                       each place to the generator with the fewest groups
:class:`ByLength`       latest start: step less expected duration   each place to the generator with the fewest tokens
======================  ==========================================  ==================================================
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from scalerl_coordinator.scheduling.view import Generator, Place, View


class SlotOrder:
    """The default."""

    def choose(self, view: View) -> list[Place]:
        return list(view.places[: view.asking.room])


class RoundRobin:
    """Equal parts, whatever the generators hold."""

    def choose(self, view: View) -> list[Place]:
        part = -(-len(view.places) // (1 + len(view.others)))
        return list(view.places[: min(view.asking.room, part)])


class LeastLoaded:
    """By number of groups."""

    def choose(self, view: View) -> list[Place]:
        return _spread(view.places, view, lambda generator: generator.groups, lambda place: 1.0)


class ByLength:
    """By when a group has to start for its step, and long groups where little else runs.

    The longest group of a step is first; a long group is before short ones of earlier steps by as many steps as it takes.

    After RhymeRL's HistoPipe (arXiv 2508.18588 [S]), which ranks prompts by historic length and gives long ones more workers. A
    decoding step takes longer the more sequences run, so a generator that holds few others finishes a long group sooner.
    """

    def choose(self, view: View) -> list[Place]:
        def due(place: Place) -> tuple[float, float]:
            """When it has to start at the latest, in steps; then the longer one."""
            return place.step - place.tokens / view.tokens_per_step, -place.tokens

        ordered = sorted(view.places, key=due)
        return _spread(ordered, view, lambda generator: generator.tokens, lambda place: place.tokens)


def _spread(
    places: Sequence[Place],
    view: View,
    load: Callable[[Generator], float],
    weight: Callable[[Place], float],
) -> list[Place]:
    """Those of ``places`` that fall to the asking generator if each in turn goes to the generator with the least load."""
    room = {one.name: one.room for one in (view.asking, *view.others)}
    heap = [(load(one), one.name) for one in (view.asking, *view.others) if one.room > 0]
    heapq.heapify(heap)
    mine: list[Place] = []
    for place in places:
        if len(mine) == view.asking.room or not heap:
            break
        loaded, name = heap[0]
        if name == view.asking.name:
            mine.append(place)
        room[name] -= 1
        if room[name]:
            heapq.heapreplace(heap, (loaded + weight(place), name))
        else:
            heapq.heappop(heap)
    return mine
