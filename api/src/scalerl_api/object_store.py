"""A prefix of an S3 bucket: copies of exported models and of checkpoints, published weights.

The client library reads the credentials: ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``,
``AWS_ENDPOINT_URL`` (with ``AWS_ALLOW_HTTP=true`` for an endpoint without TLS), or a web identity.

An object is written whole or not at all. A process that is killed in a multipart upload leaves parts, which no listing shows
and only a lifecycle rule of the bucket removes; so does a write that fails of an object that comes piece by piece.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

_RETRIES: dict[str, Any] = {
    "max_retries": 60,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=8), "base": 3},
}
"""Retries of one request. The time is their bound: about 15, of which a few do not outlast a store that answers 503 SlowDown. The
library's default, three minutes, would pass without a log; the callers retry the whole operation."""
_REQUEST_TIMEOUT = "120 seconds"
"""Of one request with its content, at most a part. The library's default, 30 s, would fail every part on a slow connection."""
_PART_BYTES = 8 << 20
_MAX_PARTS = 9_000
"""An upload has at most 10,000 parts."""
_CONCURRENCY = 4
"""Parts of a file that are sent or read at a time, and held in memory."""
_NO_BUCKET = "NoSuchBucket"
"""S3's code, in the body of an answer."""


class StoreError(Exception):
    """An object store is unreachable, or refuses a request."""


class ObjectAbsent(StoreError):
    """There is no such object. A store answers so only to those who may list; to others it refuses the request."""


class BucketAbsent(StoreError):
    """There is no such bucket, so the request need not be tried again."""


class StoreDenied(StoreError):
    """The credentials do not allow the request, so it need not be tried again."""


