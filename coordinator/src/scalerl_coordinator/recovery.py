"""Reads a journal's directory: its snapshot, the records after it, and the positions of the groups' blobs."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scalerl_coordinator import frames
from scalerl_coordinator.frames import CorruptJournal


class Location(msgspec.Struct, frozen=True, array_like=True):
    """Position of a blob's frame in the journal, in bytes."""

    segment: int
    offset: int
    length: int


class Snapshot(msgspec.Struct, frozen=True):
    """Contents of a snapshot file: the owner's state, and the positions of the blobs that it needs."""

    state: bytes
    blobs: dict[str, Location]


@dataclass(frozen=True, slots=True)
class Layout:
    """File names in one journal's directory."""

    directory: Path

    def path(self, kind: str, number: int) -> Path:
        return self.directory / f"{kind}-{number:08d}"

    def numbered(self, kind: str) -> list[int]:
        names = (path.name.removeprefix(f"{kind}-") for path in self.directory.glob(f"{kind}-*"))
        return sorted(int(name) for name in names if name.isdigit())


class BlobIndex:
    """Positions of blobs by key. Thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._at: dict[str, Location] = {}
        self._lock = threading.Lock()

    def put(self, key: str, location: Location) -> None:
        with self._lock:
            self._at[key] = location

    def forget(self, keys: Iterable[str]) -> None:
        """Drop these blobs. A later rotation deletes segments without indexed blobs."""
        with self._lock:
            for key in keys:
                self._at.pop(key, None)

    def replace(self, locations: dict[str, Location]) -> None:
        with self._lock:
            self._at = locations

    def copy(self) -> dict[str, Location]:
        with self._lock:
            return dict(self._at)

    def locations(self, keys: Iterable[str]) -> list[Location]:
        """Positions of the blobs of ``keys``. Raises KeyError for a key that was dropped or never added."""
        with self._lock:
            return [self._at[key] for key in keys]

    def read(self, keys: Iterable[str]) -> list[bytes]:
        """The blobs of ``keys``, checked against their checksums. Blocks on the disk.

        Raises:
            KeyError: a key was dropped or never added.
            CorruptJournal: a blob is damaged.
            OSError: a segment cannot be read.
        """
        keys = list(keys)
        files: dict[int, int] = {}
        try:
            blobs = []
            for at in self.locations(keys):
                path = self._layout.path("segment", at.segment)
                if at.segment not in files:
                    files[at.segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                data = os.pread(files[at.segment], at.length, at.offset)
                blobs.append(bytes(frames.read_frame(data, str(path), at.offset).blob))
            return blobs
        except FileNotFoundError:
            # Raises KeyError if the blob was dropped, and its segment deleted, in the meantime.
            self.locations(keys)
            raise
        finally:
            for fd in files.values():
                os.close(fd)


class Recovery:
    """Reads the newest snapshot, and iterates over the records after it, in order.

    The iteration yields the header of each record and its position. The caller sets the key of each blob in :attr:`blobs` while it
    iterates, and finally calls :meth:`retain`, which passes the positions of the blobs to the journal.

    Args:
        until: for a running journal, its last segment and the number of its synced bytes; later bytes, which a failed write
            may have left, are ignored.

    Raises:
        CorruptJournal, OSError: here and during the iteration.
    """

    def __init__(self, layout: Layout, blobs: BlobIndex, until: tuple[int, int] | None = None) -> None:
        self._layout, self._index, self._until = layout, blobs, until
        newest = None if until is None else until[0]
        snapshots, segments = (
            [n for n in layout.numbered(kind) if newest is None or n <= newest]
            for kind in ("snapshot", "segment")
        )
        self.snapshot: bytes | None = None
        """The owner's state; None without a snapshot."""
        self.blobs: dict[str, Location] = {}
        """Positions of the blobs found so far, by key."""
        first = 1
        if snapshots:
            first = snapshots[-1]
            path = layout.path("snapshot", first)
            try:
                snapshot = msgspec.msgpack.decode(
                    frames.decode_snapshot(path.read_bytes(), str(path)), type=Snapshot
                )
            except msgspec.DecodeError as error:
                raise CorruptJournal(str(path), 0, f"the snapshot cannot be decoded: {error}") from error
            self.snapshot, self.blobs = snapshot.state, dict(snapshot.blobs)
        self._live = [n for n in segments if n >= first]
        for number, following in itertools.pairwise(self._live):
            if following != number + 1:
                raise CorruptJournal(str(layout.path("segment", number + 1)), 0, "the segment is missing")
        if self._live[:1] != [first] and (snapshots or segments):
            raise CorruptJournal(str(layout.path("segment", first)), 0, "the segment is missing")
        self.tail = (self._live[-1] if self._live else first, 0)
        """The last segment and, after the iteration, the number of its valid bytes."""

    def __iter__(self) -> Iterator[tuple[memoryview, Location]]:
        for number in self._live:
            path = self._layout.path("segment", number)
            data = memoryview(path.read_bytes())
            if self._until is not None and number == self._until[0]:
                data = data[: self._until[1]]
            end = frames.SEGMENT_HEADER.size if len(data) >= frames.SEGMENT_HEADER.size else 0
            for frame in frames.read_segment(data, str(path), number, last=number == self._live[-1]):
                end = frame.end
                yield frame.header, Location(number, frame.offset, end - frame.offset)
            self.tail = (number, end)

    def retain(self, keys: Iterable[str]) -> None:
        """Keep only the blobs of ``keys``. Raises CorruptJournal if one is missing."""
        wanted = set(keys)
        missing = wanted - self.blobs.keys()
        if missing:
            raise CorruptJournal(
                str(self._layout.directory), 0, f"the groups of {len(missing)} leases are not in any segment"
            )
        blobs = {key: at for key, at in self.blobs.items() if key in wanted}
        for segment in sorted({at.segment for at in blobs.values()}):
            path = self._layout.path("segment", segment)
            if not path.exists():
                raise CorruptJournal(str(path), 0, "the segment is missing, and groups in it are needed")
        self._index.replace(blobs)
