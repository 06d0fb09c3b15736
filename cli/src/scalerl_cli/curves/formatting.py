"""Numbers as a person reads them."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import Final, Protocol


class Interval(Protocol):
    """A median with its 90 % interval."""

    @property
    def median(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


LEADING_ZERO: Final = re.compile(r"(?<![\d.,])0(?=\.\d)")
FARTHEST: Final = 100.0
"""Times the compute so far: what needs more than this is printed as what never comes."""


def plain(text: str) -> str:
    """The one style of numbers below 1: ``.62`` and not ``0.62``, as papers write them."""
    return LEADING_ZERO.sub("", text)


def significant(value: float, n: int = 3) -> str:
    """``1.92``, ``.7``, ``3,000``: at most ``n`` significant digits."""
    return plain(f"{value:,.{n}g}").replace("-", "−")


def reward(value: float, digits: int = 2) -> str:
    """A reward: ``.62``, ``−.05``, ``1.00``."""
    text = plain(f"{abs(value):.{digits}f}")
    return f"−{text}" if value < 0 and float(text) else text


def digits(low: float, high: float) -> int:
    """Decimals that an interval of rewards deserves."""
    width = high - low
    return 2 if width >= 0.02 else 3 if width >= 0.002 else 4


def rewards(interval: Interval, n: int | None = None) -> str:
    """``.62 (.60–.64)``, with ``n`` decimals, or as many as the interval deserves."""
    n = digits(interval.low, interval.high) if n is None else n
    return f"{reward(interval.median, n)} ({span(reward(interval.low, n), reward(interval.high, n))})"


def amount(value: float) -> str:
    """Four significant digits: ``2,542``, ``.5``, ``1.25M``, ``3.1e−7``."""
    text = _written(value, 3 - _size(value) if value else 0)
    return text.rstrip("0").rstrip(".") if "." in text and text[-1].isdigit() and "e" not in text else text


def amounts(interval: Interval) -> str:
    """``2,540 (2,300–2,900)``: as many digits as show the interval's width, and its low end, by two of them."""
    ends = [abs(v) for v in (interval.low, interval.median, interval.high)]
    width = interval.high - interval.low
    if width <= 0:
        low, median, high = (amount(v) for v in (interval.low, interval.median, interval.high))
    else:
        least = min([width, *(v for v in ends if v > width / 100.0)])
        low, median, high = (
            # A positive one is never printed as 0.
            _written(v, max(1 - _size(least), -_size(v) if v else 0))
            for v in (interval.low, interval.median, interval.high)
        )
    return f"{median} ({span(low, high)})"


def reached(interval: Interval, now: float, start: float = 0.0) -> str:
    """Compute at which something is reached, or that it is not within ``FARTHEST`` times the compute so far.

    now: compute so far, counted from ``start``, as the interval is.
    """
    limit = start + FARTHEST * now
    beyond = f"{FARTHEST:.0f}×"
    if interval.low > limit:
        return f"not within {beyond} the compute so far"
    if interval.median > limit:
        return f"not within {beyond} the compute so far (from {amount(interval.low)} on with probability .05)"
    if interval.high > limit:
        return f"{amount(interval.median)} ({amount(interval.low)} to beyond {beyond} the compute so far)"
    return amounts(interval)


def compute(value: float, unit: str) -> str:
    """``20,000 GPU-hours``; ``compute 20,000`` where nothing names the unit."""
    return f"{amount(value)} {unit}" if unit else f"compute {amount(value)}"


def count(n: int, what: str) -> str:
    """``1 point``, ``20 points``."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _size(value: float) -> int:
    """Exponent of the first significant digit."""
    return math.floor(math.log10(abs(value)))


def _written(value: float, places: int) -> str:
    """Rounded to 10^−places; letters from a million on, exponents where neither helps."""
    rounded = round(value, places)
    if rounded == 0:
        return "0"
    sign, size = "−" if rounded < 0 else "", _size(rounded)
    if not -4 <= size < 15:
        mantissa, exponent = f"{abs(rounded):.2e}".split("e")
        return f"{sign}{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("e-", "e−")
    letter, power = next(((c, p) for c, p in (("T", 12), ("G", 9), ("M", 6)) if size >= p), ("", 0))
    text = f"{abs(rounded) / 10**power:,.{max(places + power, 0)}f}"
    return sign + plain(text.rstrip("0").rstrip(".") if "." in text and power else text) + letter


def span(low: str, high: str) -> str:
    """``low–high``, with a word between where a dash would be misread."""
    return f"{low} to {high}" if "−" in low + high else f"{low}–{high}"


def probability(p: float) -> str:
    """``.97``; never 0 or 1, which no finite number of draws shows."""
    return "> .99" if p > 0.995 else "< .01" if p < 0.005 else reward(p)


def hours(value: float) -> str:
    """``40 min``, ``3.2 h``, ``12 days``."""
    if value < 1.0:
        return f"{60 * value:.0f} min"
    return f"{value:.1f} h" if value < 72.0 else f"{amount(float(round(value / 24.0)))} days"


def date(now: datetime, hours_ahead: float) -> str:
    """The date so many hours ahead, to the minute; ``beyond 9999`` where calendars end."""
    try:
        return (now + timedelta(hours=hours_ahead)).strftime("%Y-%m-%d %H:%M")
    except OverflowError:
        return "beyond 9999"


def table(rows: list[list[str]], indent: str = "  ") -> list[str]:
    """Rows as lines, columns aligned, the first row its heads."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
