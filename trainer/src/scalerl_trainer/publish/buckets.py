"""Fills the flat buffers that :mod:`scalerl_api.weight_layout` lays out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scalerl_api.weight_layout import Bucket, tensor_bytes, tensor_checksum, trailer
from scalerl_api.wire import TensorSpec
from scalerl_trainer.errors import TrainerError

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class SourceError(TrainerError):
    """The stream of weights differs from its manifest; retrying does not help."""


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The manifest entry of a whole tensor."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


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
    words = trailer(version, bucket.index, tensor_checksum(torch, payload))
    tail.view(torch.int64).copy_(torch.tensor(words, dtype=torch.int64))
    return filled
