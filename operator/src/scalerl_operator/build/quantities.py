"""Kubernetes quantities in the form in which the API server gives them back."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(|[numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)")
_DECIMAL: Final = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_BINARY: Final = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_NANO = 10**9


def value(quantity: str) -> Fraction:
    """What a quantity amounts to; nothing is finer than a billionth (rounded up).

    >>> value("1500m"), value("2Ki"), value("0.1n") == value("1n")
    (Fraction(3, 2), Fraction(2048, 1), True)

    Raises:
        ValueError: it is none.
    """
    number, suffix = _split(quantity)
    return Fraction(math.ceil(number * _factor(suffix) * _NANO), _NANO)


def canonical(quantity: str) -> str:
    """The largest suffix that leaves no fraction.

    >>> canonical("1024Mi"), canonical("0.5"), canonical("1000m"), canonical("1.5Gi"), canonical("4")
    ('1Gi', '500m', '1', '1536Mi', '4')

    Raises:
        ValueError: it is no quantity.
    """
    amount, (_, suffix) = value(quantity), _split(quantity)
    if suffix in _BINARY and amount.denominator == 1 and abs(amount) >= 1024:
        return binary(int(amount))
    return _decimal(amount, exponent=len(suffix) > 1 and suffix[0] in "eE" and suffix not in _BINARY)


def binary(count: int) -> str:
    """So many bytes.

    >>> binary(1280 * 2**20), binary(1000)
    ('1280Mi', '1000')
    """
    for suffix, power in reversed(_BINARY.items()):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{suffix}"
    return str(count)


def _split(quantity: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(f"{quantity!r} is no quantity; write it like 500m, 2 or 16Gi")
    return Fraction(match[1]), match[2]


def _factor(suffix: str) -> Fraction:
    if suffix in _BINARY:
        return Fraction(1024 ** _BINARY[suffix])
    if len(suffix) > 1:
        return Fraction(10) ** int(suffix[1:])
    return Fraction(10) ** next(power for power, name in _DECIMAL.items() if name == suffix)


def _decimal(amount: Fraction, *, exponent: bool) -> str:
    count = int(amount * _NANO)
    if not count:
        return "0"
    power = max(p for p in _DECIMAL if count % 10 ** (p + 9) == 0)
    number = count // 10 ** (power + 9)
    if exponent:
        return f"{number}e{power}" if power else str(number)
    return f"{number}{_DECIMAL[power]}"
