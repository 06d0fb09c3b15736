"""Reads published weights from files (:mod:`scalerl_api.weight_files`) of the run's volume or of an object store into memory, while the server generates.

The copy in memory has the last version that was read, so the next one is read as its changes. A version that was missed is read, too;
a copy that is too old, or that a damaged file leaves without a version, is read again from the base. Nothing of it reaches the model
before all of it is verified. If the base needs a damaged delta, too, the read fails, and the trainer writes a base. A file of an object
store that does not answer is no damaged one: the read goes on at the bucket at which it was, or fails.

The memory is shared: of the workers of a server the first one reads, and the others map what it has read.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import struct
import threading
import time
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from scalerl_api.object_store import BucketAbsent, ObjectAbsent, ObjectStore, StoreDenied, StoreError
from scalerl_api.weight_files import (
    CHANGES_OFFSET,
    COUNTS,
    END,
    FAR,
    LENGTH,
    STORED,
    Header,
    WeightFileError,
    base_name,
    decode_header,
    delta_name,
    header_bytes,
    layout_digest,
    stored_path,
)
from scalerl_api.weight_layout import (
    TRAILER_BYTES,
    Bucket,
    BucketMismatch,
    check_trailer,
    lay_out,
    tensor_checksum,
)
from scalerl_api.wire import TensorSpec, WeightFiles, WeightReceive
from scalerl_generator.weights.update_reports import FetchReport

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Between two attempts at a file of a store that does not answer."""


class StoreUnreachable(WeightFileError):
    """The object store does not answer, or refuses the credentials: no other file can be read, either."""


class SharedBuckets:
    """The buckets of one version in memory that other processes of this container can map by ``path``.

    Args:
        path: maps the memory of another process; empty for new memory.
    """

    def __init__(self, buckets: tuple[Bucket, ...], path: str = "") -> None:
        size = sum(bucket.total_bytes for bucket in buckets)
        fd = os.open(path, os.O_RDWR) if path else os.memfd_create("scalerl-weights")
        if not path:
            os.ftruncate(fd, size)
        self.path = path or f"/proc/{os.getpid()}/fd/{fd}"
        memory_u8 = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        self._fd = -1 if path else fd
        if path:
            os.close(fd)
        self.buckets = buckets
        self.of_bucket = torch.split(memory_u8, [bucket.total_bytes for bucket in buckets])
        """Payload and trailer of each."""

    def close(self) -> None:
        """Free the memory once no other process and no tensor uses it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.of_bucket = -1, ()


def apply_changes(words_u16: NDArray[np.uint16], changes: bytes | memoryview) -> None:
    """Apply the changes of a payload, without the trailer, in place.

    Raises:
        WeightFileError: they are no changes of such a payload. Which words have changed is then unknown.
    """
    try:
        changed, gaps, compressed = COUNTS.unpack_from(changes)
        positions_end = COUNTS.size + compressed
        (low_bytes,) = LENGTH.unpack_from(changes, positions_end)
        low_end = positions_end + LENGTH.size + low_bytes
        if max(changed, gaps) > 2 * len(words_u16):
            raise WeightFileError("a bucket has more changes than words")
        encoded = _inflate(changes[COUNTS.size : positions_end], gaps)
        low = _inflate(changes[positions_end + LENGTH.size : low_end], changed)
        high = _inflate(changes[low_end:], changed)
    except (struct.error, zlib.error, OverflowError, ValueError) as error:
        raise WeightFileError(f"the changes of a bucket cannot be read: {error}") from error
    positions = np.cumsum(np.where(encoded == FAR, FAR, encoded.astype(np.int64) + 1)) - 1
    positions = positions[encoded != FAR]
    if len(positions) != changed or (changed and positions[-1] >= len(words_u16)):
        raise WeightFileError("the changes of a bucket contradict themselves")
    zigzag = low.astype(np.uint16) | (high.astype(np.uint16) << 8)
    words_u16[positions] += (zigzag >> 1) ^ -(zigzag & 1)


def _inflate(data: bytes | memoryview, count: int) -> NDArray[np.uint8]:
    inflated = zlib.decompressobj().decompress(data, count + 1)
    if len(inflated) != count:
        raise WeightFileError(f"the changes of a bucket have {len(inflated)} bytes in place of {count}")
    return np.frombuffer(inflated, np.uint8)


def read_header(file: BufferedReader) -> Header:
    """The header of a file.

    Raises:
        WeightFileError: it is damaged, or is no such file.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - END.size))
    length, digest = header_bytes(file.read(), size)
    file.seek(size - END.size - length)
    return decode_header(file.read(length), digest, size)


