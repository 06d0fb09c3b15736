"""From a row of a file to a row of a table: the mapping of columns, the pattern of the answer, and the filter."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from scalerl_tasks.answers.extraction import last_box
from scalerl_tasks.dataset.expressions import Expression, ExpressionError, NoValue, kind, names, shown
from scalerl_tasks.dataset.layouts import Layout, unknown_layout
from scalerl_tasks.errors import SourceError, did_you_mean

if TYPE_CHECKING:
    from scalerl_api.dataset_source import DatasetSource as DatasetSpec

REQUIRED = ("prompt", "answer")
OPTIONAL = ("id", "difficulty", "solution", "system")
_MAX_LABEL_CHARACTERS = 100


class TableRow(msgspec.Struct, omit_defaults=True):
    """A row of a table."""

    file: int
    """Index of the file that it is from."""
    row: int
    """Its number there, from 1 on: of a text file the line."""
    id: str
    prompt: str
    """Text of the last user message."""
    answer: str = ""
    """Empty if no column is mapped to it."""
    solution: str | None = None
    difficulty: float | None = None
    system: str | None = None
    turns: list[tuple[str, str]] = []
    """Role and text of the messages before the last one of the user, without the system message."""
    labels: dict[str, str] = {}
    metadata: dict[str, Any] = {}


class RowProblem(Exception):
    """A row that cannot be used.

    Attributes:
        field: the expression whose value is wrong.
        kind: what is wrong, without the details of the row.
    """

    def __init__(self, field: str, problem: str, kind: str) -> None:
        super().__init__(problem)
        self.field, self.kind = field, kind


class Mapper:
    """Maps rows by the spec's columns, or those of a recognized layout.

    Args:
        first: the first row, or the first value of each column.
        layout: the layout that it was recognized as.
        solutions: as of :class:`.Repeats`.

    Raises:
        SourceError: an expression or the pattern cannot be parsed, or it is unknown where prompt and answer are.
    """

    def __init__(
        self, spec: DatasetSpec, first: Mapping[str, Any], layout: Layout | None, solutions: bool = False
    ) -> None:
        given = {
            name: text for name in (*REQUIRED, *OPTIONAL) if (text := getattr(spec.columns, name)) is not None
        }
        if all(name in given for name in REQUIRED):
            layout = None
        self.layout = layout
        known = (
            {}
            if layout is None
            else {k: v for k, v in layout.columns.items() if k in REQUIRED or _reads(v, first)}
        )
        self._first, self._given, self._solutions = first, frozenset(given), solutions
        texts = known | given
        if "prompt" not in texts:  # without answers, the verifier is code of the user
            raise unknown_layout(first, [name for name in REQUIRED if name not in texts])
        labels = {} if layout is None else {k: v for k, v in layout.labels.items() if _reads(v, first)}
        self.texts: dict[str, str] = texts
        """Expression by field."""
        self.label_texts: dict[str, str] = labels | spec.columns.labels
        """Expression by label."""
        self._fields = {name: Expression(text, first, f"columns.{name}") for name, text in texts.items()}
        self._labels = {
            name: Expression(text, first, f"columns.labels.{name}") for name, text in self.label_texts.items()
        }
        pattern = spec.answer_pattern
        if pattern is None and layout is not None and "answer" not in given:
            pattern = layout.pattern
        self.pattern = pattern
        self._find_answer = None if pattern is None else _answer_finder(pattern)
        self._kept = None if spec.metadata is None else frozenset(spec.metadata)
        if self._kept is not None and (unknown := sorted(self._kept - first.keys())):
            raise SourceError(
                f"metadata: there is no column {unknown[0]!r}{did_you_mean(unknown[0], first)} (columns: {names(first)})"
            )
        mapped = frozenset(e.whole_column for e in self._fields.values() if e.whole_column is not None)
        self._left_out = mapped | frozenset(() if layout is None else layout.leaves_out)
        answer = texts.get("answer", "")
        self._as_answer = answer[5:-1] if self._find_answer is None and answer.startswith("json(") else ""
        self._where = [
            Expression(text, first, f"filter.where[{at}]") for at, text in enumerate(spec.filter.where)
        ]
        self.dropped = [0] * len(self._where)
        """Number of rows for which each expression of the filter is false."""
        self.without_value = [0] * len(self._where)
        """Number of rows for which each has no value."""
        self._filter_problems: dict[int, str] = {}
        self._unseen = {name for expression in self._where for name in expression.columns}
        """Names of the filter that no row so far has had."""
        self._found = Counter[str]()
        self._problems: dict[str, str] = {}
        self.rows = 0

    def map(self, row: Mapping[str, Any], file: int, number: int) -> TableRow | None:
        """The row of the table; None if the filter drops it.

        Raises:
            RowProblem: the row cannot be used.
        """
        self.rows += 1
        values: dict[str, Any] = {}
        problems: list[RowProblem] = []
        for name, expression in self._fields.items():  # prompt before system, which then counts more
            try:
                value = self._converted(name, expression(row))
                values |= value if name == "prompt" else {name: value}
                self._found[name] += 1
            except NoValue as reason:
                self._problems.setdefault(name, str(reason))
                if name in REQUIRED:
                    what = f"{reason}; correct columns.{name}, or drop such rows with filter.where: {name} != null"
                    problems.append(RowProblem(expression.text, what, f"without {name}"))
            except RowProblem as problem:
                problems.append(problem)
        if not self._passes(row, values):
            return None
        if problems:
            raise problems[0]
        labels = {}
        for name, expression in self._labels.items():
            try:
                labels[name] = _label(expression(row))
                self._found[expression.field] += 1
            except NoValue as reason:
                self._problems.setdefault(expression.field, str(reason))
        return TableRow(
            file=file,
            row=number,
            id=values.get("id") or _content_id(values, self._solutions),
            prompt=values["prompt"],
            answer=values.get("answer", ""),
            solution=values.get("solution"),
            difficulty=values.get("difficulty"),
            system=values.get("system"),
            turns=values.get("turns", []),
            labels=labels,
            metadata={name: value for name, value in row.items() if self._keeps(name, value)},
        )

    def check_all(self) -> None:
        """Check, after the last row, that every expression had a value in some row.

        Raises:
            SourceError: one had none, as with a wrong name.
        """
        optional = [(name, e) for name, e in self._fields.items() if name in OPTIONAL and name in self._given]
        optional += [(e.field, e) for e in self._labels.values()]
        for name, expression in optional:
            if self.rows and not self._found[name] and name in self._problems:
                raise SourceError(
                    f"{expression.field}: {expression.text!r} has no value in any row: {self._problems[name]}; correct it, or "
                    "leave it out"
                )
        for at, expression in enumerate(self._where):
            if self.rows and (unseen := sorted(expression.columns & self._unseen)):  # `x != 1` would be true
                known = {**self._first, **self._fields}
                raise SourceError(
                    f"{expression.field}: {expression.text!r}: no row has {unseen[0]!r}{did_you_mean(unseen[0], known)} "
                    f"(names: {names(known)})"
                )
            if self.rows and self.without_value[at] == self.rows:
                raise SourceError(
                    f"{expression.field}: {expression.text!r} has no value in any row: {self._filter_problems[at]}"
                )

    def _converted(self, name: str, value: Any) -> Any:
        match name:
            case "prompt":
                return self._prompt(value)
            case "answer":
                return self._answer(value)
            case "difficulty":
                number = value
                if isinstance(number, str):
                    try:
                        number = float(number)
                    except ValueError:
                        problem = f"is the text {shown(value)}, not a number; use number(…), which reads the number in a text"
                        raise RowProblem(self.texts[name], problem, "type of difficulty") from None
                if (
                    not isinstance(number, int | float)
                    or isinstance(number, bool)
                    or not math.isfinite(number)
                ):
                    raise RowProblem(
                        self.texts[name], f"is {kind(value)}, not a number", "type of difficulty"
                    )
                return float(number)
            case "id":
                if isinstance(value, bool) or not isinstance(value, str | int):
                    raise RowProblem(
                        self.texts[name], f"is {kind(value)}; an id is text or an integer", "type of id"
                    )
                return str(value) or None
            case _:
                if not isinstance(value, str):
                    raise RowProblem(self.texts[name], f"is {kind(value)}, not text", f"type of {name}")
                if not value.strip():
                    raise NoValue("is empty")
                return value

    def _prompt(self, value: Any) -> dict[str, Any]:
        where = self.texts["prompt"]
        if isinstance(value, str) and value.lstrip().startswith("[{") and '"role"' in value:
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if isinstance(value, str):
            if not value.strip():
                raise RowProblem(
                    where, "is empty; drop such rows with filter.where: len(prompt) > 0", "empty prompt"
                )
            return {"prompt": value}
        if isinstance(value, list):
            return self._of_messages(where, value)
        raise RowProblem(where, f"is {kind(value)}; a prompt is text or a list of messages", "type of prompt")

    def _of_messages(self, where: str, value: list[Any]) -> dict[str, Any]:
        turns: list[tuple[str, str]] = []
        for at, message in enumerate(value):
            role, content = (
                (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
            )
            if isinstance(content, list) and all(
                isinstance(p, dict) and p.get("type") == "text" for p in content
            ):
                content = "".join(str(part.get("text") or "") for part in content)
            if role not in ("system", "developer", "user", "assistant") or not isinstance(content, str):
                raise RowProblem(
                    f"{where}[{at}]",
                    f"is {shown(message)}; a message has a role (system, user, assistant) and a content of text",
                    "no message",
                )
            turns.append((role, content))
        system = None
        if turns and turns[0][0] in ("system", "developer"):
            system = turns.pop(0)[1]
        while turns and turns[-1][0] == "assistant":
            turns.pop()
        if not turns or turns[-1][0] != "user" or not turns[-1][1].strip():
            raise RowProblem(
                where, f"{shown(value)} has no message of the user at its end", "no message of the user"
            )
        if any(role in ("system", "developer") for role, _ in turns):
            raise RowProblem(where, "has a system message that is not the first", "system message in between")
        found: dict[str, Any] = {"prompt": turns.pop()[1], "turns": turns}
        return found if system is None else {"system": system} | found

    def _answer(self, value: Any) -> str:
        where = self.texts["answer"]
        if isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, float):
            value = str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
        elif isinstance(value, int | Decimal):
            value = str(value)
        if not isinstance(value, str):
            hint = (
                f"; use {where}[0], or json({where}) for all of it"
                if isinstance(value, list)
                else f"; use a path, such as {where}.{next(iter(value), 'value')}, or json({where}) for all of it"
                if isinstance(value, dict)
                else ""
            )
            raise RowProblem(
                where, f"is {kind(value)}: {shown(value)}, not text or a number{hint}", "type of answer"
            )
        text: str = value
        if self._find_answer is not None:
            found = self._find_answer(text)
            if found is None:
                tail = text if len(text) <= 60 else "… " + text[-60:]
                raise RowProblem(
                    where,
                    f"answerPattern {self.pattern} is not in {tail!r}; correct it, or drop such rows with filter.where: len(answer) > 0",
                    "without answerPattern",
                )
            text = found.strip()
        if not text.strip():
            raise RowProblem(
                where, "is empty; drop such rows with filter.where: len(answer) > 0", "empty answer"
            )
        return text

    def _passes(self, row: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
        if not self._where:
            return True
        ours = {name: values.get(name) for name in self._fields}
        names_of = {**row, "row": row, **ours}
        if self._unseen:
            self._unseen -= names_of.keys()
        for at, expression in enumerate(self._where):
            try:
                if not expression(names_of):
                    self.dropped[at] += 1
                    return False
            except NoValue as reason:
                self.without_value[at] += 1
                self._filter_problems.setdefault(at, str(reason))
                return False
        return True

    def _keeps(self, name: str, value: Any) -> bool:
        if self._kept is not None:
            return name in self._kept
        # Tests of programs may have megabytes: a text that is the answer as it is, is stored once.
        return name not in self._left_out and not (name == self._as_answer and isinstance(value, str))


def _content_id(values: Mapping[str, Any], solutions: bool) -> str:
    """The id of a row without one: of its prompt, the turns before, the answer, and with ``solutions`` the solution."""
    parts = [values.get("system"), values.get("turns", []), values["prompt"], values.get("answer", "")]
    parts += [values.get("solution")] * solutions
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def _reads(text: str, first: Mapping[str, Any]) -> bool:
    """Whether the first row has the columns that an expression of a layout reads."""
    try:
        return Expression(text, first, "").columns <= first.keys()
    except ExpressionError:
        return False


def _label(value: Any) -> str:
    text = (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
    return text[:_MAX_LABEL_CHARACTERS]


def _answer_finder(pattern: str) -> Callable[[str], str | None]:
    """The function that finds the answer in a text.

    Raises:
        SourceError: the pattern is no regular expression with one group.
    """
    if pattern == "Boxed":
        return last_box
    if pattern == "Hashes":
        return lambda text: text.rpartition("####")[2].strip() if "####" in text else None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise SourceError(
            f"answerPattern: {pattern!r} is not Hashes, Boxed or a regular expression: {error}"
        ) from None
    if compiled.groups != 1:
        raise SourceError(
            f"answerPattern: {pattern!r} has {compiled.groups} groups; put exactly one pair of parentheses around the answer "
            "((?:…) is none)"
        )

    def find(text: str) -> str | None:
        matches = list(compiled.finditer(text))
        return matches[-1][1] if matches else None

    return find
