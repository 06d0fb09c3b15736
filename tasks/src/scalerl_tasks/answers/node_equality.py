r"""Mathematical equality of two answers, without evaluating any text as Python.

Answers are read by :mod:`.reader`, expressions by :mod:`.expression_reader`, which has a grammar of its own. What
that cannot read is given to math-verify's LaTeX reader, with exact numerals in place of its ``sympify``, which is ``eval``. Two
expressions are equal if they are the same after sympy's own ordering, or have the same value: constants to 32 digits, functions at
points of both signs.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import latex2sympy2  # type: ignore[import-untyped]

from scalerl_tasks.answers import reader
from scalerl_tasks.answers.expression_reader import (
    MANY_BITS,
    TooLargeError,
    UnreadableError,
    bits_of,
    read_expression,
)
from scalerl_tasks.answers.quantity import Number, same_quantity
from scalerl_tasks.answers.reader import Answer, Based, Group, Leaf, Node, Relation, Time

_DIGITS = 40
_TOLERANCE = sympy.Float("1e-32")
_MAX_SMALL_BITS = 48  # constants of which _DIGITS tell neighbours apart
_MAX_EXACT_BITS = 4e6
_MAX_DIGITS = 5000
_QUADRATURE_DIGITS = 15
_QUADRATURE_TOLERANCE = sympy.Float("1e-10")
_APPROXIMATION_DECIMALS = 6
_MAX_APPROXIMATION_EXPONENT = 1000
_MAX_LIBRARY_CHARACTERS = 256
_MAX_LIBRARY_DEPTH = 6
_MAX_WORDS = 12  # of a reference; one with more is a solution, not an answer
_MAX_UNORDERED = 200
_UNEVALUATED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
_POINTS = tuple(
    sympy.Rational(top, bottom)
    for top, bottom in (
        (3, 7),
        (-5, 11),
        (13, 6),
        (-17, 9),
        (29, 8),
        (-31, 10),
        (2, 13),
        (41, 5),
        (-1, 17),
        (53, 12),
    )
)
_NATURAL_POINTS = tuple(map(sympy.Integer, (3, 5, 8, 2, 7, 11)))
_MIN_POINTS = 3


@functools.lru_cache(maxsize=256)
def read_reference(answer: str) -> Answer:
    """A reference answer; without readings and text if it is empty. Of a GSM8K solution, what follows ``####``."""
    _, marked, final = answer.rpartition("####")
    extracted = math_answer_text(final if marked else answer)
    return reader.read_answer(extracted, is_reference=True)


def math_answer_text(answer: str) -> str:
    """The reference without a box around it."""
    from scalerl_tasks.answers.extraction import extract

    return extract(answer).text


def equivalent(reference: Answer, text: str, enclosed: bool) -> bool | None:
    """Whether a reply equals a reading of the reference; None if the reply has no answer. It may not terminate."""
    given = reader.read_reply(text, enclosed)
    return _answers_equal(reference, given) if given.text else None


def can_be_met(reference: Answer) -> bool:
    """Whether a reply with the text of the reference would be equal to it; nothing is evaluated, so it takes bounded time."""
    text = reference.text
    if text.count("{") != text.count("}") or (not any(map(str.isalnum, text)) and r"\{" not in text):
        return False
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)
    return bool(reference.readings) and len(words) <= _MAX_WORDS


def _answers_equal(reference: Answer, given: Answer) -> bool:
    if _same_text(reference.text, given.text):
        return True
    if reference.choice and given.choice:
        return reference.choice == given.choice and _answers_equal(
            reader.read_answer(reference.content, is_reference=True),
            reader.read_answer(given.content),
        )
    times = any(isinstance(a, Time) for a in reference.readings) and any(
        isinstance(b, Time) for b in given.readings
    )
    for a in reference.readings:
        for b in given.readings:
            if times and not isinstance(a, Time):
                continue  # 9:30 and 3:10 are not two ratios
            # Whatever sympy raises for expressions that it cannot compare: then they are not equal.
            with contextlib.suppress(
                ArithmeticError,
                AttributeError,
                LookupError,
                NotImplementedError,
                RecursionError,
                TypeError,
                ValueError,
            ):
                if _equal(a, b):
                    return True
    return False


