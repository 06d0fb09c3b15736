"""Plain data as JSON between a program, the tests that call it, and the grader: exact, without code, of bounded size.

JSON has no tuples, sets, bytes or large integers, and its keys are texts; these are objects with one key. A value of another class
is a reference, if the side that sends it keeps one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_EXACT = 1 << 53
_SHORT = 1000
Referrer = Callable[[Any], Any]


def encode(value: Any, refer: Referrer) -> Any:
    """The value as data for JSON. ``refer`` gives the data of a value that is not plain, or raises."""
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind is str or kind is float:
        return value
    if kind is int:
        return value if -_EXACT < value < _EXACT else {"i": hex(value)}
    if kind is list:
        return [encode(item, refer) for item in value]
    if kind is tuple:
        return {"t": [encode(item, refer) for item in value]}
    if kind is dict:
        return {"d": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    if kind is set or kind is frozenset:
        return {"s" if kind is set else "z": [encode(item, refer) for item in value]}
    if kind is bytes or kind is bytearray:
        return {"b": value.hex()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is Decimal:
        return {"D": str(value)}
    if kind is Fraction:
        return {"F": [hex(value.numerator), hex(value.denominator)]}
    if kind is range:
        return {"r": [encode(part, refer) for part in (value.start, value.stop, value.step)]}
    base: Any
    for base in (str, int, float, tuple, list, dict, set, frozenset):
        if isinstance(value, base):  # a named tuple, a Counter, a member of IntEnum
            return encode(base(value), refer)
    if kind.__module__ == "numpy":
        return encode(value.tolist(), refer)
    return refer(value)


def decode(data: Any, resolve: Callable[[dict[str, Any]], Any]) -> Any:
    """The value of data. ``resolve`` gives the value of a reference, or raises.

    Raises:
        ValueError: the data is of no known form.
    """
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        return resolve(data)
    ((form, content),) = data.items()
    try:
        match form:
            case "i":
                return int(content, 16)
            case "t":
                return tuple(decode(item, resolve) for item in content)
            case "d":
                return {decode(key, resolve): decode(item, resolve) for key, item in content}
            case "s":
                return {decode(item, resolve) for item in content}
            case "z":
                return frozenset(decode(item, resolve) for item in content)
            case "b":
                return bytes.fromhex(content)
            case "c":
                return complex(*content)
            case "D":
                return Decimal(content)
            case "F":
                return Fraction(int(content[0], 16), int(content[1], 16))
            case "r":
                return range(*(decode(part, resolve) for part in content))
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"{form}: {error}") from None
    return resolve(data)


def plain(data: Any) -> Any:
    """The value of data of a program, if it is of the kinds that JSON has, a tuple, or another number; the keys of objects as texts. What
    takes long to make is not made: long numbers of other classes, and sets and keys that a program can choose to have the same hash.

    Raises:
        ArithmeticError, TypeError, ValueError: it is of another kind, or wrong.
    """
    if isinstance(data, list):
        return [plain(item) for item in data]
    if not isinstance(data, dict):
        return data
    match data:
        case {"i": str(digits)}:
            return int(digits, 16)
        case {"t": list(items)}:
            return tuple(plain(item) for item in items)
        case {"d": list(pairs)}:
            return {_key(plain(key)): plain(item) for key, item in pairs}
        case {"c": [float(real), float(imaginary)]}:
            return complex(real, imaginary)
        case {"D": str() as digits} if len(digits) < _SHORT:
            return Decimal(digits)
        case {"F": [str() as over, str() as under]} if len(over) < _SHORT and len(under) < _SHORT:
            return Fraction(int(over, 16), int(under, 16))
    raise ValueError("not plain data")


def _key(key: Any) -> str:
    hash(key)  # refuses dicts, whose texts in texts would grow exponentially
    return str(key)


def refuse(value: Any) -> Any:
    """The ``refer`` of a side that keeps no references.

    Raises:
        TypeError: always.
    """
    raise TypeError(f"a {type(value).__name__} is not plain data")


def pack(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii")
