r"""Equality of two expressions: the same after sympy's own ordering, or the same value.

Constants are compared to 32 digits, functions at points of both signs. What :mod:`.expression_reader` cannot read is given to
:mod:`.library_reader`.
"""

from __future__ import annotations

import functools
from typing import Any

import sympy  # type: ignore[import-untyped]

from scalerl_tasks.answers.evaluation_bounds import MANY_BITS, TooLargeError, bits_of
from scalerl_tasks.answers.expression_reader import read_expression
from scalerl_tasks.answers.library_reader import read_by_library
from scalerl_tasks.answers.nodes import Leaf, Node, Relation
from scalerl_tasks.answers.number import Number

_DIGITS = 40
_TOLERANCE = sympy.Float("1e-32")
_MAX_SMALL_BITS = 48  # constants of which _DIGITS tell neighbours apart
_MAX_EXACT_BITS = 4e6
_MAX_DIGITS = 5000
_QUADRATURE_DIGITS = 15
_QUADRATURE_TOLERANCE = sympy.Float("1e-10")
_APPROXIMATION_DECIMALS = 6
_MAX_APPROXIMATION_EXPONENT = 1000
_UNEVALUATED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
_POINTS = tuple(
    map(sympy.Rational, ["3/7", "-5/11", "13/6", "-17/9", "29/8", "-31/10", "2/13", "41/5", "-1/17", "53/12"])
)
_NATURAL_POINTS = tuple(map(sympy.Integer, (3, 5, 8, 2, 7, 11)))
_MIN_POINTS = 3


def value_of(node: Node) -> Any:
    """The sympy expression of a leaf; None if it has none that can be read."""
    if not isinstance(node, Leaf) or not node.latex:
        return None
    if node.quantity is not None and abs(node.quantity.number[2]) <= 2000:
        top, bottom, exponent = node.quantity.number
        return sympy.Rational(top, bottom) * sympy.Integer(10) ** exponent
    return _expression(node.latex)


@functools.lru_cache(maxsize=512)
def _expression(latex: str) -> Any:
    try:
        value = read_expression(latex)
    except TooLargeError:
        return None
    except (ValueError, TypeError, AttributeError, NotImplementedError, ZeroDivisionError):
        return read_by_library(latex)
    except RecursionError:
        return None
    return None if value.has(sympy.nan, sympy.zoo) else value


def same(a: Any, b: Any) -> bool:
    """Whether two expressions are equal."""
    if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
        return isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase) and a == b
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return bool(a == b)
    if a == b:
        return True
    if a.is_Rational and b.is_Rational:
        return False
    if (a.has(sympy.oo, -sympy.oo) and a.is_infinite) or (b.has(sympy.oo, -sympy.oo) and b.is_infinite):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if MANY_BITS in (bits_of(a), bits_of(b)):
        return False
    if not symbols:
        return _same_constants(a, b)
    if any(
        isinstance(part, sympy.Integral) and len(part.limits[0]) == 1
        for part in a.atoms(sympy.Integral) | b.atoms(sympy.Integral)
    ):
        a, b = a.doit(), b.doit()
        if a.has(sympy.Integral) or b.has(sympy.Integral):
            return bool(a == b)
    return _same_functions(a, b, symbols)


def _same_constants(a: Any, b: Any) -> bool:
    compared = _compare_values(a, b)
    if compared is None:
        a, b = a.doit(), b.doit()
        return bool(a == b) or _compare_values(a, b) is True
    return compared


def _compare_values(a: Any, b: Any) -> bool | None:
    """Whether two constants have the same value to many digits; None if one cannot be computed."""
    rough = a.has(*_UNEVALUATED) or b.has(*_UNEVALUATED)
    digits, tolerance = (_QUADRATURE_DIGITS, _QUADRATURE_TOLERANCE) if rough else (_DIGITS, _TOLERANCE)
    left, right = _number(a, digits), _number(b, digits)
    if left is None or right is None:
        return None
    scale = max(abs(left), abs(right))
    if scale == 0:
        return True
    if not scale.is_finite:
        return None
    if abs(left - right) > tolerance * scale:
        # One side is exactly zero and the other an expression that may be.
        if 0 in (a, b) and scale < sympy.Float("1e-15"):
            return bool(sympy.simplify(a - b) == 0)
        return False
    return rough or _same_to_the_last_digit(a, b)


def _same_to_the_last_digit(a: Any, b: Any) -> bool:
    """Whether two large constants that agree in many digits agree in all: ``5000!`` and ``5000! + 1`` do not."""
    bits = max(bits_of(a), bits_of(b))
    if bits <= _MAX_SMALL_BITS:
        return True
    if a.is_rational and b.is_rational:
        return bits <= _MAX_EXACT_BITS and bool(a.doit() == b.doit())
    digits = _DIGITS + int(bits * 0.61)
    if digits > _MAX_DIGITS:
        return True
    left, right = _number(a, digits), _number(b, digits)
    return (
        left is None
        or right is None
        or abs(left - right) <= sympy.Float(10, digits) ** (8 - digits) * abs(left)
    )


