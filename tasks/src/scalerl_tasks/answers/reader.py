"""Reads an answer as a whole: all its readings, with its normalized text.

A text can have two readings (``1,234`` is a number or a list); each is tried.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from scalerl_tasks.answers.nodes import WHOLE_TEXT, Answer, Group, Leaf, Node
from scalerl_tasks.answers.normalization import normalize
from scalerl_tasks.answers.prose import MAX_CHARACTERS, find_in_prose
from scalerl_tasks.answers.quantity import Quantity
from scalerl_tasks.answers.structure import TIME, Structure, time_of
from scalerl_tasks.answers.tokens import UnreadableError

_THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_CHOICE = re.compile(
    r"(?:\\text\{\s*\(?\s*([A-Za-z])\s*\)?\s*[.:)]?\s*\}|\(\s*([A-J])\s*\)(?=\s*[0-9\\]))"
    r"\s*(?=[^\s,;])(?!\\(?:AND|OR)(?![A-Za-z]))"
)
_INTEGER_CONDITION = re.compile(
    r"\s*(?:,|;)?\s*\(?(?:\\text\{(?:for|where|with)[^{}]*\})?\s*([a-z])\s*\\in\s*\\mathbb\{Z\}\)?\s*\.?\s*"
)
_DATE = re.compile(r"[0-9]{4}([-/])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/])[0-9]{1,2}\2[12][0-9]{3}")
_PHRASE = re.compile(
    r"\b(?:is|are|was|were|be|get|gets|gives?|equals?|equal\s+to|has|have|there\s+are)\s*:?\s+(?=\S)"
)


def read_answer(text: str, *, is_reference: bool = False) -> Answer:
    r"""All readings of a text that is an answer as a whole.

    >>> read_answer(r"\{1, 2\}").readings[0].kind
    'set'
    >>> len(read_answer("1,234").readings)
    2
    """
    if len(text) > MAX_CHARACTERS:
        return Answer(text.strip(), ())
    raw = text.strip()
    if _DATE.fullmatch(raw) is not None:
        return Answer(raw, (Leaf("", words=raw),))
    if (time := TIME.fullmatch(raw)) is not None:
        return Answer(raw, (time_of(time), *_ratios(raw)))
    latex = normalize(raw)
    if not latex:
        return Answer("", ())
    merged = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), latex)
    readings = _readings(dict.fromkeys((merged, latex)), is_reference)
    if (inside := WHOLE_TEXT.fullmatch(latex)) is not None and re.search(
        r"[0-9,;]|\b(?:and|or)\b", inside[1]
    ):
        readings += read_answer(inside[1], is_reference=is_reference).readings
    if (choice := _CHOICE.match(latex)) is not None:
        letter, rest = (choice[1] or choice[2]).lower(), latex[choice.end() :]
        return Answer(latex, (*readings, Leaf("", words=letter)), letter, rest)
    if (condition := _INTEGER_CONDITION.search(latex)) is not None and condition.start() > 0:
        readings += _of_all_integers(latex[: condition.start()], condition[1])
    if is_reference and latex.count(r"\text{") >= 1 and (phrase := _only(_PHRASE, raw)) is not None:
        readings += read_answer(raw[phrase.end() :], is_reference=True).readings
    return Answer(latex, tuple(readings))


def _of_all_integers(latex: str, name: str) -> list[Node]:
    r"""Readings of a formula before ``k \in \mathbb{Z}``: as it is, and with ``n`` for its integer."""
    letter = re.compile(rf"(?<![\\A-Za-z]){name}(?![A-Za-z])")
    texts = [latex] if re.search(r"(?<![\\A-Za-z])n(?![A-Za-z])", latex) else [latex, letter.sub("n", latex)]
    return _readings(texts, is_reference=False)


def _readings(texts: Iterable[str], is_reference: bool) -> list[Node]:
    found: list[Node] = []
    for text in texts:
        with contextlib.suppress(UnreadableError):
            found.append(Structure(is_reference).read(text))
    return found


def _only(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = list(pattern.finditer(text))
    return found[0] if len(found) == 1 else None


def read_reply(text: str, enclosed: bool) -> Answer:
    """The answer of a reply: all of it, or if it is prose, the part that :func:`find_in_prose` finds."""
    text = text.strip()
    if enclosed:
        return read_answer(text)
    found = find_in_prose(text)
    return Answer("", ()) if found is None else read_answer(found)


def _ratios(raw: str) -> tuple[Node, ...]:
    parts = raw.split(":")
    if not all(part.strip().isdigit() for part in parts):
        return ()
    members = tuple(Leaf(part.strip(), Quantity((int(part), 1, 0), "", 0)) for part in parts)
    return (Group("ratio", members),)
