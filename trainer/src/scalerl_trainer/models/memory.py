"""How many bytes a rank needs, before anything is allocated.

An estimate for refusing what cannot work, not for packing to the last byte: parameters, gradients and optimizer
state are counted exactly by ZeRO's own bookkeeping (arXiv 1910.02054); activations and buffers are bounded from
above roughly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from scalerl_trainer.errors import ModelTooLargeError

Dtype = Literal["bfloat16", "float32"]
BYTES: dict[str, int] = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def require(self, available_bytes: int, where: str = "this rank") -> None:
        """Raise ``ModelTooLargeError`` when ``available_bytes`` are not enough."""
        if self.total > available_bytes:
            gib = 2.0**30
            raise ModelTooLargeError(
                f"training needs about {self.total / gib:.1f} GiB on {where} (parameters "
                f"{self.parameters / gib:.1f}, gradients {self.gradients / gib:.1f}, optimizer "
                f"{self.optimizer / gib:.1f}, activations {self.activations / gib:.1f}), there are "
                f"{available_bytes / gib:.1f}: choose a smaller model, a higher zeroStage, more ranks, shorter "
                "rows or activationCheckpointing"
            )


def parameter_count(config: Any) -> int:
    """Parameters of the causal language model of ``config``, tied ones once; nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def estimate_memory_bytes(
    config: Any,
    *,
    dtype: Dtype,
    zero_stage: int,
    world: int,
    micro_batch_tokens: int,
    activation_checkpointing: bool = False,
    count: int | None = None,
) -> MemoryEstimate:
    """Bytes per rank for training ``config`` with AdamW. ``count``: its parameters, where they are known already.

    A bfloat16 model keeps float32 master weights beside the two moments (12 bytes a parameter), a float32 model
    under ZeRO a float32 partition too, without ZeRO the moments only (8 bytes). Stage 1 divides the optimizer's
    share by ``world``, 2 the gradients' also, 3 the parameters' also.

    >>> from transformers import LlamaConfig
    >>> tiny = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...                    num_attention_heads=2, tie_word_embeddings=True)
    >>> estimate_memory_bytes(tiny, dtype="bfloat16", zero_stage=1, world=2, micro_batch_tokens=64).optimizer
    136128
    """
    if zero_stage not in (0, 1, 2, 3) or world < 1:
        raise ValueError(f"zero_stage {zero_stage} must be 0…3 and world {world} at least 1")
    count = parameter_count(config) if count is None else count
    size = BYTES[dtype]
    moments = 8
    master = 0 if dtype == "float32" and zero_stage == 0 else 4

    def share(from_stage: int) -> int:
        return math.ceil(count / world) if zero_stage >= from_stage else count

    parameters = share(3) * size
    if zero_stage == 3:
        # What is gathered while it is used: at most one layer and the embeddings, never more than the model.
        hidden = int(config.hidden_size)
        layer = 4 * hidden**2 + 3 * hidden * int(getattr(config, "intermediate_size", 4 * hidden))
        parameters += min(count, 2 * layer + 2 * hidden * int(config.vocab_size)) * size
    # Gradients of bfloat16 models are added up in float32.
    gradients = share(2) * max(size, 4)
    optimizer = share(1) * (moments + master)
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    # Kept per token and layer: about 34 hidden-sized values (arXiv 2205.05198, without the attention matrix),
    # one when recomputed.
    kept = layers * (1 if activation_checkpointing else 34) + (34 if activation_checkpointing else 0)
    activations = micro_batch_tokens * hidden * kept * size
    return MemoryEstimate(parameters, gradients, optimizer, activations)
