r"""Finds the formulas in prose, by the signs around them."""

from __future__ import annotations

import re

_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{3,}")
_TEXT_LIKE = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname|boxed)\s*\{[^{}]*\}|\\[A-Za-z]+")


def formulas(text: str) -> list[tuple[int, int, str]]:
    r"""Start, end and content of each ``$…$``, ``\(…\)`` and ``\[…\]``; two ``$`` with prose between them are money."""
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
        found.append((match.start(), match.end(), next(one for one in match.groups() if one is not None)))
        at = match.end()
    return found
