"""What the prior of earlier runs counted for in a forecast, in words. Pure."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET

from scalerl_api.forecast import ForecastAnswer

COUNTS: Final = 0.1
"""Weight in all from which on the method uses earlier runs; one of its own is named from there on, or where none has so much."""
MOST_NAMES: Final = 5


def counted(answer: ForecastAnswer | None) -> list[str]:
    """Names of the earlier runs that counted, by weight."""
    if answer is None or answer.earlier is UNSET:
        return []
    if sum(use.weight for use in answer.earlier) < COUNTS:
        return []
    uses = sorted(answer.earlier, key=lambda use: -use.weight)
    heavy = [use.name for use in uses if use.weight >= COUNTS]
    return heavy or [use.name for use in uses if use.weight > 0]


def with_earlier(answer: ForecastAnswer | None) -> str:
    """``with 3 earlier runs as prior: a, b, c``; empty where none counted."""
    names = counted(answer)
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    runs = "run" if len(names) == 1 else "runs"
    return f"with {len(names)} earlier {runs} as prior: {', '.join(names[:MOST_NAMES])}{more}"
