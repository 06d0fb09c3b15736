"""Memory of the roles of a run, bytes: the trainer's copies on the host, generators, and each role's host memory."""

from __future__ import annotations

import math
from typing import Final

from scalerl_api.engines import ENGINES
from scalerl_api.fields import quantity_bytes
from scalerl_api.lora import reserved_rank
from scalerl_api.memory.model_size import BYTES, Adapters, ModelSize
from scalerl_api.memory.trainer_rank import frozen_models, trained_parameters, trainer_rank_memory
from scalerl_api.spec import RunSpec
from scalerl_api.speculation import MEMORY_BYTES_PER_TOKEN

_CHECKPOINT_BYTES_A_WEIGHT: Final = 12
"""Bytes of a checkpoint per weight: a float32 copy of the weight and both moments of AdamW."""


def state_bytes(size: ModelSize, spec: RunSpec) -> int:
    """Bytes of a checkpoint, at most: between two updates that share sampled weights it has the proximal policy's weights too."""
    proximal = BYTES[spec.model.dtype] if spec.recipe.proximal_updates > 0 else 0
    return (_CHECKPOINT_BYTES_A_WEIGHT + proximal) * trained_parameters(size, spec)


def checkpoint_copy(size: ModelSize, spec: RunSpec) -> int:
    """Host memory of one rank for the copy of its state that a checkpoint is written from, bytes."""
    return math.ceil(state_bytes(size, spec) / spec.trainer.ranks)


def published_copy(size: ModelSize, spec: RunSpec) -> int:
    """Host memory for the last published version with ``weightSync.backend: Files``, in rank 0 and in each generator, bytes."""
    if not spec.weight_backend.keeps_published:
        return 0
    count = trained_parameters(size, spec) if spec.trainer.publishes_adapters else size.parameters
    return count * BYTES[spec.model.dtype]


def offloaded_bytes(size: ModelSize, spec: RunSpec) -> int:
    """Host memory of one rank for what ``trainer.offload`` moves there, bytes: exactly counted for flat buffers, at most twice for
    single tensors, which torch page-locks in powers of two."""
    trainer, each = spec.trainer, BYTES[spec.model.dtype]
    if trainer.offload == "None":
        return 0
    own = math.ceil(trained_parameters(size, spec) / trainer.ranks)
    models = frozen_models(spec) + (trainer.lora is not None)
    frozen = 2 * each * models * math.ceil(size.parameters / trainer.ranks)
    return ENGINES[trainer.engine].offloaded_bytes(own, each, trainer.offload, frozen)


def trainer_rank_bytes(size: ModelSize, spec: RunSpec) -> int:
    """Memory of one rank where its tensors are, bytes: with :func:`checkpoint_copy` on a CPU."""
    copy = 0 if spec.trainer.devices else checkpoint_copy(size, spec)
    return trainer_rank_memory(size, spec).total + copy


def server_memory(size: ModelSize, spec: RunSpec) -> int:
    """Minimum memory of one generator replica, in bytes per device: its shard of the weights and of vLLM's versions of adapters; on a
    CPU also the KV cache and past responses.

    On an accelerator the KV cache takes the memory that these leave, so they are the minimum.
    """
    generator = spec.generator
    weights = (size.parameters + _own_adapters(size, spec)) * BYTES[spec.model.dtype]
    if generator.devices:
        return math.ceil(weights / generator.devices)
    cache = quantity_bytes(generator.kv_cache) if generator.kv_cache else 0
    return weights + cache + MEMORY_BYTES_PER_TOKEN * spec.draft_memory_tokens


def _own_adapters(size: ModelSize, spec: RunSpec) -> int:
    """Parameters of the adapters that vLLM reserves memory for."""
    lora = spec.trainer.lora
    if lora is None or not spec.lora_versions:
        return 0
    return spec.lora_versions * size.adapter_parameters(Adapters(reserved_rank(lora.rank)))


def host_memory(size: ModelSize, spec: RunSpec) -> dict[str, int]:
    """Host memory by role, in bytes over all its replicas. Of roles that run on accelerators, the trainer's copies of its state
    and what it offloads."""
    needs = {}
    if spec.generator.devices == 0:
        needs["generator"] = spec.generator.replicas * server_memory(size, spec)
    rank = trainer_rank_bytes(size, spec)
    if spec.trainer.devices:
        rank = checkpoint_copy(size, spec) + offloaded_bytes(size, spec)
    return needs | {"trainer": spec.trainer.ranks * rank}
