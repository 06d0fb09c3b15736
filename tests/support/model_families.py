"""Families of models, what this release does with each, and tiny models of them: the source of the tables of docs/models.md.

``test_trainer_families.py`` holds each row to what happens: families that train do so for three steps, and those that are
refused are refused with the sentence given here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

MAX_KL: Final = 1e-6
"""Limit of the divergence between the trainer and transformers after three steps in float32, nats a token."""

_WIDTH: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
_ONE_KEY: Final = {**_WIDTH, "num_key_value_heads": 1}
_GROUPED: Final = {**_ONE_KEY, "head_dim": 32}
_GPT: Final = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}
_SLIDING: Final = {"layer_types": ["sliding_attention", "full_attention"]}
_LINEAR: Final = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
_MAMBA: Final = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32}
_EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_DEEPSEEK: Final = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A row of docs/models.md."""

    name: str
    """As its publisher writes it."""
    config: str | tuple[str, Mapping[str, Any]]
    """Of a tiny model of it: its name in ``tiny_models.FAMILIES``, or a model type and settings."""
    rows: Literal["shared", "own"] = "shared"
    """Whether sequences may share a row: ``own`` for a model that mixes them."""
    refused: str = ""
    """The beginning of the problem that ``validate`` reports; empty for a family that trains."""
    note: str = ""
    """What is particular about it, or why it is refused, for docs/models.md."""
    max_kl: float = MAX_KL


_OWN: Final = "a row of its own for each sequence"
_NO_SDPA: Final = "transformers has no sdpa for "
_MLA: Final = "its attention is multi-head latent attention (kv_lora_rank in config.json)"
_LATENT: Final = (
    "multi-head latent attention, of which vLLM keeps derived weights that a publish does not renew"
)
_BUFFERS: Final = "the model of this folder has weights that are buffers and not parameters"

