"""Writes published weights to files (:mod:`scalerl_api.weight_files`), from which generators read them.

Each version is a delta from the one before. A base is written beside it (:data:`BASE_EVERY`); then the last base and the deltas before
it are deleted. So the files take at most three times the bytes of a version, while a base is written, and a generator that was sent no
version for a while reads the deltas that it lacks, or the base. In an object store, where a deleted file is gone for a generator that reads it,
too, these are deleted one base later: four and a half times.

What touches the volume or the store has a limit, since one that hangs must not stop the trainer for ever: the call is abandoned, and no request
names its file, which a later write deletes. After a delta that failed, the next write begins with a base; a base that failed beside a delta is put off.

The writer keeps a copy of the last version in host memory. An attempt of the trainer has a folder of its own, with the name of its
:mod:`~scalerl_trainer.fence`; it deletes those of earlier ones.
"""

from __future__ import annotations

import contextlib
import logging
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from scalerl_api import wire
from scalerl_api.attempts import Attempt
from scalerl_api.weight_files import (
    COUNTS,
    FAR,
    LENGTH,
    MAX_HEADER_BYTES,
    Header,
    base_name,
    delta_name,
    encode_end,
    layout_digest,
)
from scalerl_api.weight_layout import Bucket, lay_out
from scalerl_trainer.background import LimitedCalls
from scalerl_trainer.publish.published_weights import NamedTensors, fill
from scalerl_trainer.publish.weight_folders import NewFile, WeightFolder

log = logging.getLogger(__name__)

BASE_EVERY = 32
"""Deltas from one base to the next. A generator that joins reads the base and these, so they are fewer if they have half its bytes."""
SYNC_BYTES = 256 << 20
"""Bytes between two syncs of a file on a volume, of whose time each has its own limit: the last one of a large file alone might take minutes."""


@dataclass(frozen=True)
class Written:
    """A version in files."""

    files: wire.WeightFiles
    bytes: int
    """Of the delta, or of the base without one: what a generator reads that has the version before."""


_Buckets = Iterator[tuple[bytes | torch.Tensor, bool]]
"""Content of each bucket, and whether it is the whole bucket and not its changes."""


def encode_changes(old_u16: NDArray[np.uint16], new_u16: NDArray[np.uint16]) -> bytes:
    """The changes of a payload, without the trailer."""
    changed = np.flatnonzero(old_u16 != new_u16)
    gaps = np.diff(changed, prepend=-1) - 1
    far = gaps // FAR
    encoded = np.full(int(far.sum()) + len(changed), FAR, np.uint8)
    encoded[np.cumsum(far + 1) - 1] = gaps % FAR
    differences = (new_u16[changed] - old_u16[changed]).view(np.int16)
    zigzag = ((differences << 1) ^ (differences >> 15)).view(np.uint16)
    positions, low, high = map(_compress, (encoded, zigzag & 0xFF, zigzag >> 8))
    counts = COUNTS.pack(len(changed), len(encoded), len(positions))
    return b"".join((counts, positions, LENGTH.pack(len(low)), low, high))


def _compress(part: NDArray[np.integer]) -> bytes:
    """Without a search for repeated strings: no part has any but runs, and references to them would take more than they save."""
    deflate = zlib.compressobj(strategy=zlib.Z_RLE)
    return deflate.compress(part.astype(np.uint8).tobytes()) + deflate.flush()


