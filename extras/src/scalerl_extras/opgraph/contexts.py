"""Contexts: the vocabulary with which a graph becomes a problem, such as animals in a zoo or loaves in bakeries.

All contexts have the same number of places and kinds, so that a graph can be rendered in any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

PLACES = 24 * 20
"""Number of places of a context; the name of each has a first and a second word."""
KINDS = 8 * 8
"""Number of kinds of things that are counted at a place; the name of each has a first and a second word."""


@dataclass(frozen=True, slots=True)
class Context:
    """The names of a context, by index.

    Attributes:
        places: names of places with their preposition, like ``"in Amber Hollow"``.
        kinds: names of kinds, like ``"adult otters"``.
        things: name of all kinds together, for totals, like ``"animals"``.
    """

    places: tuple[str, ...]
    kinds: tuple[str, ...]
    things: str

    def instance(self, kind: int, place: int) -> str:
        """The name of the parameter that counts one kind at one place."""
        return f"{self.kinds[kind]} {self.places[place]}"

    def total(self, place: int) -> str:
        """The name of the parameter that counts all kinds at one place."""
        return f"total number of {self.things} {self.places[place]}"


def _context(preposition: str, places: tuple[str, str], kinds: tuple[str, str], things: str) -> Context:
    first, second = (words.split() for words in places)
    of, what = (words.split() for words in kinds)
    context = Context(
        tuple(f"{preposition} {a} {b}" for a, b in product(first, second)),
        tuple(f"{a} {b}" for a, b in product(of, what)),
        things,
    )
    assert (len(set(context.places)), len(set(context.kinds))) == (PLACES, KINDS)
    return context


CONTEXTS = {
    "zoo": _context(
        "in",
        (
            "Amber Birch Cedar Cinder Clover Copper Dusky Ember Fern Flint Granite Hazel "
            "Heron Ivory Juniper Lantern Maple Marble Misty Onyx Poplar Russet Silver Willow",
            "Basin Bend Burrow Canopy Cliff Corner Dell Den Glade Hollow "
            "Island Knoll Marsh Meadow Orchard Pond Ravine Thicket Terrace Vale",
        ),
        (
            "adult young shy bold sleepy playful noisy tame",
            "otters lynxes cranes geckos tapirs ibises badgers lemurs",
        ),
        "animals",
    ),
    "school": _context(
        "at",
        (
            "Abbey Acorn Beacon Bridge Castle Chapel Coral Dover Elm Fountain Garden Hill "
            "Kings Linden Market Mill North Oak Park Queens River South Station Tower",
            "Academy Annex College Court Faculty Gallery Grammar Gymnasium Hall House "
            "Institute Junior Lodge Lyceum Primary School Seminary Square Wing Workshop",
        ),
        (
            "algebra biology chemistry drama geography history music physics",
            "teachers tutors pupils helpers coaches mentors visitors examiners",
        ),
        "people",
    ),
    "harbour": _context(
        "by",
        (
            "Anchor Breton Brine Buoy Compass Cormorant Drift Eastern Foggy Gannet Gull Harpoon "
            "Kelp Lighthouse Mariner Northern Oyster Pelican Salt Seal Southern Tern Tide Western",
            "Bank Bar Berth Breakwater Causeway Channel Cove Dock Ferry Inlet "
            "Jetty Landing Mooring Pier Point Quay Reach Slip Sound Wharf",
        ),
        (
            "white red green blue painted rusty wooden rented",
            "kayaks barges dinghies trawlers yachts canoes tugs rafts",
        ),
        "boats",
    ),
    "bakery": _context(
        "from",
        (
            "Alder Baker Bishop Butter Candle Carter Cooper Crown Dairy Fiddler Golden Honey "
            "Lemon Mason Nutmeg Pepper Potter Saddler Sugar Tanner Tinker Vine Weaver Wheat",
            "Alley Arcade Avenue Close Crescent Cross Drive Embankment Gate Green "
            "Lane Mews Parade Passage Place Road Row Street Walk Yard",
        ),
        (
            "rye oat plum cherry walnut cinnamon poppy vanilla",
            "loaves buns tarts rolls muffins pretzels scones waffles",
        ),
        "pieces",
    ),
}
"""Contexts by name. Their vocabularies are disjoint; the sentences around the names are the same."""
