"""Trainer → actor: weights on their way to a generator."""

from __future__ import annotations

from typing import Literal

from scalerl_api.wire.base import Struct


class GroupJoin(Struct, frozen=True, kw_only=True):
    """``POST /v1/weights/join``: become ``rank`` of a new process group; leaves any older one.

    All ranks begin with an all-reduce of a float32 one, so that the group's connections are open when this is answered.
    """

    epoch: int
    store_host: str
    store_port: int
    rank: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_seconds: float


class TensorSpec(Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: list[int]


class WeightReceive(Struct, frozen=True, kw_only=True):
    """``POST /v1/weights/receive``: pause, take version ``version`` over the group, resume."""

    epoch: int
    version: int
    tensors: list[TensorSpec]
    bucket_bytes: int
    timeout_seconds: float


class WeightReceived(Struct, frozen=True, kw_only=True):
    """Seconds by phase, as measured at the generator."""

    version: int
    pause_seconds: float
    transfer_seconds: float
    load_seconds: float
    resume_seconds: float


class Probe(Struct, frozen=True, kw_only=True):
    """``POST /v1/weights/probe``: score these sequences under the weights held now."""

    version: int
    sequences: list[bytes]
    prompt_tokens: list[int]


class Probed(Struct, frozen=True, kw_only=True):
    version: int
    logprobs: list[bytes]
    """Float32, of the tokens after each prompt."""