class WeightWriter:
    """Writes the versions of one attempt of the trainer.

    Args:
        folder: the attempt's own. It is made where it does not exist, also if it was deleted.
        begin: called before it is made; deletes those of earlier attempts, or raises if a later one has begun.
    """

    def __init__(self, folder: WeightFolder, bucket_bytes: int, begin: Callable[[], None]) -> None:
        self.folder = folder
        self._bucket_bytes = bucket_bytes
        self._begin = begin
        self._begun = False
        """Whether the folders beside it are known to be of the same run."""
        self._layout = ""
        self._buckets: tuple[Bucket, ...] = ()
        self._last_u8: list[torch.Tensor] = []
        """The buckets of the last version, if there may be a delta from it."""
        self._base = -1
        self._versions: list[int] = []
        """Those that can be read (:class:`scalerl_api.wire.WeightFiles`); empty after a failed write, whose successor is a base."""
        self._readable: set[str] = set()
        """Names of the last base and of the deltas beside it, from which a generator may read."""
        self._before: set[str] = set()
        """Those at the base before, which a generator may still be reading, where that keeps no file."""
        self._base_bytes = self._delta_bytes = 0
        """Of the base, and of the deltas since."""
        self._base_due = (0, 0.0)
        """Number of deltas since the base, and of their bytes, after which another base is written."""
        self._last_bytes = 0
        self._refused = False
        self._volume = LimitedCalls(math.inf)

    def refuse(self) -> None:
        """Make the next write one of a base, because a generator cannot read a file that is there."""
        self._refused = True

    def write(
        self,
        version: int,
        manifest: list[wire.TensorSpec],
        stream: Callable[[], NamedTensors],
        call_seconds: float = math.inf,
        total_seconds: float = math.inf,
    ) -> Written:
        """Write a version, unless it was the last one written and is not refused. The stream is read to its end.

        Args:
            call_seconds: limit of one call of the volume, such as the write of a bucket.
            total_seconds: limit of all of them, without the time that the weights take.

        Raises:
            TimeoutError: a limit has passed.
            OSError: the folder cannot be written. What is there stays, and the next write begins with a base.
            SourceError: the stream differs from the manifest.
        """
        if self._refused or not self._versions or self._versions[-1] != version:
            self._volume = LimitedCalls(call_seconds, total_seconds, self.folder.kind)
            self._volume(self._start)
            tensors = stream()
            try:
                self._last_bytes = self._write(version, manifest, tensors)
            finally:
                for _ in tensors:  # the other ranks take part in the collective to its end
                    pass
        files = wire.WeightFiles(
            folder=self.folder.name, base=self._base, versions=self._versions, to=self.folder.to
        )
        return Written(files, self._last_bytes)

    def remove(self, limit_seconds: float = math.inf) -> None:
        """Delete the folder, at the end of the run, and those of earlier attempts that could not be deleted before."""
        with contextlib.suppress(OSError):
            LimitedCalls(limit_seconds)(self._remove)

    def _remove(self) -> None:
        self.folder.remove()
        own = Attempt.parse(self.folder.name)
        if own is None or not self._begun:
            return
        for other in self.folder.others():
            attempt = Attempt.parse(other.name)
            if attempt is not None and attempt < own:
                other.remove()

    def _start(self) -> None:
        if not self.folder.exists():  # the first version, or it was deleted
            self._begin()
            self._begun = True
            self.folder.make()
            self._versions = []
            self._readable, self._before = set(), set()

    def _write(self, version: int, manifest: list[wire.TensorSpec], tensors: NamedTensors) -> int:
        layout = layout_digest(manifest, self._bucket_bytes)
        earlier = self._versions
        if not earlier:  # after a failed write, which may have lacked space, no request names what is there
            self._before = set()
            if self.folder.open_files_stay:
                self._readable = set()
        self._keep_only_readable()  # a call that was abandoned may have left a file since
        self._versions = []
        if self._refused or not earlier or layout != self._layout or not self._last_u8:
            self._layout, self._buckets = layout, lay_out(manifest, self._bucket_bytes)
            self._last_u8 = []
            # Most bits of a float32 change with every update.
            keep = {tensor.dtype for tensor in manifest} <= {"bfloat16", "float16"}
            return self._write_base(version, [version], self._filled(version, tensors, keep=keep))
        size = self._write_file(delta_name(version), version, earlier[-1], self._changes(version, tensors))
        self._delta_bytes += size
        self._readable.add(delta_name(version))
        versions = [*earlier, version]
        since = versions[versions.index(self._base) :]
        self._versions = versions
        deltas, (due_deltas, due_bytes) = len(since) - 1, self._base_due
        if deltas >= due_deltas or self._delta_bytes > due_bytes:
            try:
                self._write_base(version, since, ((last, True) for last in self._last_u8))
            except OSError as error:
                self._base_due = deltas + BASE_EVERY, self._delta_bytes + self._base_bytes
                log.warning("no base of version %d, whose delta is written, deltas go on: %s", version, error)
        return size

    def _write_base(self, version: int, versions: list[int], buckets: _Buckets) -> int:
        size = self._write_file(base_name(version), version, None, buckets)
        self._base, self._base_bytes, self._delta_bytes = version, size, 0
        self._base_due = BASE_EVERY, size / 2
        self._refused = False
        self._versions = versions
        self._before = set() if self.folder.open_files_stay else self._readable
        self._readable = {base_name(version), *map(delta_name, versions[1:])}
        with contextlib.suppress(OSError):  # it is written, and the next write deletes, too
            self._keep_only_readable()
        return size

    def _keep_only_readable(self) -> None:
        self._volume(partial(self._delete_others, self._readable | self._before, self._volume))

    def _delete_others(self, names: set[str], calls: LimitedCalls) -> None:
        with contextlib.suppress(OSError):  # another write is due in time
            for name in self.folder.names():
                if name not in names and not calls.hung:  # else it may be of a later write
                    with contextlib.suppress(OSError):
                        self.folder.delete(name)

    def _filled(self, version: int, tensors: NamedTensors, *, keep: bool) -> _Buckets:
        scratch = self._scratch()
        for bucket in self._buckets:
            filled = fill(bucket, version, tensors, scratch)
            if keep:
                self._last_u8.append(filled.clone())
            yield filled, True

    def _changes(self, version: int, tensors: NamedTensors) -> _Buckets:
        scratch = self._scratch()
        for bucket, last in zip(self._buckets, self._last_u8, strict=True):
            new, end = fill(bucket, version, tensors, scratch), bucket.payload_bytes
            changes = encode_changes(_words(last[:end]), _words(new[:end]))
            last.copy_(new)
            if len(changes) < end:
                yield bytes(new[end:].numpy()) + changes, False
            else:
                yield new, True

    def _scratch(self) -> torch.Tensor:
        return torch.empty(max(bucket.total_bytes for bucket in self._buckets), dtype=torch.uint8)

    def _write_file(self, name: str, version: int, previous: int | None, buckets: _Buckets) -> int:
        """Write a file, which has its name once it is complete; returns its size."""
        max_bytes = sum(bucket.total_bytes for bucket in self._buckets) + MAX_HEADER_BYTES
        sizes: list[int] = []
        whole: list[bool] = []
        unsynced = 0
        file = self._volume(partial(self.folder.create, name, max_bytes))
        try:
            for bucket, is_whole in buckets:
                content = bucket if isinstance(bucket, bytes) else bucket.numpy().data
                self._volume(partial(file.write, content))
                unsynced += len(content)
                if unsynced >= SYNC_BYTES:
                    self._volume(file.sync)
                    unsynced = 0
                sizes.append(len(content))
                whole.append(is_whole)
            end = encode_end(Header(self.folder.name, version, previous, self._layout, sizes, whole))
            return self._volume(partial(_complete, file, end))
        except BaseException:
            if not self._volume.hung:  # else closing the file would wait for the call that hangs
                with contextlib.suppress(OSError):
                    self._volume(file.discard)
            raise


def _complete(file: NewFile, end: bytes) -> int:
    file.write(end)
    return file.complete()


def _words(payload_u8: torch.Tensor) -> NDArray[np.uint16]:
    words: NDArray[np.uint16] = payload_u8.numpy().view(np.uint16)
    return words
