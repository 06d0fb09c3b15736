"""The policies.

======================  ==========================================  ==================================================
policy                  order                                       generator
======================  ==========================================  ==================================================
:class:`SlotOrder`      slots                                       whoever asks first gets all that it asks for
:class:`RoundRobin`     slots                                       all that ask get equally many
:class:`LeastLoaded`    slots                                       each place to the generator with the fewest groups
:class:`ByLength`       longest first, earlier steps before later   each place to the generator with the fewest tokens
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
    """Longest first within the window, and long groups where little else runs.

    After RhymeRL's HistoPipe (arXiv 2508.18588 [S]), which ranks prompts by historic length and gives long ones more workers. A
    decoding step takes longer the more sequences run, so a generator that holds few others finishes a long group sooner.
    """

    def choose(self, view: View) -> list[Place]:
        longest = max((place.tokens for place in view.places), default=1.0)

        def rank(place: Place) -> tuple[float, int]:
            # A step is due later by one part of the window; the longest group takes about the whole window.
            due = (place.step - view.oldest_step) / view.window_steps
            return due - place.tokens / longest, place.slot

        ordered = sorted(view.places, key=rank)
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
