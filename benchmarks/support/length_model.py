"""A tiny model whose completions have a known length distribution, for measuring throughput.

A Llama of 0.9 M parameters with a vocabulary of 15 tokens. Its weights are set so that it emits digits and blanks, with a
constant probability of the end token: the lengths of sampled completions have a geometric distribution with the requested
mean, on every system that loads the model. It is written without torch and transformers, whose import takes longer than
the generation in a short benchmark.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = (*"0123456789", " ", ":")
HEAD_SIZE = 32
"""A head size for which vLLM's CPU attention has a kernel."""
LAYERS = 4
SPREAD = 0.02


def make_length_model(
    directory: Path,
    mean_tokens: float,
    context_tokens: int,
    hidden: int = 128,
    seed: int = 0,
    kv_heads: int | None = None,
) -> int:
    """Write model and tokenizer; returns the number of parameters.

    kv_heads: key-value heads of each layer; by default one per attention head.
    """
    kv_heads = kv_heads or hidden // HEAD_SIZE
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(vocabulary),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // HEAD_SIZE,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    for name, content in (
        ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}),
        ("config", config),
    ):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2))

    weights = np.ones(len(vocabulary), np.float32)
    weights[: len(SPECIAL)] = 1e-9
    weights[vocabulary[" "]] = 6.0
    weights[1] = weights.sum() / (mean_tokens - 1)
    generator = np.random.default_rng(seed)
    tensors = _layers(hidden, kv_heads * HEAD_SIZE, generator)
    # All tokens have nearly the same embedding, which the layers barely change. The head maps the common component to the
    # log-weights, and has small weights for the other components, so that gradients reach every layer.
    noise = SPREAD * generator.standard_normal((2, len(vocabulary), hidden), np.float32)
    tensors["model.embed_tokens.weight"] = 1 + noise[0]
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    tensors["lm_head.weight"] = np.log(weights)[:, None] / hidden + noise[1] - noise[1].mean(1, keepdims=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.size for tensor in tensors.values())


def _layers(hidden: int, kv_size: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {
        **{f"self_attn.{name}_proj": (hidden if name in "qo" else kv_size, hidden) for name in "qkvo"},
        "mlp.gate_proj": (3 * hidden, hidden),
        "mlp.up_proj": (3 * hidden, hidden),
        "mlp.down_proj": (hidden, 3 * hidden),
    }
    tensors = {}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            drawn = SPREAD * generator.standard_normal(shape, np.float32)
            tensors[f"model.layers.{layer}.{name}.weight"] = drawn
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    return tensors


def write_prompts(path: Path, count: int) -> None:
    """Write a JSONL file of distinct prompts, each with a digit as its answer, which some random completions end with."""
    with path.open("w") as file:
        for index in range(count):
            file.write(
                json.dumps({"id": str(index), "prompt": f"{index:06d}:", "answer": str(index % 10)}) + "\n"
            )
