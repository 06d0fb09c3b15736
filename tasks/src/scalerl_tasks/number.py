"""The last number in a text, compared exactly, without float and without evaluating anything."""

from __future__ import annotations

import re

_DIGITS = "0123456789"
_MAX_NUMBER_CHARACTERS = 512
"""Maximum length of a number, in characters. No task needs more, and it bounds the work for any text."""

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
# A minus after a digit, a letter or a closing bracket subtracts; elsewhere it is a sign.
_NUMBER = re.compile(rf"((?<![0-9A-Za-z.)\]])[+\-\u2212])?({_DECIMAL})(?: ?/ ?({_DECIMAL}))?")

Number = tuple[int, int, int]
"""Numerator, denominator (> 0, not reduced), exponent: the value is numerator / denominator · 10^exponent."""


def last_number(text: str) -> Number | None:
    """The last number in ``text``, or None.

    Accepted: ``-1,234.50``, ``.5``, ``6.02e23``, ``3/4``, ``−7`` (U+2212). Only ASCII
    digits count. A comma followed by three digits groups thousands, any other comma ends a number. ``%``,
    currency and units are ignored. Names for infinity and NaN are not numbers, nor is a fraction with
    denominator zero.

    >>> last_number("from 3 to 1,234.50 dollars.")
    (12345, 1, -1)
    >>> last_number("NaN") is None
    True
    """
    last = max(map(text.rfind, _DIGITS))
    if last < 0:
        return None
    start = max(0, last + 1 - _MAX_NUMBER_CHARACTERS)
    window = text[start : last + 1]
    found: re.Match[str] | None = None
    for match in _NUMBER.finditer(window):
        found = match
    if found is None or (start > 0 and found.start() == 0):
        return None  # longer than the window
    sign, number, divisor = found.groups()
    digits, exponent = _decimal(number)
    below, below_exponent = _decimal(divisor) if divisor is not None else (1, 0)
    if below == 0:
        return None
    negative = sign is not None and sign != "+"
    return (-digits if negative else digits, below, exponent - below_exponent)


def equal(a: Number, b: Number) -> bool:
    """Whether two numbers are the same rational; the cost does not grow with their exponents.

    >>> equal(last_number("0.50"), last_number("1/2"))
    True
    >>> equal(last_number("1e999999999"), last_number("1e999999998"))
    False
    """
    left, right = a[0] * b[1], b[0] * a[1]
    shift = a[2] - b[2]
    if shift < 0:
        left, right, shift = right, left, -shift
    # left · 10^shift == right. A non-zero right has at most 2·_WINDOW digits.
    if left == 0 or right == 0:
        return left == right
    return shift <= 2 * _MAX_NUMBER_CHARACTERS and left * 10**shift == right


def _decimal(text: str) -> tuple[int, int]:
    """``12.50e3`` → (125, 2): digits without trailing zeros after the point, and the exponent of ten."""
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    return int((whole + fraction) or "0"), int(exponent or "0") - len(fraction)
