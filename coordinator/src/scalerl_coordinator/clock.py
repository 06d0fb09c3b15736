"""Time for deadlines: monotonic, and deaf to the coordinator's own pauses."""

from __future__ import annotations


class LogicalClock:
    """Turns readings of a monotonic clock into seconds in which the coordinator was awake.

    A deadline is a promise to members that somebody listens to them until then. When the process was
    stopped, swapped out or its machine suspended, nobody listened: a gap between two readings above
    ``longest_gap_seconds`` counts as that much and no more, so that waking up expires nobody. Readings
    that go backwards count as nothing.

    >>> clock = LogicalClock(100.0, longest_gap_seconds=1.0)
    >>> clock.read(100.5), clock.read(4000.0), clock.read(3999.0), clock.read(3999.25)
    (0.5, 1.5, 1.5, 1.75)
    """

    def __init__(self, reading: float, longest_gap_seconds: float = 2.0) -> None:
        self._last = reading
        self._now = 0.0
        self._longest_gap = longest_gap_seconds

    def read(self, reading: float, *, awake: bool = True) -> float:
        """Logical seconds since construction; never decreases, and stands still while not ``awake``."""
        gap = reading - self._last
        self._last = reading
        if awake and gap > 0:
            self._now += min(gap, self._longest_gap)
        return self._now
