"""One rank of ``benchmarks/memory.py``: two steps of an engine, and the bytes of the tensors that it holds."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    Rank,
    TrainBatch,
    deepspeed_config,
    destroy_process_group,
    init_process_group,
)
from scalerl_trainer.models.lora import Lora
from scalerl_trainer.packing import Sequence

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 64}


def resident(reset: bool = False) -> tuple[int, int]:
    """Resident bytes of this process, and their peak since the last reset."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        rows = dict(line.split(":", 1) for line in file)
    return tuple(int(rows[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def batch(rank: int, tokens: int, sequences: int, vocabulary: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(rank)
    length = tokens // sequences - 4
    ids = torch.randint(3, vocabulary, (sequences, length + 4), generator=generator).tolist()
    rows = [Sequence(one[:4], one[4:]) for one in ids]
    return TrainBatch(
        rows,
        torch.full((sequences,), 1 / (sequences * length)),
        torch.randn(sequences, generator=generator),
        torch.full((sequences * length,), -8.0),
    )


def make_engine(sizes: dict[str, Any], case: dict[str, Any], device: torch.device) -> Engine:
    experts = "num_local_experts" in sizes
    config = (MixtralConfig if experts else LlamaConfig)(
        **sizes, num_key_value_heads=sizes["num_attention_heads"], max_position_embeddings=32768
    )
    config._attn_implementation = "sdpa"

    def model() -> Any:
        made = (MixtralForCausalLM if experts else LlamaForCausalLM)(config).to(getattr(torch, case["dtype"]))
        made.config.use_cache = False
        return made

    deepspeed_config.BUCKET_ELEMENTS = case["bucket"]
    settings = EngineSettings(
        engine=case["engine"],
        zero_stage=case["stage"],
        dtype=case["dtype"],
        warmup_steps=0,
        micro_batch_tokens=case["tokens"],
        activation_checkpointing=case["checkpointing"],
        fp32_head=case["fp32_head"],
        ratio_guard=None,
        lora=None if case["lora"] is None else Lora(case["lora"], case["lora"], tuple(case["targets"])),
    )
    engine = Engine(model(), settings, device)
    if case["reference"]:
        engine.set_reference(model())
    return engine


def two_steps(engine: Engine, case: dict[str, Any], rank: int) -> None:
    """Each of two micro-batches, so that gradients are accumulated; the second step has the optimizer's state."""
    for number in range(2):
        gc.collect()
        resident(reset=True)
        mine = batch(rank + 2 * number, 2 * case["tokens"], 2 * case["sequences"], engine.config.vocab_size)
        stats = engine.step(mine, Cispo(5.0))
        assert stats.applied, stats.skipped


def main() -> None:
    case = json.loads(sys.argv[1])
    rank = Rank.from_environment(os.environ)
    torch.set_num_threads(1)
    device = init_process_group(rank, device="cpu", timeout_seconds=300)
    # The libraries' own memory is in use before anything is measured.
    small = make_engine(case["model"] | SMALL, case, device)
    two_steps(small, case, rank.rank)
    small.close()
    del small
    gc.collect()
    base = resident()[0]
    engine = make_engine(case["model"], case, device)
    gc.collect()
    count = sum(math.prod(shape) for _, shape in engine.weights.parameter_shapes())
    two_steps(engine, case, rank.rank)
    gc.collect()
    held, peak = resident()
    engine.close()
    destroy_process_group()
    print("RESULT " + json.dumps({"parameters": count, "held": held - base, "peak": peak - base}), flush=True)


if __name__ == "__main__":
    main()
