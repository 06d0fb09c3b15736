r"""The number that an answer is, with its unit, compared exactly, without float and without evaluating anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from scalerl_tasks.answers.formulas import formulas
from scalerl_tasks.answers.normalization import TEXT, normalize, without_text
from scalerl_tasks.answers.number import (
    DIGITS,
    MAX_CHARACTERS,
    PLAIN_NUMERAL,
    Number,
    decimal_of,
    divide,
    equal,
    last_number,
)
from scalerl_tasks.answers.units import CURRENCY_CHARACTERS, canonical_unit

_CURRENCY = re.escape(CURRENCY_CHARACTERS)
_POWER_OF_TEN = r"10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,9})\s*\}|([+-]?[0-9]{1,9}))"
_QUANTITY = re.compile(
    rf"(?:\\approx\s*)?([+-]?)\s*([{_CURRENCY}]?)\s*([+-]?)\s*"
    rf"(?:([0-9]+)\s*\\frac\{{\s*([0-9]+)\s*\}}\{{\s*([0-9]+)\s*\}}"
    rf"|\\frac\{{\s*([+-]?{PLAIN_NUMERAL})\s*\}}\{{\s*([+-]?{PLAIN_NUMERAL})\s*\}}"
    rf"|{_POWER_OF_TEN}"
    rf"|({PLAIN_NUMERAL})(?:\s*/\s*({PLAIN_NUMERAL})(?!\s*\\cdot|\s*\\times|\s*x\s*10))?(?:\s*(?:\\cdot|\\times|[xX])\s*{_POWER_OF_TEN})?)"
)
_NAMED = re.compile(
    r"\s*(?:[A-Za-z]|\\(?:alpha|beta|theta|phi|lambda|mu))(?:_(?:\{[A-Za-z0-9]+\}|[A-Za-z0-9]))?\s*=\s*"
)
_TEMPERATURE = re.compile(r"\\degree\s*(?:\\text\{)?\s*([CF])\}?")
_BARE_UNIT = re.compile(r"[mghslL](?![A-Za-z])")
_WORDS = re.compile(r"[A-Za-z][A-Za-z .,'()/-]*")
_WORDS_OF_NUMBERS = """
or and not to than least most if when unless but hundred thousand million billion trillion dozen half halves
squared cubed factorial pi root over plus minus more less fewer between per
"""
_NOT_UNITS = frozenset(_WORDS_OF_NUMBERS.split())
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MAX_MATH_CHARACTERS = 2048


@dataclass(frozen=True, slots=True)
class Quantity:
    r"""A number with what stands beside it.

    Attributes:
        number: the value as written, ``5`` for ``5\%``.
        unit: ``%``, ``°``, a currency sign, the canonical name of a unit, or empty without one and for other words.
        decimals: digits after the point if it is written as a decimal, else None.
    """

    number: Number
    unit: str = ""
    decimals: int | None = None


def last_quantity(text: str) -> Quantity | None:
    """:func:`last_number`, and whether ``%`` follows it. If the last digits are in a formula between ``$`` signs or the like, the
    formula, or what stands after its last ``=``, has to be one number.
    """
    last = max(map(text.rfind, DIGITS))
    if last < 0:
        return None
    start = max(0, last - _MAX_MATH_CHARACTERS)
    area = text[start : last + _MAX_MATH_CHARACTERS]
    formula: str | None = None
    for begin, end, content in formulas(area):
        if begin <= last - start < end:
            formula = content
    if formula is not None:
        return read_quantity(re.split(r"=|\\approx", formula)[-1])
    number = last_number(text)
    if number is None:
        return None
    percent = re.match(r"[\s}]*(?:\\?%|percent\b)", text[last + 1 : last + 16])
    return Quantity(number, "%" if percent else "")


@lru_cache(maxsize=1024)
def read_quantity(text: str) -> Quantity | None:
    r"""The number that all of ``text`` is, or None.

    Accepted beside what :func:`last_number` reads: mixed numbers, ``\frac{3}{4}``, ``6.02\times 10^{23}``, thousands marks of LaTeX
    (``1{,}000``, ``1,\!000``, ``1\,000``, ``1 000``), repeating decimals, a leading ``x =``, a currency before or after,
    ``%``, degrees, and words or units after the number.

    >>> read_quantity(r"2\frac{1}{2} \text{ hours}")
    Quantity(number=(5, 2, 0), unit='h', decimals=None)
    >>> read_quantity("5 - 3"), read_quantity("10:30"), read_quantity("1, 2")
    (None, None, None)
    """
    if len(text) > MAX_CHARACTERS:
        return None
    latex = normalize(text)
    if (inside := TEXT.fullmatch(latex)) is not None:
        latex = normalize(inside[1])
    named = _NAMED.match(latex)
    return read_normalized(latex[named.end() :] if named is not None else latex, bare_units=True)


def read_normalized(latex: str, *, bare_units: bool) -> Quantity | None:
    """:func:`read_quantity` of normalized text. ``bare_units``: whether ``m`` of ``5 m`` is a metre, not a variable."""
    if len(latex) > MAX_CHARACTERS:
        return None
    latex = latex.strip()
    while latex[:1] + latex[-1:] in ("()", "{}") and len(latex) > 2 and not set(latex[1:-1]) & set("(){}"):
        latex = latex[1:-1].strip()
    match = _QUANTITY.match(latex)
    if match is None:
        return None
    sign, currency, inner_sign, whole, top, bottom, above, below, *more = match.groups()
    decimal, divisor = more[2:4]
    if sign and inner_sign:
        return None
    negative = "-" in (sign, inner_sign)
    exponent = int(next((power for power in (*more[:2], *more[4:]) if power is not None), "0"))
    decimals: int | None = None
    if whole is not None:
        if int(bottom) == 0 or int(top) >= int(bottom):
            return None
        number: Number = (int(whole) * int(bottom) + int(top), int(bottom), 0)
    elif above is not None or divisor is not None:
        divided = divide(decimal_of(above or decimal), decimal_of(below or divisor))
        if divided is None:
            return None
        number = divided
    elif decimal is not None:
        digits, tens = decimal_of(decimal)
        number = (digits, 1, tens)
        decimals = len(decimal.partition(".")[2])
    else:
        number = (1, 1, 0)
    top_value = -number[0] if negative else number[0]
    number = (top_value, number[1], number[2] + exponent)
    if exponent and decimals is not None:
        decimals = max(0, decimals - exponent)
    rest = latex[match.end() :].strip()
    unit = _unit(rest, bare_units)
    if unit is None:
        return None
    if (scale := _SCALES.get(unit)) is not None:
        number, unit = (number[0], number[1], number[2] + scale), ""
    if currency:
        unit = currency if unit in ("", currency) else None
        if unit is None:
            return None
    return Quantity(number, unit, decimals)


def _unit(rest: str, bare_units: bool) -> str | None:
    """The unit that follows a number; empty for none and for other words; None if anything else follows."""
    if not rest:
        return ""
    if rest in (r"\%", r"\degree"):
        return "%" if rest == r"\%" else "°"
    if rest in CURRENCY_CHARACTERS:
        return rest
    if (temperature := _TEMPERATURE.fullmatch(rest)) is not None:
        return temperature[1]
    words = without_text(rest).strip()
    if (
        r"\text{" not in rest
        and not (bare_units and _BARE_UNIT.match(rest))
        and not re.match(r"[a-z]{2}", rest)
    ):
        return None
    unit = canonical_unit(words)
    if unit is not None:
        return unit
    if words.lower() in _SCALES:
        return words.lower()
    generic = re.fullmatch(
        r"(?:(?:sq(?:uare|\.)?|cubic|cu\.?)\s+)?(?:units?)(?:\s*\^\s*\{?\s*[23]\s*\}?)?", words
    )
    if generic is not None:
        return ""
    if r"\text{" not in rest or _WORDS.fullmatch(words) is None:
        return None
    split = re.findall(r"[a-z]+", words.lower())
    return None if not split or split[0] in _NOT_UNITS or _NOT_UNITS & {split[-1]} else ""


def same_quantity(reference: Quantity, given: Quantity) -> bool:
    r"""Whether two quantities are equal.

    A unit on one side only is ignored; two different ones make the quantities different. ``%`` divides by 100; on one side only
    it is also ignored, unless the other side is a number below 1: ``50\%`` equals 50 and 0.5, ``0.5\%`` does not equal 0.5.
    """
    a, b = reference.number, given.number
    if reference.unit != given.unit and reference.unit and given.unit:
        return False
    if reference.unit != given.unit and "%" in (reference.unit, given.unit):
        percent, plain = (a, b) if reference.unit == "%" else (b, a)
        if equal((percent[0], percent[1], percent[2] - 2), plain):
            return True
        return equal(percent, plain) and not _below_one(plain)
    return equal(a, b)


def _below_one(number: Number) -> bool:
    top, bottom, exponent = number
    if abs(exponent) > 2 * MAX_CHARACTERS:
        return exponent < 0 and top != 0
    return bool(0 < abs(top) * 10 ** max(0, exponent) < bottom * 10 ** max(0, -exponent))