def _same_text(a: str, b: str) -> bool:
    a, b = (
        re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", re.sub(r"\\text\{([^{}]*)\}", r"\1", text))
        for text in (a, b)
    )
    return a == b and bool(a)


# --- structures


def _equal(a: Node, b: Node) -> bool:
    """Whether a reference ``a`` and an answer ``b`` are the same."""
    if isinstance(a, Relation) or isinstance(b, Relation) or _is_logic(a) or _is_logic(b):
        return _relations_equal(a, b)
    if isinstance(a, Time) or isinstance(b, Time):
        return _times_equal(a, b)
    if isinstance(a, Based) or isinstance(b, Based):
        return _based_equal(a, b)
    if isinstance(a, Leaf) and isinstance(b, Leaf):
        return _leaves_equal(a, b)
    if isinstance(a, Group) and isinstance(b, Group):
        return _groups_equal(a, b)
    group, other = (a, b) if isinstance(a, Group) else (b, a)
    assert isinstance(group, Group)
    if group.kind in ("set", "list") and len(group.members) == 1:
        return _equal(group.members[0], other)
    if group is a and group.kind == "list" and group.brackets == "or":
        return all(_equal(member, other) for member in group.members)  # "3/2 or 1.5"
    if group.kind == "ratio" and len(group.members) == 2 and isinstance(other, Leaf):
        top, bottom = map(_value, group.members)
        value = _value(other)
        return None not in (top, bottom, value) and bottom != 0 and _same(top / bottom, value)
    if group.kind in ("union", "tuple", "difference") and isinstance(other, Leaf):
        return _real_sets_equal(group, other)
    return group.kind == "set" and not group.members and _is_empty_set(other)


def _is_empty_set(node: Node) -> bool:
    return isinstance(node, Leaf) and node.words in _NO_SOLUTION


def _groups_equal(a: Group, b: Group) -> bool:
    kinds = {a.kind, b.kind}
    if kinds <= {"list", "set"}:
        return _unordered_equal(a.members, b.members, distinct="set" in kinds)
    if kinds == {"tuple"}:
        if len(a.members) == 2 and a.brackets and b.brackets and a.brackets != b.brackets:
            return False
        return _ordered_equal(a.members, b.members)
    if kinds == {"list", "tuple"}:
        brackets = (a if a.kind == "tuple" else b).brackets
        if brackets == "[]" and len(a.members) == 2:
            return False  # an interval, and two values
        if brackets == "[]":
            return _unordered_equal(a.members, b.members, distinct=False)
        return brackets == "()" and _ordered_equal(a.members, b.members)
    if kinds == {"ratio"}:
        return _ratios_equal(a.members, b.members)
    if kinds == {"compound"} or kinds == {"matrix"}:
        return _ordered_equal(a.members, b.members)
    if kinds & {"union", "difference"}:
        if kinds == {"union"} and _unordered_equal(a.members, b.members, distinct=True):
            return True
        return _real_sets_equal(a, b)
    return False


def _ordered_equal(a: Sequence[Node], b: Sequence[Node]) -> bool:
    return len(a) == len(b) and all(map(_equal, a, b))


def _unordered_equal(a: Sequence[Node], b: Sequence[Node], *, distinct: bool) -> bool:
    if distinct:
        a, b = _distinct(a), _distinct(b)
    if len(a) != len(b) or len(a) > _MAX_UNORDERED:
        return False
    left = list(b)
    for one in a:
        at = next((index for index, other in enumerate(left) if _members_equal(one, other)), None)
        if at is None:
            return False
        del left[at]
    return True


def _members_equal(a: Node, b: Node) -> bool:
    """As :func:`_equal`, except that ``\\{2\\}`` is not 2."""
    return _is_set(a) == _is_set(b) and _equal(a, b)


def _is_set(node: Node) -> bool:
    return isinstance(node, Group) and node.kind == "set"


def _distinct(nodes: Sequence[Node]) -> list[Node]:
    kept: list[Node] = []
    for node in nodes[:_MAX_UNORDERED]:
        if not any(_members_equal(node, other) for other in kept):
            kept.append(node)
    return kept


