"""Tiny causal language models of many families, with random weights under the names of the families' published checkpoints.

>>> sorted(FAMILIES)[:3]
['deepseek-v2', 'gemma-2', 'gemma-3']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from scalerl_trainer.models.scratch import EOS, PAD, UNKNOWN, train_tokenizer

VOCABULARY: Final = 300
CONTEXT_TOKENS: Final = 512
_TEXTS: Final = ("0123456789+-= abcdefghijklmnopqrstuvwxyz",)

_WIDTH: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
}
_GROUPED: Final[Mapping[str, Any]] = {**_WIDTH, "num_key_value_heads": 1, "head_dim": 32}


def _config(model_type: str, **settings: Any) -> Callable[[], Any]:
    return lambda: AutoConfig.for_model(model_type, **settings)


FAMILIES: Final[Mapping[str, Callable[[], Any]]] = {
    "llama": _config("llama", **_GROUPED),
    "llama-tied": _config("llama", **_GROUPED, tie_word_embeddings=True),
    "mistral": _config("mistral", **_GROUPED, sliding_window=None),
    "qwen2": _config("qwen2", **_WIDTH, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3": _config("qwen3", **_GROUPED, tie_word_embeddings=True),
    "phi-3": _config("phi3", **_WIDTH, num_key_value_heads=1, sliding_window=None, pad_token_id=0),
    "olmo-2": _config("olmo2", **_WIDTH, num_key_value_heads=1),
    "pythia": _config("gpt_neox", **_WIDTH, rotary_pct=0.25),
    "gemma-2": _config(
        "gemma2",
        **_GROUPED,
        query_pre_attn_scalar=32,
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
    ),
    "gemma-3": _config("gemma3_text", **_GROUPED, query_pre_attn_scalar=32),
    "mixtral": _config(
        "mixtral", **_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen2-moe": _config(
        "qwen2_moe",
        **_WIDTH,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
    ),
    "qwen3-moe": _config(
        "qwen3_moe", **_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "olmoe": _config("olmoe", **_WIDTH, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2),
    "deepseek-v2": _config(
        "deepseek_v2",
        **_WIDTH,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_group=1,
        topk_group=1,
    ),
}
"""Configs by family. Gemma-2's caps of logits are off: a policy with them is refused. The experts of Qwen3-MoE have a width that vLLM
pads on CPUs."""


def write(family: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write config, tokenizer and weights of ``family`` into ``folder``, deterministically; returns ``folder``."""
    config = FAMILIES[family]()
    config.vocab_size = VOCABULARY
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    for name, value in special.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    model.generation_config.update(**special)
    model.to(dtype).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(_TEXTS, VOCABULARY), eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN
    )
    tokenizer.save_pretrained(folder)
    return folder


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter again, biases and norms too, wide enough that a wrong tensor changes log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                # A standard deviation of 1/√inputs, above transformers' .02 at this width, keeps activations in scale.
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.1 * noise + (parameter if "norm" in name else 0.0))
