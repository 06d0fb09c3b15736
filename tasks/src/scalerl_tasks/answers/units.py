"""Units of measurement and of money, by the names that answers use.

Only to tell units from variables and to see that two answers have different ones; nothing is converted.
"""

from __future__ import annotations

import re
from functools import lru_cache

CURRENCY_CHARACTERS = "$€£¥₹₩₽₪₫฿¢₺₴₦"

_NAMES: dict[str, str] = {}
for _line in """
m meter meters metre metres
cm centimeter centimeters centimetre centimetres
mm millimeter millimeters millimetre millimetres
km kilometer kilometers kilometre kilometres
in inch inches
ft foot feet
yd yard yards
mi mile miles
l L liter liters litre litres
ml mL milliliter milliliters millilitre millilitres
gal gallon gallons
g gram grams gm
kg kilogram kilograms kilo kilos
mg milligram milligrams
lb lbs pound pounds
oz ounce ounces
t ton tons tonne tonnes
s sec secs second seconds
min mins minute minutes
h hr hrs hour hours
d day days
wk week weeks
month months
yr yrs year years
ms millisecond milliseconds
mph
kph kmh
N newton newtons
J joule joules
kJ kilojoule kilojoules
W watt watts
kW kilowatt kilowatts
V volt volts
A amp amps ampere amperes
Hz hertz
Pa pascal pascals
K kelvin kelvins
C Celsius celsius
F Fahrenheit fahrenheit
mol mole moles
ohm ohms
rad radian radians
acre acres
hectare hectares
cent cents
""".strip().splitlines():
    _first, *_others = _line.split()
    for _name in (_first, *_others):
        _NAMES[_name] = _first
_PREFIXED = re.compile(r"(square|sq\.?|cubic|cu\.?)\s+(\w+)")
_PARTS = re.compile(
    r"\s*(?:(/|\bper\b)|([A-Za-z.]+)(?:\s*\^\s*\{?\s*(-?[0-9])\s*\}?|([23])(?![0-9A-Za-z]))?|(\\cdot|\*))"
)


def is_unit(word: str) -> bool:
    """Whether the word, by itself, names a unit of the table."""
    return word in _NAMES or (len(word) > 2 and word.lower() in _NAMES)


@lru_cache(maxsize=4096)
def canonical_unit(text: str) -> str | None:
    """One name for all spellings of a unit, or None if the text has anything else.

    >>> canonical_unit("square centimeters"), canonical_unit("cm^2"), canonical_unit("miles per hour")
    ('cm^2', 'cm^2', 'mi/h')
    >>> canonical_unit("apples") is None
    True
    """
    text = text.replace("{", "").replace("}", "").strip()
    if text in ("mph", "kph", "kmh"):
        return {"mph": "mi/h"}.get(text, "km/h")
    text = _PREFIXED.sub(lambda match: f"{match[2]}^{2 if match[1].startswith('s') else 3}", text)
    powers: dict[str, int] = {}
    at, sign = 0, 1
    while at < len(text):
        match = _PARTS.match(text, at)
        if match is None or match.end() == at:
            return None
        at = match.end()
        per, word, power, digit, _ = match.groups()
        if per:
            sign = -1
        elif word:
            word = word.rstrip(".") if word.endswith(".") else word
            name = _NAMES.get(word) or (_NAMES.get(word.lower()) if len(word) > 2 else None)
            if name is None:
                return None
            powers[name] = powers.get(name, 0) + sign * int(power or digit or 1)
    if not powers:
        return None
    parts = [name if power == 1 else f"{name}^{power}" for name, power in sorted(powers.items()) if power > 0]
    below = [
        name if power == -1 else f"{name}^{-power}" for name, power in sorted(powers.items()) if power < 0
    ]
    return "*".join(parts) + "".join(f"/{name}" for name in below)