def _ratios_equal(a: Sequence[Node], b: Sequence[Node]) -> bool:
    left, right = [_value(node) for node in a], [_value(node) for node in b]
    if len(left) != len(right) or None in left or None in right:
        return False
    return all(
        _same(left[0] * other, right[0] * one) for one, other in zip(left[1:], right[1:], strict=True)
    ) and (left[0] != 0) == (right[0] != 0)


def _times_equal(a: Node, b: Node) -> bool:
    if not (isinstance(a, Time) and isinstance(b, Time)):
        return False
    if (a.half == "p") != (b.half == "p") and (a.half and b.half) == "":
        late, other = (a, b) if a.half else (b, a)
        if other.parts[0] > 12:  # 3:30 p.m. and 15:30
            return (late.parts[0] + 12, *late.parts[1:]) == other.parts
    return a.parts == b.parts and (a.half == b.half or not (a.half and b.half))


def _based_equal(a: Node, b: Node) -> bool:
    """Equal with the same base. A reply without one has to have the same digits; a reference without one is decimal."""
    if isinstance(a, Based) and isinstance(b, Based):
        return int(a.digits, a.base) == int(b.digits, b.base) and a.base == b.base
    based, other = (a, b) if isinstance(a, Based) else (b, a)
    assert isinstance(based, Based)
    if not isinstance(other, Leaf):
        return False
    if isinstance(a, Based):
        return re.sub(r"\s", "", other.latex).lower().lstrip("0") == a.digits
    value = _value(other)
    return value is not None and value == sympy.Integer(int(based.digits, based.base))


def _leaves_equal(a: Leaf, b: Leaf) -> bool:
    if a.words and b.words and a.words == b.words:
        return True
    if a.words and b.words and (not a.latex or not b.latex):
        return a.words in _ALL_REALS and b.words in _ALL_REALS
    if not a.latex or not b.latex:
        return _words_equal(a, b) or (bool({a.words, b.words} & _ALL_REALS) and _real_sets_equal(a, b))
    if a.quantity is not None and b.quantity is not None:
        return same_quantity(a.quantity, b.quantity) or _approximately(a, b)
    if a.unit and b.unit and a.unit != b.unit and {a.unit, b.unit} != {"°", "rad"}:
        return False
    left, right = _value(a), _value(b)
    if left is None or right is None:
        return False
    if _same(left, right) or _approximately(a, b):
        return True
    if "°" in (a.unit, b.unit) and a.unit != b.unit:
        degrees, other = (left, right) if a.unit == "°" else (right, left)
        return _same(degrees * sympy.pi / 180, other)
    if "%" in (a.unit, b.unit) and a.unit != b.unit:
        percent, other = (left, right) if a.unit == "%" else (right, left)
        return _same(percent / 100, other)
    return False


def _words_equal(a: Leaf, b: Leaf) -> bool:
    """Words against letters: ``\\text{Evelyn}`` and ``Evelyn`` read as a product."""
    left, right = (leaf.words or re.sub(r"[\s{}()]", "", leaf.latex).lower() for leaf in (a, b))
    return bool(left) and left.replace(" ", "") == right.replace(" ", "")


# --- values


def _value(node: Node) -> Any:
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
    except (UnreadableError, ValueError, TypeError, AttributeError, NotImplementedError, ZeroDivisionError):
        return _library_expression(latex)
    except RecursionError:
        return None
    return None if value.has(sympy.nan, sympy.zoo) else value


def _same(a: Any, b: Any) -> bool:
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


def _approximately(a: Leaf, b: Leaf) -> bool:
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
        left, right = _value(decimal), _value(other)
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


# --- relations


def _is_logic(node: Node) -> bool:
    return isinstance(node, Group) and node.kind in ("and", "or")


