"""Intervals of the calls of a server that makes steps or scores completions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Intervals, in seconds."""

    first_back_off: float = 0.5
    """Wait before a server that failed is asked again; it doubles with each failure."""
    max_back_off: float = 30.0
    full_back_off: float = 5.0
    """Longest back-off of a generator that has no session: shorter than the times for which others give one back."""
    waiting: float = 1.0
    """Interval of the notices of a grader that waits, which keep its lease alive."""
    full: float = 30.0
    """A server that refused a session is asked for more after this time, by a generator that has one."""
    spare: float = 6.0
    """Time for which a generator that has all sessions gives one back."""
    opening: float = 1.0
    """Time after which a server that refused a session while others were being opened is asked again."""
    ended: float = 5.0
    """Idle sessions without an episode are closed after this time."""
    idle: float = 60.0
    """Idle sessions with an episode are closed after this time."""
    first_avoided: float = 0.5
    """Time for which an address that failed is avoided; it doubles with each failure."""
    max_avoided: float = 30.0
    resolved: float = 5.0
    """The server's name is resolved again after this time."""


TIMINGS = Timings()