FAMILIES: Final[tuple[Family, ...]] = (
    Family("Llama 2, Llama 3", "llama"),
    Family("Llama 3.2 (tied head)", "llama-tied"),
    Family("Mistral", "mistral"),
    Family("Qwen2, Qwen2.5", "qwen2"),
    Family("Qwen3", "qwen3"),
    Family("Phi-3, Phi-4", "phi-3"),
    Family("Phi-2", ("phi", _WIDTH), note="the head's bias is trained and published"),
    Family("OLMo", ("olmo", _ONE_KEY)),
    Family("OLMo-2", "olmo-2"),
    Family("OLMo-3", ("olmo3", {**_ONE_KEY, **_SLIDING})),
    Family("Pythia, GPT-NeoX", "pythia"),
    Family("Gemma 3 (text)", "gemma-3"),
    Family(
        "Gemma 2 with capped attention",
        ("gemma2", {**_GROUPED, "query_pre_attn_scalar": 32}),
        refused="the model caps its attention's logits (attn_logit_softcapping = 50.0), which sdpa does not compute",
        note="transformers' `sdpa` leaves out the cap of the attention's logits, which vLLM computes; on GPUs use "
        "`model.attention: flash_attention_2`, which has it",
    ),
    Family(
        "Gemma 2 without that cap",
        (
            "gemma2",
            {
                **_GROUPED,
                "query_pre_attn_scalar": 32,
                "final_logit_softcapping": 5.0,
                "attn_logit_softcapping": None,
            },
        ),
        note="the final cap of the logits is exact",
    ),
    Family(
        "Cohere Command R",
        ("cohere", {**_ONE_KEY, "logit_scale": 0.0625}),
        note="`logit_scale` is exact",
    ),
    Family(
        "Cohere Command R7B", ("cohere2", {**_ONE_KEY, **_SLIDING, "logit_scale": 0.25}), note="`logit_scale`"
    ),
    Family(
        "Granite 3",
        (
            "granite",
            {
                **_ONE_KEY,
                "logits_scaling": 8.0,
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.0156,
            },
        ),
        note="`logits_scaling` is exact",
    ),
    Family("GLM-4", ("glm4", _GROUPED)),
    Family("SmolLM3", ("smollm3", _ONE_KEY)),
    Family("StableLM", ("stablelm", _ONE_KEY)),
    Family("StarCoder2", ("starcoder2", {**_ONE_KEY, "sliding_window": None})),
    Family("Exaone 4", ("exaone4", {**_ONE_KEY, **_SLIDING, "sliding_window": 64})),
    Family("Ernie 4.5 (dense)", ("ernie4_5", _GROUPED)),
    Family("Seed-OSS", ("seed_oss", _GROUPED)),
    Family("Nemotron", ("nemotron", {**_ONE_KEY, "head_dim": 32})),
    Family("GPT-2", ("gpt2", _GPT)),
    Family(
        "OPT",
        (
            "opt",
            {
                "hidden_size": 64,
                "ffn_dim": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "max_position_embeddings": 512,
                "word_embed_proj_dim": 64,
            },
        ),
        rows="own",
        note=_OWN,
    ),
    Family(
        "Falcon",
        (
            "falcon",
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "alibi": False,
                "new_decoder_architecture": True,
                "num_kv_heads": 1,
            },
        ),
        rows="own",
        note=_OWN,
    ),
    Family(
        "Falcon with ALiBi",
        (
            "falcon",
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "alibi": True,
                "new_decoder_architecture": False,
                "multi_query": False,
                "bias": True,
                "parallel_attn": False,
            },
        ),
        rows="own",
        note=f"{_OWN}; transformers rounds ALiBi to bfloat16, in one kernel differently than in another",
        max_kl=2e-5,
    ),
    Family("Mixtral", "mixtral"),
    Family("Qwen2-MoE", "qwen2-moe"),
    Family("Qwen3-MoE", "qwen3-moe"),
    Family("OLMoE", "olmoe"),
    Family("Phi-3.5-MoE", ("phimoe", {**_ONE_KEY, "num_local_experts": 4})),
    Family(
        "Granite 3 MoE",
        ("granitemoe", {**_ONE_KEY, **_EXPERTS, "logits_scaling": 6.0}),
        note="`logits_scaling`",
    ),
    Family("DeepSeek-V2", "deepseek-v2", refused=_MLA, note=_LATENT),
    Family(
        "DeepSeek-V3",
        (
            "deepseek_v3",
            {
                **_WIDTH,
                **_DEEPSEEK,
                "num_key_value_heads": 2,
                "kv_lora_rank": 32,
                "q_lora_rank": None,
                "qk_rope_head_dim": 32,
                "qk_nope_head_dim": 32,
                "v_head_dim": 32,
            },
        ),
        refused=_MLA,
        note="as DeepSeek-V2; and the router's bias is a buffer",
    ),
    Family(
        "GLM-4.5",
        ("glm4_moe", {**_GROUPED, **_DEEPSEEK}),
        refused=_BUFFERS,
        note="the router's bias is a buffer, which is neither published nor exported",
    ),
    Family(
        "Apertus",
        ("apertus", _ONE_KEY),
        refused=_BUFFERS,
        note="numbers of its activation are buffers",
    ),
    Family(
        "gpt-oss",
        ("gpt_oss", {**_GROUPED, **_EXPERTS}),
        refused=_NO_SDPA,
        note="its attention has sinks, which the kernel does not compute; the published weights are quantised (MXFP4)",
    ),
    Family(
        "Bloom",
        ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 2}),
        refused=_NO_SDPA,
        note="ALiBi",
    ),
    Family(
        "GPT-J", ("gptj", {**_GPT, "rotary_dim": 16}), refused=_NO_SDPA, note="its attention was never ported"
    ),
    Family(
        "Mamba-2",
        (
            "mamba2",
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "state_size": 16,
                "num_heads": 4,
                "head_dim": 32,
                "expand": 2,
                "n_groups": 1,
                "chunk_size": 32,
            },
        ),
        refused=_NO_SDPA,
        note="a recurrence without attention, which vLLM's build for CPUs does not have either",
    ),
    Family(
        "Qwen3-Next",
        ("qwen3_next", {**_GROUPED, **_ROUTED, **_LINEAR, "shared_expert_intermediate_size": 64}),
        rows="own",
        note=_OWN,
    ),
    Family("Qwen3.5 (text)", ("qwen3_5_text", {**_GROUPED, **_LINEAR}), rows="own", note=_OWN),
    Family(
        "Falcon-H1",
        (
            "falcon_h1",
            {
                **_GROUPED,
                **_MAMBA,
                "mamba_d_ssm": 64,
                "mamba_d_head": 16,
                "lm_head_multiplier": 0.04,
            },
        ),
        rows="own",
        note=f"{_OWN}; `lm_head_multiplier` is exact",
    ),
    Family(
        "Bamba",
        ("bamba", {**_ONE_KEY, **_MAMBA, "attn_layer_indices": [1]}),
        refused="vLLM no longer serves BambaForCausalLM, which it had until 0.23.0",
        note="vLLM 0.32 has dropped it, and others such as Persimmon, MPT, Dots1 and MiniMax-M1",
    ),
    Family(
        "LFM2",
        ("lfm2", {**_ONE_KEY, "layer_types": ["conv", "full_attention"]}),
        rows="own",
        note=_OWN,
    ),
    Family(
        "RecurrentGemma",
        (
            "recurrent_gemma",
            {
                **_ONE_KEY,
                "lru_width": 64,
                "attention_window_size": 64,
                "block_types": ["recurrent", "attention"],
            },
        ),
        refused="vLLM cannot serve RecurrentGemmaForCausalLM: it has no class for it, and in the code of transformers only 1 of 2",
        note="a recurrence, for which vLLM has no class of its own",
    ),
)

