"""Estimates of the memory of a run's roles in bytes, from the spec and the model's size.

The estimates serve to reject runs that cannot fit, not to use the last byte: parameters, gradients and optimizer state are
counted as in the ZeRO paper (arXiv 1910.02054), activations and buffers are rough bounds, and the libraries' own memory is not
included. Warnings and errors use the same figures; the callers determine the available memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from scalerl_api.fields import quantity_bytes
from scalerl_api.spec import RunSpec, ScratchModel
from scalerl_api.speculation import MEMORY_BYTES_PER_TOKEN

Dtype = Literal["bfloat16", "float32"]
BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float32": 4}
"""Bytes of one value."""
_MOMENTS_BYTES = 8
"""Bytes per parameter of AdamW's two float32 moments."""
_GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model, named as in ``config.json``."""

    parameters: int
    """Number of parameters; tied ones count once."""
    hidden_size: int
    layers: int
    intermediate_size: int
    vocabulary_size: int

    @classmethod
    def of_scratch(cls, model: ScratchModel) -> Self:
        """Size of a Llama without grouped-query attention whose tokenizer reaches the maximum vocabulary.

        >>> ModelSize.of_scratch(ScratchModel(layers=4, hidden_size=128, vocabulary_size=128)).parameters
        869504
        """
        h = model.hidden_size
        layer = 4 * h * h + 3 * h * model.intermediate_size + 2 * h
        embeddings = model.vocabulary_size * h * (1 if model.tied_embeddings else 2)
        return cls(
            parameters=model.layers * layer + embeddings + h,
            hidden_size=h,
            layers=model.layers,
            intermediate_size=model.intermediate_size,
            vocabulary_size=model.vocabulary_size,
        )

    @classmethod
    def of_config(cls, config: Mapping[str, Any], parameters: int) -> Self | None:
        """Size from a ``config.json`` and the number of parameters; None if the config lacks sizes."""
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            return None
        hidden, layers, vocabulary = (
            text.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        )
        if not (isinstance(hidden, int) and isinstance(layers, int) and isinstance(vocabulary, int)):
            return None
        wide = text.get("intermediate_size")
        return cls(parameters, hidden, layers, wide if isinstance(wide, int) else 4 * hidden, vocabulary)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one trainer rank in bytes: of its accelerator, or without one of the host."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    reference: int = 0
    """Frozen models: the reference of ``recipe.kl``, and the proximal policy of ``recipe.correction``."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.reference

    def __str__(self) -> str:
        names = ["parameters", "gradients", "optimizer", "activations"]
        if self.reference:
            names.append("reference")
        parts = ", ".join(f"{name} {getattr(self, name) / _GIB:.1f}" for name in names)
        return f"{self.total / _GIB:.1f} GiB ({parts})"


def trainer_rank_memory(size: ModelSize, spec: RunSpec) -> RankMemory:
    """Memory of one rank for training a model of this size with ``spec``."""
    return rank_memory(
        size,
        dtype=spec.model.dtype,
        zero_stage=spec.trainer.zero_stage,
        world=spec.trainer.ranks,
        micro_batch_tokens=spec.micro_batch_tokens,
        activation_checkpointing=spec.trainer.activation_checkpointing,
        frozen=(spec.recipe.kl.penalty is not None) + (spec.recipe.proximal_updates > 0),
    )


def rank_memory(
    size: ModelSize,
    *,
    dtype: Dtype,
    zero_stage: int,
    world: int,
    micro_batch_tokens: int,
    activation_checkpointing: bool = False,
    frozen: int = 0,
) -> RankMemory:
    """Memory per rank for training with AdamW under DeepSpeed.

    The optimizer of a bfloat16 model keeps float32 master weights besides the two moments (12 bytes per parameter). So does
    that of a float32 model under ZeRO; without ZeRO it keeps only the moments (8 bytes). Stage 1 divides the optimizer state
    by ``world``, stage 2 also the gradients, stage 3 also the parameters. The ``frozen`` models have only parameters; their
    activations are freed before those of the policy are allocated.

    >>> tiny = ModelSize(parameters=1000, hidden_size=8, layers=2, intermediate_size=16, vocabulary_size=64)
    >>> rank_memory(tiny, dtype="bfloat16", zero_stage=1, world=2, micro_batch_tokens=64)
    RankMemory(parameters=2000, gradients=4000, optimizer=6000, activations=69632, reference=0)

    Raises:
        ValueError: ``zero_stage`` does not exist, or ``world`` is less than 1.
    """
    if zero_stage not in (0, 1, 2, 3) or world < 1:
        raise ValueError(f"zero_stage {zero_stage} must be 0…3 and world {world} at least 1")
    count, hidden, each = size.parameters, size.hidden_size, BYTES[dtype]
    master = 0 if dtype == "float32" and zero_stage == 0 else 4

    def share(from_stage: int) -> int:
        return math.ceil(count / world) if zero_stage >= from_stage else count

    parameters = share(3) * each
    if zero_stage == 3:
        # Parameters gathered for use: at most two layers and the embeddings, never more than the model.
        layer = 4 * hidden**2 + 3 * hidden * size.intermediate_size
        parameters += min(count, 2 * layer + 2 * hidden * size.vocabulary_size) * each
    gradients = share(2) * 4  # accumulated in float32, also for bfloat16 models
    optimizer = share(1) * (_MOMENTS_BYTES + master)
    # Values kept per token and layer: about 34 of the hidden size (arXiv 2205.05198, without the attention matrix),
    # one with activation checkpointing.
    kept = (size.layers + 34) if activation_checkpointing else 34 * size.layers
    activations = micro_batch_tokens * hidden * kept * each
    return RankMemory(parameters, gradients, optimizer, activations, parameters * frozen)


def server_memory(size: ModelSize, spec: RunSpec) -> int:
    """Minimum memory of one generator replica, in bytes per device: its shard of the weights; on a CPU also the KV cache and
    past responses.

    On an accelerator the KV cache takes the memory that the weights leave, so the weights are the minimum.
    """
    generator = spec.generator
    weights = size.parameters * BYTES[spec.model.dtype]
    if generator.devices:
        return math.ceil(weights / generator.devices)
    cache = quantity_bytes(generator.kv_cache) if generator.kv_cache else 0
    return weights + cache + MEMORY_BYTES_PER_TOKEN * spec.draft_memory_tokens


def host_memory(size: ModelSize, spec: RunSpec) -> dict[str, int]:
    """Host memory by role, in bytes over all its replicas; without roles that run on accelerators."""
    needs = {}
    if spec.generator.devices == 0:
        needs["generator"] = spec.generator.replicas * server_memory(size, spec)
    if spec.trainer.devices == 0:
        needs["trainer"] = spec.trainer.ranks * trainer_rank_memory(size, spec).total
    return needs
