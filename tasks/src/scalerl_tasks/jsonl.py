"""Prompts from a JSONL file: opening it checks every line, and lists those that are invalid, but keeps none in memory."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from array import array
from pathlib import Path
from typing import IO, Any

import msgspec

from scalerl_tasks.errors import JsonlError, SourceError, did_you_mean
from scalerl_tasks.prompts import Prompt, check_index
from scalerl_tasks.repeats import Repeats
from scalerl_tasks.row_problems import RowProblems

MAX_LINE_BYTES = 1 << 20
"""Maximum line length: 1 MiB. Longer lines nearly always mean that the file is not JSONL."""

_FIELDS = ("prompt", "answer", "id", "difficulty", "solution", "metadata")
_ALLOWED = ", ".join(_FIELDS)


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    answer: str
    id: str | None = None
    difficulty: float | None = None
    solution: str | None = None
    metadata: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Row)


class JsonlSource:
    """A :class:`~scalerl_tasks.PromptSource` over a file: :class:`_Row` has the fields of a line. Blank lines and those with the
    prompt of an earlier one are skipped, and a prompt without an ``id`` gets a hash of its prompt and answer, with
    ``solutions`` also of its solution.

    It uses 24 bytes of memory per line, and up to 96 more while it is opened. The file stays open and must not change while in use; the next read detects a change.
    ``digest`` is the SHA-256 of the file's bytes.

    Raises:
        JsonlError: invalid lines: not UTF-8, invalid JSON, a missing, unknown or ill-typed field, an empty prompt or answer, a line
            over 1 MiB, the ``id`` of an earlier prompt; or the file has no prompts. It is a :class:`JsonlRowsError` if there are several.
        SourceError: the file cannot be read.
    """

    def __init__(self, path: Path, *, keep_valid: bool = False, solutions: bool = False) -> None:
        """
        Args:
            keep_valid: do not raise for invalid lines. The source then has the valid ones, which may be none, and
                :attr:`problems` lists the others.
            solutions: as of :class:`.Repeats`.
        """
        self.path, self._solutions = path, solutions
        try:
            if not path.is_file() and path.exists():
                raise SourceError(f"{path}: is not a regular file; task.jsonl.path must name one")
            with path.open("rb") as file:
                scan = _Scan(path, solutions)
                scan.run(file)
                if not keep_valid:
                    scan.problems.check()
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise SourceError(
                f"{path}: cannot be read: {error.strerror or error}; check its path in the run file"
            ) from error
        self.problems = scan.problems
        self._offsets = scan.offsets
        self._lines = scan.lines
        self.dropped = scan.repeats.dropped
        """Number of lines that repeat an earlier prompt, by what is said about them."""
        self.digest: str = scan.hash.hexdigest()
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        self._file_stamp = _file_stamp(self._descriptor)

    def close(self) -> None:
        """Close the file; the source cannot be read afterwards. Deleting the source closes it too."""
        self._finalizer()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int, /) -> Prompt:
        check_index(index, len(self._lines))
        if not self._finalizer.alive:
            raise SourceError(f"{self.path}: the source was closed")
        start, end = self._offsets[2 * index], self._offsets[2 * index + 1]
        raw = os.pread(self._descriptor, end - start, start)
        if _file_stamp(self._descriptor) != self._file_stamp:
            raise SourceError(
                f"{self.path}: changed since it was opened; start again, and give a changed set a new file"
            )
        row = _parse(self.path, self._lines[index], raw)
        return Prompt(
            id=_row_id(row, self._solutions),
            text=row.prompt,
            answer=row.answer,
            solution=row.solution,
            difficulty=row.difficulty,
            metadata=row.metadata,
        )

    def difficulty(self, index: int, /) -> float | None:
        return self[index].difficulty

    def place(self, index: int) -> str:
        """File and line of the prompt at ``index``."""
        return f"{self.path}, line {self._lines[index]}"

    def line(self, index: int) -> int:
        """The line of the prompt at ``index``, from 1 on; empty lines count."""
        return self._lines[index]


class _Scan:
    """One pass over the file: check each line, record the positions of the valid ones that repeat no earlier one."""

    def __init__(self, path: Path, solutions: bool) -> None:
        self.path = path
        self.problems = RowProblems(path)
        self.hash = hashlib.sha256()
        self.offsets = array("Q")  # start, end; start, end; …
        self.lines = array("Q")
        self.repeats = Repeats(solutions)

    def run(self, file: IO[bytes]) -> None:
        line, offset = 0, 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            line += 1
            self.hash.update(raw)
            if len(raw) > MAX_LINE_BYTES:
                self.problems.rows += 1
                self.problems.add_error(
                    JsonlError(
                        self.path,
                        f"the line is longer than {MAX_LINE_BYTES:,} bytes; one JSON object a line is wanted "
                        f"(is this a JSON array, or a file without line breaks?)",
                        line=line,
                        kind="too long",
                    )
                )
                offset += len(raw)
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                    self.hash.update(raw)
                    offset += len(raw)
                continue
            if line == 1 and raw.startswith(b"\xef\xbb\xbf"):
                mark = "starts with a byte order mark; save as UTF-8 without one"
                self.problems.add_error(JsonlError(self.path, mark, line=1, column=1, kind="byte order mark"))
            elif raw.strip():
                self.problems.rows += 1
                try:
                    self._add(_parse(self.path, line, raw), line, offset, offset + len(raw))
                except JsonlError as error:
                    self.problems.add_error(error)
            offset += len(raw)
        if not (self.lines or self.problems.total):
            raise JsonlError(self.path, 'has no prompts; add lines like {"prompt": "2 + 2 =", "answer": "4"}')

    def _add(self, row: _Row, line: int, start: int, end: int) -> None:
        if self.repeats.is_repeat(row.prompt, (), row.answer, row.solution):
            return
        if row.id is not None and not self.repeats.is_new_id(row.id):
            what = f"{row.id!r} is also the id of an earlier line; ids must be unique"
            raise JsonlError(self.path, what, line=line, field="id", kind="repeated id")
        self.offsets.extend((start, end))
        self.lines.append(line)


def _parse(path: Path, line: int, raw: bytes) -> _Row:
    try:
        row = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _bad_field(path, line, raw, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_json(path, line, raw, error) from None
    for field in ("prompt", "answer"):
        if not getattr(row, field).strip():
            problem = "is empty; every line needs text here"
            raise JsonlError(path, problem, line=line, field=field, kind=f"empty {field}")
    if row.id is not None and not row.id:
        raise JsonlError(
            path,
            "is empty; leave it out to have one made from the content",
            line=line,
            field="id",
            kind="empty id",
        )
    return row


def _bad_json(path: Path, line: int, raw: bytes, error: Exception) -> JsonlError:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as broken:
        return JsonlError(
            path,
            f"byte 0x{raw[broken.start]:02x} is not UTF-8; convert the file, e.g. iconv -f LATIN1 -t UTF-8",
            line=line,
            column=broken.start + 1,
            kind="not UTF-8",
        )
    # The standard library's parser reports the position best, but accepts more: NaN, half surrogates, deep nesting.
    try:
        json.loads(text)
    except json.JSONDecodeError as precise:
        problem, column = precise.msg.lower(), precise.colno
    except RecursionError:
        problem, column = "nested too deeply", 1
    else:
        problem, _, position = str(error).removeprefix("JSON is malformed: ").partition(" (byte ")
        digits = position.rstrip(")")
        column = len(raw[: int(digits)].decode("utf-8", "ignore")) + 1 if digits.isdigit() else 1
    return JsonlError(
        path,
        f"bad JSON: {problem}; each line must be one JSON object",
        line=line,
        column=column,
        kind="bad JSON",
    )


def _bad_field(path: Path, line: int, raw: bytes, message: str) -> JsonlError:
    """Convert msgspec's error to one with the field and the action to take."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # An invalid field, and invalid JSON after it.
        return _bad_json(path, line, raw, error)
    if not isinstance(found, dict):
        problem = f"is a JSON {_json_type(found)}, not an object with {_ALLOWED}"
        return JsonlError(path, problem, line=line, kind="no object")
    for name in ("prompt", "answer"):
        if name not in found:
            near = did_you_mean(name, [key for key in found if key not in _FIELDS])
            return JsonlError(path, f"is missing{near}", line=line, field=name, kind=f"without {name}")
    for name in found:
        if name not in _FIELDS:
            return JsonlError(
                path,
                f'is not known{did_you_mean(name, _FIELDS)} (known: {_ALLOWED}; others belong inside "metadata")',
                line=line,
                field=name,
                kind=f"unknown field {name}" if len(name) <= 40 else "unknown field",
            )
    wanted = {"difficulty": "a number", "metadata": "an object"}
    for name, value in found.items():
        try:
            msgspec.convert({"prompt": "", "answer": "", name: value}, _Row)
        except msgspec.ValidationError:
            hint = '; put it in quotes: "42"' if isinstance(value, int | float) else ""
            problem = f"must be {wanted.get(name, 'a string')}, is {_json_type(value)}{hint}"
            return JsonlError(path, problem, line=line, field=name, kind=f"type of {name}")
    return JsonlError(path, message, line=line)


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (dict, "object"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "number"


def _row_id(row: _Row, solutions: bool) -> str:
    if row.id is not None:
        return row.id
    content = msgspec.json.encode((row.prompt, row.answer, *([row.solution] if solutions else ())))
    return hashlib.sha256(content).hexdigest()[:16]


def _file_stamp(descriptor: int) -> tuple[int, int]:
    stat = os.fstat(descriptor)
    return stat.st_size, stat.st_mtime_ns
