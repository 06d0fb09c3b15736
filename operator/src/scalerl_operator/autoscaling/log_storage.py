"""Where the lines of a record are kept: bytes that only grow, in a file here, with the coordinator on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Final, Protocol

PAGE_BYTES: Final = 2**20


class RecordError(Exception):
    """The record cannot be read or written; the message says why. Nothing may be acted on that is not in it."""


class RecordLost(RecordError):
    """Another operator has written, or it is unknown whether this line was: the record has to be read again."""


class Storage(Protocol):
    """The content of one record. Every method raises :class:`RecordError`, and nothing else."""

    name: str
    """For messages."""

    def pages(self) -> AsyncGenerator[bytes, None]:
        """All of it, in pages of bounded size, which may end within a line; none where there is nothing yet."""

    async def append(self, content: bytes, at: int) -> None:
        """Have ``content`` follow the first ``at`` bytes, and nothing follow it: all of it is there, or nothing is.

        Raises:
            RecordError: nothing was written, and what was there is as it was.
            RecordLost: see there.
        """

    async def set_aside(self, problem: str) -> str:
        """Keep the content, which has ``problem``, under another name, which is returned, and begin with none.

        Raises:
            RecordError: it stays as it is, and the record cannot be used: the message says what to do.
        """

    def close(self) -> None:
        """Give it up, once a write under way has ended."""


class FileStorage:
    """A file; see :class:`Storage` for the methods."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path
        self._fd: int | None = None
        self._closed = False
        # An append whose caller was cancelled continues in its thread; the file is not closed under it.
        self._lock = threading.Lock()

    async def pages(self) -> AsyncGenerator[bytes, None]:
        offset = 0
        while page := await asyncio.to_thread(self._page, offset):
            yield page
            offset += len(page)

    async def append(self, content: bytes, at: int) -> None:
        # On disk when this returns.
        await asyncio.to_thread(self._write, content, at)

    async def set_aside(self, problem: str) -> str:
        return await asyncio.to_thread(self._move_aside)

    def _page(self, offset: int) -> bytes:
        with self._used():
            if not self._path.exists():
                return b""
            with self._path.open("rb") as file:
                file.seek(offset)
                return file.read(PAGE_BYTES)

    def _write(self, content: bytes, at: int) -> None:
        with self._used():
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                _sync_directory(self._path.parent)
            fd = self._fd
            try:
                # What an earlier failure may have left beyond the last whole line goes first.
                os.ftruncate(fd, at)
                done = 0
                while done < len(content):
                    done += os.pwrite(fd, content[done:], at + done)
                os.fsync(fd)
            except OSError:
                # If this fails too, the next append begins with it, and so does the next opening.
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, at)
                raise

    def _move_aside(self) -> str:
        with self._used():
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            aside = _free_name(self._path)
            os.replace(self._path, aside)
            return aside.name

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd, self._closed = None, True

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise RecordError(f"{self._path}: closed")
            try:
                yield
            except OSError as error:
                raise RecordError(f"{self._path}: {error.strerror or error}") from error


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}-untrusted-{number}{path.suffix}")).exists():
        number += 1
    return aside


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