def _relations_equal(a: Node, b: Node) -> bool:
    if isinstance(b, Relation) and b.is_equation and not (isinstance(a, Relation) and a.is_equation):
        return _consistent(b) and any(_equal(a, side) for side in _sides(b))
    if isinstance(a, Relation) and a.is_equation and not isinstance(b, Relation):
        named = a.name is not None or all(_is_constant(part) for part in a.parts)
        return named and any(_equal(side, b) for side in _sides(a))
    if isinstance(a, Relation) and isinstance(b, Relation) and a.is_equation and b.is_equation:
        return _equations_equal(a, b)
    return _real_sets_equal(a, b) or _inequalities_equal(a, b)


def _sides(relation: Relation) -> list[Node]:
    """The side that is the value: the last one, or the other one of ``5 = x``."""
    parts, last = relation.parts, relation.latex[-1].strip()
    if len(parts) == 2 and re.fullmatch(r"[A-Za-z]", last) and _is_constant(parts[0]):
        return [parts[0]]
    return [parts[-1]]


def _is_constant(node: Node) -> bool:
    value = _value(node)
    return value is not None and isinstance(value, sympy.Expr) and not value.free_symbols


def _consistent(relation: Relation) -> bool:
    """Whether the constants of a chain are equal: ``6 = 7`` is not an answer."""
    constants = [part for part in relation.parts if _is_constant(part)]
    return all(_equal(constants[0], other) for other in constants[1:])


def _equations_equal(a: Relation, b: Relation) -> bool:
    if not _consistent(b):
        return False
    names = [re.fullmatch(r"([a-z])\(([a-z])\)", node.name or "") for node in (a, b)]
    if names[0] and names[1] and names[0][1] == names[1][1] and names[0][2] != names[1][2]:
        left, right = _value(a.parts[-1]), _value(b.parts[-1])
        ours, theirs = (sympy.Symbol(name[2], real=True) for name in names if name)
        if left is None or right is None or right.has(ours):
            return False
        return _same(left, right.subs(theirs, ours))
    if a.name is not None and b.name is not None:
        if a.name == b.name and _equal(a.parts[-1], b.parts[-1]):
            return True
        if (
            a.name == b.name
            and len(a.parts) == len(b.parts) == 2
            and (_is_constant(a.parts[1]) or _is_constant(b.parts[1]))
        ):
            return False
    if len(a.parts) != 2 or len(b.parts) != 2:
        return False
    left, right = _difference(a), _difference(b)
    return left is not None and right is not None and _proportional(left, right, positive=False)


def _difference(relation: Relation) -> Any:
    left, right = map(_value, relation.parts[:2])
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return None
    return left - right


def _proportional(a: Any, b: Any, *, positive: bool) -> bool:
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
            return _same(a, ratio * b)
    return False


_FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", r"\neq": r"\neq"}


def _inequalities_equal(a: Node, b: Node) -> bool:
    if not (isinstance(a, Relation) and isinstance(b, Relation)) or len(a.parts) != len(b.parts):
        return False
    if len(a.parts) != 2:
        same = a.operators == b.operators and _ordered_equal(a.parts, b.parts)
        flipped = tuple(_FLIPPED.get(operator, operator) for operator in reversed(b.operators))
        return same or (a.operators == flipped and _ordered_equal(a.parts, b.parts[::-1]))
    left, right = _difference(a), _difference(b)
    if left is None or right is None:
        return False
    if a.operators == b.operators:
        return _proportional(left, right, positive=a.operators != (r"\neq",))
    return _FLIPPED.get(b.operators[0]) == a.operators[0] and _proportional(left, -right, positive=True)


def _real_sets_equal(a: Node, b: Node) -> bool:
    left, right = _real_set(a), _real_set(b)
    if left is None or right is None:
        return False
    return bool(left == right) or bool(left.symmetric_difference(right) == sympy.S.EmptySet)


_NO_SOLUTION = frozenset(("no solution", "no real solution", "empty set", "empty"))
_ALL_REALS = frozenset(
    (
        "all real number",
        "all real",
        "real number",
        "all real value",
        "set of all real number",
        "every real number",
    )
)


