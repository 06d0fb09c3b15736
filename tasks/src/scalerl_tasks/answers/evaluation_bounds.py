"""Bounds of what sympy computes: an expression whose value takes long is refused, or kept as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]

_MAX_RESULT_BITS = (
    20_000  # of a power or factorial that is computed when it is read; larger ones stay as they are
)
MAX_ARGUMENT_BITS = 50_000.0  # of the argument of a function, which is needed to its last bit
_MAX_EXPONENT_BITS = 50.0
_MAX_EXACT_BITS = 2e5  # of a power of a function's value, which is computed exactly
_SYMBOL_BITS = 4.0
MANY_BITS = math.inf


class TooLargeError(ValueError):
    """The text is an expression, and its value takes too long to compute."""


def bits_of(value: Any) -> float:
    """About the logarithm of the largest number that evaluating an expression has to hold; :data:`MANY_BITS` if that takes long."""
    if value.is_Rational:
        return float(max(abs(value.p).bit_length(), value.q.bit_length()))
    if not value.args:
        return _SYMBOL_BITS
    parts = [bits_of(part) for part in value.args]
    largest = max(parts)
    if isinstance(value, sympy.Pow):
        exponent = value.exp
        if exponent.is_Rational and parts[1] < _MAX_EXPONENT_BITS:
            bits = parts[0] * float(abs(exponent))
            exact = exponent.is_Integer and value.base.free_symbols
            return MANY_BITS if exact and bits > _MAX_EXACT_BITS else max(bits, parts[1])
        return parts[0] * 2.0 ** parts[1] if parts[1] < _MAX_EXPONENT_BITS else MANY_BITS
    if isinstance(value, sympy.exp | sympy.factorial | sympy.gamma):
        return max(largest, 2.0) * 2.0**largest if largest < _MAX_EXPONENT_BITS else MANY_BITS
    if isinstance(value, sympy.Mul):
        return sum(parts)
    if isinstance(value, sympy.Function) and not isinstance(value, sympy.Abs | sympy.log):
        return largest if largest <= MAX_ARGUMENT_BITS else MANY_BITS
    return largest


def bounded(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, refused for arguments that take long to compute."""

    def apply(argument: Any) -> Any:
        if bits_of(argument) > MAX_ARGUMENT_BITS:
            raise TooLargeError("the argument of a function")
        return function(argument)

    return apply


def power(base: Any, exponent: Any) -> Any:
    """A power, not computed if that would make a number too large to hold."""
    bits = 0.0
    if base.is_Rational and exponent.is_Rational:
        size = max(abs(base.p).bit_length(), base.q.bit_length())
        bits = size * abs(exponent.p) / exponent.q
        if exponent.p.bit_length() > 64 or bits > _MAX_RESULT_BITS:
            return sympy.Pow(base, exponent, evaluate=False)
    elif exponent.has(sympy.Pow) and not exponent.free_symbols and base.is_Rational:
        return sympy.Pow(base, exponent, evaluate=False)
    return sympy.Pow(base, exponent)


def factorial(value: Any) -> Any:
    """A factorial, not computed if it is too large to hold."""
    if bits_of(value) > _MAX_EXPONENT_BITS and not value.free_symbols:
        raise TooLargeError("a factorial")
    if value.is_Integer and value > 2000:
        return sympy.factorial(value, evaluate=False)
    return sympy.factorial(value)
