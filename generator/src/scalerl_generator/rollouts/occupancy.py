"""How many groups fill the server.

A group is n sequences that end at different times: while the longest is still generating, the others'
places in the batch are free. *Occupancy* is the fraction of a group's sequences that are still generating, averaged over
the group's duration (mean length over longest); it determines how many groups fill the server. An episode that waits for its
environment holds no place either, so the occupancy of a group of episodes is the time of its requests over that of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

from scalerl_api.generator_spec import MAX_LEASED
from scalerl_generator.rollouts.partial_completion import PartialCompletion

_PREFETCH_FRACTION = 0.125
"""Surplus of leased groups over those that fill the server."""
MIN_OCCUPANCY = 1 / MAX_LEASED
"""Least occupancy that leases reckon with."""
_SMOOTHING = 0.05
"""Weight of the newest group in the running mean of occupancy."""


class Occupancy:
    """Running mean of the groups' occupancy, from finished groups; initially 1. It is at least a fifth, which bounds how many times
    the sequences that the server runs are leased.

    >>> occupancy = Occupancy(smoothing=0.5)
    >>> occupancy.observe([10, 2, 4, 4]); occupancy.fraction
    0.75
    """

    def __init__(self, smoothing: float = _SMOOTHING) -> None:
        self._smoothing = smoothing
        self.fraction = 1.0

    def observe(self, parts: Sequence[float], whole: float = 0.0) -> None:
        """Add a group.

        Args:
            parts: the length of each sequence, or the seconds in which it held a place.
            whole: the group's; 0 for the largest part.
        """
        whole = max([whole, *parts], default=0)
        of_group = sum(parts) / (len(parts) * whole) if whole else 1.0
        self.fraction += self._smoothing * (of_group - self.fraction)
        self.fraction = max(self.fraction, MIN_OCCUPANCY)

    def observe_episodes(self, episodes: Sequence[PartialCompletion], seconds: float) -> None:
        """Add a group of episodes that took ``seconds``. The time in which their environment was down does not count: more episodes
        would not have filled the server, and after it they would all sample at once."""
        down = max(one.waited_seconds for one in episodes)
        self.observe([one.sampling_seconds for one in episodes], seconds - down)


def groups_wanted(capacity: int, per_group: int, occupancy: float, at_server: int, in_hand: int) -> int:
    """Number of groups to request now (see the table of :mod:`.leasing`).

    Args:
        capacity: sequences that the server runs concurrently.
        per_group: completions of a training group.
        occupancy: mean fraction of a group's sequences that are still generating (:class:`Occupancy`).
        at_server: sequences of the groups at the server, finished ones included.
        in_hand: leased groups that the coordinator has not acknowledged, except those that wait for the teacher.

    >>> groups_wanted(256, 16, 1.0, at_server=0, in_hand=0)
    18
    >>> groups_wanted(256, 16, 1.0, at_server=272, in_hand=17)
    1
    >>> groups_wanted(256, 16, 0.5, at_server=0, in_hand=0)
    36
    """
    group_sequences = per_group * occupancy
    target = max(capacity * (1 + _PREFETCH_FRACTION), capacity + group_sequences)
    to_target = int((target - at_server * occupancy) / group_sequences)
    to_limit = 2 * int(target / group_sequences) - in_hand
    return max(0, min(to_target, to_limit))
