"""Time of a step with and without the gradient guard, and of one that it computes again, by processor time of one rank.

The three kinds of steps alternate in one engine (ZeRO 1, bfloat16, a model that is mostly its vocabulary). Without outliers the
guard adds squares of one number per token and the gathering of two; a masked token costs a second forward and backward pass.

    python benchmarks/gradient_guard.py [--quick] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from support.vllm_process import free_port
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl_trainer.algo.gradient_guard import GradientGuard
from scalerl_trainer.algo.losses import PpoClip
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    Rank,
    TrainBatch,
    destroy_process_group,
    init_process_group,
)
from scalerl_trainer.packing import Sequence

SEQUENCE_TOKENS = 128


def batch(vocabulary: int, count: int, *, outlier: bool) -> TrainBatch:
    """``count`` sequences with the log-probabilities of a uniform policy; ``outlier``: one token of ratio e^10."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (count, SEQUENCE_TOKENS), generator=generator).tolist()
    generator_logprobs_n = torch.full(
        (count * (SEQUENCE_TOKENS - 1),), -float(torch.tensor(vocabulary).log())
    )
    advantages_s = torch.ones(count)
    advantages_s[::2] = -1
    if outlier:
        generator_logprobs_n[0] -= 10
    return TrainBatch(
        [Sequence(one[:1], one[1:]) for one in ids],
        torch.full((count,), 1 / len(generator_logprobs_n)),
        advantages_s,
        generator_logprobs_n,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a vocabulary of 15,000, three rounds")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    vocabulary, count, rounds = (15_000, 4, 3) if given.quick else (150_000, 4, given.rounds)
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    device = init_process_group(Rank.from_environment(os.environ), device="cpu", timeout_seconds=600)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=2,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        use_cache=False,
    )
    settings = EngineSettings(zero_stage=1, dtype="bfloat16", micro_batch_tokens=256, ratio_guard=None)
    engine = Engine(LlamaForCausalLM(config), settings, device)
    kinds: dict[str, tuple[GradientGuard | None, bool]] = {
        "without": (None, False),
        "with": (GradientGuard(), False),
        "masking": (GradientGuard(), True),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name, (guard, outlier) in kinds.items():
            engine.settings = replace(settings, gradient_guard=guard)
            made = batch(vocabulary, count, outlier=outlier)
            begin = time.process_time()
            stats: Any = engine.step(made, PpoClip())
            seconds = time.process_time() - begin
            assert stats.applied
            assert stats.guard_masked_tokens == (name == "masking"), stats
            if turn:  # the first one allocates
                found[name].append(seconds)
    engine.close()
    destroy_process_group()
    base = median(found["without"])
    print(f"vocabulary {vocabulary:,}, {count * (SEQUENCE_TOKENS - 1):,} trainable tokens, {rounds} rounds")
    figures = {"without_seconds": base}
    for name, seconds in found.items():
        ratio = [a / b for a, b in zip(seconds, found["without"], strict=True)]
        print(
            f"{name:8} {median(seconds):7.3f} s ({min(seconds):.3f} to {max(seconds):.3f})   {median(ratio):.3f} of without"
        )
        figures[f"{name}_ratio"] = median(ratio)
    print(json.dumps({"benchmark": "gradient_guard", "figures": figures}))


if __name__ == "__main__":
    main()
