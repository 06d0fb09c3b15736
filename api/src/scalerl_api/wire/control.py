"""Trainer → actor: transfer of weights to a generator."""

from __future__ import annotations

from typing import Literal

from scalerl_api.wire.base import Struct

GroupBackend = Literal["gloo", "nccl"]
"""Backend of the process group over which weights are sent."""


class GroupJoin(Struct, frozen=True, kw_only=True):
    """``POST /v1/weights/join``: join a new process group as ``rank`` and leave any older one.

    All ranks start with an all-reduce of the float32 number 1, and over NCCL broadcast the result from rank 0, so that the group's
    connections are open when the actor responds. NCCL connects the ranks of an algorithm when it is first used: the call then waits for all
    ranks, without a timeout, and a broadcast may have another algorithm than a small all-reduce.
    """

    epoch: int
    store_host: str
    store_port: int
    rank: int
    world_size: int
    backend: GroupBackend
    timeout_seconds: float


class TensorSpec(Struct, frozen=True, array_like=True):
    """A tensor of a publish; ``dtype`` is torch's name."""

    name: str
    dtype: str
    shape: list[int]


class WeightFiles(Struct, frozen=True, kw_only=True):
    """Where a version is read from (:mod:`scalerl_api.weight_files`)."""

    folder: str
    """Name of a folder below ``weights`` in the run's directory, or in ``to``."""
    base: int
    versions: list[int]
    """Versions that were written, ascending, up to the one to receive: each but the first has a delta from the one before."""
    to: str = ""
    """Prefix of a bucket, ``s3://bucket/prefix``, which is read with the generator's own credentials; empty: the run's directory."""


class WeightReceive(Struct, frozen=True, kw_only=True):
    """``POST /v1/weights/receive``: pause generation, receive weight version ``version`` over the group, resume. With ``files``, read
    it before the pause."""

    epoch: int
    version: int
    tensors: list[TensorSpec]
    bucket_bytes: int
    timeout_seconds: float
    adapter_scale: float = 0.0
    """If not 0, the tensors are adapters A and B of the base model's weights W, named ``<W>/lora_A`` and ``<W>/lora_B``, and the
    version's weights are ``W + adapter_scale · B A``."""
    files: WeightFiles | None = None
    """Without a process group; ``epoch`` then has no meaning."""


class WeightReceived(Struct, frozen=True, kw_only=True):
    """Duration of each phase of a weight update in seconds, measured by the generator."""

    version: int
    pause_seconds: float
    transfer_seconds: float
    load_seconds: float
    resume_seconds: float


class Probe(Struct, frozen=True, kw_only=True):
    """``POST /v1/weights/probe``: score these sequences under the server's present weights."""

    version: int
    """Weight version that the server must hold."""
    sequences: list[bytes]
    """Token ids of each sequence, prompt included: little-endian int32."""
    prompt_tokens: list[int]
    """Prompt length of each sequence, in tokens."""


class Probed(Struct, frozen=True, kw_only=True):
    """Log-probabilities of the sequences of a :class:`Probe`."""

    version: int
    """Weight version that scored them."""
    logprobs: list[bytes]
    """For each sequence, the log-probabilities of the tokens after the prompt: little-endian float32."""
