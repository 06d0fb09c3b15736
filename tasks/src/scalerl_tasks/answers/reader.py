r"""Reads an answer into its structure: numbers with units, lists, sets, tuples and intervals, equations, matrices, text.

A text can have two readings (``1,234`` is a number or a list); each is tried. Expressions stay LaTeX here;
:mod:`scalerl_tasks.answers.node_equality` reads and compares them.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Literal

from scalerl_tasks.answers.normalization import normalize
from scalerl_tasks.answers.quantity import Quantity, formulas, read_normalized
from scalerl_tasks.answers.units import canonical_unit

MAX_CHARACTERS = 2048
"""A longer answer in a box is not read; of longer prose, the end is."""

_MAX_NODES = 400
_MAX_DEPTH = 12
_MAX_BARE_CHARACTERS = 256
_OPENERS, _CLOSERS = (
    ("(", "[", "{", r"\{", r"\lfloor", r"\lceil"),
    (")", "]", "}", r"\}", r"\rfloor", r"\rceil"),
)
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_RELATIONS = ("=", "<", ">", r"\leq", r"\geq", r"\neq", r"\approx", r"\equiv")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WHOLE_TEXT = re.compile(r"\s*\(?\s*\\text\{([^{}]*)\}\s*\)?\s*")
_TIME = re.compile(
    r"\s*(?:\\text\{)?\s*([01]?[0-9]|2[0-4])\s*:\s*([0-5][0-9])(?::([0-5][0-9]))?\s*\}?\s*"
    r"(?:\\text\{)?\s*(?:([ap])\.?\s*m\b\.?)?\s*\}?\s*\.?\s*",
    re.IGNORECASE,
)
_BASED = re.compile(
    r"\s*([0-9A-Fa-f]+)\s*_\s*(?:\{?\s*\(?([0-9]{1,2})\)?\s*\}?|\{?\s*\\text\{(\w+)\}\s*\}?)\s*"
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASES |= {"twelve": 12, "sixteen": 16, "bin": 2, "oct": 8, "hex": 16}
_MATRIX = re.compile(
    r"\s*(?:[(\[]\s*)?\\begin\{([pb]?matrix|array|smallmatrix)\}(.*)\\end\{\1\}\s*[)\]]?\s*", re.DOTALL
)
_THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_UNIT_TAIL = re.compile(r"((?:\s*/?\s*\\text\{[^{}]*\}(?:\s*\^\s*(?:\{\s*-?[0-9]\s*\}|[0-9]))?)+)\s*$")
_LABEL = re.compile(r"^\s*\(?\s*([A-Za-z])\s*\)?\s*$")
_SYMBOL = re.compile(
    r"\s*(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\{[^{}]*\}|[A-Za-z0-9]))?'*(?:\s*\^\s*\{\s*-1\s*\})?"
    r"(?:\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\))?\s*"
)
_GEOMETRIC_NAME = re.compile(
    r"(?:m\s*)?(?:\\(?:angle|triangle|overline)\s*)?\{?[A-Z]{1,4}\}?|\|[A-Z]{2}\||\[[A-Z]{3,6}\]"
)
_CHOICE = re.compile(
    r"(?:\\text\{\s*\(?\s*([A-Za-z])\s*\)?\s*[.:)]?\s*\}|\(\s*([A-J])\s*\)(?=\s*[0-9\\]))"
    r"\s*(?=[^\s,;])(?!\\(?:AND|OR)(?![A-Za-z]))"
)
_REVERSED_INTERVAL = re.compile(r"([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])")
_CASES = re.compile(
    r"\s*(?:\\\{\s*)?\\begin\{(?:cases|array|aligned)\}(?:\{[lcr]+\})?([^&]*)\\end\{(?:cases|array|aligned)\}\s*\.?\s*"
)
_INTEGER_CONDITION = re.compile(
    r"\s*(?:,|;)?\s*\(?(?:\\text\{(?:for|where|with)[^{}]*\})?\s*([a-z])\s*\\in\s*\\mathbb\{Z\}\)?\s*\.?\s*"
)
_REALS_WITHOUT = re.compile(r"\s*(\\mathbb\{R\})\s*-\s*(?=\\\{)")
_DATE = re.compile(r"[0-9]{4}([-/])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/])[0-9]{1,2}\2[12][0-9]{3}")
_PHRASE = re.compile(
    r"\b(?:is|are|was|were|be|get|gets|gives?|equals?|equal\s+to|has|have|there\s+are)\s*:?\s+(?=\S)"
)
_TUPLE_END = re.compile(r"(?:(?<=\s)|(?<=^))[(\[][^()\[\]{}A-Za-z]*,[^()\[\]{}A-Za-z]*[)\]]$")
_LISTED = re.compile(
    r"(?<![\S])(?:-?[0-9]+(?:\.[0-9]+|/[0-9]+)?(?:,\s+(?:and\s+|or\s+)?|\s+(?:and|or)\s+))+$"
)
_NEGATION = re.compile(
    r"(?:\b(?:not|never|cannot)|n't|\\neq|≠)(?:\s+(?:be|equal|to|exactly|simply|just)){0,3}\s*[$(]*\s*$",
    re.IGNORECASE,
)
_BUILDER = re.compile(r"\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:)")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_ANCHOR = re.compile(r"(?:answer|option|choice)s?\s*(?:is|are|was|:|=)+\s*:?|####", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_UNIT_POWER = re.compile(r"(?<=[a-z])()\$\s*\^\s*\{?([23])\}?\s*\$")
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9)])(?:\*\*|__|`)|(?:\*\*|__|`)(?![A-Za-z0-9(])")
_RUN_WORD = re.compile(r"[0-9+\-*/^().,=×·÷%$€£√π\u2212]+|\\(?:times|cdot|%|\$[0-9.,]+)|x")
_STANDALONE = re.compile(
    r"[+\-\u2212]?(?:\\?[$€£¥₹])?[+\-\u2212]?[0-9][0-9.,]*(?:/[0-9][0-9.,]*)?(?:[eE][+-]?[0-9]+)?(?:\\?%|°|€|£)?"
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value.

    Attributes:
        latex: the expression, without its unit; empty for words.
        quantity: the value, if it is a number.
        unit: canonical unit; empty without a known one.
        words: the words in lower case, if there is nothing else.
    """

    latex: str
    quantity: Quantity | None = None
    unit: str = ""
    words: str = ""


