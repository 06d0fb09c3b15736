"""Repairs: how often what somebody else has changed of a run's objects is put back. Pure, remembered between looks.

Whoever else writes our fields is not fought at full speed, and what an apply has left as it was (admission keeps it so)
is not applied again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from scalerl_operator.controller.drift import Difference
from scalerl_operator.controller.owned import Place

REPAIR_SECONDS: Final = 2.0
"""The first repair of an object comes at once, the next after so long, then twice that, up to five minutes."""
LONGEST_REPAIR_SECONDS: Final = 300.0

_Object = tuple[str, str]
"""(kind, name)."""


@dataclass(frozen=True)
class _Repair:
    """count: repairs one after the other. last: when the newest was. due: of one that is withheld, when it may be."""

    count: int
    last: float
    due: float = 0.0


@dataclass
class _Run:
    repairs: dict[_Object, _Repair] = field(default_factory=dict)
    left: dict[_Object, list[Difference]] = field(default_factory=dict)


class Repairs:
    """The repairs of all runs, by uid."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def forget(self, uid: str) -> None:
        """The run is gone."""
        self._runs.pop(uid, None)

    def may(self, place: Place, what: tuple[str, str]) -> bool:
        """Whether an object may be repaired now, which then counts as done."""
        repairs = self._runs.setdefault(place.uid, _Run()).repairs
        before, now = repairs.get(what), place.unix_seconds
        if before is None or not _is_recent(before, now):
            repairs[what] = _Repair(1, now)
            return True
        pause = min(REPAIR_SECONDS * 2.0 ** min(before.count - 1, 16), LONGEST_REPAIR_SECONDS)
        if 0 <= now - before.last < pause:
            repairs[what] = _Repair(before.count, before.last, before.last + pause)
            return False
        repairs[what] = _Repair(before.count + 1, now)
        return True

    def lately(self, place: Place) -> bool:
        """Whether somebody else has lately changed an object of the run: then it is compared at every look."""
        return any(_is_recent(repair, place.unix_seconds) for repair in self._of(place).repairs.values())

    def next_seconds(self, place: Place) -> float | None:
        """In how long a repair is due that was withheld; None: there is none."""
        waits = (repair.due - place.unix_seconds for repair in self._of(place).repairs.values())
        return min((wait for wait in waits if 0 < wait <= LONGEST_REPAIR_SECONDS), default=None)

    def applied(self, place: Place, what: tuple[str, str], left: list[Difference]) -> bool:
        """An object was applied, and the answer differs by ``left`` from what was sent. Whether that is new."""
        known = self._of(place).left
        if left == known.get(what, []):
            return False
        self._runs.setdefault(place.uid, _Run()).left[what] = left
        return bool(left)

    def in_vain(self, place: Place, what: tuple[str, str], found: list[Difference]) -> bool:
        """Whether all that an object differs by now is what the last apply has left as it was."""
        return bool(found) and found == self._of(place).left.get(what)

    def _of(self, place: Place) -> _Run:
        return self._runs.get(place.uid, _Run())


def _is_recent(repair: _Repair, now: float) -> bool:
    return now - repair.last <= 2 * LONGEST_REPAIR_SECONDS
