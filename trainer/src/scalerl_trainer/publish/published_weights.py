"""What is published: a stream of whole weights or of adapters, its manifest, and the buckets of :mod:`scalerl_api.weight_layout`
that it fills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from scalerl_api import wire
from scalerl_api.spec import RunSpec
from scalerl_api.weight_layout import Bucket, tensor_bytes, tensor_checksum, trailer
from scalerl_api.wire import TensorSpec
from scalerl_trainer.engine.weights import Weights
from scalerl_trainer.errors import TrainerError
from scalerl_trainer.models.lora import PUBLISHED, AdapterNames

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class SourceError(TrainerError):
    """The stream of weights differs from its manifest; retrying does not help."""


@dataclass(frozen=True)
class WeightSource:
    """The weights to publish."""

    manifest: list[wire.TensorSpec]
    """Names, dtypes and shapes of all tensors, in the order of the stream."""
    stream: Callable[[], NamedTensors]
    """Called for each attempt, once its group is open. The stream is always exhausted, because under ZeRO-3 it is a
    collective of the trainer's ranks."""
    adapter_scale: float = 0.0
    """See :class:`scalerl_api.wire.WeightReceive`."""


def weights_to_publish(
    spec: RunSpec,
    weights: Weights,
    whole: Callable[[], NamedTensors],
    adapters: Callable[[AdapterNames], NamedTensors],
) -> WeightSource:
    """The current weights, or the adapters, as they are published.

    Args:
        weights: of which names and shapes are read.
        whole: streams whole weights, with merged adapters.
        adapters: streams the adapters.
    """
    lora, only_adapters = spec.trainer.lora, spec.trainer.publishes_adapters
    shapes = weights.adapter_shapes(PUBLISHED) if only_adapters else weights.checkpoint_shapes()
    manifest = [wire.TensorSpec(name, spec.model.dtype, list(shape)) for name, shape in shapes]
    if lora is not None and only_adapters:
        return WeightSource(manifest, partial(adapters, PUBLISHED), lora.alpha / lora.rank)
    return WeightSource(manifest, whole)


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
