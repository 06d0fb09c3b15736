"""Peak memory of a trainer rank in a step, by ZeRO stage: the largest of its moments.

Parameters, gradients, optimizer state and the engine's buffers (:mod:`scalerl_api.engines`) are those that ``benchmarks/memory.py``
measures. On accelerators an allowance for the libraries and for fragmentation is added; on CPUs the memory of a process without a
model is not included. ``benchmarks/gpu_check.py`` compares it with what a GPU has in use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from scalerl_api.engines import (
    BUCKET_ELEMENTS,
    ENGINES,
    MOMENTS_BYTES,
    Engine,
    EngineName,
    Offload,
    Partition,
)
from scalerl_api.memory.model_size import BYTES, Adapters, Dtype, ModelSize
from scalerl_api.spec import RunSpec

CHUNK_BYTES = 64 * 2**20
"""Logits that the output head computes at a time on a CPU."""
ACCELERATOR_CHUNK_BYTES = 2**30
"""The same on an accelerator without the head's kernels."""
KERNEL_CHUNK_BYTES = 5 * 2**30 // 3
"""The same with them: in the backward pass logits are kept once in float32 and once in bfloat16."""
CONTEXT_BYTES = 5 * 2**28
"""Memory of an accelerator for CUDA's context, NCCL's channels and cuBLAS's workspaces: 1.25 GiB [by reading]."""
HOST_BYTES = 2**25
"""Memory that a step on a CPU takes beside tensors: MKL's buffers, and what the allocator has freed between blocks in use. 9 to 29 MB were
measured."""
FRAGMENTATION = 0.05
"""Share of the tensors' memory that torch's allocator cannot use [by reading]."""
_FINAL_VALUES: Final = 6
"""Values of the hidden size that a token has between the last layer and the head, and as its gradient."""
_GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one trainer rank at a moment, in bytes: of its accelerator, or without one of the host."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward pass; with checkpointing recomputed ones of a layer; gradients of a layer's values."""
    gathered: int = 0
    """Partitioned parameters that are whole while they are used."""
    head: int = 0
    """The output head: on a CPU its weight in float32; the weight's gradient in float32 and in the model's dtype, chunks of logits.
    In the layers' backward pass the last gradient."""
    buckets: int = 0
    """Buffers of a publish, communication buckets, gradients that are being reduced, and what an update needs."""
    reference: int = 0
    """Frozen models: the reference of ``recipe.kl``, and the proximal policy of ``recipe.correction``."""
    allowance: int = 0
    """For libraries, and for fragmentation of an accelerator's memory."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        optional = ("gathered", "reference", "allowance")
        named = {part.name: getattr(self, part.name) for part in fields(self)}
        parts = ", ".join(f"{n} {v / _GIB:.1f}" for n, v in named.items() if v or n not in optional)
        return f"{self.total / _GIB:.1f} GiB ({parts})"


def trainer_rank_memory(size: ModelSize, spec: RunSpec) -> RankMemory:
    """Memory of one rank for training a model of this size with ``spec``."""
    moments = rank_moments(
        size,
        dtype=spec.model.dtype,
        zero_stage=spec.trainer.zero_stage,
        engine=spec.trainer.engine,
        offload=spec.trainer.offload,
        world=spec.trainer.ranks,
        micro_batch_tokens=spec.micro_batch_tokens,
        activation_checkpointing=spec.trainer.activation_checkpointing,
        frozen=frozen_models(spec),
        adapters=_adapters(spec),
        fp32_head=spec.recipe.fp32_logits in ("Both", "Trainer"),
        publish_bytes=spec.publish_bucket_bytes,
        accelerator=spec.trainer.devices > 0,
    )
    return peak(moments)


def trained_parameters(size: ModelSize, spec: RunSpec) -> int:
    """Number of trained parameters; with ``trainer.lora`` those of :meth:`.ModelSize.adapter_parameters`.

    >>> small = ModelSize(parameters=10**6, hidden_size=64, layers=2, intermediate_size=128, vocabulary_size=1000)
    >>> small.adapter_parameters(Adapters(8)), small.adapter_parameters(Adapters(8, ("q_proj", "mlp.up_proj")))
    (17408, 5120)
    """
    adapters = _adapters(spec)
    return size.parameters if adapters is None else size.adapter_parameters(adapters)


def _adapters(spec: RunSpec) -> Adapters | None:
    lora = spec.trainer.lora
    return None if lora is None else Adapters(lora.rank, tuple(lora.target_modules))


def frozen_models(spec: RunSpec) -> int:
    """Models beside the policy. The reference of adapters is the policy without them, except after a warm start."""
    second = spec.trainer.lora is None or spec.warm_start is not None
    return (spec.recipe.kl.penalty is not None and second) + (spec.recipe.proximal_updates > 0)


def rank_moments(
    size: ModelSize,
    *,
    dtype: Dtype,
    zero_stage: int,
    world: int,
    micro_batch_tokens: int,
    engine: EngineName = "DeepSpeed",
    offload: Offload = "None",
    activation_checkpointing: bool = False,
    frozen: int = 0,
    adapters: Adapters | None = None,
    fp32_head: bool = True,
    publish_bytes: int = 0,
    accelerator: bool = False,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> dict[str, RankMemory]:
    """Memory per rank at those moments of a step with AdamW that can be its peak, in their order, with gradients of micro-batches before.

    The optimizer of a bfloat16 model keeps float32 master weights besides the two moments (12 bytes per parameter). So does
    that of a float32 model under ZeRO; without ZeRO it keeps only the moments (8 bytes). Gradients are accumulated in float32.
    Stage 1 divides the optimizer state by ``world``, stage 2 also the gradients, stage 3 also the parameters. What ``offload`` moves to
    the host is not counted (:func:`.roles.offloaded_bytes`). The ``frozen`` models have only parameters; their activations are freed
    before those of the policy are allocated. ``publish_bytes``: a bucket of a publish, of which two are in use. With ``adapters``
    they alone have gradients.

    >>> tiny = ModelSize(parameters=1000, hidden_size=8, layers=2, intermediate_size=16, vocabulary_size=64)
    >>> moments = rank_moments(tiny, dtype="bfloat16", zero_stage=1, world=2, micro_batch_tokens=64)
    >>> list(moments)
    ['head', 'layer', 'embedding', 'update']
    >>> {(each.parameters, each.gradients, each.optimizer) for each in moments.values()}
    {(2000, 4000, 6000)}

    Raises:
        ValueError: ``zero_stage`` does not exist, or ``world`` is less than 1.
    """
    if zero_stage not in (0, 1, 2, 3) or world < 1:
        raise ValueError(f"zero_stage {zero_stage} must be 0…3 and world {world} at least 1")
    hidden, each, whole = size.hidden_size, BYTES[dtype], adapters is None
    added, implied = 0 if adapters is None else size.adapter_parameters(adapters), ENGINES[engine]
    own, parameters = added or size.parameters, size.parameters + added
    part = Partition(size, own, parameters, each, zero_stage, world, offload, bucket_elements)
    publish = _publish(size, publish_bytes, each)
    buckets = publish + implied.bucket_bytes(part, reducing=False)
    reduction = implied.overlap_bytes(part) if accelerator else 0
    reduction += publish + implied.bucket_bytes(part, reducing=True)
    always = replace(_state(part, implied, dtype, frozen), buckets=buckets)
    layer = size.activation_values(dtype, adapters)
    values = size.layers * (hidden if activation_checkpointing else layer)
    token = micro_batch_tokens * each
    moments = {
        "head": replace(
            always,
            activations=token * (values + _FINAL_VALUES * hidden),
            gathered=implied.gathered_at_head(part) * each,
            head=_head(size, micro_batch_tokens, each, trains=whole, fp32=fp32_head, accelerator=accelerator),
        ),
        "layer": replace(
            always,
            activations=token * (values + activation_checkpointing * layer + size.backward_values),
            gathered=implied.gathered_elements(part) * each,
            head=whole * each * size.vocabulary_size * hidden,
            buckets=reduction + whole * implied.layer_bytes(part),
        ),
        "embedding": replace(
            always, activations=2 * token * hidden, buckets=reduction + whole * implied.embedding_bytes(part)
        ),
        "update": replace(always, buckets=buckets + implied.update_bytes(part)),
    }
    return {name: replace(one, allowance=_allowance(one.total, accelerator)) for name, one in moments.items()}


def _state(part: Partition, implied: Engine, dtype: Dtype, frozen: int) -> RankMemory:
    """What a rank has in its own memory at each moment: parameters, gradients, optimizer state and ``frozen`` models."""
    kept = part.parameters if implied.keeps_trained_weights else part.parameters - part.trained
    master_bytes = 0 if dtype == "float32" and part.zero_stage == 0 else 4
    weights_here = part.offload != "OptimizerAndParameters"
    optimizer_here = part.offload == "None"
    return RankMemory(
        parameters=part.share(3, kept) * part.value_bytes * weights_here,
        gradients=part.share(2, part.trained) * 4 * optimizer_here,
        optimizer=part.share(1, part.trained) * (MOMENTS_BYTES + master_bytes) * optimizer_here,
        activations=0,
        reference=part.share(3, part.size.parameters) * part.value_bytes * frozen * weights_here,
    )


def _publish(size: ModelSize, bucket_bytes: int, each: int) -> int:
    """Bytes of the buckets of a publish, which are kept between publishes, beside forward and backward passes. One has at least the
    largest tensor."""
    largest = max(size.vocabulary_size * size.hidden_size, size.largest_parameter)
    return 2 * max(min(bucket_bytes, size.parameters * each), largest * each) if bucket_bytes else 0


def _allowance(tensors: int, accelerator: bool) -> int:
    """Bytes beside those of ``tensors``."""
    if accelerator:
        return CONTEXT_BYTES + math.ceil(FRAGMENTATION * tensors)
    return HOST_BYTES


def peak(moments: Mapping[str, RankMemory]) -> RankMemory:
    """The moment with the most memory."""
    return max(moments.values(), key=lambda one: one.total)


def _head(size: ModelSize, tokens: int, each: int, *, trains: bool, fp32: bool, accelerator: bool) -> int:
    """Bytes of the weight's gradient, float32 until all chunks are in it, and of chunks of logits, of which the next is computed while those
    of the last are there: in the forward pass logits and log-probabilities, in the backward pass logits and their derivative in the
    model's dtype; all three where the forward pass computes gradients, a float32 derivative in place of the logits. On a CPU also the
    weight's float32 copy: there products of bfloat16 are not accumulated in float32. Without ``fp32``, logits are in the model's dtype first.
    """
    output, low = size.vocabulary_size * size.hidden_size, each != 4
    every = 4 * tokens * size.vocabulary_size
    chunk = min(ACCELERATOR_CHUNK_BYTES if accelerator else CHUNK_BYTES, every)
    following = min(chunk, every - chunk) + (chunk // 2 if low and not fp32 else 0)
    last = 3 * chunk // 2 if low else chunk
    kernels = 3 * min(KERNEL_CHUNK_BYTES, every) // 2 if accelerator and fp32 and low else 0
    computed = kernels or 2 * chunk + (chunk // 2 if low else 0)
    forward, backward, end = 2 * chunk + following, max(last + following, computed), last
    if trains:
        backward, end = backward + 4 * output, end + (4 + each * low) * output
    return max(forward, backward, end) + (4 * output if fp32 and low and not accelerator else 0)


def stage_plan(size: ModelSize, spec: RunSpec) -> dict[int, RankMemory]:
    """The memory of one rank by the ZeRO stages that can train ``spec``, which differs in nothing else."""
    stages = ENGINES[spec.trainer.engine].zero_stages(spec.trainer.offload, spec.model.dtype)
    return {stage: trainer_rank_memory(size, with_trainer(spec, zero_stage=stage)) for stage in stages}


def with_trainer(spec: RunSpec, **changes: object) -> RunSpec:
    """The spec with other fields of its trainer."""
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update=changes)})