@dataclass(frozen=True, slots=True)
class Time:
    """A time of day, or a duration: hours, minutes, seconds, and ``a`` or ``p`` if given."""

    parts: tuple[int, int, int]
    half: str


@dataclass(frozen=True, slots=True)
class Based:
    """A number in a base: ``101_2``."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Group:
    """Several values.

    Attributes:
        kind: ``list`` (without brackets), ``set``, ``tuple`` (in brackets), ``union``, ``ratio``, ``compound`` (``5 h 20 min``),
            ``matrix`` (rows are tuples), ``and`` or ``or`` (of relations), ``difference`` (of two sets).
        members: the values.
        brackets: of a tuple; of a list that only "or" joins, ``or``.
    """

    kind: Literal["list", "set", "tuple", "union", "ratio", "compound", "matrix", "and", "or", "difference"]
    members: tuple[Node, ...]
    brackets: str = ""


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain ``parts[0] operators[0] parts[1] …`` of ``=``, ``<``, ``>``, ``\\leq``, ``\\geq``, ``\\neq``."""

    parts: tuple[Node, ...]
    operators: tuple[str, ...]
    latex: tuple[str, ...]

    @property
    def is_equation(self) -> bool:
        return all(operator == "=" for operator in self.operators)

    @property
    def name(self) -> str | None:
        """The left side if it is a symbol, a function of symbols, or words; None otherwise."""
        first = self.latex[0].strip()
        if _SYMBOL.fullmatch(first) or _WHOLE_TEXT.fullmatch(first):
            return re.sub(r"\s+", "", first).lower()
        if _GEOMETRIC_NAME.fullmatch(first) or re.fullmatch(r"\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)", first):
            return re.sub(r"\s+", "", first).lower()
        return None


Node = Leaf | Time | Based | Group | Relation


