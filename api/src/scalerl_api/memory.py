"""How many bytes a run's roles need, from the spec and the model's size alone.

Estimates for refusing what cannot work, not for packing to the last byte: parameters, gradients and optimizer
state are counted by ZeRO's own bookkeeping (arXiv 1910.02054); activations and buffers are bounded roughly; the
libraries' own memory comes on top. Whoever warns and whoever refuses read the same figures here. How much memory
there is, they find out themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from scalerl_api.fields import quantity_bytes
from scalerl_api.spec import RunSpec, ScratchModel

Dtype = Literal["bfloat16", "float32"]
BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float32": 4}
"""Bytes of one value."""
_MOMENTS_BYTES = 8
"""AdamW's two float32 moments a parameter."""
_GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class ModelSize:
    """``parameters`` counts all of them, tied ones once; the rest is as in ``config.json``."""

    parameters: int
    hidden_size: int
    layers: int
    intermediate_size: int
    vocabulary_size: int

    @classmethod
    def of_scratch(cls, model: ScratchModel) -> Self:
        """Of a Llama without grouped queries whose tokenizer uses all the vocabulary it may.

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
        """Of a ``config.json`` and the count of its weights; None where it does not say its sizes."""
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
    """Bytes on one trainer rank, on its accelerator where it has one. reference: the frozen model of ``recipe.kl``."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    reference: int = 0

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
    """One rank's share of training ``size`` as ``spec`` says."""
    return rank_memory(
        size,
        dtype=spec.model.dtype,
        zero_stage=spec.trainer.zero_stage,
        world=spec.trainer.ranks,
        micro_batch_tokens=spec.micro_batch_tokens,
        activation_checkpointing=spec.trainer.activation_checkpointing,
        reference=spec.recipe.kl.penalty is not None,
    )


def rank_memory(
    size: ModelSize,
    *,
    dtype: Dtype,
    zero_stage: int,
    world: int,
    micro_batch_tokens: int,
    activation_checkpointing: bool = False,
    reference: bool = False,
) -> RankMemory:
    """Bytes per rank for training with AdamW under DeepSpeed.

    A bfloat16 model keeps float32 master weights beside the two moments (12 bytes a parameter), a float32 model
    under ZeRO a float32 partition too, without ZeRO the moments only (8 bytes). Stage 1 divides the optimizer's
    share by ``world``, 2 the gradients' also, 3 the parameters' also. The ``reference`` of the KL penalty has parameters
    alone; its activations are freed before the policy's exist.

    >>> tiny = ModelSize(parameters=1000, hidden_size=8, layers=2, intermediate_size=16, vocabulary_size=64)
    >>> rank_memory(tiny, dtype="bfloat16", zero_stage=1, world=2, micro_batch_tokens=64)
    RankMemory(parameters=2000, gradients=4000, optimizer=6000, activations=69632, reference=0)

    Raises:
        ValueError: a stage that does not exist, or no rank.
    """
    if zero_stage not in (0, 1, 2, 3) or world < 1:
        raise ValueError(f"zero_stage {zero_stage} must be 0…3 and world {world} at least 1")
    count, hidden, each = size.parameters, size.hidden_size, BYTES[dtype]
    master = 0 if dtype == "float32" and zero_stage == 0 else 4

    def share(from_stage: int) -> int:
        return math.ceil(count / world) if zero_stage >= from_stage else count

    parameters = share(3) * each
    if zero_stage == 3:
        # What is gathered while it is used: at most two layers and the embeddings, never more than the model.
        layer = 4 * hidden**2 + 3 * hidden * size.intermediate_size
        parameters += min(count, 2 * layer + 2 * hidden * size.vocabulary_size) * each
    gradients = share(2) * 4  # added up in float32, of bfloat16 models too
    optimizer = share(1) * (_MOMENTS_BYTES + master)
    # Kept per token and layer: about 34 hidden-sized values (arXiv 2205.05198, without the attention matrix),
    # one when recomputed.
    kept = (size.layers + 34) if activation_checkpointing else 34 * size.layers
    activations = micro_batch_tokens * hidden * kept * each
    return RankMemory(parameters, gradients, optimizer, activations, parameters if reference else 0)


def server_memory(size: ModelSize, spec: RunSpec) -> int:
    """Bytes of one generator replica on each of its devices: its share of the weights, on a CPU the KV cache and past responses too.

    On an accelerator the cache takes what the weights leave, so the weights are the least it needs.
    """
    generator = spec.generator
    weights = size.parameters * BYTES[spec.model.dtype]
    if generator.devices:
        return math.ceil(weights / generator.devices)
    cache = quantity_bytes(generator.kv_cache) if generator.kv_cache else 0
    return weights + cache + (generator.speculation.memory_bytes if generator.speculation else 0)


def host_memory(size: ModelSize, spec: RunSpec) -> dict[str, int]:
    """Bytes by role that all its replicas need together on the host; roles on accelerators are not in it."""
    needs = {}
    if spec.generator.devices == 0:
        needs["generator"] = spec.generator.replicas * server_memory(size, spec)
    if spec.trainer.devices == 0:
        needs["trainer"] = spec.trainer.ranks * trainer_rank_memory(size, spec).total
    return needs