class WeightReader:
    """The copy of the last version that was read.

    Args:
        root: ``weights`` in the run's directory, for files that are in no object store.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._store: ObjectStore | None = None
        """That of the present files; None: they are in ``root``."""
        self._key = ("", "")
        """Folder and layout."""
        self.version: int | None = None
        """That of the copy; None while it has none."""
        self.copy: SharedBuckets | None = None
        self.bytes_read = 0
        """Of all versions, by bucket: whether a read that takes long makes progress."""
        self._retry_until = 0.0

    def read(
        self,
        version: int,
        tensors: list[TensorSpec],
        bucket_bytes: int,
        files: WeightFiles,
        retry_seconds: float = 0.0,
    ) -> int:
        """Make the copy one of ``version``; returns the number of bytes read.

        Args:
            retry_seconds: from now, in which a request that the store did not answer is sent again.

        Raises:
            StoreUnreachable: the copy keeps its version unless a bucket has changed.
            WeightFileError: a file cannot be used, and neither can the base.
        """
        self._retry_until = time.monotonic() + retry_seconds
        key = files.folder, layout_digest(tensors, bucket_bytes)
        if files.folder != Path(files.folder).name or files.folder in ("", ".."):
            raise WeightFileError(f"{files.folder!r} is no name of a folder")
        if self.copy is None or key[1] != self._key[1]:
            if self.copy is not None:
                self.copy.close()
            self.copy = SharedBuckets(lay_out(tensors, bucket_bytes))
        if key != self._key:
            self._key, self.version = key, None
        if not files.versions or files.versions[-1] != version or files.base not in files.versions:
            raise WeightFileError(f"version {version} is not what the files {files} have")
        if self.version == version:
            return 0
        self._connect(files.to)
        if self.version in files.versions:
            start = self.version
            try:
                return self._read_deltas(files, start)
            except StoreUnreachable:
                raise
            except WeightFileError as error:
                log.warning("version %d is read again from the base: %s", version, error)
        return self._read_file(base_name(files.base), files.base, None) + self._read_deltas(files, files.base)

    def _connect(self, to: str) -> None:
        if to == (self._store.to if self._store else ""):
            return
        try:
            self._store = ObjectStore(to) if to else None
        except StoreError as error:
            raise StoreUnreachable(str(error)) from error

    def _open(self, name: str) -> BufferedReader:
        if self._store is not None:
            return self._store.open(stored_path(self._key[0], name))
        return (self._root / self._key[0] / name).open("rb")

    def _read_deltas(self, files: WeightFiles, start: int) -> int:
        versions = files.versions[files.versions.index(start) :]
        pairs = itertools.pairwise(versions)
        return sum(self._read_file(delta_name(version), version, previous) for previous, version in pairs)

    def _read_file(self, name: str, version: int, previous: int | None) -> int:
        root = self._root if self._store is None else f"{self._store.to}/{STORED}"
        verified: list[int] = []
        while True:
            try:
                return self._read_on(name, version, previous, verified)
            except (OSError, ObjectAbsent, WeightFileError, BucketMismatch) as error:
                raise WeightFileError(f"{root}/{self._key[0]}/{name}: {error}") from error
            except StoreError as error:
                late = time.monotonic() + RETRY_SECONDS > self._retry_until
                if late or isinstance(error, StoreDenied | BucketAbsent):
                    raise StoreUnreachable(f"{root}/{self._key[0]}/{name}: {error}") from error
                log.warning("%s is read on in %g s: %s", name, RETRY_SECONDS, error)
                time.sleep(RETRY_SECONDS)

    def _read_on(self, name: str, version: int, previous: int | None, verified: list[int]) -> int:
        """Read the buckets of a file that are not ``verified``, which gets their sizes; returns the size of the file."""
        with self._open(name) as file:
            header = read_header(file)
            expected = (*self._key, version, previous)
            found = (header.folder, header.layout, header.version, header.previous)
            if found != expected:
                raise WeightFileError(
                    f"it has version {header.version} after {header.previous} of {header.folder}, with the layout "
                    f"{header.layout}; expected are {version}, {previous}, {self._key[0]} and {self._key[1]}"
                )
            self._read_buckets(file, header, verified)
            size = file.seek(0, os.SEEK_END)
        self.version = version
        return size

    def _read_buckets(self, file: BufferedReader, header: Header, verified: list[int]) -> None:
        assert self.copy is not None
        if len(header.whole) != len(self.copy.buckets) or (header.previous is None and not all(header.whole)):
            raise WeightFileError("it has other buckets than its version")
        file.seek(sum(verified))
        buckets = zip(self.copy.buckets, self.copy.of_bucket, header.bucket_bytes, header.whole, strict=True)
        for bucket, memory_u8, size, whole in itertools.islice(buckets, len(verified), None):
            payload_u8, trailer_u8 = memory_u8[: bucket.payload_bytes], memory_u8[bucket.payload_bytes :]
            if whole:
                self.version = None  # until the last bucket is verified
                if size != bucket.total_bytes or file.readinto(memory_u8.numpy().data) != size:
                    raise WeightFileError(f"bucket {bucket.index} is cut off")
            else:
                content = memoryview(file.read(size))
                if len(content) < CHANGES_OFFSET:
                    raise WeightFileError(f"bucket {bucket.index} is cut off")
                self.version = None
                apply_changes(payload_u8.numpy().view(np.uint16), content[TRAILER_BYTES:])
                trailer_u8.copy_(torch.frombuffer(bytearray(content[:TRAILER_BYTES]), dtype=torch.uint8))
            self.bytes_read += size
            words = trailer_u8.view(torch.int64).tolist()
            check_trailer(words, header.version, bucket.index, tensor_checksum(torch, payload_u8))
            verified.append(size)


class WeightFetcher:
    """Reads versions on a thread. A fetch that takes too long for its publish continues, and the next one begins where it ends."""

    def __init__(self, root: Path) -> None:
        self.reader = WeightReader(root)
        self._wanted: WeightReceive | None = None
        self._lock = threading.Lock()
        self._done: tuple[WeightReceive, FetchReport] | None = None

    def start(self, request: WeightReceive) -> None:
        """Begin to read the version of ``request``, after a fetch in progress; one that waits is given up."""
        self._wanted = request
        threading.Thread(target=self._fetch, args=(request,), name="fetch-weights", daemon=True).start()

    def report(self, version: int) -> FetchReport:
        """State of the fetch of ``version``, which must be the last one that was started."""
        wanted, done = self._wanted, self._done
        if wanted is None or wanted.version != version:
            return FetchReport(problem=f"version {version} is not being read")
        if done is not None and done[0] is wanted:
            return done[1]
        return FetchReport(bytes=self.reader.bytes_read)

    def _fetch(self, request: WeightReceive) -> None:
        with self._lock:
            if request is not self._wanted:
                return
            started = time.perf_counter()
            try:
                assert request.files is not None
                # Half, so that the answer to the request has the reason.
                retry_seconds = request.timeout_seconds / 2
                size = self.reader.read(
                    request.version, request.tensors, request.bucket_bytes, request.files, retry_seconds
                )
            except Exception as error:
                unreachable = isinstance(error, StoreUnreachable)
                report = FetchReport(problem=str(error) or type(error).__name__, unreachable=unreachable)
            else:
                assert self.reader.copy is not None
                report = FetchReport("", self.reader.copy.path, time.perf_counter() - started, size)
            self._done = request, report
