r"""Reads normalized LaTeX into its structure: lists, sets, tuples and intervals, equations, matrices, values with units, words."""

from __future__ import annotations

import re

from scalerl_tasks.answers.nodes import SYMBOL, WHOLE_TEXT, Based, Group, Leaf, Node, Relation, Time
from scalerl_tasks.answers.normalization import TEXT
from scalerl_tasks.answers.quantity import Quantity, read_normalized
from scalerl_tasks.answers.tokens import UnreadableError
from scalerl_tasks.answers.units import canonical_unit

_MAX_NODES = 400
_MAX_DEPTH = 12
_OPENERS, _CLOSERS = (
    ("(", "[", "{", r"\{", r"\lfloor", r"\lceil"),
    (")", "]", "}", r"\}", r"\rfloor", r"\rceil"),
)
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_RELATIONS = ("=", "<", ">", r"\leq", r"\geq", r"\neq", r"\approx", r"\equiv")
TIME = re.compile(
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
UNIT_TAIL = re.compile(r"((?:\s*/?\s*\\text\{[^{}]*\}(?:\s*\^\s*(?:\{\s*-?[0-9]\s*\}|[0-9]))?)+)\s*$")
_LABEL = re.compile(r"^\s*\(?\s*([A-Za-z])\s*\)?\s*$")
_REVERSED_INTERVAL = re.compile(r"([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])")
_CASES = re.compile(
    r"\s*(?:\\\{\s*)?\\begin\{(?:cases|array|aligned)\}(?:\{[lcr]+\})?([^&]*)\\end\{(?:cases|array|aligned)\}\s*\.?\s*"
)
_REALS_WITHOUT = re.compile(r"\s*(\\mathbb\{R\})\s*-\s*(?=\\\{)")
_BUILDER = re.compile(r"\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:)")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def time_of(match: re.Match[str]) -> Time:
    """The time of a match of :data:`TIME`."""
    hours, minutes, seconds, half = match.groups()
    return Time((int(hours), int(minutes), int(seconds or 0)), (half or "").lower())


class Structure:
    """Reads one text.

    Args:
        is_reference: whether ``m`` of ``5 m`` is a variable; in a reply it is a metre.

    Raises:
        UnreadableError: nested too deeply, or too many parts.
    """

    def __init__(self, is_reference: bool) -> None:
        self._is_reference = is_reference
        self._nodes = 0
        self._depth = 0

    def read(self, latex: str) -> Node:
        """A list at the top: separated by commas, semicolons, ``\\AND`` and ``\\OR``."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnreadableError("nested too deeply")
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
            raise UnreadableError("too many parts")
        latex = latex.strip().rstrip(".").strip()
        if (time := TIME.fullmatch(latex)) is not None:
            return time_of(time)
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
            if (left != r"\pi" and SYMBOL.fullmatch(left)) or WHOLE_TEXT.fullmatch(left):
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
            raise UnreadableError("an empty matrix")
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
        for match in TEXT.finditer(latex):
            quantity = read_normalized(latex[at : match.end()], bare_units=False)
            if quantity is None or not quantity.unit:
                return None
            members.append(Leaf(latex[at : match.start()].strip(), quantity, quantity.unit))
            at = match.end()
        return Group("compound", tuple(members)) if len(members) > 1 and not latex[at:].strip() else None

    def _leaf(self, latex: str, quantity: Quantity | None) -> Leaf:
        if quantity is not None:
            return Leaf(latex, quantity, quantity.unit)
        if (text := WHOLE_TEXT.fullmatch(latex)) is not None:
            return Leaf("", words=_plain_words(text[1]))
        unit = ""
        tail = UNIT_TAIL.search(latex)
        if tail is not None and tail.start() > 0:
            words = TEXT.sub(r"\1", tail[1]).replace("{", "").replace("}", "").strip()
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