OTHERS: Final[tuple[tuple[str, str], ...]] = (
    ("quantised checkpoints (GPTQ, AWQ, bitsandbytes, FP8, compressed-tensors, MXFP4)", "only unquantised weights can be trained"),
    ("adapters (LoRA) instead of a model", "merge them into their base model"),
    ("vision-language, audio and encoder-decoder models", "the trainer computes log-probabilities of text after text"),
    ("models with code of their own (`auto_map`) that transformers does not have", "code from a model's repository is never run"),
    ("weights as `.bin`, `.pth` or GGUF only", "convert them to safetensors"),
    ("models whose logits are no linear function of the hidden states, but for a scale, a cap or a bias", "found by comparing the head with the model's own forward pass"),
)  # fmt: skip
"""Kinds that ``validate`` refuses, with the reason; ``test_trainer_model_checks.py`` has them."""


def write_family(family: Family, folder: Path) -> Path:
    """Write a tiny model of ``family``, as :func:`tiny_models.write` does."""
    import tiny_models

    if isinstance(family.config, str):
        return tiny_models.write(family.config, folder)
    return _write(_config(*family.config), folder)


def _config(model_type: str, settings: Mapping[str, Any]) -> Callable[[], Any]:
    from transformers import AutoConfig

    return lambda: AutoConfig.for_model(model_type, **settings, pad_token_id=0)


def _write(config: Callable[[], Any], folder: Path) -> Path:
    import tiny_models

    name = "a row of docs/models.md"
    families = tiny_models.FAMILIES
    assert isinstance(families, dict)
    families[name] = config
    try:
        return tiny_models.write(name, folder)
    finally:
        del families[name]


def table(rows: str) -> str:
    """A table of docs/models.md: ``trained`` families, or those ``refused``."""
    if rows == "refused":
        every = [(f.name, f.note) for f in FAMILIES if f.refused] + list(OTHERS)
        head = ("family or kind", "why")
    else:
        every = [(f.name, f.note) for f in FAMILIES if not f.refused]
        head = ("family", "particular")
    lines = [head, ("---", "---"), *every]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
