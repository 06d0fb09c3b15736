"""The table of a data set: one file with its rows as JSON, an index, and what it was made from.

::

    {"file":0,"row":1,"id":…}\n …      rows: :class:`~scalerl_tasks.dataset.rows.TableRow`
    offsets, uint64, rows + 1           start of each row; the last one is the end
    {"digest":…}                        :class:`TableInfo`
    length of that, uint64; MAGIC

Random access reads one row; opening reads only the end. The index is mapped into memory, 8 bytes a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import weakref
from array import array
from pathlib import Path

import msgspec

from scalerl_tasks.dataset.rows import TableRow
from scalerl_tasks.errors import SourceError

MAGIC = b"SCALERL1"
_TAIL = struct.Struct("<Q8s")
_BUFFER_BYTES = 1 << 20


class TableInfo(msgspec.Struct, omit_defaults=True):
    """What a table is made from."""

    digest: str
    rows: int
    files: list[str]
    """Names of the files, by their index in the rows."""
    words: list[str]
    """What the row numbers of each file count."""
    read: int
    """Rows of the files."""
    layout: str = ""
    """Name of the layout that was recognized."""
    programs: bool = False
    """Whether the answers are tests of programs."""
    fields: dict[str, str] = {}
    """Expression by field."""
    labels: dict[str, str] = {}
    """Expression by label."""
    pattern: str | None = None
    columns: list[str] = []
    """Columns of the first row."""
    dropped: dict[str, int] = {}
    """Rows that were left out, by reason."""
    chat: bool = False
    """Whether a row has a system message or several turns."""
    revision: str = ""
    """Commit of a data set of a hub."""
    stamps: list[tuple[int, int]] = []
    """Size and modification time (ns) of each file."""


class LeftOut(msgspec.Struct, omit_defaults=True):
    """Rows of a table that a run leaves out, found once the table was made: a JSON file beside it. In a run's directory, verifiers and
    filters cannot change."""

    digest: str
    """That of the table."""
    rows: list[int]
    """Indices of those whose answers a verifier of the run rejects, ascending."""
    rejected: dict[str, int] = {}
    """Their number by reason."""
    examples: list[str] = []
    """The first of each reason, with file and row."""
    overlap: list[int] | None = None
    """Indices, among the others, of those that overlap with held-out prompts; None: not determined."""

    @staticmethod
    def path(table: Path) -> Path:
        return table.with_suffix(".left-out.json")

    @classmethod
    def of(cls, table: Table) -> LeftOut | None:
        """Read the file beside a table; None if there is none of this table. Raises ``SourceError``."""
        path = cls.path(table.path)
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
            return found if found.digest == table.info.digest else None
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise SourceError(f"{path}: cannot be read: {error}") from error

    def write(self, table: Path) -> None:
        """Write the file beside a table, atomically. Raises ``SourceError``."""
        path = self.path(table)
        staged = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            staged.write_bytes(msgspec.json.encode(self))
            staged.rename(path)
        except OSError as error:
            raise SourceError(f"{path}: cannot be written: {error.strerror or error}") from error
        finally:
            staged.unlink(missing_ok=True)


class TableWriter:
    """Writes a table to a temporary file beside ``path``, renamed by :meth:`finish`; used as a context manager.

    Raises:
        SourceError: the file cannot be written, as on a full disk; nothing is left.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._staged = path, path.with_name(f".{path.name}-{os.getpid()}")
        self._hash, self._offsets, self._end = hashlib.sha256(), array("Q", [0]), 0
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> TableWriter:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._staged.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise self._problem(error) from error
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # the buffer, on a full disk; the error of the write is on its way
            self._file.close()
        self._staged.unlink(missing_ok=True)

    @property
    def rows(self) -> int:
        return len(self._offsets) - 1

    def encode(self, row: TableRow) -> bytes:
        """A row for :meth:`add`. Raises ``ValueError``, ``TypeError``, ``OverflowError`` or ``RecursionError`` if it is no JSON."""
        return self._encoder.encode(row) + b"\n"

    def add(self, raw: bytes) -> None:
        self._hash.update(raw)
        self._end += len(raw)
        self._offsets.append(self._end)
        try:
            self._file.write(raw)
        except OSError as error:
            raise self._problem(error) from error

    def finish(self, info: TableInfo) -> None:
        """Write index and ``info``, and rename the file. The digest is set here."""
        info = msgspec.structs.replace(info, digest=self._hash.hexdigest(), rows=self.rows)
        end = self._encoder.encode(info)
        try:
            self._file.write(bytes(-self._end % 8))
            self._offsets.tofile(self._file)
            self._file.write(end + _TAIL.pack(len(end), MAGIC))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._staged.rename(self._path)
        except OSError as error:
            raise self._problem(error) from error

    def _problem(self, error: OSError) -> SourceError:
        return SourceError(
            f"{self._path}: cannot be written after {self._end / 2**20:,.0f} MiB: {error.strerror or error}; make room, or keep "
            "fewer columns (task.dataset.metadata)"
        )


class Table:
    """An open table; safe to read from several threads.

    Raises:
        SourceError: the file is not a complete table.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(TableRow)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < _TAIL.size:
                    raise ValueError("it is too short")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._descriptor = os.dup(file.fileno())
        except (OSError, ValueError) as error:
            raise SourceError(f"{path}: cannot be read: {error}") from error
        self._finalizer = weakref.finalize(self, _close, self._map, self._descriptor)
        length, magic = _TAIL.unpack(self._map[-_TAIL.size :])
        try:
            if magic != MAGIC or length > size:
                raise ValueError("it is not a table of this release")
            end = size - _TAIL.size - length
            self.info = msgspec.json.decode(self._map[end : size - _TAIL.size], type=TableInfo)
            self._index = end - 8 * (self.info.rows + 1)
            if self._index < 0:
                raise ValueError("its index is cut off")
        except (ValueError, msgspec.MsgspecError) as error:
            self.close()
            raise SourceError(f"{path}: {error}; delete it to have it made again") from None

    def __len__(self) -> int:
        return self.info.rows

    def __getitem__(self, index: int, /) -> TableRow:
        at = self._index + 8 * index
        start, end = struct.unpack("<QQ", self._map[at : at + 16])
        return self._decoder.decode(os.pread(self._descriptor, end - start, start))

    def close(self) -> None:
        self._finalizer()


def _close(mapped: mmap.mmap, descriptor: int) -> None:
    mapped.close()
    os.close(descriptor)