class ObjectStore:
    """A prefix of an S3 bucket. Any thread may call it; every method raises ``StoreError``.

    Args:
        to: ``s3://bucket/prefix``.

    Raises:
        StoreError: the library is missing, or a variable of the credentials is invalid.
    """

    def __init__(self, to: str) -> None:
        self.to = to.rstrip("/")
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ImportError as error:
            raise StoreError(f"{self.to}: obstore is missing; install requirements/s3.txt") from error
        self._obstore: Any = obstore
        self._errors = (exceptions.BaseError, OSError, ValueError)
        self._exists = exceptions.AlreadyExistsError
        self._not_found = (exceptions.NotFoundError, FileNotFoundError)
        self._denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        bucket, _, prefix = self.to.removeprefix("s3://").partition("/")
        with self.translated():
            self._store: Any = S3Store(
                bucket,
                prefix=prefix or None,
                retry_config=_RETRIES,
                # Not client_options, which would replace the variables AWS_ALLOW_HTTP and AWS_PROXY_URL.
                config={"timeout": _REQUEST_TIMEOUT},
            )

    def put(self, path: str, content: bytes | Path) -> None:
        """Write an object; a file is sent in parts, and never whole in memory. Raises OSError if the file cannot be opened."""
        if isinstance(content, Path):
            with content.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
        else:
            size = len(content)
        with self.translated():
            self._obstore.put(
                self._store,
                path,
                content,
                chunk_size=max(_PART_BYTES, -(-size // _MAX_PARTS)),
                max_concurrency=_CONCURRENCY,
            )

    def create(self, path: str, content: bytes) -> bool:
        """Write an object unless it exists; returns whether it did not exist."""
        with self.translated():
            try:
                self._obstore.put(self._store, path, content, mode="create", use_multipart=False)
            except self._exists:
                return False
        return True

    def read(self, path: str) -> bytes | None:
        """The content of a small object; None if it does not exist."""
        try:
            with self.translated():
                return bytes(self._obstore.get(self._store, path).bytes())
        except ObjectAbsent:
            return None

    def download(self, path: str, size: int, target: Path) -> str | None:
        """Write the first ``size`` bytes of an object to a file, part by part; returns their SHA-256, None if there is no such object.

        Raises:
            OSError: the file cannot be written.
        """
        digest = hashlib.sha256()
        with target.open("wb") as file:
            for start in range(0, size, _PART_BYTES):
                length = min(_PART_BYTES, size - start)
                try:
                    part = self.part(path, start, length)
                except ObjectAbsent:
                    return None
                file.write(part)
                digest.update(part)
        return digest.hexdigest()

    def new(self, path: str, max_bytes: int) -> NewObject:
        """Begin to write an object whose content comes piece by piece.

        Args:
            max_bytes: that it may have at most; from it the size of the parts.
        """
        part_bytes = max(_PART_BYTES, -(-max_bytes // _MAX_PARTS))
        with self.translated():
            writer = self._obstore.open_writer(
                self._store, path, buffer_size=part_bytes, max_concurrency=_CONCURRENCY
            )
        return NewObject(self, writer)

    def open(self, path: str) -> io.BufferedReader:
        """Open an object for reading, several parts of it at a time. Reads raise ``StoreError``, too."""
        try:
            with self.translated():
                size = self._obstore.head(self._store, path)["size"]
        except ObjectAbsent:
            self.part(path, 0, 1)  # the answer to a HEAD does not say whether the bucket is absent
            raise
        return io.BufferedReader(_StoredObject(self, path, size), _CONCURRENCY * _PART_BYTES)

    def part(self, path: str, start: int, length: int) -> memoryview:
        """Bytes of an object from ``start``."""
        with self.translated():
            return memoryview(self._obstore.get_range(self._store, path, start=start, length=length))

    def sizes(self, folder: str | None = None) -> dict[str, int]:
        """Sizes of all objects below ``folder`` by path."""
        with self.translated():
            pages = self._obstore.list(self._store, prefix=folder)
            return {entry["path"]: entry["size"] for page in pages for entry in page}

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""
        if paths := list(paths):
            with self.translated():
                self._obstore.delete(self._store, paths)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Makes ``StoreError`` of the client library's errors."""
        try:
            yield
        except self._errors as error:
            kind = self._kind(error)
            problem = f"{type(error).__name__}: {first_line(error)}"
            if kind is BucketAbsent:
                problem = "there is no such bucket"
            raise kind(f"{self.to}: {problem}") from error

    def _kind(self, error: Exception) -> type[StoreError]:
        if isinstance(error, self._denied):
            return StoreDenied
        if _NO_BUCKET in str(error):
            return BucketAbsent
        return ObjectAbsent if isinstance(error, self._not_found) else StoreError


class NewObject:
    """An object that is being written. It exists once it is closed; one that is dropped before leaves parts at most."""

    def __init__(self, store: ObjectStore, writer: Any) -> None:
        self._store, self._writer = store, writer
        self._bytes = 0

    def write(self, content: bytes | memoryview) -> None:
        """Add to the object. ``content`` may change afterwards."""
        with self._store.translated():
            self._writer.write(bytes(content))  # the library keeps what it gets, without a copy
        self._bytes += len(content)

    def close(self) -> int:
        """Make the object exist; returns its size."""
        with self._store.translated():
            self._writer.close()
        return self._bytes


class _StoredObject(io.RawIOBase):
    def __init__(self, store: ObjectStore, path: str, size: int) -> None:
        self._store, self._path, self._size = store, path, size
        self._at = 0
        self._threads = ThreadPoolExecutor(_CONCURRENCY)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        memory, begin = memoryview(buffer).cast("B"), self._at
        end = min(begin + len(memory), self._size)

        def read(start: int) -> None:
            part = self._store.part(self._path, start, min(_PART_BYTES, end - start))
            memory[start - begin : start - begin + len(part)] = part

        parts = [self._threads.submit(read, start) for start in range(begin, end, _PART_BYTES)]
        wait(parts)  # none writes to the buffer after another one has failed
        for part in parts:
            part.result()
        self._at = max(begin, end)
        return self._at - begin

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        super().close()


def first_line(error: Exception) -> str:
    """The first line of a library's error message, or the error's type if the message is empty.

    A line that ends with a colon comes with the next one.

    >>> first_line(ValueError("field 'layers':\\n    expected int"))
    "field 'layers': expected int"
    """
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first
