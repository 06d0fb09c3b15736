"""Paths into rows, and expressions over columns: ``reward_model.ground_truth``, ``1 - solve_rate``, ``len(prompt) < 4000``.

The syntax is a subset of Python's: names, attributes and indices, constants and lists, comparisons, ``and``, ``or``, ``not``,
arithmetic, and the functions of :data:`FUNCTIONS`. A path steps into objects, lists, and text that is JSON.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from scalerl_tasks.errors import SourceError, did_you_mean


class ExpressionError(SourceError):
    """An expression that cannot be parsed."""


class NoValue(Exception):
    """An expression has no value in a row; the message says why."""


Evaluate = Callable[[Mapping[str, Any]], Any]

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:\s*/\s*(\d+))?")


def _number(value: Any) -> float:
    """The last number in a text; ``5/8`` is a quotient."""
    if isinstance(value, int | float):
        return value
    matches = list(_NUMBER.finditer(value)) if isinstance(value, str) else []
    if not matches:
        raise NoValue(f"there is no number in {shown(value)}")
    above = float(matches[-1][0].split("/")[0].replace(",", ""))
    below = matches[-1][1]
    if below is None:
        return above
    if not int(below):
        raise NoValue(f"{shown(value)} divides by zero")
    return above / int(below)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _length(value: Any) -> int:
    if not isinstance(value, str | list | dict):
        raise NoValue(f"{shown(value)} has no length")
    return len(value)


def _lower(value: Any) -> str:
    if not isinstance(value, str):
        raise NoValue(f"{shown(value)} is not text")
    return value.lower()


FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "number": _number,
    "len": _length,
    "lower": _lower,
    "json": _json,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Expression:
    """A path or an expression.

    Args:
        text: as in the spec. The exact name of a column is that column, whatever characters it has.
        field: path in the spec, for messages.

    Raises:
        ExpressionError: the text cannot be parsed.
    """

    def __init__(self, text: str, columns: Collection[str], field: str) -> None:
        self.text, self.field = text, field
        self.columns: set[str] = set()
        """Columns that the expression reads."""
        if text in columns:
            self.columns.add(text)
            self._evaluate = _column(text)
            self.whole_column: str | None = text
            return
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ExpressionError(
                f"{field}: {text!r} is neither a column{did_you_mean(text, columns)} nor an expression ({reason}); columns: "
                f"{names(columns)}"
            ) from None
        self.whole_column = node.id if isinstance(node, ast.Name) else None
        self._evaluate = self._compiled(node)

    def __call__(self, row: Mapping[str, Any], /) -> Any:
        """The value in a row, without NaN.

        Raises:
            NoValue: it has none: a column or an item is missing or null, or the operands do not fit.
        """
        try:
            value = self._evaluate(row)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
            raise NoValue(str(error)) from None
        if value is None:
            raise NoValue("is null")
        if isinstance(value, float) and math.isnan(value):
            raise NoValue("is NaN")
        return value

    def _compiled(self, node: ast.expr) -> Evaluate:
        match node:
            case ast.Constant(value=str() | int() | float() | bool() | None as value):
                return lambda row: value
            case ast.Name(id=name):
                constants = {"true": True, "false": False, "null": None}
                if name in constants:
                    return lambda row: constants[name]
                self.columns.add(name)
                return _column(name)
            case ast.Attribute(value=inner, attr=key):
                return self._step(inner, key)
            case ast.Subscript(value=inner, slice=ast.Constant(value=str() | int() as key)):
                return self._step(inner, key)
            case ast.Subscript(
                value=inner, slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as key))
            ):
                return self._step(inner, -key)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                values = [self._compiled(item) for item in items]
                return lambda row: [value(row) for value in values]
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                of = self._compiled(inner)
                return lambda row: not of(row)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                of = self._compiled(inner)
                return lambda row: -of(row)
            case ast.BoolOp(op=op, values=items):
                values = [self._compiled(item) for item in items]
                every = all if isinstance(op, ast.And) else any
                return lambda row: every(value(row) for value in values)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._binary(self._compiled(left), _ARITHMETIC[type(op)], self._compiled(right))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(
                type(op) in _COMPARISONS for op in ops
            ):
                return self._comparison(left, ops, others)
            case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in FUNCTIONS:
                of, function = self._compiled(inner), FUNCTIONS[name]
                return lambda row: function(_given(of(row)))
        raise ExpressionError(
            f"{self.field}: {ast.unparse(node)!r} in {self.text!r} is not supported; use columns, paths such as a.b and a[0], "
            f"constants, lists, comparisons, and, or, not, + - * /, and {', '.join(FUNCTIONS)}; a column of any name is written "
            "alone"
        )

    def _step(self, inner: ast.expr, key: str | int) -> Evaluate:
        of, path = self._compiled(inner), ast.unparse(inner)

        def step(row: Mapping[str, Any]) -> Any:
            value = of(row)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except ValueError:
                    raise NoValue(f"{path} is the text {shown(value)}, which is not JSON") from None
            if isinstance(key, int):
                if not isinstance(value, list):
                    raise NoValue(f"{path} is {kind(value)}, not a list")
                if not -len(value) <= key < len(value):
                    raise NoValue(f"{path} has {len(value)} items")
                return value[key]
            if not isinstance(value, dict):
                raise NoValue(f"{path} is {kind(value)}, not an object")
            if key not in value:
                raise NoValue(f"{path} has no {key!r} (it {'has ' + names(value) if value else 'is empty'})")
            return value[key]

        return step

    def _binary(self, left: Evaluate, function: Callable[[Any, Any], Any], right: Evaluate) -> Evaluate:
        def of_numbers(row: Mapping[str, Any]) -> Any:
            values = left(row), right(row)
            for value in values:
                if not isinstance(value, int | float):
                    raise NoValue(
                        f"{shown(value)} is {kind(value)}, not a number; number(…) reads the number in a text"
                    )
            return function(*values)

        return of_numbers

    def _comparison(self, left: ast.expr, ops: list[ast.cmpop], others: list[ast.expr]) -> Evaluate:
        values = [self._compiled(node) for node in (left, *others)]
        of = [type(op) for op in ops]

        def compare(row: Mapping[str, Any]) -> bool:
            found = [_or_none(value, row) for value in values]
            for op, a, b in zip(of, found, found[1:], strict=False):
                if (
                    op in _ORDER
                    and not (_is_number(a) and _is_number(b))
                    and not (isinstance(a, str) and isinstance(b, str))
                ):
                    raise NoValue(
                        f"{shown(a)} and {shown(b)} cannot be ordered; number(…) reads the number in a text"
                    )
                if not _COMPARISONS[op](a, b):
                    return False
            return True

        return compare


def _column(name: str) -> Evaluate:
    def read(row: Mapping[str, Any]) -> Any:
        if name not in row:
            raise NoValue(f"there is no column {name!r}{did_you_mean(name, row)} (columns: {names(row)})")
        return row[name]

    return read


def _given(value: Any) -> Any:
    if value is None:
        raise NoValue("is null")
    return value


def _or_none(evaluate: Evaluate, row: Mapping[str, Any]) -> Any:
    """The value, None if it is missing or NaN: ``x == null`` and ``x in [...]`` have an answer then."""
    try:
        value = evaluate(row)
    except NoValue:
        return None
    return None if isinstance(value, float) and math.isnan(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def kind(value: Any) -> str:
    """What a value is, for messages.

    >>> kind([1, 2]), kind("a"), kind(None)
    ('a list of 2', 'text', 'null')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "NaN" if isinstance(value, float) and math.isnan(value) else "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, bytes):
        return "binary data"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """A value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:60] + " … " + text[-15:]


def names(columns: Collection[str]) -> str:
    """The first names of columns."""
    listed = sorted(map(str, columns))
    return ", ".join(listed[:20]) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "")
