"""Finds the answer in prose: a formula, a number or a short text."""

from __future__ import annotations

import re

from scalerl_tasks.answers.formulas import formulas
from scalerl_tasks.answers.normalization import TEXT, normalize
from scalerl_tasks.answers.structure import UNIT_TAIL
from scalerl_tasks.answers.units import canonical_unit

MAX_CHARACTERS = 2048
"""A longer answer in a box is not read; of longer prose, the end is."""
_MAX_BARE_CHARACTERS = 256
_TUPLE_END = re.compile(r"(?:(?<=\s)|(?<=^))[(\[][^()\[\]{}A-Za-z]*,[^()\[\]{}A-Za-z]*[)\]]$")
_LISTED = re.compile(
    r"(?<![\S])(?:-?[0-9]+(?:\.[0-9]+|/[0-9]+)?(?:,\s+(?:and\s+|or\s+)?|\s+(?:and|or)\s+))+$"
)
_NEGATION = re.compile(
    r"(?:\b(?:not|never|cannot)|n't|\\neq|≠)(?:\s+(?:be|equal|to|exactly|simply|just)){0,3}\s*[$(]*\s*$",
    re.IGNORECASE,
)
_ANCHOR = re.compile(r"(?:answer|option|choice)s?\s*(?:is|are|was|:|=)+\s*:?|####", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_UNIT_POWER = re.compile(r"(?<=[a-z])()\$\s*\^\s*\{?([23])\}?\s*\$")
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9)])(?:\*\*|__|`)|(?:\*\*|__|`)(?![A-Za-z0-9(])")
_RUN_WORD = re.compile(r"[0-9+\-*/^().,=×·÷%$€£√π\u2212]+|\\(?:times|cdot|%|\$[0-9.,]+)|x")
_STANDALONE = re.compile(
    r"[+\-\u2212]?(?:\\?[$€£¥₹])?[+\-\u2212]?[0-9][0-9.,]*(?:/[0-9][0-9.,]*)?(?:[eE][+-]?[0-9]+)?(?:\\?%|°|€|£)?"
)


def find_in_prose(text: str) -> str | None:
    """The answer in prose, or None.

    1. A short text without words is the answer.
    2. What follows the last "answer is", "answer:" or "####", to the end of its sentence: a formula or number in it, or all.
    3. The last formula between ``$`` signs or the like, or the last number that stands by itself, whichever is later. Formulas
       that only "and", "or" or a comma separates are one.
    """
    text = _EMPHASIS.sub("", text[-MAX_CHARACTERS:]).strip()
    text = _UNIT_POWER.sub(r"\1^\2", text)
    if not text:
        return None
    anchor: re.Match[str] | None = None
    for match in _ANCHOR.finditer(text):
        anchor = match
    if anchor is None and len(text) <= _MAX_BARE_CHARACTERS and "\n" not in text and not _has_words(text):
        return text
    if anchor is not None:
        rest = text[anchor.end() :].lstrip(" :=\n")
        found = _joined_formulas(rest, first=True)
        line = _SENTENCE_END.split(rest, maxsplit=1)[0].strip()
        if found is not None and found[0] <= len(line):
            return found[2]
        if line:
            if not _has_words(line) or len(line.split()) <= 3:
                return line
            numbers = [
                word for word in line.split() if _STANDALONE.fullmatch(word.strip("*_()[]:;!?,").rstrip("."))
            ]
            return numbers[0].strip("*_()[]:;!?,").rstrip(".") if numbers else line
    formula, number = _joined_formulas(text, first=False), _last_standalone(text)
    if formula is not None and (number is None or formula[1] >= number[1]):
        return formula[2]
    if number is not None:
        return number[2]
    if len(text) <= _MAX_BARE_CHARACTERS and not any(map(str.isdigit, text)):
        return text
    return None


def _has_words(text: str) -> bool:
    """Whether a text has words that are no unit after a number."""
    rest = normalize(text)
    while True:
        tail = UNIT_TAIL.search(rest)
        if tail is None or tail.start() == 0:
            break
        words = TEXT.sub(r"\1", tail[1])
        if canonical_unit(words.replace("{", "").replace("}", "").strip()) is None:
            break
        rest = rest[: tail.start()]
    return r"\text{" in rest


def _joined_formulas(text: str, first: bool) -> tuple[int, int, str] | None:
    found = formulas(text)
    if not found:
        return None
    low = high = 0 if first else len(found) - 1
    while low > 0 and _is_joint(text[found[low - 1][1] : found[low][0]]):
        low -= 1
    while high + 1 < len(found) and _is_joint(text[found[high][1] : found[high + 1][0]]):
        high += 1
    start, end = found[low][0], found[high][1]
    joined = ", ".join(content.strip().rstrip(".,") for _, _, content in found[low : high + 1])
    percent = re.match(r"\s*(?:\\?%|percent\b)", text[end : end + 12])
    return start, end, joined + (r"\%" if percent else "")


def _is_joint(between: str) -> bool:
    return len(between) <= 12 and re.fullmatch(r"\s*(?:,|;|,?\s*(?:and|or|&))\s*", between) is not None


def _last_standalone(text: str) -> tuple[int, int, str] | None:
    """Start, end and text of the last word with a digit, if it is a number by itself ("so 2x+5" has none)."""
    words = [(match.start(), match.end()) for match in re.finditer(r"\S+", text)]
    at = len(words) - 1
    while at >= 0:
        start, end = words[at]
        word = text[start:end]
        if not any("0" <= character <= "9" for character in word):
            at -= 1
            continue
        stripped = word.strip("*_()[]:;!?").rstrip(".,").removesuffix("$")
        if (
            at > 0
            and canonical_unit(stripped.replace("²", "^2").replace("³", "^3")) is not None
            and stripped[:1].isalpha()
        ):
            at -= 1  # "25 cm^2"
            continue
        return _standalone(text, words, at, stripped)
    return None


def _standalone(
    text: str, words: list[tuple[int, int]], at: int, stripped: str
) -> tuple[int, int, str] | None:
    start, end = words[at]
    if _NEGATION.search(text[max(0, start - 40) : start]) is not None:
        return None
    if (bracketed := _bracketed(text, end)) is not None:
        return bracketed
    end = start + len(text[start:end].rstrip("$*_()[]:;!?.,"))
    if (named := re.fullmatch(r"[A-Za-z]=(\S+)", stripped)) is not None:
        stripped = named[1]
    number = _STANDALONE.fullmatch(stripped)
    low = at
    while low > 0 and _RUN_WORD.fullmatch(text[slice(*words[low - 1])]) and at - low < 40:
        low -= 1
    run = text[words[low][0] : end].rstrip(".,;:!?")
    if low < at and (
        re.search(r"[+*/^=×·÷]|\\times|\\cdot|\s[-\u2212]\s?", run) or re.search(r"[0-9] [0-9]+/[0-9]", run)
    ):
        return words[low][0], end, run
    if number is None:
        return None
    after = re.match(r"\s*(percent\b|°|\\?%)", text[end : end + 12])
    last = stripped + (r"\%" if after and after[1] != "°" else "")
    listed = _LISTED.search(text[max(0, start - 160) : start])
    if listed is not None and re.search(r"and|or|,.*,", listed[0], re.DOTALL):
        return start - len(listed[0]), end, f"{listed[0]}{last}"
    return words[at][0], end, last


def _bracketed(text: str, end: int) -> tuple[int, int, str] | None:
    """The tuple or interval that ends with the word, "(2, 3)."; None if it does not, or if it has words in it."""
    word = text[:end].rstrip("$*_:;!?.,")
    found = _TUPLE_END.search(word[-160:])
    return None if found is None else (len(word) - len(found[0]), len(word), found[0])
