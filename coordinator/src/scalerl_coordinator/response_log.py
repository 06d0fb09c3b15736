"""The files of the response store: segments, of which the newest is appended to and the oldest deleted when the store is full.

Groups in the oldest segment that are still the newest of their prompt are copied to the newest segment if they take less than
half of the oldest. If they take more, the store is too small for an epoch: copying them would only evict others, so they are
evicted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from scalerl_coordinator import response_segments as segments
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.recovery import Layout
from scalerl_coordinator.response_index import Location, ResponseIndex
from scalerl_coordinator.response_segments import SEGMENT_HEADER_BYTES, Head

log = logging.getLogger(__name__)

_SEGMENTS: Final = 32
"""Minimum number of segments of a full store, since eviction deletes a whole segment."""
_MAX_SEGMENT_BYTES: Final = 2**25
_RETRY_SECONDS = 1.0

DROP_REASONS: Final = ("queue_full", "disk", "no_space", "too_large", "evicted", "failed")
LOOKUP_RESULTS: Final = ("hit", "miss", "mismatch")


@dataclass(slots=True)
class HistoryCounters:
    """Counters for the metrics."""

    stored: int = 0
    """Responses stored."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Responses dropped, by :data:`DROP_REASONS`."""
    lookups: Counter[str] = field(default_factory=Counter)
    """Lookups, by :data:`LOOKUP_RESULTS`."""
    damaged: int = 0
    """Damaged frames and segments."""
    discarded_segments: int = 0
    """Segments deleted because they were of another task, tokenizer or format."""
    nbytes: int = 0
    """Size of all segments."""
    prompts: int = 0
    """Prompts with a stored group."""


