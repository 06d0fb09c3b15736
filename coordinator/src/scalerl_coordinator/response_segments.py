"""The byte layout of the response store, as pure functions.

A segment file is a header and frames, all little-endian. A frame is one group of responses to one prompt::

    header   magic 8 | number u64 | identity 32 | crc32 u32
    frame    magic 4 | blob_bytes u32 | blob_crc u32 | task u32 | prompt u64 | digest 8 | visit u32 | responses u32
             | crc32 u32 | blob

The last crc32 covers only the frame's head, so that a scan can index a segment without reading blobs; a blob is checked when
it is read. The journal's frames (:mod:`.frames`) have one checksum for both, because its recovery reads everything.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

SEGMENT_MAGIC: Final = b"SCRLHST2"
_SEGMENT: Final = struct.Struct("<8sQ32s")
FRAME_MAGIC: Final = b"\xf7RS\x1b"
_HEAD: Final = struct.Struct("<4sIIIQ8sII")
_CRC: Final = struct.Struct("<I")
SEGMENT_HEADER_BYTES: Final = _SEGMENT.size + _CRC.size
HEAD_BYTES: Final = _HEAD.size + _CRC.size
_SEARCH_BYTES: Final = 2**20

Read = Callable[[int, int], bytes]
"""Reads bytes at an offset, given their number; returns fewer at the end of the file."""


class Head(NamedTuple):
    """The head of a frame, which describes its blob."""

    blob_bytes: int
    blob_crc: int
    task: int
    prompt: int
    """With ``task``, the :class:`~scalerl_api.wire.PromptRef` of the training prompt."""
    digest: bytes
    """Digest of the prompt's tokens, 8 bytes."""
    visit: int
    """Number of earlier groups of the prompt."""
    responses: int
    """Number of responses in the blob."""

    @property
    def frame_bytes(self) -> int:
        return HEAD_BYTES + self.blob_bytes


def encode_segment_header(number: int, identity: bytes) -> bytes:
    """The first bytes of segment ``number``; ``identity`` has 32 bytes."""
    header = _SEGMENT.pack(SEGMENT_MAGIC, number, identity)
    return header + _CRC.pack(zlib.crc32(header))


def decode_segment_header(data: bytes, number: int) -> bytes | None:
    """The identity of segment ``number``; empty for another release's format, None if ``data`` has no valid header."""
    if len(data) < SEGMENT_HEADER_BYTES:
        return None
    family = len(SEGMENT_MAGIC) - 1
    if data[:family] == SEGMENT_MAGIC[:family] and data[family] != SEGMENT_MAGIC[family]:
        return b""
    magic, found, identity = _SEGMENT.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _SEGMENT.size)
    if (magic, found) != (SEGMENT_MAGIC, number) or zlib.crc32(data[: _SEGMENT.size]) != crc:
        return None
    return bytes(identity)


def encode_frame(head: Head, blob: bytes) -> bytes:
    """One frame. ``head.blob_bytes`` and ``head.blob_crc`` are ignored and computed from the blob."""
    packed = _HEAD.pack(FRAME_MAGIC, len(blob), zlib.crc32(blob), *head[2:])
    return b"".join((packed, _CRC.pack(zlib.crc32(packed)), blob))


def decode_head(data: bytes) -> Head | None:
    """The head at the start of ``data``; None if there is no undamaged one."""
    if len(data) < HEAD_BYTES or data[:4] != FRAME_MAGIC:
        return None
    (crc,) = _CRC.unpack_from(data, _HEAD.size)
    if zlib.crc32(data[: _HEAD.size]) != crc:
        return None
    return Head(*_HEAD.unpack_from(data)[1:])


def decode_frame(data: bytes) -> tuple[Head, bytes] | None:
    """The single frame in ``data``; None if it is damaged."""
    head = decode_head(data)
    if head is None or head.frame_bytes != len(data):
        return None
    blob = data[HEAD_BYTES:]
    return (head, blob) if zlib.crc32(blob) == head.blob_crc else None


def scan(read: Read, size: int) -> Iterator[tuple[int, Head | None]]:
    """The heads of a segment's frames with their offsets, in order; None for each damaged range.

    ``size`` is that of the file. The last frame may be incomplete: its head is yielded although the blob exceeds the file.
    """
    offset = SEGMENT_HEADER_BYTES
    while offset < size:
        head = decode_head(read(offset, HEAD_BYTES))
        yield offset, head
        offset = _next_head(read, offset + 1, size) if head is None else offset + head.frame_bytes


def _next_head(read: Read, offset: int, size: int) -> int:
    """Offset of the next undamaged head, or ``size``."""
    while offset < size:
        data = read(offset, _SEARCH_BYTES)
        at = data.find(FRAME_MAGIC)
        while at >= 0:
            if decode_head(read(offset + at, HEAD_BYTES)) is not None:
                return offset + at
            at = data.find(FRAME_MAGIC, at + 1)
        if len(data) < _SEARCH_BYTES:
            break
        offset += len(data) - len(FRAME_MAGIC) + 1  # the magic may straddle two reads
    return size
