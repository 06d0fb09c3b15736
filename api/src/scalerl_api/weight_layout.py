"""Byte layout of the weights that the trainer broadcasts to the generators; both sides compute it.

A publish is a *manifest* (every tensor's name, dtype and shape, in sending order) cut into
*buckets*. A bucket is one flat buffer and one broadcast: the tensors' bytes back to back, each
starting at a multiple of :data:`ALIGNMENT`, then a trailer of four 64-bit words with the weight
version, the index of the bucket and the checksum of its payload. Trainer and generator compute the
layout from the same manifest, so only the manifest is exchanged beforehand. A receiver rejects a
bucket with another version, index or checksum than expected.

Pure Python: this module does not import torch. :func:`tensor_checksum` gets it as an argument; tests
compare it with :func:`checksum`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scalerl_api.wire import TensorSpec

ALIGNMENT = 16
"""Bytes. Every tensor of a bucket starts at a multiple of this number, and the payload ends at one."""

TRAILER_WORDS = 4
TRAILER_BYTES = 8 * TRAILER_WORDS
"""Size of the trailer of every bucket: magic, version, bucket index, checksum (little-endian signed 64-bit words)."""

TRAILER_MAGIC = 0x5CA1E_B0C4E7
"""First word of a trailer; it marks a buffer that a broadcast has written."""

_COLUMNS = 1 << 14
"""Words per row (128 KiB) when a buffer is summed as a matrix."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}
"""Bytes per element of the dtypes that can be published, by torch's names."""


class BucketMismatch(RuntimeError):
    """The received bytes are not the expected bucket: wrong order, wrong version, or corrupted."""


def tensor_bytes(tensor: TensorSpec) -> int:
    """Size of a tensor without padding.

    Raises:
        ValueError: a dtype not in :data:`DTYPE_BYTES`, or a negative size.

    >>> tensor_bytes(TensorSpec("w", "bfloat16", [3, 5])), tensor_bytes(TensorSpec("scale", "float32", []))
    (30, 4)
    """
    if tensor.dtype not in DTYPE_BYTES:
        raise ValueError(
            f"tensor {tensor.name!r}: dtype {tensor.dtype!r} is not one of {', '.join(DTYPE_BYTES)}"
        )
    if any(n < 0 for n in tensor.shape):
        raise ValueError(f"tensor {tensor.name!r}: negative size in shape {tensor.shape}")
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


@dataclass(frozen=True, slots=True)
class Slot:
    """Position of a tensor in its bucket: ``buffer[offset : offset + tensor_bytes(tensor)]``."""

    tensor: TensorSpec
    """Name, dtype and shape."""
    offset: int
    """First byte in the bucket, a multiple of :data:`ALIGNMENT`."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One broadcast: ``payload_bytes`` of tensors (padded to :data:`ALIGNMENT`), then the trailer."""

    index: int
    """Position of the bucket in the publish, from 0."""
    slots: tuple[Slot, ...]
    """Its tensors, in the order of the manifest."""
    payload_bytes: int
    """Bytes before the trailer, padding included."""

    @property
    def total_bytes(self) -> int:
        """Size of the buffer to broadcast."""
        return self.payload_bytes + TRAILER_BYTES


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of :data:`ALIGNMENT`.

    >>> aligned(0), aligned(1), aligned(16), aligned(17)
    (0, 16, 16, 32)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def lay_out(manifest: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut a manifest into buckets whose payload is at most ``bucket_bytes``, in the manifest's order.

    A tensor larger than ``bucket_bytes`` gets a bucket of its own, so the largest buffer is
    ``max(bucket_bytes, largest tensor)`` plus the trailer.

    Raises:
        ValueError: an empty manifest, a name that comes twice, a tensor that
            :func:`tensor_bytes` refuses, or ``bucket_bytes`` below 1.

    >>> w, b = TensorSpec("w", "float32", [3, 5]), TensorSpec("b", "bfloat16", [3])
    >>> [(s.tensor.name, s.offset) for s in lay_out([w, b], 1024)[0].slots]
    [('w', 0), ('b', 64)]
    >>> [bucket.payload_bytes for bucket in lay_out([w, b], 64)]
    [64, 16]
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    filled = 0
    seen: set[str] = set()
    for tensor in manifest:
        if tensor.name in seen:
            raise ValueError(f"tensor {tensor.name!r} is in the manifest twice")
        seen.add(tensor.name)
        size = aligned(tensor_bytes(tensor))
        if slots and filled + size > bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(slots), filled))
            slots, filled = [], 0
        slots.append(Slot(tensor, filled))
        filled += size
    if not slots:
        raise ValueError("the manifest is empty: there is nothing to publish")
    buckets.append(Bucket(len(buckets), tuple(slots), filled))
    return tuple(buckets)


