"""What adapters cost beside whole weights: a step, a checkpoint, a publish.

    python benchmarks/lora.py [--quick] [--rank 32] [--steps 8]

Two engines of one rank (ZeRO 1, bfloat16) train the same Llama, one of them adapters of all linear layers. Steps alternate, so that what
else the machine does counts for both. *publish* is the bytes of merged weights, which is what generators get, and beside it those of
the adapters in them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from support.memory_worker import batch
from support.vllm_process import free_port
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import Engine, EngineSettings, Rank, destroy_process_group, init_process_group
from scalerl_trainer.models.lora import PUBLISHED, Lora

MODEL = {
    "hidden_size": 512,
    "num_hidden_layers": 10,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
TOKENS, SEQUENCES = 256, 4


def engine(lora: Lora | None, device: torch.device) -> Engine:
    config = LlamaConfig(**MODEL)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    settings = EngineSettings(
        dtype="bfloat16", warmup_steps=0, micro_batch_tokens=TOKENS, ratio_guard=None, lora=lora
    )
    return Engine(LlamaForCausalLM(config).to(torch.bfloat16), settings, device)


def step_seconds(one: Engine) -> float:
    stats = one.step(batch(0, TOKENS, SEQUENCES, MODEL["vocab_size"]), Cispo(5.0))
    assert stats.applied, stats.skipped
    return stats.seconds["total"]


def saved(one: Engine) -> tuple[int, float]:
    """Bytes of a checkpoint, and the seconds to write it."""
    folder = Path(tempfile.mkdtemp(prefix="scalerl-lora-"))
    try:
        begin = time.perf_counter()
        one.save(folder)
        seconds = time.perf_counter() - begin
        return sum(file.stat().st_size for file in folder.iterdir()), seconds
    finally:
        shutil.rmtree(folder)


def size(shapes: list[tuple[str, tuple[int, ...]]]) -> int:
    return sum(2 * math.prod(shape) for _, shape in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    steps = 2 if arguments.quick else arguments.steps
    torch.set_num_threads(1)
    device = init_process_group(Rank(0, 1, 0, "127.0.0.1", free_port()), device="cpu", timeout_seconds=300)
    engines = {
        "weights": engine(None, device),
        "adapters": engine(Lora(arguments.rank, arguments.rank), device),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(steps + 1):
        for name, one in engines.items():
            seconds[name].append(step_seconds(one))
    results: dict[str, Any] = {}
    for name, one in engines.items():
        checkpoint_bytes, checkpoint_seconds = saved(one)
        results[name] = {
            "step_seconds": statistics.median(seconds[name][1:]),
            "checkpoint_bytes": checkpoint_bytes,
            "checkpoint_seconds": checkpoint_seconds,
        }
        print(
            f"{name:9} step {results[name]['step_seconds']:.2f} s, checkpoint {checkpoint_bytes / 1e6:.1f} MB"
        )
    adapters = engines["adapters"]
    results["publish_bytes"] = size(adapters.weights.checkpoint_shapes())
    results["adapter_bytes"] = size(adapters.weights.adapter_shapes(PUBLISHED))
    share = results["adapter_bytes"] / results["publish_bytes"]
    print(f"publish {results['publish_bytes'] / 1e6:.1f} MB; adapters in it {share:.1%}")
    for one in engines.values():
        one.close()
    destroy_process_group()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
