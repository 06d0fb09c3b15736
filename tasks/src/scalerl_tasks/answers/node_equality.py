"""Equality of two readings: of values, lists, sets, tuples, equations and inequalities."""

from __future__ import annotations

import re
from collections.abc import Sequence

import sympy  # type: ignore[import-untyped]

from scalerl_tasks.answers.expression_equality import approximately, difference, proportional, same, value_of
from scalerl_tasks.answers.nodes import Based, Group, Leaf, Node, Relation, Time
from scalerl_tasks.answers.quantity import same_quantity
from scalerl_tasks.answers.real_sets import ALL_REALS, FLIPPED, same_real_sets

_MAX_UNORDERED = 200


def equal(a: Node, b: Node) -> bool:
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
        return equal(group.members[0], other)
    if group is a and group.kind == "list" and group.brackets == "or":
        return all(equal(member, other) for member in group.members)  # "3/2 or 1.5"
    if group.kind == "ratio" and len(group.members) == 2 and isinstance(other, Leaf):
        top, bottom = map(value_of, group.members)
        value = value_of(other)
        return None not in (top, bottom, value) and bottom != 0 and same(top / bottom, value)
    if group.kind in ("union", "tuple", "difference") and isinstance(other, Leaf):
        return same_real_sets(group, other)
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
        return same_real_sets(a, b)
    return False


def _ordered_equal(a: Sequence[Node], b: Sequence[Node]) -> bool:
    return len(a) == len(b) and all(map(equal, a, b))


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
    """As :func:`equal`, except that ``\\{2\\}`` is not 2."""
    return _is_set(a) == _is_set(b) and equal(a, b)


def _is_set(node: Node) -> bool:
    return isinstance(node, Group) and node.kind == "set"


def _distinct(nodes: Sequence[Node]) -> list[Node]:
    kept: list[Node] = []
    for node in nodes[:_MAX_UNORDERED]:
        if not any(_members_equal(node, other) for other in kept):
            kept.append(node)
    return kept


def _ratios_equal(a: Sequence[Node], b: Sequence[Node]) -> bool:
    left, right = [value_of(node) for node in a], [value_of(node) for node in b]
    if len(left) != len(right) or None in left or None in right:
        return False
    return all(
        same(left[0] * other, right[0] * one) for one, other in zip(left[1:], right[1:], strict=True)
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
    value = value_of(other)
    return value is not None and value == sympy.Integer(int(based.digits, based.base))


def _leaves_equal(a: Leaf, b: Leaf) -> bool:
    if a.words and b.words and a.words == b.words:
        return True
    if a.words and b.words and (not a.latex or not b.latex):
        return a.words in ALL_REALS and b.words in ALL_REALS
    if not a.latex or not b.latex:
        return _words_equal(a, b) or (bool({a.words, b.words} & ALL_REALS) and same_real_sets(a, b))
    if a.quantity is not None and b.quantity is not None:
        return same_quantity(a.quantity, b.quantity) or approximately(a, b)
    if a.unit and b.unit and a.unit != b.unit and {a.unit, b.unit} != {"°", "rad"}:
        return False
    left, right = value_of(a), value_of(b)
    if left is None or right is None:
        return False
    if same(left, right) or approximately(a, b):
        return True
    if "°" in (a.unit, b.unit) and a.unit != b.unit:
        degrees, other = (left, right) if a.unit == "°" else (right, left)
        return same(degrees * sympy.pi / 180, other)
    if "%" in (a.unit, b.unit) and a.unit != b.unit:
        percent, other = (left, right) if a.unit == "%" else (right, left)
        return same(percent / 100, other)
    return False


def _words_equal(a: Leaf, b: Leaf) -> bool:
    """Words against letters: ``\\text{Evelyn}`` and ``Evelyn`` read as a product."""
    left, right = (leaf.words or re.sub(r"[\s{}()]", "", leaf.latex).lower() for leaf in (a, b))
    return bool(left) and left.replace(" ", "") == right.replace(" ", "")


def _is_logic(node: Node) -> bool:
    return isinstance(node, Group) and node.kind in ("and", "or")


def _relations_equal(a: Node, b: Node) -> bool:
    if isinstance(b, Relation) and b.is_equation and not (isinstance(a, Relation) and a.is_equation):
        return _consistent(b) and any(equal(a, side) for side in _sides(b))
    if isinstance(a, Relation) and a.is_equation and not isinstance(b, Relation):
        named = a.name is not None or all(_is_constant(part) for part in a.parts)
        return named and any(equal(side, b) for side in _sides(a))
    if isinstance(a, Relation) and isinstance(b, Relation) and a.is_equation and b.is_equation:
        return _equations_equal(a, b)
    return same_real_sets(a, b) or _inequalities_equal(a, b)


def _sides(relation: Relation) -> list[Node]:
    """The side that is the value: the last one, or the other one of ``5 = x``."""
    parts, last = relation.parts, relation.latex[-1].strip()
    if len(parts) == 2 and re.fullmatch(r"[A-Za-z]", last) and _is_constant(parts[0]):
        return [parts[0]]
    return [parts[-1]]


def _is_constant(node: Node) -> bool:
    value = value_of(node)
    return value is not None and isinstance(value, sympy.Expr) and not value.free_symbols


def _consistent(relation: Relation) -> bool:
    """Whether the constants of a chain are equal: ``6 = 7`` is not an answer."""
    constants = [part for part in relation.parts if _is_constant(part)]
    return all(equal(constants[0], other) for other in constants[1:])


def _equations_equal(a: Relation, b: Relation) -> bool:
    if not _consistent(b):
        return False
    names = [re.fullmatch(r"([a-z])\(([a-z])\)", node.name or "") for node in (a, b)]
    if names[0] and names[1] and names[0][1] == names[1][1] and names[0][2] != names[1][2]:
        left, right = value_of(a.parts[-1]), value_of(b.parts[-1])
        ours, theirs = (sympy.Symbol(name[2], real=True) for name in names if name)
        if left is None or right is None or right.has(ours):
            return False
        return same(left, right.subs(theirs, ours))
    if a.name is not None and b.name is not None:
        if a.name == b.name and equal(a.parts[-1], b.parts[-1]):
            return True
        if (
            a.name == b.name
            and len(a.parts) == len(b.parts) == 2
            and (_is_constant(a.parts[1]) or _is_constant(b.parts[1]))
        ):
            return False
    if len(a.parts) != 2 or len(b.parts) != 2:
        return False
    left, right = difference(a), difference(b)
    return left is not None and right is not None and proportional(left, right, positive=False)


def _inequalities_equal(a: Node, b: Node) -> bool:
    if not (isinstance(a, Relation) and isinstance(b, Relation)) or len(a.parts) != len(b.parts):
        return False
    if len(a.parts) != 2:
        same = a.operators == b.operators and _ordered_equal(a.parts, b.parts)
        flipped = tuple(FLIPPED.get(operator, operator) for operator in reversed(b.operators))
        return same or (a.operators == flipped and _ordered_equal(a.parts, b.parts[::-1]))
    left, right = difference(a), difference(b)
    if left is None or right is None:
        return False
    if a.operators == b.operators:
        return proportional(left, right, positive=a.operators != (r"\neq",))
    return FLIPPED.get(b.operators[0]) == a.operators[0] and proportional(left, -right, positive=True)


_NO_SOLUTION = frozenset(("no solution", "no real solution", "empty set", "empty"))
