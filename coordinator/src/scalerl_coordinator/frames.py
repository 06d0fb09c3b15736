"""The journal's byte layout, as pure functions.

A segment file is a header (8 bytes magic, u64 segment number) and frames, all little-endian::

    magic 4 | header_len u32 | blob_len u32 | synced u64 | crc32 u32 | header | blob

``header`` is a record, ``blob`` the tokens of a group or nothing; the crc covers everything except itself. ``synced`` is the
number of bytes of this segment that were on disk when the frame was written. It distinguishes a partial tail from damage:
bytes below the ``synced`` of a later frame were acknowledged and must be intact; bytes above it were not acknowledged, and
may be incomplete in any order after a power failure.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

SEGMENT_MAGIC: Final = b"SCRLJNL1"
SEGMENT_HEADER: Final = struct.Struct("<8sQ")
FRAME_MAGIC: Final = b"\xf7RL\x1a"
_HEAD: Final = struct.Struct("<4sIIQ")
_CRC: Final = struct.Struct("<I")
OVERHEAD: Final = _HEAD.size + _CRC.size

SNAPSHOT_MAGIC: Final = b"SCRLSNP1"
_SNAPSHOT: Final = struct.Struct("<8sQI")

Buffer = bytes | memoryview


class CorruptJournal(Exception):
    """Acknowledged bytes are damaged. The message has the file, the offset and the remedy."""

    def __init__(self, name: str, offset: int, problem: str) -> None:
        super().__init__(
            f"{name}, offset {offset}: {problem}; acknowledged rollouts would be lost. Restore the coordinator's "
            f"directory from a backup, or empty it: the trainer's newest checkpoint then restores the state"
        )
        self.name = name
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Frame:
    """One valid frame: its position and its two parts."""

    offset: int
    end: int
    header: memoryview
    blob: memoryview


def segment_header(number: int) -> bytes:
    """The first bytes of segment ``number``."""
    return SEGMENT_HEADER.pack(SEGMENT_MAGIC, number)


def encode_frame(header: Buffer, blob: Buffer, synced: int) -> list[Buffer]:
    """The parts of one frame, in the order in which to write them."""
    head = _HEAD.pack(FRAME_MAGIC, len(header), len(blob), synced)
    crc = zlib.crc32(blob, zlib.crc32(header, zlib.crc32(head)))
    return [head, _CRC.pack(crc), header, blob]


def frame_bytes(header: Buffer, blob: Buffer) -> int:
    return OVERHEAD + len(header) + len(blob)


def _frame_at(data: memoryview, offset: int) -> tuple[Frame, int] | None:
    """The frame at ``offset`` and its ``synced``; None if there is no complete, undamaged frame."""
    if offset + OVERHEAD > len(data):
        return None
    magic, header_len, blob_len, synced = _HEAD.unpack_from(data, offset)
    end = offset + OVERHEAD + header_len + blob_len
    if magic != FRAME_MAGIC or end > len(data):
        return None
    (crc,) = _CRC.unpack_from(data, offset + _HEAD.size)
    body = data[offset + OVERHEAD : end]
    if zlib.crc32(body, zlib.crc32(data[offset : offset + _HEAD.size])) != crc:
        return None
    return Frame(offset, end, body[:header_len], body[header_len:]), synced


def read_frame(data: Buffer, name: str, offset: int) -> Frame:
    """Decode the single frame in ``data``. ``name`` and ``offset``, where it was read, are for the error.

    Raises:
        CorruptJournal: ``data`` is not one undamaged frame.
    """
    found = _frame_at(memoryview(data), 0)
    if found is None or found[0].end != len(data):
        raise CorruptJournal(name, offset, "a group's frame is damaged (bad length or checksum)")
    return found[0]


def read_segment(data: memoryview, name: str, number: int, *, last: bool) -> Iterator[Frame]:
    """The frames of a segment, in order.

    Args:
        data: the whole file.
        name: its name, for errors.
        number: the number in the file's name.
        last: whether it is the last segment, whose tail may be partial; the iteration then ends before the partial frame.

    Raises:
        CorruptJournal: acknowledged bytes are damaged, or any bytes of a segment that is not the last.
    """
    if len(data) < SEGMENT_HEADER.size:
        if last:
            return
        raise CorruptJournal(name, 0, "the segment's header is missing")
    magic, found_number = SEGMENT_HEADER.unpack_from(data, 0)
    if magic != SEGMENT_MAGIC or found_number != number:
        raise CorruptJournal(name, 0, "not a segment of this journal (magic or number differ)")
    offset = SEGMENT_HEADER.size
    while offset < len(data):
        found = _frame_at(data, offset)
        if found is None:
            if not last:
                raise CorruptJournal(
                    name, offset, "damaged frame (bad length or checksum) in a finished segment"
                )
            if _acknowledged_after(data, offset):
                raise CorruptJournal(name, offset, "damaged frame (bad length or checksum) before good ones")
            return
        frame, _ = found
        yield frame
        offset = frame.end


def _acknowledged_after(data: memoryview, offset: int) -> bool:
    """Whether a later frame records that the bytes at ``offset`` were on disk."""
    whole = bytes(data[offset:])
    at = whole.find(FRAME_MAGIC, 1)
    while at >= 0:
        found = _frame_at(data, offset + at)
        if found is not None and found[1] > offset:
            return True
        at = whole.find(FRAME_MAGIC, at + 1)
    return False


def encode_snapshot(payload: bytes) -> bytes:
    """The contents of a snapshot file."""
    return _SNAPSHOT.pack(SNAPSHOT_MAGIC, len(payload), zlib.crc32(payload)) + payload


def decode_snapshot(data: bytes, name: str) -> bytes:
    """The payload of a snapshot file. Raises CorruptJournal if it is damaged: the file is renamed only when complete."""
    if len(data) >= _SNAPSHOT.size:
        magic, length, crc = _SNAPSHOT.unpack_from(data, 0)
        payload = data[_SNAPSHOT.size :]
        if magic == SNAPSHOT_MAGIC and length == len(payload) and zlib.crc32(payload) == crc:
            return payload
    raise CorruptJournal(name, 0, "the snapshot is damaged (bad length or checksum)")
