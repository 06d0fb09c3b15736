"""Times between reconciles, and waits that survive a clock that was set back."""

from __future__ import annotations

from typing import Final

POLL_SECONDS: Final = 5.0
"""Between two reconciles of a run with a coordinator, whose status is polled."""
ASK_AGAIN_SECONDS: Final = 2.0
"""The same, while the next step depends on the answer."""
START_DELAY_SECONDS: Final = 300.0
"""The longest delay of the next attempt of a trainer that has been ready before. With twenty restarts, an obstacle (a detached
volume, a device plug-in) may last an hour."""


def no_later(before: float | None, now: float) -> float:
    """The earlier of ``before`` and ``now``: a clock that was set back must not give a time in the future."""
    return now if before is None else min(before, now)


def is_pending(wait: float) -> bool:
    """Whether a wait of so many seconds is left. One longer than any delay is due to a clock that was set back; stored times are
    rounded up to whole seconds."""
    return 0 < wait <= START_DELAY_SECONDS + 1
