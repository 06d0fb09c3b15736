"""Reads the rows of JSON Lines, JSON, CSV, Parquet and Arrow files, compressed or not, one at a time.

A file's content decides how it is decompressed, and its content or, for text, its name which format it has.
"""

from __future__ import annotations

import bz2
import csv
import glob
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from scalerl_tasks.dataset.expressions import kind, shown
from scalerl_tasks.errors import DatasetError, JsonlError, SourceError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
MAX_ROW_CHARACTERS = 64 << 20
"""Maximum length of a line of JSON, of a value in a JSON array and of a CSV field."""
_BATCH_ROWS = 512
_LFS = b"version https://git-lfs"

Row = dict[str, Any]


def find_files(patterns: Sequence[str], directory: Path) -> list[Path]:
    """The files of paths and globs, each once.

    Raises:
        SourceError: a path or a glob finds no file, or a file with an unknown ending.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = directory / pattern
        if path.is_file():
            found[path] = None
            continue
        if path.is_dir():
            raise SourceError(
                f"task.dataset.files: {path} is a directory; name its files, such as {pattern.rstrip('/')}/*.parquet"
            )
        matches = [
            Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()
        ]
        if not matches:
            raise SourceError(f"task.dataset.files: {path}: no such file")
        found.update(dict.fromkeys(matches))
    for path in found:
        if _suffix(path) not in SUFFIXES:
            raise SourceError(
                f"task.dataset.files: {path}: unknown ending; files are {', '.join(SUFFIXES)}, also with {', '.join(COMPRESSIONS)}"
            )
    return list(found)


def _suffix(path: Path) -> str:
    suffixes = [one.lower() for one in path.suffixes]
    while suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_rows(path: Path) -> Iterator[tuple[int, Row | JsonlError]]:
    """The rows of a file, each with its number from 1 on (of a text file the line), or the error of a row that cannot be read.

    Raises:
        SourceError: the file cannot be read, or not any further.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS))
        if not head:
            raise DatasetError(path, "is empty; write it again, or leave it out")
        if head == _LFS:
            raise DatasetError(path, "is a pointer of Git LFS: fetch the file itself (git lfs pull)")
        if head.startswith(b"PAR1"):
            yield from _read_parquet(path)
        elif head.startswith(b"ARROW1") or (
            _suffix(path) == ".arrow" and head.startswith(b"\xff\xff\xff\xff")
        ):
            yield from _read_arrow(path)
        elif _suffix(path) in (".parquet", ".arrow"):
            raise DatasetError(path, f"is not a {_suffix(path)[1:]} file; download or write it again")
        else:
            with _decompressed(path, head) as stream:
                yield from _read_text(path, stream)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        # pyarrow's errors are of OSError and ValueError.
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DatasetError(path, f"cannot be read: {reason}; download or write it again") from error


def row_word(path: Path) -> str:
    """What the numbers of :func:`read_rows` count."""
    return "line" if _suffix(path) in (".jsonl", ".ndjson", ".csv", ".tsv") else "row"


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DatasetError(
            path, "reading it needs pyarrow, which is not installed here: pip install pyarrow"
        ) from error
    return pyarrow