def _real_set(node: Node) -> Any:
    """The set of reals that a node describes; None if it does not, or not simply."""
    if isinstance(node, Leaf):
        if node.words in _ALL_REALS:
            return sympy.S.Reals
        return {r"\mathbb{R}": sympy.S.Reals}.get(node.latex.replace(" ", ""))
    if isinstance(node, Relation):
        return _solutions(node)
    if not isinstance(node, Group):
        return None
    if node.kind == "tuple" and len(node.members) == 2:
        ends = [_value(member) for member in node.members]
        if any(end is None or not end.is_extended_real for end in ends):
            return None
        return sympy.Interval(*ends, node.brackets[0] == "(", node.brackets[1] == ")")
    if node.kind == "set":
        values = [_value(member) for member in node.members]
        return None if any(value is None for value in values) else sympy.FiniteSet(*values)
    if node.kind == "difference":
        whole, removed = map(_real_set, node.members)
        return None if whole is None or removed is None else sympy.Complement(whole, removed)
    if node.kind in ("union", "and", "or"):
        sets = [_real_set(member) for member in node.members]
        if any(one is None for one in sets):
            return None
        return sympy.Intersection(*sets) if node.kind == "and" else sympy.Union(*sets)
    return None


def _solutions(relation: Relation) -> Any:
    """The solutions of a chain of linear inequalities in one symbol."""
    values = [_value(part) for part in relation.parts]
    if any(not isinstance(value, sympy.Expr) for value in values):
        return None
    symbols = set().union(*(value.free_symbols for value in values))
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    if len(values) == 2 and (between := _absolute(values[0], values[1], relation.operators[0])) is not None:
        return _solutions_of(*between, symbol)
    return _solutions_of(values, relation.operators, symbol)


def _absolute(left: Any, right: Any, operator: str) -> tuple[list[Any], tuple[str, ...]] | None:
    """``|f| < c`` as ``-c < f < c``; None for other inequalities."""
    if isinstance(right, sympy.Abs):
        left, right, operator = right, left, _FLIPPED[operator]
    if not isinstance(left, sympy.Abs) or right.free_symbols or operator not in ("<", r"\leq"):
        return None
    return [-right, left.args[0], right], (operator, operator)


def _solutions_of(values: list[Any], operators: Sequence[str], symbol: Any) -> Any:
    found = sympy.S.Reals
    for (left, right), operator in zip(pairwise(values), operators, strict=True):
        if sympy.oo in (left, right) or -sympy.oo in (left, right):
            continue  # x < \infty
        difference = sympy.expand(left - right)
        slope = difference.coeff(symbol, 1)
        rest = difference - slope * symbol
        if slope == 0 or slope.free_symbols or rest.free_symbols or not slope.is_real:
            return None
        at = sympy.simplify(-rest / slope)
        if not at.is_extended_real:
            return None
        if operator == r"\neq":
            found = found.intersect(
                sympy.Union(sympy.Interval.open(-sympy.oo, at), sympy.Interval.open(at, sympy.oo))
            )
            continue
        less = (operator in ("<", r"\leq")) == bool(slope.is_positive)
        is_open = operator in ("<", ">")
        half = (
            sympy.Interval(-sympy.oo, at, True, is_open)
            if less
            else sympy.Interval(at, sympy.oo, is_open, True)
        )
        found = found.intersect(half)
    return found


# --- what only the library reads


class _ExactReader(latex2sympy2._Latex2Sympy):  # type: ignore[misc]
    """math-verify's LaTeX reader, with numerals as exact rationals: its own passes them to ``sympify``, which is ``eval``."""

    def parse_number(self, text: str) -> Any:
        return sympy.Rational(text.replace(",", ""))


def _readable_by_library(latex: str) -> bool:
    """Whether the library can be expected to read a text in bounded time: its time doubles with each level of brackets."""
    depth = deepest = 0
    for character in latex:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return len(latex) <= _MAX_LIBRARY_CHARACTERS and deepest <= _MAX_LIBRARY_DEPTH


def _library_expression(latex: str) -> Any:
    if not _readable_by_library(latex) or r"\text{" in latex or "'" in latex:
        return None
    try:
        value = _ExactReader(is_real=True).parse(latex.replace(r"\cr", "\\\\"))
    except Exception:  # whatever its grammar and sympy raise for text that they cannot read
        return None
    return value if isinstance(value, sympy.Expr | sympy.MatrixBase) else None
