"""Writes a randomly initialised Llama or Mixtral, without torch and transformers, which take 10 s to import.

The files are those of ``LlamaForCausalLM.save_pretrained``, or of ``MixtralForCausalLM`` for a model with experts. The weights are normally distributed, the norms' weights are
one, and the tokenizer is a byte-level BPE with one token per digit (arithmetic on merged digits is needlessly hard).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scalerl_api.memory.model_size import BYTES, Dtype
from scalerl_api.spec import ScratchModel
from scalerl_trainer.errors import ModelError

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"

Array = np.ndarray[Any, np.dtype[Any]]


def write_scratch(
    directory: Path,
    model: ScratchModel,
    texts: Iterable[str],
    *,
    seed: int,
    dtype: Dtype,
    context_tokens: int,
) -> None:
    """Write config, tokenizer and weights into an existing ``directory``, deterministically.

    Raises:
        ModelError: the vocabulary is smaller than the alphabet of ``texts``.
    """
    tokenizer = train_tokenizer(texts, model.vocabulary_size)
    vocabulary = tokenizer.get_vocab_size()
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "eos_token": EOS,
            "unk_token": UNKNOWN,
            "model_max_length": context_tokens,
        },
    )
    special = {"eos_token_id": tokenizer.token_to_id(EOS), "pad_token_id": tokenizer.token_to_id(PAD)}
    _write_json(directory / "generation_config.json", special)
    config = scratch_config(model, vocabulary, dtype, context_tokens) | special
    _write_json(directory / "config.json", config)
    write_safetensors(directory / "model.safetensors", model, vocabulary, seed, dtype)


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with at most ``vocabulary_size`` tokens, deterministically.

    A vocabulary with room for all 256 bytes encodes every text. A smaller one has only the ten digits and the bytes of
    ``texts``, and encodes other bytes as the unknown token.

    Raises:
        ModelError: the vocabulary is smaller than the alphabet.
    """
    texts = list(texts)
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    special = [PAD, EOS, UNKNOWN]
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary_size < len(special) + len(alphabet):
        alphabet = set("0123456789").union(
            *(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
        )
    if len(special) + len(alphabet) > vocabulary_size:
        raise ModelError(
            f"the task's texts use {len(alphabet)} different bytes: a vocabulary of {vocabulary_size} is too small, "
            f"take at least {len(special) + len(alphabet)}"
        )
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def llama_config(
    model: ScratchModel, vocabulary: int, dtype: Dtype, context_tokens: int
) -> dict[str, object]:
    """``config.json`` of a :class:`ScratchModel` without experts."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": vocabulary,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.attention_heads,
        "head_dim": model.hidden_size // model.attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": float(model.initializer_range),
        "bos_token_id": None,
    }


def scratch_config(
    model: ScratchModel, vocabulary: int, dtype: Dtype, context_tokens: int
) -> dict[str, object]:
    """``config.json`` of a :class:`ScratchModel`."""
    config = llama_config(model, vocabulary, dtype, context_tokens)
    if model.experts is None:
        return config
    return config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": model.experts.count,
        "num_experts_per_tok": model.experts.per_token,
        "sliding_window": None,
    }


def initial_weights(model: ScratchModel, vocabulary: int, seed: int) -> Iterator[tuple[str, Array]]:
    """Names and initial values of all parameters, float32; each depends only on ``seed``, its name and its shape."""
    deviation = np.float32(model.initializer_range)
    for name, shape in parameter_shapes(model, vocabulary):
        if name.endswith("norm.weight"):
            yield name, np.ones(shape, np.float32)
            continue
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        yield name, generator.standard_normal(shape, np.float32) * deviation


def parameter_shapes(model: ScratchModel, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters, in the order of the weights file."""
    hidden, wide = model.hidden_size, model.intermediate_size
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        for part in "qkvo":
            yield f"{prefix}.self_attn.{part}_proj.weight", (hidden, hidden)
        if model.experts is None:
            yield f"{prefix}.mlp.gate_proj.weight", (wide, hidden)
            yield f"{prefix}.mlp.up_proj.weight", (wide, hidden)
            yield f"{prefix}.mlp.down_proj.weight", (hidden, wide)
        else:
            yield f"{prefix}.block_sparse_moe.gate.weight", (model.experts.count, hidden)
            for expert in range(model.experts.count):
                each = f"{prefix}.block_sparse_moe.experts.{expert}"
                yield f"{each}.w1.weight", (wide, hidden)
                yield f"{each}.w2.weight", (hidden, wide)
                yield f"{each}.w3.weight", (wide, hidden)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not model.tied_embeddings:
        yield "lm_head.weight", (vocabulary, hidden)


def write_safetensors(path: Path, model: ScratchModel, vocabulary: int, seed: int, dtype: Dtype) -> None:
    """Write the weights with one tensor in memory at a time.

    The format is eight bytes with the length of a JSON header, the header, then the tensors' bytes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in parameter_shapes(model, vocabulary):
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        kind = {"bfloat16": "BF16", "float32": "F32"}[dtype]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in initial_weights(model, vocabulary, seed):
            file.write((_bfloat16(array) if dtype == "bfloat16" else array.astype("<f4")).data)


def _bfloat16(array: Array) -> Array:
    """bfloat16 bits of a float32 array, uint16, rounded to nearest even as in torch; the values are finite and small."""
    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    return np.asarray((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16, "<u2")


def _write_json(path: Path, data: Mapping[str, object]) -> None:
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
