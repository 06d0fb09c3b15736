"""A monotonic clock for deadlines that does not advance while the coordinator is suspended."""

from __future__ import annotations


class LogicalClock:
    """Converts readings of a monotonic clock into seconds in which the coordinator was running.

    A member can meet a deadline only if the coordinator receives its requests. While the process is stopped or swapped out, or
    its machine suspended, it receives none. Therefore a gap between two readings counts as at most ``max_gap_seconds``, so that
    a pause does not expire leases. A reading that goes backwards counts as zero.

    >>> clock = LogicalClock(100.0, max_gap_seconds=1.0)
    >>> clock.read(100.5), clock.read(4000.0), clock.read(3999.0), clock.read(3999.25)
    (0.5, 1.5, 1.5, 1.75)
    """

    def __init__(self, reading: float, max_gap_seconds: float = 2.0) -> None:
        self._last = reading
        self._now = 0.0
        self._max_gap = max_gap_seconds

    def read(self, reading: float, *, awake: bool = True) -> float:
        """Logical seconds since construction; never decreases, and does not advance while not ``awake``."""
        gap = reading - self._last
        self._last = reading
        if awake and gap > 0:
            self._now += min(gap, self._max_gap)
        return self._now
