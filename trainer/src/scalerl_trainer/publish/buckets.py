"""Tensors into the flat buffers that :mod:`scalerl_api.weights` lays out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scalerl_api.weights import Bucket, tensor_bytes, trailer
from scalerl_api.wire import TensorSpec
from scalerl_trainer.publish.errors import SourceError

_CHECKSUM_CHUNK_WORDS = 1 << 18

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What the manifest says of a tensor (its shape must be the full one)."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def checksum_u8(payload_u8: torch.Tensor) -> int:
    """:func:`scalerl_api.weights.checksum` of a flat uint8 tensor, on its own device.

    ``Σ (2i + 1) x_i mod 2^64``: int64 arithmetic of torch wraps. In chunks, so that a large bucket
    costs no second one in memory.
    """
    words = payload_u8.view(torch.int64)
    weights = torch.arange(1, 2 * min(_CHECKSUM_CHUNK_WORDS, words.numel()) + 1, 2, device=payload_u8.device)
    total = torch.zeros((), dtype=torch.int64, device=payload_u8.device)
    for start in range(0, words.numel(), _CHECKSUM_CHUNK_WORDS):
        chunk = words[start : start + _CHECKSUM_CHUNK_WORDS]
        total += torch.dot(chunk, weights[: chunk.numel()]) + 2 * start * chunk.sum()
    return int(total.item())


def fill(bucket: Bucket, version: int, tensors: NamedTensors, buffer_u8: torch.Tensor) -> torch.Tensor:
    """Write the next tensors of the stream into ``buffer_u8`` as ``bucket``; returns the bytes to broadcast.

    ``tensors`` comes in the manifest's order; exactly the bucket's are taken from it. Padding is zero.

    Raises:
        SourceError: the stream ends early, or its next tensor is not the one of the manifest.
    """
    filled = buffer_u8[: bucket.total_bytes]
    end = 0
    for slot in bucket.slots:
        name, tensor = next(tensors, (None, None))
        if name is None or tensor is None:
            raise SourceError(f"the weights ended before {slot.tensor.name!r}")
        found = tensor_spec(name, tensor)
        if found != slot.tensor:
            raise SourceError(f"the manifest says {slot.tensor}, the weights have {found}")
        filled[end : slot.offset].zero_()
        end = slot.offset + tensor_bytes(slot.tensor)
        filled[slot.offset : end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    payload, tail = filled[: bucket.payload_bytes], filled[bucket.payload_bytes :]
    payload[end:].zero_()
    words = trailer(version, bucket.index, checksum_u8(payload))
    tail.view(torch.int64).copy_(torch.tensor(words, dtype=torch.int64))
    return filled