_OPENERS: tuple[tuple[bytes, Callable[[Path], Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"\xfd7zXZ", lzma.open),
    (b"BZh", bz2.open),
    (b"\x28\xb5\x2f\xfd", lambda path: _pyarrow(path).input_stream(str(path), compression="zstd")),
)
"""How a text file is decompressed, by its first bytes."""


def _decompressed(path: Path, head: bytes) -> io.BufferedReader:
    for magic, opener in _OPENERS:
        if head.startswith(magic):
            return io.BufferedReader(opener(path))
    return path.open("rb")


def _read_text(path: Path, stream: io.BufferedReader) -> Iterator[tuple[int, Row | JsonlError]]:
    mark = stream.peek(4)[:4]
    if mark[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DatasetError(path, "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
    if mark.startswith(b"PAR1"):
        raise DatasetError(path, "is a compressed Parquet file; decompress it")
    if mark[:3] == b"\xef\xbb\xbf":
        stream.read(3)
    suffix = _suffix(path)
    if suffix in (".csv", ".tsv"):
        yield from _read_csv(path, stream, "\t" if suffix == ".tsv" else ",")
    elif suffix == ".json" and stream.peek(1)[:1] == b"[":
        yield from _read_array(path, stream)
    else:
        yield from _read_lines(path, stream)


def _read_lines(path: Path, stream: io.BufferedReader) -> Iterator[tuple[int, Row | JsonlError]]:
    decode, number = msgspec.json.Decoder().decode, 0
    while raw := stream.readline(MAX_ROW_CHARACTERS):
        number += 1
        if not raw.strip():
            continue
        if len(raw) == MAX_ROW_CHARACTERS:
            raise DatasetError(path, "the line is longer than 64 MiB", row=number, word=row_word(path))
        try:
            row = decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            row = _lenient(path, number, raw)
        if number == 1 and not isinstance(row, dict) and _suffix(path) == ".json":
            raise DatasetError(
                path, "is neither a JSON array of objects nor one object a line; write it as JSON Lines"
            )
        if not isinstance(row, dict | JsonlError):
            hint = "; name a file that is one array .json" if isinstance(row, list) and number == 1 else ""
            what = f"is {kind(row)}, not an object{hint}"
            row = DatasetError(path, what, row=number, word=row_word(path), kind="no object")
        elif number == 1 and isinstance(row, dict) and _is_nested(path, row):
            raise DatasetError(
                path,
                f"is one JSON object of {', '.join(map(repr, list(row)[:3]))}; write a list of objects, or one object a line "
                '(pandas: to_json(…, orient="records", lines=True))',
            )
        yield number, row


def _is_nested(path: Path, row: Row) -> bool:
    """Whether the object is a whole table: columns of rows, as pandas writes it, or of lists; or rows below a key."""
    values = list(row.values())
    if len(row) > 1 and all(isinstance(value, dict) and "0" in value for value in values):
        return True
    if _suffix(path) != ".json" or not all(isinstance(value, list) and value for value in values):
        return False
    if len(row) == 1:
        return isinstance(values[0][0], dict) and "role" not in values[0][0]
    return len({len(value) for value in values}) == 1 and not any(
        isinstance(value[0], dict) for value in values
    )


def _lenient(path: Path, number: int, raw: bytes) -> Row | JsonlError:
    """As :mod:`json` reads the line, which allows NaN and half surrogates, as other writers produce them."""

    def error(problem: str, column: int | None, kind: str) -> DatasetError:
        return DatasetError(path, problem, row=number, word=row_word(path), column=column, kind=kind)

    try:
        found = json.loads(raw)
    except UnicodeDecodeError as broken:
        what = f"byte 0x{raw[broken.start]:02x} is not UTF-8; convert the file, e.g. iconv -f LATIN1 -t UTF-8"
        return error(what, broken.start + 1, "not UTF-8")
    except json.JSONDecodeError as bad:
        return error(f"bad JSON: {bad.msg.lower()}; each line must be one JSON object", bad.colno, "bad JSON")
    except RecursionError:
        return error("bad JSON: nested too deeply", 1, "bad JSON")
    if isinstance(found, dict):
        return found
    return error(f"is {kind(found)}, not an object", None, "no object")


def _read_array(path: Path, stream: io.BufferedReader) -> Iterator[tuple[int, Row | JsonlError]]:
    """The objects of a JSON array, without the whole array in memory."""
    decoder, buffer, number, at_end = json.JSONDecoder(), "", 0, False
    with io.TextIOWrapper(stream, encoding="utf-8") as text:
        text.read(1)
        while True:
            buffer = buffer.lstrip(" \t\r\n,")
            if buffer.startswith("]"):
                return
            try:
                if not buffer:
                    raise json.JSONDecodeError("no further object", "", 0)
                value, end = decoder.raw_decode(buffer)
            except json.JSONDecodeError as error:
                if at_end or len(buffer) > MAX_ROW_CHARACTERS:
                    problem = f"bad JSON: {error.msg.lower()}; the array ends or breaks off here"
                    raise DatasetError(path, problem, row=number + 1) from None
                try:
                    more = text.read(max(1 << 16, len(buffer)))
                except UnicodeDecodeError:
                    raise DatasetError(path, "is not UTF-8", row=number + 1) from None
                at_end, buffer = not more, buffer + more
                continue
            number, buffer = number + 1, buffer[end:]
            if isinstance(value, dict):
                yield number, value
            else:
                problem = f"is {kind(value)}, not an object"
                yield number, DatasetError(path, problem, row=number, kind="no object")


def _read_csv(
    path: Path, stream: io.BufferedReader, delimiter: str
) -> Iterator[tuple[int, Row | JsonlError]]:
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    line = 1
    with io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter)
        try:
            header = [name.strip() for name in next(reader, [])]
            if len(header) == 1 and (other := [mark for mark in ";\t|" if mark in header[0]]):
                problem = (
                    f"has one column, {shown(header[0])}: its fields are separated by {other[0]!r}; write it with commas, or as .tsv "
                    "with tabs"
                )
                raise DatasetError(path, problem, row=1, word="line")
            if len(set(header)) != len(header):
                raise DatasetError(path, f"has two columns of one name: {shown(header)}", row=1, word="line")
            line = reader.line_num + 1
            for fields in reader:
                if fields and len(fields) != len(header):
                    problem = (
                        f"has {len(fields)} fields, the header {len(header)}; quote fields that contain {delimiter!r} or line "
                        "breaks"
                    )
                    yield line, DatasetError(path, problem, row=line, word="line", kind="number of fields")
                elif fields:
                    yield line, {name: field or None for name, field in zip(header, fields, strict=True)}
                line = reader.line_num + 1
        except csv.Error as error:
            raise DatasetError(path, f"bad CSV: {error}", row=line, word="line") from None
        except UnicodeDecodeError as error:
            problem = f"this line, or one soon after it, is not UTF-8 ({error.reason}); convert the file, e.g. iconv -f LATIN1 -t UTF-8"
            raise DatasetError(path, problem, row=line, word="line") from None


def _read_parquet(path: Path) -> Iterator[tuple[int, Row | JsonlError]]:
    pyarrow = _pyarrow(path)
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, memory_map=True) as file:
            yield from _of_batches(path, file.iter_batches(batch_size=_BATCH_ROWS))
    except pyarrow.ArrowException as error:
        raise DatasetError(path, f"cannot be read as Parquet: {error}; download or write it again") from error


def _read_arrow(path: Path) -> Iterator[tuple[int, Row | JsonlError]]:
    pyarrow = _pyarrow(path)
    from pyarrow import ipc

    try:
        with pyarrow.memory_map(str(path)) as file:
            try:
                reader = ipc.open_file(file)
                batches: Iterator[Any] = (reader.get_batch(at) for at in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:
                file.seek(0)
                batches = iter(ipc.open_stream(file))
            yield from _of_batches(path, batches)
    except pyarrow.ArrowException as error:
        raise DatasetError(path, f"cannot be read as Arrow: {error}; download or write it again") from error


def _of_batches(path: Path, batches: Iterator[Any]) -> Iterator[tuple[int, Row | JsonlError]]:
    import pyarrow

    number = 0
    for batch in batches:
        # Python has no nanoseconds.
        for at, column in enumerate(batch.schema):
            if pyarrow.types.is_temporal(column.type):
                text = batch.column(at).cast(pyarrow.string())
                batch = batch.set_column(at, column.name, text)
        for start in range(0, batch.num_rows, _BATCH_ROWS):  # a batch of an Arrow file may be the whole file
            try:
                rows = batch.slice(start, _BATCH_ROWS).to_pylist()
            except (ValueError, OverflowError) as error:  # nanoseconds below a column, years after 9999
                raise DatasetError(path, f"cannot be read: {error}", row=number + 1) from error
            for row in rows:
                number += 1
                yield number, row
