"""Types of the command's arguments: a text that is none of them raises ValueError or ArgumentTypeError."""

from __future__ import annotations

import argparse
import math

from scalerl_analysis.rollout_search import NEWEST


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return value


def positive(text: str) -> float:
    """A finite number > 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def not_negative(text: str) -> float:
    """A finite number ≥ 0."""
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def whole(text: str) -> int:
    """A whole number ≥ 0 that 63 bits hold."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 0, below 2^63")
    return value


def positive_whole(text: str) -> int:
    """A whole number ≥ 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def counts(text: str) -> list[int]:
    """Different whole numbers ≥ 1, such as ``1,2,4``."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts such as 1,2,4") from None
    if min(found) < 1 or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: counts must be at least 1 and unique")
    return found


def scale(text: str) -> tuple[float, float]:
    """The lowest and the highest reward, ``LOW,HIGH``."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW,HIGH; for ±1 write --scale=-1,1")
    low, high = number(parts[0]), number(parts[1])
    if low >= high:
        raise argparse.ArgumentTypeError(f"{text}: LOW must be below HIGH")
    return low, high


def port(text: str) -> int:
    """A number of a TCP port; 0 is any free one."""
    value = int(text)
    if not 0 <= value < 2**16:
        raise ValueError(text)
    return value


def interval(text: str) -> tuple[float, float]:
    """A closed interval.

    >>> interval("3"), interval("0.5:1"), interval(":0")
    ((3.0, 3.0), (0.5, 1.0), (-inf, 0.0))
    """
    low, colon, high = text.partition(":")
    try:
        first = float(low) if low else -math.inf
        last = (float(high) if high else math.inf) if colon else first
    except ValueError:
        first, last = math.inf, -math.inf
    if not (low or colon) or not first <= last:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no range: write N, N:M, N: or :M")
    return first, last


def step_interval(text: str) -> tuple[float, float] | str:
    """As :func:`interval`, or ``last``."""
    return text if text == NEWEST else interval(text)


def text_argument(text: str) -> str:
    """A text that UTF-8 can encode: an argument may have bytes that are none."""
    text.encode()
    return text