def _number(value: Any, digits: int) -> Any:
    if value.has(sympy.Limit, sympy.Derivative, sympy.Sum, sympy.Product):
        value = value.doit()
        if value.has(sympy.Sum, sympy.Product):
            return None  # evalf would compile the terms, which the audit guard refuses
    try:
        number = value.evalf(digits)
    except (ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError, RecursionError):
        return None
    real, imaginary = number.as_real_imag()
    return (
        number if real.is_Number and imaginary.is_Number and real.is_finite and imaginary.is_finite else None
    )


def _with_real_roots(value: Any) -> Any:
    """Odd roots of functions as real ones: x^{2/3} of a negative x is real to most authors, and complex to sympy."""
    return value.replace(
        lambda part: (
            part.is_Pow
            and part.exp.is_Rational
            and part.exp.q % 2
            and part.exp.q > 1
            and part.base.free_symbols
        ),
        lambda part: sympy.sign(part.base) ** (part.exp.p % 2) * sympy.Abs(part.base) ** part.exp,
    )


def _same_functions(a: Any, b: Any, symbols: list[Any]) -> bool:
    """Whether two functions have the same value at all points where both have one."""
    natural = a.has(sympy.Sum, sympy.Product, sympy.factorial, sympy.binomial) or b.has(
        sympy.Sum, sympy.Product, sympy.factorial, sympy.binomial
    )
    points = _NATURAL_POINTS if natural else _POINTS
    a, b = _with_real_roots(a), _with_real_roots(b)
    agreed = 0
    for at in range(len(points)):
        values = {
            symbol: points[(at + 3 * k) % len(points)] + (k // len(points))
            for k, symbol in enumerate(symbols)
        }
        try:
            left, right = a.subs(values), b.subs(values)
            if left.has(*_UNEVALUATED) or right.has(*_UNEVALUATED):
                left, right = left.doit(), right.doit()
            compared = (
                None
                if left.has(sympy.nan, sympy.zoo) and right.has(sympy.nan, sympy.zoo)
                else _compare_values(left, right)
            )
        except (ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError):
            continue
        if compared is False:
            return False
        agreed += compared is True
    if agreed >= _MIN_POINTS:
        return True
    return not (a - b).has(*_UNEVALUATED) and bool(sympy.simplify(a - b) == 0)


def approximately(a: Leaf, b: Leaf) -> bool:
    """Whether one side is a decimal that approximates the other to at least six decimals, or below 0.1 six digits."""
    for decimal, other in ((a, b), (b, a)):
        quantity = decimal.quantity
        if quantity is None or not quantity.decimals or quantity.decimals < _APPROXIMATION_DECIMALS:
            continue
        if abs(quantity.number[2]) > _MAX_APPROXIMATION_EXPONENT:
            continue
        if (quantity.unit != other.unit and quantity.unit and other.unit) or "%" in (
            quantity.unit,
            other.unit,
        ):
            continue
        if other.quantity is not None and _has_few_decimals(other.quantity.number):
            continue
        left, right = value_of(decimal), value_of(other)
        if right is None or right.free_symbols or not right.is_real:
            continue
        exact = _number(right, _DIGITS)
        if exact is None or left == 0 or exact == 0:
            continue
        size = int(sympy.floor(sympy.log(abs(exact), 10).evalf(15)))
        digits = _APPROXIMATION_DECIMALS + max(0, -size - 1)
        step = sympy.Rational(1, 10 ** min(digits, quantity.decimals)) if digits <= 400 else None
        if step is not None and abs(exact - left) * 2 <= step * (1 + sympy.Float("1e-12")):
            return True
    return False


def _has_few_decimals(number: Number) -> bool:
    """Whether a rational has a finite decimal expansion of less than six decimals, so that it needs no approximation."""
    top, bottom, exponent = number
    if abs(exponent) > 1000:
        return True
    scaled = sympy.Rational(top, bottom) * sympy.Integer(10) ** (exponent + _APPROXIMATION_DECIMALS - 1)
    return bool(scaled.is_Integer)


def difference(relation: Relation) -> Any:
    """Left side minus right side of a relation; None if one cannot be read."""
    left, right = map(value_of, relation.parts[:2])
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return None
    return left - right


def proportional(a: Any, b: Any, *, positive: bool) -> bool:
    """Whether a / b is a constant other than zero, and positive if asked."""
    if a.free_symbols != b.free_symbols or not a.free_symbols:
        return False
    if not positive:
        a, b = (sympy.fraction(sympy.together(side))[0] for side in (a, b))
    symbols = sorted(a.free_symbols, key=str)
    for at in range(len(_POINTS)):
        point = {symbol: _POINTS[(at + 3 * k) % len(_POINTS)] for k, symbol in enumerate(symbols)}
        top, bottom = a.subs(point), b.subs(point)
        if (
            bottom != 0
            and top != 0
            and not top.has(sympy.nan, sympy.zoo)
            and not bottom.has(sympy.nan, sympy.zoo)
        ):
            ratio = top / bottom
            if positive and not ratio.evalf(_DIGITS).is_positive:
                return False
            return same(a, ratio * b)
    return False
