"""Which series a PromQL query reads. Enough of the language to take our own queries apart, not a parser of it: that
is promtool's, in the tests that have it."""

from __future__ import annotations

import re
from dataclasses import dataclass

WORDS = {
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "and",
    "or",
    "unless",
    "bool",
    "offset",
    "inf",
    "nan",
}
_CLAUSE = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_SELECTOR = re.compile(r"(?<![\w.$])([a-zA-Z_:][\w:]*)(?![\w:])\s*(\{[^{}]*\})?(?!\s*\()")
_MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"\s*')


@dataclass(frozen=True)
class Selector:
    """``metric{label="value"}``."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]

    @property
    def labels(self) -> set[str]:
        return {name for name, _, _ in self.matchers}


class NotUnderstood(Exception):
    """Not one of our queries, or a wrong one."""


def selectors(expr: str) -> list[Selector]:
    """All vector selectors of a query.

    >>> selectors('sum by (pod) (rate(a_total{run="r"}[5m])) / on (pod) b > 0.5')
    [Selector(metric='a_total', matchers=(('run', '=', 'r'),)), Selector(metric='b', matchers=())]
    """
    for opening, closing in ("()", "[]", "{}"):
        if expr.count(opening) != expr.count(closing):
            raise NotUnderstood(f"{opening}{closing} do not match: {expr}")
    bare = re.sub(r"\[[^\]]*\]", "", _CLAUSE.sub(" ", expr))
    found = []
    for metric, matchers in _SELECTOR.findall(bare):
        if metric.lower() not in WORDS:
            found.append(Selector(metric, _matchers(matchers, expr)))
    return found


def grouped_labels(expr: str) -> set[str]:
    """Labels that ``by``, ``on`` and their like name."""
    return {name.strip() for _, names in _CLAUSE.findall(expr) for name in names.split(",") if name.strip()}


def _matchers(braces: str, expr: str) -> tuple[tuple[str, str, str], ...]:
    inner = braces.strip("{}").strip()
    if not inner:
        return ()
    parts = []
    for part in re.split(r",(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", inner):
        match = _MATCHER.fullmatch(part)
        if match is None:
            raise NotUnderstood(f"{part!r} is no matcher: {expr}")
        parts.append((match[1], match[2], match[3]))
    return tuple(parts)
