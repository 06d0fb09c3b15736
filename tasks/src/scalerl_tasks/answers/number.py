r"""Numerals and exact rationals: what a numeral is, the last one in prose, and whether two numbers are equal."""

from __future__ import annotations

import re

from scalerl_tasks.answers.normalization import without_text
from scalerl_tasks.answers.units import canonical_unit

DIGITS = "0123456789"
MAX_CHARACTERS = 512
"""Maximum length of a number, in characters. No task needs more, and it bounds the work for any text."""
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
# A minus after a digit, a letter or a closing bracket subtracts; elsewhere it is a sign.
_NUMBER = re.compile(rf"((?<![0-9A-Za-z.)\]])[+\-\u2212])?({_DECIMAL})(?: ?/ ?({_DECIMAL}))?")
PLAIN_NUMERAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER_BEFORE = re.compile(r"(\\text\{[^{}]*|\\mathrm\{[^{}]*|[A-Za-z]+)\}?\s*\^\s*\{?\s*-?$")
_SCIENTIFIC_END = re.compile(
    rf"([+\-\u2212]?{PLAIN_NUMERAL})\s*(?:\\times|\\cdot|[*xX×·⋅])\s*10\s*\^\s*\{{?\s*([+\-\u2212]?[0-9]{{1,9}})$"
)
_FRACTION_END = re.compile(
    rf"([+\-\u2212]?)([0-9]*)\s*\\[dt]?frac\s*\{{\s*([+\-]?{PLAIN_NUMERAL})\s*\}}\s*\{{\s*({PLAIN_NUMERAL})$"
)
_MIXED_END = re.compile(r"([+\-\u2212]?)(?<![0-9.,/])([0-9]+) +([0-9]+) ?/ ?([0-9]+)$")
_RAISED = re.compile(r"[0-9A-Za-z)\]}](?:\s*\^|\*\*| +\*\* +|_)[ {(+\-\u2212]*$")
_COMMAND_BEFORE = re.compile(r"\\[A-Za-z]+\s*(?:\[[^\[\]]*\])?\s*\{[^{}]*$")

Number = tuple[int, int, int]
"""Numerator, denominator (> 0, not reduced), exponent: the value is numerator / denominator · 10^exponent."""


def last_number(text: str) -> Number | None:
    """The last number in prose, or None.

    Accepted: ``-1,234.50``, ``.5``, ``6.02e23``, ``3/4``, ``2 1/2``, ``−7`` (U+2212), and in LaTeX ``\\frac{3}{4}`` and
    ``6.02 \\times 10^{23}``. Only ASCII digits count. A comma followed by three digits groups thousands, any other comma ends
    a number. ``%``, currency and units are ignored, with the exponent of a unit (``25 cm^2``). Names for infinity and NaN are
    not numbers, nor is a fraction with denominator zero.

    A text whose last digits are a part of something else has no number: an exponent (``x^2``, ``4^2``), a time or ratio
    (``9:30``), the argument of a command (``\\sqrt{2}``).

    >>> last_number("from 3 to 1,234.50 dollars.")
    (12345, 1, -1)
    >>> last_number("The area is 25 cm^2.")
    (25, 1, 0)
    >>> last_number("NaN") is None
    True
    """
    for _ in range(4):
        last = max(map(text.rfind, DIGITS))
        if last < 0:
            return None
        start = max(0, last + 1 - MAX_CHARACTERS)
        window = text[start : last + 1]
        found: re.Match[str] | None = None
        for match in _NUMBER.finditer(window):
            found = match
        if found is None or (start > 0 and found.start() == 0):
            return None  # longer than the window
        before = window[: found.start()]
        if (special := _special(window)) is not None:
            return special
        if _RAISED.search(before):
            power = _POWER_BEFORE.search(before)
            unit = power is not None and canonical_unit(without_text(power[1])) is not None
            if not unit:
                return None
            assert power is not None
            text = text[: start + power.start()]
            continue
        if re.search(r"[0-9]:$", before):
            return None
        unit_digit = re.search(r"[0-9] ?([a-z]{1,2})$", before) if found[0] in ("2", "3") else None
        if unit_digit is not None and canonical_unit(unit_digit[1]) is not None:  # 25 cm2
            text = text[: start + unit_digit.start(1)]
            continue
        if _COMMAND_BEFORE.search(before[-64:]) and not re.search(
            r"\\(?:text|mathrm|mathbf|textbf)\s*\{[^{}]*$", before
        ):
            return None
        return _value(found.groups())
    return None


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
    # left · 10^shift == right. A non-zero right has at most 2·MAX_CHARACTERS digits.
    if left == 0 or right == 0:
        return left == right
    return shift <= 2 * MAX_CHARACTERS and left * 10**shift == right


def _special(window: str) -> Number | None:
    r"""A number at the end of ``window`` that is more than one numeral: scientific, ``\frac``, mixed."""
    if (match := _SCIENTIFIC_END.search(window)) is not None:
        digits, tens = decimal_of(match[1].lstrip("+-\u2212"))
        exponent = int(match[2].replace("\u2212", "-"))
        return (-digits if match[1][0] in "-\u2212" else digits, 1, tens + exponent)
    if (match := _FRACTION_END.search(window)) is not None:
        above = match[3]
        negative = match[1] in ("-", "\u2212")
        divided = divide(decimal_of(above), decimal_of(match[4]))
        if divided is None:
            return None
        top, bottom, exponent = divided
        if match[2] and exponent == 0:
            top = int(match[2]) * bottom + top
        return (-top if negative else top, bottom, exponent)
    if (match := _MIXED_END.search(window)) is not None and 0 < int(match[3]) < int(match[4]):
        top = int(match[2]) * int(match[4]) + int(match[3])
        return (-top if match[1] in ("-", "\u2212") else top, int(match[4]), 0)
    return None


def _value(groups: tuple[str | None, ...]) -> Number | None:
    sign, number, divisor = groups
    assert number is not None
    divided = divide(decimal_of(number), decimal_of(divisor or "1"))
    if divided is None:
        return None
    top, bottom, exponent = divided
    return (top if sign in (None, "+") else -top, bottom, exponent)


def divide(above: tuple[int, int], below: tuple[int, int]) -> Number | None:
    """The quotient of two results of :func:`decimal_of`; None by zero."""
    if below[0] == 0:
        return None
    sign = -1 if below[0] < 0 else 1
    return (sign * above[0], sign * below[0], above[1] - below[1])


def decimal_of(text: str) -> tuple[int, int]:
    """``12.50e3`` → (125, 2): digits without trailing zeros after the point, and the exponent of ten."""
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    return int((whole + fraction) or "0"), int(exponent or "0") - len(fraction)
