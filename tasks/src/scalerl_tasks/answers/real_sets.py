"""The sets of reals that intervals, unions and inequalities describe, and their equality."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import sympy  # type: ignore[import-untyped]

from scalerl_tasks.answers.expression_equality import value_of
from scalerl_tasks.answers.nodes import Group, Leaf, Node, Relation

FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", r"\neq": r"\neq"}


def same_real_sets(a: Node, b: Node) -> bool:
    """Whether both describe the same set of reals; False if one describes none."""
    left, right = _real_set(a), _real_set(b)
    if left is None or right is None:
        return False
    return bool(left == right) or bool(left.symmetric_difference(right) == sympy.S.EmptySet)


ALL_REALS = frozenset(
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
        if node.words in ALL_REALS:
            return sympy.S.Reals
        return {r"\mathbb{R}": sympy.S.Reals}.get(node.latex.replace(" ", ""))
    if isinstance(node, Relation):
        return _solutions(node)
    if not isinstance(node, Group):
        return None
    if node.kind == "tuple" and len(node.members) == 2:
        ends = [value_of(member) for member in node.members]
        if any(end is None or not end.is_extended_real for end in ends):
            return None
        return sympy.Interval(*ends, node.brackets[0] == "(", node.brackets[1] == ")")
    if node.kind == "set":
        values = [value_of(member) for member in node.members]
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
    values = [value_of(part) for part in relation.parts]
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
        left, right, operator = right, left, FLIPPED[operator]
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
