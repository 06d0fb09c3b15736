"""Format of the files through which the trainer publishes weights with ``weightSync.backend: Files``.

A file has a version in the buckets of :mod:`.weight_layout`: of a *base* each whole, with its trailer; of a *delta* each as its changes
since the version that was written before, or whole where that takes fewer bytes. After the buckets come the header as JSON, its
length and digest, and a magic word, so a file that was cut off has no end. A file gets its name once it is complete, and never changes.

The changes of a bucket are of its payload as little-endian 16-bit words, an element of bfloat16 each::

    trailer            of the bucket after the change, so the receiver verifies its result, not the changes
    three uint64       number of changed words, bytes of the gaps, compressed bytes of the gaps
    gaps               zlib; a byte below 255 is a changed word ``byte + 1`` words further, 255 is 255 words without one
    low bytes          zlib, their length first (uint64); of the differences new - old as int16, zigzag: 0, -1, 1, -2, … are 0, 1, 2, 3, …
    high bytes         zlib

At small learning rates few elements change, most of them to a neighbouring bfloat16, whose bits differ by one as an integer, so almost
all high bytes are 0: of a version at 5e-7, .9 % of the bytes are left (``benchmarks/weight_deltas.py``).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence

import msgspec

from scalerl_api.weight_layout import TRAILER_BYTES
from scalerl_api.wire import TensorSpec

MAGIC = b"SCALERW1"
"""Its last byte is the version of the format."""
END = struct.Struct("<Q16s8s")
"""Last bytes of a file: length and digest of the header, the magic word."""
COUNTS = struct.Struct("<QQQ")
LENGTH = struct.Struct("<Q")
CHANGES_OFFSET = TRAILER_BYTES + COUNTS.size
"""Of the gaps in a bucket's changes."""
FAR = 255
"""Byte of a gap that is longer."""
MAX_HEADER_BYTES = 64 << 20
STORED = "weights"
"""Folder with the attempts' folders in the prefix of an object store (``weightSync.to``)."""


class WeightFileError(RuntimeError):
    """A file that cannot be used: absent, cut off, damaged, of another version, or of another writer."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file has."""

    folder: str
    """Name of the folder of the attempt that wrote it."""
    version: int
    previous: int | None
    """The version of which a delta has the changes; None for a base."""
    layout: str
    """:func:`layout_digest` of its tensors."""
    bucket_bytes: list[int]
    """Bytes of each bucket in the file."""
    whole: list[bool]
    """Which of them are whole."""


FILE_NAME = re.compile(r"(?:base|delta)-\d{8,}", re.ASCII)


def base_name(version: int) -> str:
    return f"base-{version:08d}"


def delta_name(version: int) -> str:
    return f"delta-{version:08d}"


def stored_path(folder: str, name: str) -> str:
    return f"{STORED}/{folder}/{name}"


def layout_digest(tensors: Sequence[TensorSpec], bucket_bytes: int) -> str:
    return hashlib.blake2b(msgspec.json.encode([tensors, bucket_bytes]), digest_size=16).hexdigest()


def encode_end(header: Header) -> bytes:
    """What follows the buckets of a file."""
    encoded = msgspec.json.encode(header)
    return encoded + END.pack(len(encoded), hashlib.blake2b(encoded, digest_size=16).digest(), MAGIC)


def header_bytes(end: bytes, file_bytes: int) -> tuple[int, bytes]:
    """Length and digest of the header, from a file's last bytes.

    Raises:
        WeightFileError: they are not the end of such a file.
    """
    if len(end) != END.size or end[-len(MAGIC) :] != MAGIC:
        raise WeightFileError("it is cut off, of another format, or no file with weights")
    length, digest, _ = END.unpack(end)
    if length > min(MAX_HEADER_BYTES, file_bytes - END.size):
        raise WeightFileError(f"its header would have {length} bytes")
    return length, digest


def decode_header(encoded: bytes, digest: bytes, file_bytes: int) -> Header:
    """The header of a file of ``file_bytes``.

    Raises:
        WeightFileError: it is damaged, or does not describe a file of this size.
    """
    if hashlib.blake2b(encoded, digest_size=16).digest() != digest:
        raise WeightFileError("its header is damaged")
    try:
        header = msgspec.json.decode(encoded, type=Header)
    except msgspec.DecodeError as error:
        raise WeightFileError(f"its header cannot be read: {error}") from error
    if len(header.whole) != len(header.bucket_bytes) or min(header.bucket_bytes, default=0) < 0:
        raise WeightFileError("its header contradicts itself")
    if sum(header.bucket_bytes) + len(encoded) + END.size != file_bytes:
        raise WeightFileError(f"it has {file_bytes} bytes, its header describes another size")
    return header
