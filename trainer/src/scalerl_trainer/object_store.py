"""A prefix of an S3 bucket: copies of exported models and of checkpoints.

The client library reads the credentials: ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``,
``AWS_ENDPOINT_URL`` (with ``AWS_ALLOW_HTTP=true`` for an endpoint without TLS), or a web identity.

An object is written whole or not at all. A process that is killed in a multipart upload leaves parts, which no listing shows
and only a lifecycle rule of the bucket removes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from scalerl_trainer.errors import TrainerError, first_line

_RETRIES: dict[str, Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
"""Retries of one request. The library's default, ten, takes minutes without a log; the callers retry the whole operation."""
_REQUEST_TIMEOUT = "120 seconds"
"""Of one request with its content, at most a part. The library's default, 30 s, would fail every part on a slow connection."""
_PART_BYTES = 8 << 20
_MAX_PARTS = 9_000
"""An upload has at most 10,000 parts."""
_CONCURRENCY = 4
"""Parts of a file that are sent at a time, and held in memory."""


class StoreError(TrainerError):
    """An object store is unreachable, or refuses a request."""


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
            raise StoreError(
                f"{self.to}: obstore is missing; install requirements/s3.txt beside the trainer"
            ) from error
        self._obstore: Any = obstore
        self._errors = (exceptions.BaseError, OSError, ValueError)
        self._exists = exceptions.AlreadyExistsError
        self._absent = (exceptions.NotFoundError, FileNotFoundError)
        bucket, _, prefix = self.to.removeprefix("s3://").partition("/")
        with self._translated():
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
        with self._translated():
            self._obstore.put(
                self._store,
                path,
                content,
                chunk_size=max(_PART_BYTES, -(-size // _MAX_PARTS)),
                max_concurrency=_CONCURRENCY,
            )

    def create(self, path: str, content: bytes) -> bool:
        """Write an object unless it exists; returns whether it did not exist."""
        with self._translated():
            try:
                self._obstore.put(self._store, path, content, mode="create", use_multipart=False)
            except self._exists:
                return False
        return True

    def read(self, path: str) -> bytes | None:
        """The content of a small object; None if it does not exist."""
        with self._translated():
            try:
                return bytes(self._obstore.get(self._store, path).bytes())
            except self._absent:
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
                with self._translated():
                    try:
                        part = self._obstore.get_range(self._store, path, start=start, length=length)
                    except self._absent:
                        return None
                file.write(part)
                digest.update(part)
        return digest.hexdigest()

    def sizes(self, folder: str | None = None) -> dict[str, int]:
        """Sizes of all objects below ``folder`` by path."""
        with self._translated():
            pages = self._obstore.list(self._store, prefix=folder)
            return {entry["path"]: entry["size"] for page in pages for entry in page}

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""
        if paths := list(paths):
            with self._translated():
                self._obstore.delete(self._store, paths)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise StoreError(f"{self.to}: {type(error).__name__}: {first_line(error)}") from error