def checksum(payload: bytes | bytearray | memoryview) -> int:
    r"""The checksum of a payload, :math:`\sum_i (2i + 1)\, x_i \bmod 2^{64}`, as a signed 64-bit integer.

    :math:`x_i` are the payload's little-endian 64-bit words. Because the weights are odd, the checksum
    detects any change of one word. Because the weights are distinct, it detects an exchange of two words,
    unless twice the product of their difference and their distance is a multiple of 2⁶⁴ (neighbours that
    differ in bit 63 alone). Wrapping integer arithmetic gives the same value on every device in any order
    of summation. The checksum detects drift and corruption, not deliberate manipulation.

    This function is the slow reference of :func:`tensor_checksum`.

    >>> checksum(bytes(16)), checksum((5).to_bytes(8, "little") + (7).to_bytes(8, "little"))
    (0, 26)
    """
    if len(payload) % ALIGNMENT:
        raise ValueError(f"a payload is a multiple of {ALIGNMENT} bytes long, got {len(payload)}")
    total = 0
    for i in range(0, len(payload), 8):
        total += (i // 4 + 1) * int.from_bytes(payload[i : i + 8], "little", signed=True)
    return signed64(total)


def tensor_checksum(torch: Any, payload_u8: Any) -> int:
    """:func:`checksum` of a flat uint8 tensor, computed on the tensor's device.

    torch's int64 arithmetic wraps. With the words as a matrix of C columns, i = rC + c, the checksum equals
    ``Σ_c (2c + 1) Σ_r x_rc + Σ_r 2rC Σ_c x_rc``, plus the words after the last whole row. These sums read the buffer twice and write
    almost nothing. A dot product would be simpler, but torch has none for integers on CUDA. The number of operations does not depend
    on the size: generation is paused meanwhile, and on a GPU each one is a launch.

    Args:
        torch: the module, on which this member does not depend.
    """

    def weighted_sum(values: Any, first: int, step: int) -> Any:
        """``Σ (first + step·i) values_i``."""
        stop = first + step * values.numel()
        return (values * torch.arange(first, stop, step, device=values.device)).sum()

    words = payload_u8.view(torch.int64)
    whole = words.numel() // _COLUMNS * _COLUMNS
    rows, rest = words[:whole].view(-1, _COLUMNS), words[whole:]
    total = (
        weighted_sum(rows.sum(0), 1, 2)
        + weighted_sum(rows.sum(1), 0, 2 * _COLUMNS)
        + weighted_sum(rest, 2 * whole + 1, 2)
    )
    return int(total.item())


def signed64(value: int) -> int:
    """``value`` modulo 2**64, in ``[-2**63, 2**63)``: the result of wrapping 64-bit arithmetic."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def trailer(version: int, bucket_index: int, payload_checksum: int) -> tuple[int, int, int, int]:
    """The four signed 64-bit words that follow a bucket's payload."""
    return (TRAILER_MAGIC, version, bucket_index, payload_checksum)


def check_trailer(words: Sequence[int], version: int, bucket_index: int, payload_checksum: int) -> None:
    """Compare a received trailer with the expected version and index and the computed checksum.

    Raises:
        BucketMismatch: a word differs; the message names it.
    """
    magic, sent_version, sent_index, sent_checksum = words
    where = f"bucket {bucket_index} of version {version}"
    if magic != TRAILER_MAGIC:
        raise BucketMismatch(f"{where}: the buffer does not end in a bucket's trailer (word {magic:#x})")
    if (sent_version, sent_index) != (version, bucket_index):
        raise BucketMismatch(f"{where}: the sender sent bucket {sent_index} of version {sent_version}")
    if sent_checksum != payload_checksum:
        raise BucketMismatch(
            f"{where}: checksum mismatch: {sent_checksum} was sent, the bytes received sum to {payload_checksum}"
        )
