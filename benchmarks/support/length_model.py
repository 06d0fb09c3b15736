"""A tiny model whose completions have a known length distribution, for measuring throughput.

A Llama of 0.9 M parameters over a 16-token vocabulary is fitted for a minute at most to emit digits and blanks with
a constant probability of ending, so sampled completions are geometric in length with the mean asked for, on every
system that loads the same directory.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = [*"0123456789", " ", ":"]
HEAD_SIZE = 32
"""One that vLLM's attention on CPUs has a kernel for."""


def make_length_model(
    directory: Path, mean_tokens: float, context_tokens: int, hidden: int = 128, seed: int = 0
) -> int:
    """Write model and tokenizer; returns the number of parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )
    fast.save_pretrained(directory)

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    weights = torch.full((len(vocabulary),), 1.0)
    weights[:3] = 0.0
    weights[vocabulary[" "]] = 6.0
    weights[1] = weights.sum() / (mean_tokens - 1)
    target = (weights / weights.sum()).expand(8, 64, -1)
    for _ in range(80):
        tokens = torch.multinomial(weights, 8 * 64, replacement=True, generator=generator).view(8, 64)
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), target.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def write_prompts(path: Path, count: int) -> None:
    """A JSONL of distinct prompts whose answer is a digit that random completions end on now and then."""
    with path.open("w") as file:
        for index in range(count):
            file.write(
                json.dumps({"id": str(index), "prompt": f"{index:06d}:", "answer": str(index % 10)}) + "\n"
            )
