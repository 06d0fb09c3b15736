"""What the publishers of the weights have in common: their interface, what they publish, how it fills the buckets of
:mod:`scalerl_api.weight_layout`, and what they measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
import torch

from scalerl_api import wire
from scalerl_api.spec import RunSpec
from scalerl_api.weight_layout import Bucket, tensor_bytes, tensor_checksum, trailer
from scalerl_api.wire import TensorSpec
from scalerl_trainer.engine.weights import Weights
from scalerl_trainer.errors import TrainerError
from scalerl_trainer.models.lora import PUBLISHED, AdapterNames

NamedTensors = Iterator[tuple[str, torch.Tensor]]

MAX_TIMEOUTS = 3.0
"""Limit of a publish with all its attempts, in multiples of the timeout; for files, of one call of the volume."""
WRITE_TIMEOUTS = 8.0
"""Limit of a write to files with all its attempts, which may read the weights for as long as it makes progress."""


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


@dataclass(frozen=True)
class Outcome:
    """Result of a publish."""

    version: int
    updated: list[str]
    """Ids of the members that received the version."""
    failed: list[str]
    """Ids of the members that did not."""
    error: str
    """Why the first of them did not; empty if all did."""
    stats: dict[str, float]
    """Statistics for the coordinator and metrics.jsonl."""
    kept: list[str] = field(default_factory=list)
    """Ids of the members that could not read the version, and generate with the one they have."""
    slow: bool = False
    """Whether one of these continues to read the version."""


@dataclass
class PhaseSeconds:
    """Duration of the sender's phases in one attempt, in seconds."""

    open: float = 0.0
    gather: float = 0.0
    send: float = 0.0


class Publisher(Protocol):
    """Executes the publishes of a run on rank 0; one for each ``weightSync.backend``."""

    def publish(
        self,
        version: int,
        weights: WeightSource,
        members: list[wire.Member],
        have_read: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Publish ``version`` to ``members``.

        Args:
            have_read: called once the weights may change.

        Raises:
            SourceError: the stream of weights differs from its manifest.
        """
        ...

    def close(self) -> None:
        """End what the publisher keeps from one publish to the next. At the end of the attempt."""
        ...


def decode_received(body: bytes) -> wire.WeightReceived:
    return msgspec.msgpack.decode(body, type=wire.WeightReceived)


def stats_of(
    received: list[wire.WeightReceived], clock: PhaseSeconds, total_seconds: float
) -> dict[str, float]:
    """Durations of the last attempt's phases, in seconds, for metrics.jsonl.

    ``open``, ``gather`` and ``send`` are measured by the sender, the others by each member, of which the slowest counts.
    ``gather`` overlaps with ``transfer`` except for the first bucket.
    """

    def slowest(seconds: Callable[[wire.WeightReceived], float]) -> float:
        return max((seconds(r) for r in received), default=0.0)

    return {
        "publish_seconds": total_seconds,
        "publish_open_seconds": clock.open,
        "publish_gather_seconds": clock.gather,
        "publish_send_seconds": clock.send,
        "publish_pause_seconds": slowest(lambda r: r.pause_seconds),
        "publish_transfer_seconds": slowest(lambda r: r.transfer_seconds),
        "publish_load_seconds": slowest(lambda r: r.load_seconds),
        "publish_resume_seconds": slowest(lambda r: r.resume_seconds),
    }


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
