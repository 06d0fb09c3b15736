"""Fills the flat buffers that :mod:`scalerl_api.weight_layout` lays out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scalerl_api.weight_layout import Bucket, tensor_bytes, trailer
from scalerl_api.wire import TensorSpec
from scalerl_trainer.errors import TrainerError

_COLUMNS = 1 << 14
"""Words per row (128 KiB) when a buffer is summed as a matrix."""

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class SourceError(TrainerError):
    """The stream of weights differs from its manifest; retrying does not help."""


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The manifest entry of a whole tensor."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def checksum_u8(payload_u8: torch.Tensor) -> int:
    """:func:`scalerl_api.weight_layout.checksum` of a flat uint8 tensor, computed on the tensor's device.

    The checksum is ``Σ (2i + 1) x_i mod 2^64`` over 64-bit words (torch's int64 arithmetic wraps). With the words as a matrix
    of C columns, i = rC + c, it equals ``Σ_c (2c + 1) Σ_r x_rc + Σ_r 2rC Σ_c x_rc``, plus the words after the last whole row.
    These sums read the buffer twice and write almost nothing. A dot product would be simpler, but torch has none for integers
    on CUDA.
    """
    words = payload_u8.view(torch.int64)
    whole = words.numel() // _COLUMNS * _COLUMNS
    rows, rest = words[:whole].view(-1, _COLUMNS), words[whole:]
    total = (
        _weighted_sum(rows.sum(0), 1, 2)
        + _weighted_sum(rows.sum(1), 0, 2 * _COLUMNS)
        + _weighted_sum(rest, 2 * whole + 1, 2)
    )
    return int(total.item())


def _weighted_sum(values: torch.Tensor, first: int, step: int) -> torch.Tensor:
    """``Σ (first + step·i) values_i``."""
    stop = first + step * values.numel()
    return (values * torch.arange(first, stop, step, device=values.device)).sum()


def fill(bucket: Bucket, version: int, tensors: NamedTensors, buffer_u8: torch.Tensor) -> torch.Tensor:
    """Write the next tensors of the stream into ``buffer_u8``, in the layout of ``bucket``; returns the part to broadcast.

    ``tensors`` is in the manifest's order, and exactly the bucket's tensors are consumed. Padding is filled with zeros.

    Raises:
        SourceError: the stream ends early, or its next tensor differs from the manifest.
    """
    filled = buffer_u8[: bucket.total_bytes]
    end = 0
    for slot in bucket.slots:
        name, tensor = next(tensors, (None, None))
        if name is None or tensor is None:
            raise SourceError(f"the stream of weights ended before {slot.tensor.name!r}")
        found = tensor_spec(name, tensor)
        if found != slot.tensor:
            raise SourceError(f"the manifest has {slot.tensor}, but the stream of weights has {found}")
        filled[end : slot.offset].zero_()
        end = slot.offset + tensor_bytes(slot.tensor)
        filled[slot.offset : end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    payload, tail = filled[: bucket.payload_bytes], filled[bucket.payload_bytes :]
    payload[end:].zero_()
    words = trailer(version, bucket.index, checksum_u8(payload))
    tail.view(torch.int64).copy_(torch.tensor(words, dtype=torch.int64))
    return filled