@dataclass(frozen=True, slots=True)
class Answer:
    """All readings of an answer, with its normalized text.

    Attributes:
        choice: the letter of an option that stands before its content, as in ``(C) 12``, in lower case; empty without one.
        content: what follows that letter.
    """

    text: str
    readings: tuple[Node, ...]
    choice: str = ""
    content: str = ""


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
    if (time := _TIME.fullmatch(raw)) is not None:
        return Answer(raw, (_time(time), *_ratios(raw)))
    latex = normalize(raw)
    if not latex:
        return Answer("", ())
    texts = [latex]
    merged = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), latex)
    if merged != latex:
        texts.insert(0, merged)
    readings: list[Node] = []
    for one in texts:
        try:
            readings.append(_Structure(is_reference).read(one))
        except _UnreadError:
            continue
    if (inside := _WHOLE_TEXT.fullmatch(latex)) is not None and re.search(
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
    readings: list[Node] = []
    for text in texts:
        with contextlib.suppress(_UnreadError):
            readings.append(_Structure(False).read(text))
    return readings


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
    latex = normalize(text)
    rest = latex
    while True:
        tail = _UNIT_TAIL.search(rest)
        if tail is None or tail.start() == 0:
            break
        words = _TEXT.sub(r"\1", tail[1])
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


def _time(match: re.Match[str]) -> Time:
    hours, minutes, seconds, half = match.groups()
    return Time((int(hours), int(minutes), int(seconds or 0)), (half or "").lower())


def _ratios(raw: str) -> tuple[Node, ...]:
    parts = raw.split(":")
    if not all(part.strip().isdigit() for part in parts):
        return ()
    members = tuple(Leaf(part.strip(), Quantity((int(part), 1, 0), "", 0)) for part in parts)
    return (Group("ratio", members),)


class _UnreadError(ValueError):
    """Nested too deeply, or too many parts."""


class _Structure:
    def __init__(self, is_reference: bool) -> None:
        self._is_reference = is_reference
        self._nodes = 0
        self._depth = 0

    def read(self, latex: str) -> Node:
        """A list at the top: separated by commas, semicolons, ``\\AND`` and ``\\OR``."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _UnreadError("nested too deeply")
        try:
            return self._read(latex)
        finally:
            self._depth -= 1

    def _read(self, latex: str) -> Node:
        whole = read_normalized(latex, bare_units=not self._is_reference)
        if whole is not None:
            return self._leaf(latex, whole)
        if (cases := _CASES.fullmatch(latex)) is not None and not latex.startswith("$"):
            latex = ", ".join(row for row in re.split(r"\\cr(?![A-Za-z])", cases[1]) if row.strip(" ."))
        reversed_ = _REVERSED_INTERVAL.fullmatch(latex.strip())
        if reversed_ is not None and (reversed_[1] == "]" or reversed_[3] == "["):
            latex = (
                ("(" if reversed_[1] == "]" else "[") + reversed_[2] + (")" if reversed_[3] == "[" else "]")
            )
        parts, separators = split(latex, (",", ";", r"\AND", r"\OR"))
        filled = [part for part in parts if part.strip(" .")]
        if len(filled) < 2:
            return self._item(filled[0] if filled else latex)
        if (compound := self._compound(latex)) is not None:
            return compound
        members: list[Node] = []
        for part in filled:
            node = self._item(part)
            if isinstance(node, Group) and node.kind == "list":
                members += node.members  # of a plus-minus
            else:
                members.append(node)
        if all(isinstance(node, Relation) and not node.is_equation for node in members):
            return Group("or" if r"\OR" in separators else "and", tuple(members))
        return Group("list", tuple(members), "or" if set(separators) == {r"\OR"} else "")

    def _item(self, latex: str) -> Node:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise _UnreadError("too many parts")
        latex = latex.strip().rstrip(".").strip()
        if (time := _TIME.fullmatch(latex)) is not None:
            return _time(time)
        if (based := _BASED.fullmatch(latex)) is not None and (node := _based(based)) is not None:
            return node
        quantity = read_normalized(latex, bare_units=not self._is_reference)
        if quantity is not None:
            return self._leaf(latex, quantity)
        for arrow in (r"\implies", r"\Rightarrow", r"\Longrightarrow", r"\therefore"):
            if arrow in latex:
                latex = latex.rpartition(arrow)[2].strip()
        parts, operators = split(latex, (*_RELATIONS, r"\in"))
        if operators:
            return self._relation(parts, operators)
        if (matrix := _MATRIX.fullmatch(latex)) is not None:
            return self._matrix(matrix)
        if (bracket := self._bracket(latex)) is not None:
            return bracket
        parts, operators = split(latex, (r"\cup",))
        if operators:
            return Group("union", tuple(self._item(part) for part in parts))
        parts, operators = split(latex, (r"\setminus",))
        if not operators and (removed := _REALS_WITHOUT.match(latex)) is not None:
            parts, operators = [removed[1], latex[removed.end() :]], [r"\setminus"]
        if len(operators) == 1 and all(part.strip() for part in parts):
            return Group("difference", tuple(self._item(part) for part in parts))
        parts, operators = split(latex, (":",))
        if operators and all(part.strip() for part in parts):
            return Group("ratio", tuple(self._item(part) for part in parts))
        if r"\pm" in latex or r"\mp" in latex:
            upper = latex.replace(r"\pm", "+").replace(r"\mp", "-")
            lower = latex.replace(r"\pm", "-").replace(r"\mp", "+")
            return Group("list", (self._item(upper), self._item(lower)))
        if latex in (r"\emptyset", r"\{\}", r"\{ \}"):
            return Group("set", ())
        if (compound := self._compound(latex)) is not None:
            return compound
        return self._leaf(latex, None)

    def _relation(self, parts: list[str], operators: list[str]) -> Node:
        if operators == [r"\in"]:
            return self.read(parts[1])
        if r"\in" in operators:
            return self._leaf(r" \in ".join(parts), None)
        if r"\approx" in operators:
            at = operators.index(r"\approx")
            # What stands left of it is the value, unless that is only a name.
            left = parts[at].strip()
            if (left != r"\pi" and _SYMBOL.fullmatch(left)) or _WHOLE_TEXT.fullmatch(left):
                operators = ["=" if operator == r"\approx" else operator for operator in operators]
            else:
                parts, operators = parts[: at + 1], operators[:at]
                if not operators:
                    return self._item(parts[0])
        if not parts[0].strip() and operators[0] == "=":
            parts, operators = parts[1:], operators[1:]
            if not operators:
                return self.read(parts[0])
        if any(not part.strip() for part in parts):
            return self._leaf(" = ".join(parts), None)
        operators = ["=" if operator == r"\equiv" else operator for operator in operators]
        return Relation(tuple(self.read(part) for part in parts), tuple(operators), tuple(parts))

    def _bracket(self, latex: str) -> Node | None:
        """A set, tuple or interval, if one pair of brackets holds all of the text."""
        tokens = _TOKEN.findall(latex)
        if (
            len(tokens) < 2
            or tokens[0] not in ("(", "[", "{", r"\{")
            or tokens[-1] not in (")", "]", "}", r"\}")
        ):
            return None
        depth = 0
        for at, token in enumerate(tokens):
            depth += (token in _OPENERS) - (token in _CLOSERS)
            if depth == 0:
                if at != len(tokens) - 1:
                    return None
                break
        opener, closer = tokens[0], tokens[-1]
        inside = latex[len(opener) : -len(closer)]
        if opener == r"\{":
            if (builder := _BUILDER.match(inside)) is not None:
                return self.read(inside[builder.end() :])
            if closer != r"\}" or re.search(r"(?<!\d):", inside):
                return None
            parts, _ = split(inside, (",", ";", r"\AND", r"\OR"))
            return Group("set", self._members([part for part in parts if part.strip()]))
        if opener == "{" or closer in ("}", r"\}"):
            return self.read(inside) if (opener, closer) == ("{", "}") and inside.strip() else None
        parts, _ = split(inside, (",", ";"))
        if len(parts) == 1:
            return (
                self.read(inside) if (opener, closer) in (("(", ")"), ("[", "]")) and inside.strip() else None
            )
        if any(not part.strip() for part in parts):
            return None
        return Group("tuple", self._members(parts), opener + closer)

    def _members(self, parts: list[str]) -> tuple[Node, ...]:
        members: list[Node] = []
        for part in parts:
            node = self._item(part)
            members += node.members if isinstance(node, Group) and node.kind == "list" else [node]
        return tuple(members)

    def _matrix(self, match: re.Match[str]) -> Node:
        body = match[2]
        if match[1] == "array":
            body = re.sub(r"^\s*\{[lcr|\s]*\}", "", body)
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![A-Za-z])", body) if row.strip()]
        if not rows:
            raise _UnreadError("an empty matrix")
        return Group(
            "matrix",
            tuple(Group("tuple", tuple(self._item(cell) for cell in row.split("&"))) for row in rows),
        )

    def _compound(self, latex: str) -> Node | None:
        r"""``5 \text{ hours } 20 \text{ minutes}``: two or more numbers, each with a unit."""
        if latex.count(r"\text{") < 2:
            return None
        latex = latex.replace(r"\AND", " ").replace(",", " ").replace(" and}", "}")
        members: list[Node] = []
        at = 0
        for match in _TEXT.finditer(latex):
            quantity = read_normalized(latex[at : match.end()], bare_units=False)
            if quantity is None or not quantity.unit:
                return None
            members.append(Leaf(latex[at : match.start()].strip(), quantity, quantity.unit))
            at = match.end()
        return Group("compound", tuple(members)) if len(members) > 1 and not latex[at:].strip() else None

    def _leaf(self, latex: str, quantity: Quantity | None) -> Leaf:
        if quantity is not None:
            return Leaf(latex, quantity, quantity.unit)
        if (text := _WHOLE_TEXT.fullmatch(latex)) is not None:
            return Leaf("", words=_plain_words(text[1]))
        unit = ""
        tail = _UNIT_TAIL.search(latex)
        if tail is not None and tail.start() > 0:
            words = _TEXT.sub(r"\1", tail[1]).replace("{", "").replace("}", "").strip()
            unit = canonical_unit(words) or ""
            latex = latex[: tail.start()].strip()
        elif (head := re.match(r"\\text\{([^{}]*)\}\s*(?=[0-9\\(-])", latex)) is not None and _LABEL.match(
            head[1]
        ):
            latex = latex[head.end() :]  # "(C) 5"
        for sign in ("$", "€", "£"):
            if latex.startswith(sign) or latex.endswith(sign):
                latex, unit = latex.strip(sign).strip(), sign
        if latex.endswith((r"\degree", r"\%")) and not _TRIGONOMETRIC.search(latex):
            unit = "°" if latex.endswith(r"\degree") else "%"
            latex = latex[: -len(r"\degree")].strip() if unit == "°" else latex[:-2].strip()
        words = _plain_words(latex) if re.fullmatch(r"[A-Za-z() .']*[A-Za-z).]", latex) else ""
        return Leaf(latex, None, unit, words)


def _based(match: re.Match[str]) -> Based | None:
    base = int(match[2]) if match[2] else _BASES.get((match[3] or "").lower(), 0)
    digits = match[1].lower().lstrip("0") or "0"
    if not 2 <= base <= 36 or len(digits) > 256 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Based(digits, base)


def _plain_words(text: str) -> str:
    """Words for comparison: lower case and singular, without brackets, quotes, a final stop, an article, "option"."""
    text = re.sub(r"[()\"'`]|\.$", "", text.strip().lower()).strip()
    text = re.sub(r"^(?:(?:the|an?)\s+(?=\w{2})|(?:option|choice)\s+(?=[a-z]$))", "", text)
    return re.sub(r"(?<=\w{3})s$", "", re.sub(r"\s+", " ", text).strip(" ."))


def split(latex: str, separators: tuple[str, ...]) -> tuple[list[str], list[str]]:
    r"""The parts between separators outside of all brackets and environments, and the separators.

    >>> split(r"(1, 2), \frac{3}{4}", (",",))
    (['(1, 2)', ' \\frac{3}{4}'], [','])
    """
    if not any(separator in latex for separator in separators):
        return [latex], []
    parts, found, start, depth = [], [], 0, 0
    for match in _TOKEN.finditer(latex):
        token = match[0]
        if token in _OPENERS or token == r"\begin":
            depth += 1
        elif token in _CLOSERS or token == r"\end":
            depth = max(0, depth - 1)
        elif depth == 0 and token in separators:
            parts.append(latex[start : match.start()])
            found.append(token)
            start = match.end()
    parts.append(latex[start:])
    return parts, found
