"""Formats numbers for text and pictures."""

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
"""Multiple of the compute so far beyond which the compute to a target is printed as out of reach."""


def plain(text: str) -> str:
    """Remove leading zeros: ``.62`` instead of ``0.62``, as in papers."""
    return LEADING_ZERO.sub("", text)


def significant(value: float, n: int = 3) -> str:
    """``1.92``, ``.7``, ``3,000``: at most ``n`` significant digits."""
    return plain(f"{value:,.{n}g}").replace("-", "−")


def reward(value: float, digits: int = 2) -> str:
    """A reward: ``.62``, ``−.05``, ``1.00``."""
    text = plain(f"{abs(value):.{digits}f}")
    return f"−{text}" if value < 0 and float(text) else text


def known(value: float | None) -> str:
    """A reward or correlation with three decimals; empty if it is not known."""
    return "" if value is None else reward(value, 3)


def percent(share: float) -> str:
    """``12.5%``."""
    return f"{share:.1%}"


def digits(low: float, high: float) -> int:
    """Number of decimals for an interval of rewards, by its width."""
    width = high - low
    return 2 if width >= 0.02 else 3 if width >= 0.002 else 4


def rewards(interval: Interval, n: int | None = None) -> str:
    """``.62 (.60–.64)``, with ``n`` decimals; None chooses them by the width of the interval."""
    n = digits(interval.low, interval.high) if n is None else n
    return f"{reward(interval.median, n)} ({span(reward(interval.low, n), reward(interval.high, n))})"


def amount(value: float) -> str:
    """Four significant digits: ``2,542``, ``.5``, ``1.25M``, ``3.1e−7``."""
    text = _written(value, 3 - _size(value) if value else 0)
    return text.rstrip("0").rstrip(".") if "." in text and text[-1].isdigit() and "e" not in text else text


def amounts(interval: Interval) -> str:
    """``2,540 (2,300–2,900)``: enough digits that the width and the low end of the interval have two significant ones."""
    ends = [abs(v) for v in (interval.low, interval.median, interval.high)]
    width = interval.high - interval.low
    if width <= 0:
        low, median, high = (amount(v) for v in (interval.low, interval.median, interval.high))
    else:
        least = min([width, *(v for v in ends if v > width / 100.0)])
        low, median, high = (
            # At least one significant digit: a positive value is never printed as 0.
            _written(v, max(1 - _size(least), -_size(v) if v else 0))
            for v in (interval.low, interval.median, interval.high)
        )
    return f"{median} ({span(low, high)})"


def reached(interval: Interval, now: float, start: float = 0.0) -> str:
    """Compute at which a target is reached, or a note that it is not within ``FARTHEST`` times the compute so far.

    Args:
        interval: total compute, on the axis of the file.
        now: compute so far, counted from ``start``.
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
    """``20,000 GPU-hours``; ``compute 20,000`` without a unit."""
    return f"{amount(value)} {unit}" if unit else f"compute {amount(value)}"


def count(n: int, what: str) -> str:
    """``1 point``, ``20 points``."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _size(value: float) -> int:
    """Exponent of the first significant digit."""
    return math.floor(math.log10(abs(value)))


def _written(value: float, places: int) -> str:
    """Round to ``places`` decimals; suffixes M, G and T from a million on, exponents below 1e−4 and from 1e15 on."""
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
    """``low–high``, or ``low to high`` for negative numbers, where a dash would be misread."""
    return f"{low} to {high}" if "−" in low + high else f"{low}–{high}"


def probability(p: float) -> str:
    """``.97``; never 0 or 1, which a finite number of draws cannot show."""
    return "> .99" if p > 0.995 else "< .01" if p < 0.005 else reward(p)


def date(now: datetime, hours_ahead: float) -> str:
    """The date ``hours_ahead`` from now, to the minute; ``beyond 9999`` after that year."""
    try:
        return (now + timedelta(hours=hours_ahead)).strftime("%Y-%m-%d %H:%M")
    except OverflowError:
        return "beyond 9999"
