"""All errors of this package, as one tree. Every message names the problem, its location, and the action to take."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path


class TaskError(Exception):
    """Base of all errors raised by this package."""


class SourceError(TaskError):
    """A prompt source cannot be opened or read."""


class PromptError(SourceError):
    """One prompt of a source cannot be generated; others may be."""


class UnknownTaskError(SourceError):
    """No reasoning-gym task has this name."""


class ParameterError(SourceError):
    """A task's parameter is unknown, of a wrong type, or out of range.

    Attributes:
        parameter: the wrong parameter, or None if the task does not name it.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class JsonlError(SourceError):
    """A JSONL file, or one of its lines, is invalid.

    Attributes:
        line: 1-based line number, None for the whole file.
        field: the invalid JSON field, if known.
        kind: what is wrong, without the details of the line; several such lines are counted together.
    """

    def __init__(
        self,
        path: Path,
        problem: str,
        *,
        line: int | None = None,
        column: int | None = None,
        field: str | None = None,
        kind: str = "",
    ) -> None:
        """column: from 1 on, in characters (in bytes if the line is not UTF-8)."""
        where = str(path)
        if line is not None:
            where += f", line {line}"
        if column is not None:
            where += f", column {column}"
        if field is not None:
            where += f", field {field!r}"
        super().__init__(f"{where}: {problem}")
        self.line, self.field, self.kind = line, field, kind or problem


class JsonlRowsError(JsonlError):
    """Several lines of a JSONL file are invalid; line, field and kind are those of the first.

    Attributes:
        texts: messages about the first of them, then a summary, which is also the message of the error.
    """

    def __init__(self, first: JsonlError, texts: Sequence[str]) -> None:
        Exception.__init__(self, texts[-1])
        self.line, self.field, self.kind = first.line, first.field, first.kind
        self.texts = tuple(texts)


class DatasetError(JsonlError):
    """A file of a data set, or one of its rows, cannot be used."""

    def __init__(
        self,
        path: Path,
        problem: str,
        *,
        row: int | None = None,
        word: str = "row",
        column: int | None = None,
        field: str | None = None,
        kind: str = "",
    ) -> None:
        """row: 1-based number; word: what it counts; field: the column or expression, if known."""
        super().__init__(path, problem, kind=kind)
        where = "".join(
            (
                "" if row is None else f", {word} {row:,}",
                "" if column is None else f", column {column}",
                "" if field is None else f", {field}",
            )
        )
        self.args = (f"{path}{where}: {problem}",)
        self.line, self.field = row, field


class SplitError(SourceError):
    """The requested held-out set cannot be taken from this source."""


class SectionError(TaskError):
    """One of several sections of a run cannot be used.

    Attributes:
        field: path of the section in the spec, with its index.
        problem: the error of the section.
    """

    def __init__(self, name: str, field: str, problem: TaskError) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"{field} ({name}): {problem}")


class EvaluationSetError(SectionError):
    """A set of ``evaluation.sets`` cannot be used."""


class MixedTaskError(SectionError):
    """A task of ``task.mix`` cannot be used."""


class TemplateError(TaskError):
    """A prompt template has an unknown placeholder, or lacks ``{prompt}``."""


class TokenizerError(TaskError):
    """The model's tokenizer, chat template or end tokens do not fit the run; the message names the field."""


class VerifierError(TaskError):
    """An unknown verifier, or one that cannot grade this task."""


class AnswersError(VerifierError):
    """Answers that the verifier cannot use.

    Attributes:
        texts: messages about the first of them; if there are several, then a summary, which is also the message of the error.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__(texts[-1])
        self.texts = tuple(texts)


class GradingError(TaskError):
    """The grading processes cannot be started or kept running.

    A completion's text never raises it: a completion that cannot be graded gets an error in place of a verdict. After a
    GradingError the group has no scores.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'a' or 'b'?"``, or an empty string if nothing is close.

    >>> did_you_mean("chain_sums", ["chain_sum", "gcd"])
    "; did you mean 'chain_sum'?"
    >>> did_you_mean("zzz", ["chain_sum", "gcd"])
    ''
    """
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
