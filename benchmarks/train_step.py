"""A training step beside one of plain Hugging Face code: tokens a second, and memory.

    python benchmarks/train_step.py [--quick] [--rounds N] [--dtype bfloat16] [--engine FSDP2]

Both train the same Llama with the same sequences on two gloo ranks of one thread each: CISPO on token log-probabilities, AdamW, clipped
gradients. *Plain* is what a script without an engine does: ``DistributedDataParallel``, ``torch.optim.AdamW``, micro-batches padded to
their longest sequence, ``log_softmax`` of all logits in float32; in bfloat16, float32 weights under autocast. *Ours* is the engine at
ZeRO 1, the default, or with FSDP2, with its FP32 head and its guards. Lengths are uniform between a half and the whole of the case's; a micro-batch has two
sequences of the longest. Tokens a second count tokens of sequences, not padding. Peak memory is resident memory beyond that of the same process after
steps of a tiny model. Runs alternate; medians over rounds of the second of two steps. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.memory_worker import SMALL, resident
from support.vllm_process import free_port
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    Rank,
    TrainBatch,
    destroy_process_group,
    init_process_group,
)
from scalerl_trainer.packing import Sequence

WORLD = 2
MODELS = {
    "30 M": {
        "hidden_size": 384,
        "num_hidden_layers": 10,
        "intermediate_size": 1024,
        "num_attention_heads": 6,
        "vocab_size": 32_000,
    },
    "135 M": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "vocab_size": 49_152,
    },
}
CASES = {
    "30 M, 1k": ("30 M", 1024, 8),
    "30 M, 4k": ("30 M", 4096, 4),
    "135 M, 1k": ("135 M", 1024, 4),
    "135 M, 4k": ("135 M", 4096, 2),
}
"""Model, longest sequence in tokens, and sequences a rank and step."""
QUICK = ["30 M, 1k"]
PROMPT_TOKENS = 64
LIMIT_SECONDS = 1800.0


def sequences(rank: int, longest: int, count: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(longest // 2, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def model(sizes: dict[str, Any]) -> Any:
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    made = LlamaForCausalLM(config)
    made.config.use_cache = False
    return made


def ours(
    sizes: dict[str, Any], longest: int, dtype: str, device: torch.device, **partition: Any
) -> Callable[[list[list[int]]], None]:
    settings = EngineSettings(**partition, dtype=dtype, warmup_steps=0, micro_batch_tokens=2 * longest)
    engine = Engine(model(sizes).to(getattr(torch, dtype)), settings, device)

    def step(rows: list[list[int]]) -> None:
        trained = sum(len(row) - PROMPT_TOKENS for row in rows)
        mine = TrainBatch(
            [Sequence(row[:PROMPT_TOKENS], row[PROMPT_TOKENS:]) for row in rows],
            torch.full((len(rows),), 1 / trained),
            torch.linspace(-1, 1, len(rows)),
            torch.full((trained,), -math.log(sizes["vocab_size"])),
        )
        stats = engine.step(mine, Cispo(5.0))
        assert stats.applied, stats.skipped

    return step


def plain(
    sizes: dict[str, Any], longest: int, dtype: str, device: torch.device
) -> Callable[[list[list[int]]], None]:
    replica = DistributedDataParallel(model(sizes))
    optimizer = torch.optim.AdamW(replica.parameters(), lr=5e-7, eps=1e-15, weight_decay=0.01)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")

    def loss(rows: list[list[int]], advantages: torch.Tensor, trained: int) -> torch.Tensor:
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        with autocast:
            logits = replica(input_ids=ids, attention_mask=mask).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(2, ids[:, 1:, None])[..., 0]
        ratio = torch.exp(logprobs.detach() + math.log(sizes["vocab_size"])).clamp(max=5.0)
        of_completion = mask[:, 1:].bool() & (torch.arange(1, width) >= PROMPT_TOKENS)
        return -(ratio * advantages[:, None] * logprobs * of_completion).sum() / trained

    def step(rows: list[list[int]]) -> None:
        trained, advantages = sum(len(row) - PROMPT_TOKENS for row in rows), torch.linspace(-1, 1, len(rows))
        for first in range(0, len(rows), 2):
            some = slice(first, first + 2)
            replica.require_backward_grad_sync = first + 2 >= len(rows)
            loss(rows[some], advantages[some], trained).backward()
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def worker(case: dict[str, Any]) -> None:
    rank = Rank.from_environment(os.environ)
    torch.set_num_threads(1)
    device = init_process_group(rank, device="cpu", timeout_seconds=LIMIT_SECONDS)
    fsdp = {"engine": "FSDP2", "zero_stage": 3} if case["engine"] == "FSDP2" else {}
    make = {"ours": partial(ours, **fsdp), "plain": plain}[case["side"]]
    small = make(case["sizes"] | SMALL | {"num_attention_heads": 2}, 128, case["dtype"], device)
    for _ in range(2):
        small(sequences(rank.rank, 128, 2, SMALL["vocab_size"]))
    del small
    gc.collect()
    base = resident(reset=True)[0]
    step = make(case["sizes"], case["longest"], case["dtype"], device)
    rows = sequences(rank.rank, case["longest"], case["count"], case["sizes"]["vocab_size"])
    for _ in range(2):
        torch.distributed.barrier()
        begin = time.perf_counter()
        step(rows)
        torch.distributed.barrier()
        seconds = time.perf_counter() - begin
    print(
        "RESULT "
        + json.dumps({"seconds": seconds, "tokens": sum(map(len, rows)), "peak": resident()[1] - base}),
        flush=True,
    )
    destroy_process_group()


def measure(side: str, name: str, dtype: str, engine: str) -> tuple[float, float]:
    """Tokens a second of all ranks, and the larger peak in bytes."""
    sizes, longest, count = CASES[name]
    case = {"side": side, "sizes": MODELS[sizes], "longest": longest, "count": count, "dtype": dtype}
    case["engine"] = engine
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(case)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    found = []
    try:
        for process in ranks:
            output, errors = process.communicate(timeout=LIMIT_SECONDS)
            line = next((one for one in output.splitlines() if one.startswith("RESULT ")), None)
            if line is None:
                raise SystemExit(f"{side}, {name}: a rank has failed\n{errors[-3000:]}")
            found.append(json.loads(line.removeprefix("RESULT ")))
    finally:
        for process in ranks:
            process.kill()
    seconds = max(one["seconds"] for one in found)
    return sum(one["tokens"] for one in found) / seconds, max(one["peak"] for one in found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="cases, separated by semicolons")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--engine", choices=["DeepSpeed", "FSDP2"], default="DeepSpeed")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    names = arguments.only.split(";") if arguments.only else QUICK if arguments.quick else list(CASES)
    figures: dict[str, Any] = {}
    for name in names:
        runs: dict[str, list[tuple[float, float]]] = {"ours": [], "plain": []}
        for _ in range(1 if arguments.quick else arguments.rounds):
            for side, values in runs.items():
                values.append(measure(side, name, arguments.dtype, arguments.engine))
        speed, peak = (
            {side: statistics.median(one[i] for one in values) for side, values in runs.items()}
            for i in (0, 1)
        )
        figures[name] = {"tokens_per_second": speed, "peak_bytes": peak}
        print(
            f"{name} tokens, {arguments.dtype}, {arguments.engine}: {speed['ours']:.0f} tokens/s, plain {speed['plain']:.0f} "
            f"({speed['ours'] / speed['plain']:.2f}×); peak {peak['ours'] / 2**20:.0f} MiB, plain {peak['plain'] / 2**20:.0f} "
            f"({peak['ours'] / peak['plain']:.2f}×)",
            flush=True,
        )
    options = {"dtype": arguments.dtype, "engine": arguments.engine}
    print(json.dumps({"benchmark": "train_step", **options, "figures": figures}))


if __name__ == "__main__":
    main()
