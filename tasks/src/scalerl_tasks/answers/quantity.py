r"""Numbers in answers, compared exactly, without float and without evaluating anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from scalerl_tasks.answers.normalization import normalize
from scalerl_tasks.answers.units import CURRENCY_CHARACTERS, canonical_unit

_DIGITS = "0123456789"
_MAX_NUMBER_CHARACTERS = 512
"""Maximum length of a number, in characters. No task needs more, and it bounds the work for any text."""

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
# A minus after a digit, a letter or a closing bracket subtracts; elsewhere it is a sign.
_NUMBER = re.compile(rf"((?<![0-9A-Za-z.)\]])[+\-\u2212])?({_DECIMAL})(?: ?/ ?({_DECIMAL}))?")

_PLAIN = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_CURRENCY = re.escape(CURRENCY_CHARACTERS)
_POWER_OF_TEN = r"10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,9})\s*\}|([+-]?[0-9]{1,9}))"
_QUANTITY = re.compile(
    rf"(?:\\approx\s*)?([+-]?)\s*([{_CURRENCY}]?)\s*([+-]?)\s*"
    rf"(?:([0-9]+)\s*\\frac\{{\s*([0-9]+)\s*\}}\{{\s*([0-9]+)\s*\}}"
    rf"|\\frac\{{\s*([+-]?{_PLAIN})\s*\}}\{{\s*([+-]?{_PLAIN})\s*\}}"
    rf"|{_POWER_OF_TEN}"
    rf"|({_PLAIN})(?:\s*/\s*({_PLAIN})(?!\s*\\cdot|\s*\\times|\s*x\s*10))?(?:\s*(?:\\cdot|\\times|[xX])\s*{_POWER_OF_TEN})?)"
)
_NAMED = re.compile(
    r"\s*(?:[A-Za-z]|\\(?:alpha|beta|theta|phi|lambda|mu))(?:_(?:\{[A-Za-z0-9]+\}|[A-Za-z0-9]))?\s*=\s*"
)
_TEMPERATURE = re.compile(r"\\degree\s*(?:\\text\{)?\s*([CF])\}?")
_TEXT_WRAPPER = re.compile(r"\\text\{([^{}]*)\}")
_BARE_UNIT = re.compile(r"[mghslL](?![A-Za-z])")
_WORDS = re.compile(r"[A-Za-z][A-Za-z .,'()/-]*")
_NOT_UNITS = frozenset(
    [
        "or",
        "and",
        "not",
        "to",
        "than",
        "least",
        "most",
        "if",
        "when",
        "unless",
        "but",
        "hundred",
        "thousand",
        "million",
        "billion",
        "trillion",
        "dozen",
        "half",
        "halves",
        "squared",
        "cubed",
        "factorial",
        "pi",
        "root",
        "over",
        "plus",
        "minus",
        "more",
        "less",
        "fewer",
        "between",
        "per",
    ]
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{3,}")
_POWER_BEFORE = re.compile(r"(\\text\{[^{}]*|\\mathrm\{[^{}]*|[A-Za-z]+)\}?\s*\^\s*\{?\s*-?$")
_SCIENTIFIC_END = re.compile(
    rf"([+\-\u2212]?{_PLAIN})\s*(?:\\times|\\cdot|[*xX×·⋅])\s*10\s*\^\s*\{{?\s*([+\-\u2212]?[0-9]{{1,9}})$"
)
_FRACTION_END = re.compile(
    rf"([+\-\u2212]?)([0-9]*)\s*\\[dt]?frac\s*\{{\s*([+\-]?{_PLAIN})\s*\}}\s*\{{\s*({_PLAIN})$"
)
_MIXED_END = re.compile(r"([+\-\u2212]?)(?<![0-9.,/])([0-9]+) +([0-9]+) ?/ ?([0-9]+)$")
_RAISED = re.compile(r"[0-9A-Za-z)\]}](?:\s*\^|\*\*| +\*\* +|_)[ {(+\-\u2212]*$")
_COMMAND_BEFORE = re.compile(r"\\[A-Za-z]+\s*(?:\[[^\[\]]*\])?\s*\{[^{}]*$")
_MAX_MATH_CHARACTERS = 2048

Number = tuple[int, int, int]
"""Numerator, denominator (> 0, not reduced), exponent: the value is numerator / denominator · 10^exponent."""


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
        before = window[: found.start()]
        if (special := _special(window)) is not None:
            return special
        if _RAISED.search(before):
            power = _POWER_BEFORE.search(before)
            unit = power is not None and canonical_unit(_unwrapped(power[1])) is not None
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


def last_quantity(text: str) -> Quantity | None:
    """:func:`last_number`, and whether ``%`` follows it. If the last digits are in a formula between ``$`` signs or the like, the
    formula, or what stands after its last ``=``, has to be one number.
    """
    last = max(map(text.rfind, _DIGITS))
    if last < 0:
        return None
    start = max(0, last - _MAX_MATH_CHARACTERS)
    area = text[start : last + _MAX_MATH_CHARACTERS]
    formula: str | None = None
    for match in _formulas(area):
        if match.start() <= last - start < match.end():
            formula = next(group for group in match.groups() if group is not None)
    if formula is not None:
        return read_quantity(re.split(r"=|\\approx", formula)[-1])
    number = last_number(text)
    if number is None:
        return None
    percent = re.match(r"[\s}]*(?:\\?%|percent\b)", text[last + 1 : last + 16])
    return Quantity(number, "%" if percent else "")


def formulas(text: str) -> list[tuple[int, int, str]]:
    r"""Start, end and content of each ``$…$``, ``\(…\)`` and ``\[…\]``; two ``$`` with prose between them are money."""
    return [
        (match.start(), match.end(), next(group for group in match.groups() if group is not None))
        for match in _formulas(text)
    ]


def _formulas(text: str) -> list[re.Match[str]]:
    found = []
    at = 0
    while (match := _MATH.search(text, at)) is not None:
        inside = match[2]
        if inside is not None:
            words = _PROSE_WORD.search(_TEXT_LIKE.sub(" ", inside))
            money = text[match.end() : match.end() + 1].isdigit() and inside[-1:] in " ,;"
            if words or money or "\n\n" in inside:
                at = match.start() + 1
                continue
        found.append(match)
        at = match.end()
    return found


_TEXT_LIKE = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname|boxed)\s*\{[^{}]*\}|\\[A-Za-z]+")


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
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    latex = normalize(text)
    if (inside := _TEXT_WRAPPER.fullmatch(latex)) is not None:
        latex = normalize(inside[1])
    named = _NAMED.match(latex)
    return read_normalized(latex[named.end() :] if named is not None else latex, bare_units=True)


def read_normalized(latex: str, *, bare_units: bool) -> Quantity | None:
    """:func:`read_quantity` of normalized text. ``bare_units``: whether ``m`` of ``5 m`` is a metre, not a variable."""
    if len(latex) > _MAX_NUMBER_CHARACTERS:
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
        divided = _divide(_decimal(above or decimal), _decimal(below or divisor))
        if divided is None:
            return None
        number = divided
    elif decimal is not None:
        digits, tens = _decimal(decimal)
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
    words = _unwrapped(rest).strip()
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


def _unwrapped(text: str) -> str:
    text = _TEXT_WRAPPER.sub(r"\1", text)
    return re.sub(r"\\(?:text|mathrm)\s*\{", "", text)


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
    if abs(exponent) > 2 * _MAX_NUMBER_CHARACTERS:
        return exponent < 0 and top != 0
    return bool(0 < abs(top) * 10 ** max(0, exponent) < bottom * 10 ** max(0, -exponent))


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


def _special(window: str) -> Number | None:
    r"""A number at the end of ``window`` that is more than one numeral: scientific, ``\frac``, mixed."""
    if (match := _SCIENTIFIC_END.search(window)) is not None:
        digits, tens = _decimal(match[1].lstrip("+-\u2212"))
        exponent = int(match[2].replace("\u2212", "-"))
        return (-digits if match[1][0] in "-\u2212" else digits, 1, tens + exponent)
    if (match := _FRACTION_END.search(window)) is not None:
        above = match[3]
        negative = match[1] in ("-", "\u2212")
        divided = _divide(_decimal(above), _decimal(match[4]))
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
    digits, exponent = _decimal(number)
    below, below_exponent = _decimal(divisor) if divisor is not None else (1, 0)
    if below == 0:
        return None
    negative = sign is not None and sign != "+"
    return (-digits if negative else digits, below, exponent - below_exponent)


def _divide(above: tuple[int, int], below: tuple[int, int]) -> Number | None:
    if below[0] == 0:
        return None
    sign = -1 if below[0] < 0 else 1
    return (sign * above[0], sign * below[0], above[1] - below[1])


def _decimal(text: str) -> tuple[int, int]:
    """``12.50e3`` → (125, 2): digits without trailing zeros after the point, and the exponent of ten."""
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    return int((whole + fraction) or "0"), int(exponent or "0") - len(fraction)
