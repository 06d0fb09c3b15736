"""Randomly initialised models on the device, and the FLOPs of a training step, for ``gpu_check``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """Shape of a model, and of one training step: ``rows`` rows of ``sequence`` tokens."""

    kind: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    sequence: int
    rows: int
    tied: bool = True
    spread: float = 0.02


SHAPES = {
    "0.5B": Shape("qwen2", 896, 24, 14, 2, 4864, 151936, 2048, 8),
    "1.5B": Shape("qwen2", 1536, 28, 12, 2, 8960, 151936, 2048, 8),
    "8B": Shape("llama3", 4096, 4, 32, 8, 14336, 128256, 2048, 4, tied=False),
    "MoE": Shape("moe", 1024, 8, 16, 4, 3584, 32000, 2048, 4, tied=False),
}
"""Shapes of Qwen2.5 models, of four of the 32 layers of Llama 3 8B, and of a mixture of eight experts."""
TINY = {name: Shape("qwen2", 64, 2, 4, 2, 128, 512, 32, 2) for name in SHAPES}


def positions_shape(kind: str, tiny: bool) -> Shape:
    """Shape of a model with large weights, so that attention depends on a token's position."""
    size = (64, 2, 4, 2, 128, 256, 256, 1) if tiny else (512, 4, 8, 4, 1024, 1024, 16384, 1)
    return Shape(kind, *size, spread=0.1)


def make(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A transformers causal language model with random weights on ``device``."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config

    common: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "max_position_embeddings": max(4096, shape.sequence),
        "initializer_range": shape.spread,
        "tie_word_embeddings": shape.tied,
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    match shape.kind:
        case "qwen2":
            rope = {"rope_type": "default", "rope_theta": 1e6}
            config: Any = Qwen2Config(**common, **special, rope_parameters=rope)
        case "llama3":
            rope = {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            }
            config = LlamaConfig(**common, **special, rope_parameters=rope)
        case "gemma3":
            config = Gemma3TextConfig(
                **common, **special, query_pre_attn_scalar=shape.hidden // shape.heads, sliding_window=512
            )
        case kind:
            raise ValueError(f"no model of kind {kind!r}")
    torch.manual_seed(7)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    return model.to(device)


def make_moe(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A Mixtral of eight experts, two of them for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.sequence,
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )
    torch.manual_seed(7)
    with torch.device(device):
        model = MixtralForCausalLM(config).to(dtype)
    model.config.use_cache = False
    return model.to(device)


def step_flops(shape: Shape, parameters: int, tokens: int) -> float:
    """Floating-point operations of the forward and backward passes.

    Six per parameter and token, and those of attention, which the causal mask halves. An untied embedding does not count,
    since it is a lookup; a tied one counts as the head's matrix.
    """
    lookup = 0 if shape.tied else shape.vocabulary * shape.hidden
    return (6 * (parameters - lookup) + 6 * shape.layers * shape.hidden * shape.sequence) * tokens


class Masters:
    """AdamW on float32 master copies of bfloat16 parameters, as in ZeRO: the trainer's optimizer on one device."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._masters = [p.detach().float().requires_grad_() for p in parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-6, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.copy_(master)
            master.grad = None


def policy_logprobs(policy: Any, ids: list[int], device: Any) -> Any:
    """One sequence as the trainer computes it: packed, without the last token."""
    from scalerl_trainer.packing import Sequence, pack

    (micro,) = pack([Sequence(ids[:1], ids[1:])], len(ids), shared_rows=False).micro_batches
    inputs = (micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m)
    with torch.no_grad():
        logprobs, _ = policy(*(tensor.to(device) for tensor in inputs), 1.0, False)
    return logprobs