class ResponseLog:
    """Writes the segments of one directory, and updates the index. All methods except :meth:`read` belong to one thread, and may
    raise OSError.

    Args:
        identity: 32 bytes; segments of another identity are deleted.
        max_bytes: maximum size on disk.
    """

    def __init__(
        self,
        directory: Path,
        identity: bytes,
        max_bytes: int,
        index: ResponseIndex,
        counters: HistoryCounters,
        disk: Disk,
    ) -> None:
        self.directory = directory
        self.max_frame_bytes = max_bytes // 2 - SEGMENT_HEADER_BYTES
        self._layout = Layout(directory)
        self._identity = identity
        self._max_bytes = max_bytes
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, max_bytes // _SEGMENTS)
        self._index = index
        self._counters = counters
        self._disk = disk
        self._sizes: dict[int, int] = {}
        """Bytes of each segment by number, ascending."""
        self._fd = -1
        """The newest segment, while it is written."""
        self._next_number = 1
        self._retry_at = 0.0
        self._problem = ""

    @property
    def waits(self) -> bool:
        """Whether a write failed less than ``_RETRY_SECONDS`` ago."""
        return time.monotonic() < self._retry_at

    # --- reading --------------------------------------------------------------------------------

    def read(self, at: Location) -> tuple[Head, bytes] | None:
        """Read and check a frame; None if it is damaged or its segment has been deleted. Any thread may call it."""
        segment, offset, length = at
        try:
            with self._open(segment) as fd:
                found = segments.decode_frame(_read_fully(fd, offset, length))
        except FileNotFoundError:
            return None
        except OSError as error:
            self.report_unreadable(error)
            found = None
        self._counters.damaged += found is None
        return found

    def _heads(self, number: int, size: int) -> list[tuple[int, Head | None]]:
        """The heads of a segment's frames with their offsets; None for each damaged range."""
        with self._open(number) as fd:
            return list(segments.scan(lambda offset, length: _read_fully(fd, offset, length), size))

    @contextlib.contextmanager
    def _open(self, number: int) -> Iterator[int]:
        fd = os.open(self._layout.path("segment", number), os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    # --- writing --------------------------------------------------------------------------------

    def make_room(self, size: int) -> bool:
        """Delete old segments until a frame of ``size`` bytes fits the store and the volume; returns whether it fits."""
        self._bound_index()
        while self._sizes and self._counters.nbytes + size + SEGMENT_HEADER_BYTES > self._max_bytes:
            self._delete_oldest(copy=True)
        return not self._begins_segment(size) or self._leave_free(max(self._segment_bytes, size))

    def append(self, head: Head, blob: bytes) -> Location:
        """Append a frame to the open segment, or to a new one if that is full. A failure leaves no valid partial frame."""
        if self._begins_segment(head.frame_bytes):
            self.finish_segment()
            self._open_segment()
        at = self._number, self._sizes[self._number], head.frame_bytes
        self._write(segments.encode_frame(head, blob))
        return at

    def finish_segment(self) -> None:
        """Sync and close the open segment, so that the journal's next sync does not wait for the store's data."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            self._disk.sync(fd)
        finally:
            os.close(fd)

    def _bound_index(self) -> None:
        """Delete the oldest segments until the index has no more groups than it may have."""
        while self._index.full and len(self._sizes) > 1:
            self._delete_oldest(copy=False)

    def yield_space(self, error: OSError) -> None:
        """Handle a failed write: delay the next one, and delete the oldest segment if the volume is full. Does not raise."""
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        self.report(f"{self.directory} cannot be written: {error.strerror}; responses are dropped")
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and self._sizes:
            with contextlib.suppress(OSError):
                self._delete_oldest(copy=False)

    def keep_reserve(self) -> None:
        """Delete the oldest segments while other files fill the volume. Does not raise."""
        with contextlib.suppress(OSError):
            self._leave_free(0)

    def report(self, problem: str) -> None:
        """Log a problem, unless it is the same as the last one."""
        if problem != self._problem:
            log.error("history: %s", problem)
            self._problem = problem

    def report_unreadable(self, error: OSError) -> None:
        self.report(f"{self.directory} cannot be read: {error.strerror}")

    @property
    def _number(self) -> int:
        """Number of the newest segment; 0 without segments."""
        return next(reversed(self._sizes), 0)

    def _begins_segment(self, size: int) -> bool:
        return self._fd < 0 or self._sizes[self._number] + size > self._segment_bytes

    def _leave_free(self, size: int) -> bool:
        """Delete the oldest segments until the volume has the reserve plus ``size`` bytes free; returns whether it has."""
        while not self._disk.leaves_reserve(self.directory, size):
            if not self._sizes:
                return False
            self._delete_oldest(copy=False)
        return True

    def _open_segment(self) -> None:
        number = self._next_number
        path = self._layout.path("segment", number)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._next_number += 1
        self._sizes[number] = 0
        self._write(segments.encode_segment_header(number, self._identity))

    def _write(self, data: bytes) -> None:
        try:
            self._disk.write_all(self._fd, data)
        except OSError:
            self._abandon_segment()
            raise
        self._set_size(self._number, self._sizes[self._number] + len(data))

    def _abandon_segment(self) -> None:
        """Close a segment whose last write failed. Its size includes the partial frame, which the next start truncates."""
        self._set_size(self._number, os.fstat(self._fd).st_size)
        os.close(self._fd)
        self._fd = -1

    def _set_size(self, number: int, size: int) -> None:
        self._counters.nbytes += size - self._sizes[number]
        self._sizes[number] = size

    def _unlink(self, number: int) -> None:
        self._layout.path("segment", number).unlink(missing_ok=True)
        self._counters.nbytes -= self._sizes.pop(number)

    def _delete_oldest(self, *, copy: bool) -> None:
        """Delete the oldest segment. With ``copy``, groups that are the newest of their prompt are written again if they take
        less than half of it."""
        number, size = next(iter(self._sizes.items()))
        if number == self._number:
            self.finish_segment()
        try:
            heads = self._heads(number, size)
        except OSError as error:  # lookups will remove its groups from the index
            self.report_unreadable(error)
            heads = []
        frames = [(head, (number, offset, head.frame_bytes)) for offset, head in heads if head is not None]
        live = [(head, at) for head, at in frames if self._index.is_newest(head, at)]
        evicted = sum(head.responses for head, _ in live)
        kept = []
        if copy and 2 * sum(head.frame_bytes for head, _ in live) < size:
            kept = [found for _, at in live if (found := self.read(at)) is not None]
        for head, at in frames:
            self._index.remove(head, at)
        try:
            self._unlink(number)
            for head, blob in kept:
                self._index.add(head, self.append(head, blob))
                evicted -= head.responses
        finally:
            self._counters.dropped["evicted"] += evicted
            self._counters.prompts = self._index.prompts

    # --- recovery -------------------------------------------------------------------------------

    def recover(self) -> None:
        """Index the groups in the directory, oldest first. May be called again after an error."""
        self._sizes.clear()
        self._index.clear()
        self._counters.nbytes = 0
        self.directory.mkdir(parents=True, exist_ok=True)
        numbers = self._layout.numbered("segment")
        self._next_number = numbers[-1] + 1 if numbers else 1
        for number in numbers:
            size = self._layout.path("segment", number).stat().st_size
            self._sizes[number] = size
            self._counters.nbytes += size
            try:
                if own := self._is_own(number):
                    self._index_segment(number, size)
            except OSError as error:  # keep the segment until it is the oldest
                self._counters.damaged += 1
                self.report_unreadable(error)
                continue
            if not own or self._sizes[number] <= SEGMENT_HEADER_BYTES:
                self._unlink(number)
            self._bound_index()
        while self._counters.nbytes > self._max_bytes:
            self._delete_oldest(copy=False)
        self._counters.prompts = self._index.prompts
        if self._counters.discarded_segments:
            log.info(
                "history: deleted %d segments of another task, tokenizer or format from %s",
                *(self._counters.discarded_segments, self.directory),
            )

    def _is_own(self, number: int) -> bool:
        """Whether a segment has an undamaged header and this store's identity."""
        with self._open(number) as fd:
            identity = segments.decode_segment_header(_read_fully(fd, 0, SEGMENT_HEADER_BYTES), number)
        self._counters.damaged += identity is None
        self._counters.discarded_segments += identity is not None and identity != self._identity
        return identity == self._identity

    def _index_segment(self, number: int, size: int) -> None:
        """Index the frames of a segment, and truncate an incomplete last one."""
        for offset, head in self._heads(number, size):
            if head is None:
                self._counters.damaged += 1
                continue
            if offset + head.frame_bytes > size:
                os.truncate(self._layout.path("segment", number), offset)
                self._set_size(number, offset)
                break
            self._index.add(head, (number, offset, head.frame_bytes))


def _read_fully(fd: int, offset: int, length: int) -> bytes:
    """``length`` bytes from ``offset``; fewer at the end of the file."""
    parts = []
    while length and (part := os.pread(fd, length, offset)):
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)
