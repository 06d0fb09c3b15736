"""A training step beside one of plain Hugging Face code, and beside TRL's: tokens a second, processor time, and memory.

    python benchmarks/train_step.py [--quick] [--rounds N] [--dtype bfloat16] [--engine FSDP2] [--trl]

All train the same Llama with the same sequences on two gloo ranks of one thread each: CISPO on token log-probabilities, AdamW, clipped
gradients. *Plain* is what a script without an engine does: ``DistributedDataParallel``, ``torch.optim.AdamW``, micro-batches padded to
their longest sequence, ``log_softmax`` of all logits in float32; in bfloat16, float32 weights under autocast. *TRL* is its GRPO trainer under
accelerate, which is given the sequences in place of generating them; it comes from requirements/bench.txt. *Ours* is the engine at
ZeRO 1, the default, or with FSDP2, with its FP32 head and its guards. Activations are kept by all. Lengths are uniform between a half and the whole of the
case's; a micro-batch has two sequences of the longest, or one. Tokens a second count tokens of sequences, not padding. Peak memory is resident memory
beyond that of the same process after steps of a tiny model. Each run is two processes of its own, and measures the second of two steps: the first has
the beginnings of the sequences. Runs alternate; medians over rounds. The last line is one JSON object.

    python benchmarks/train_step.py --prompts [--rounds N]

Ours alone, of groups of completions of one prompt: processor time of a step in which a prompt is computed once for its completions, and
of one in which each has its prompt. One rank of one thread at ZeRO 1 in float32; steps alternate, after one of each that is not counted.
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

from scalerl_api.trainer_spec import DEFAULT_MICRO_BATCH_TOKENS
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
    "30 M, 1k": ("30 M", 1024, 4),
    "30 M, 4k": ("30 M", 4096, 2),
    "135 M, 1k": ("135 M", 1024, 2),
    "135 M, 4k": ("135 M", 4096, 1),
}
"""Model, longest sequence in tokens, and sequences a rank and step, which fit a case into four minutes and 24 GiB."""
QUICK = ["30 M, 1k"]
SUMS = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
"""The model of ``make run``."""
LONG = SUMS | {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, "vocab_size": 8192}
GROUPS = {
    "sums of 14 tokens, 8 a prompt": (SUMS, 10, 14, 8, 64),
    "sums of 14 tokens, 16 a prompt": (SUMS, 10, 14, 16, 32),
    "prompts of 256 of 1,024 tokens, 8 a prompt": (LONG, 256, 1024, 8, 1),
    "prompts of 256 of 1,024 tokens, 16 a prompt": (LONG, 256, 1024, 16, 1),
}
"""Model, tokens of a prompt and of a sequence, completions a prompt, and prompts a step."""
PROMPT_TOKENS = 64
LIMIT_SECONDS = 600.0

Measure = Callable[[], None]


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


def group_batch(case: tuple[dict[str, Any], int, int, int, int], tokens: int, seed: int) -> TrainBatch:
    """Groups of completions, of sequences of so many tokens."""
    sizes, prompt_tokens, _, completions, prompts = case
    generator, count = torch.Generator().manual_seed(seed), prompts * completions

    def draw(length: int) -> list[int]:
        return torch.randint(3, sizes["vocab_size"], (length,), generator=generator).tolist()

    rows = [
        Sequence(prompt, draw(tokens - prompt_tokens))
        for prompt in [draw(prompt_tokens) for _ in range(prompts)]
        for _ in range(completions)
    ]
    trained = count * (tokens - prompt_tokens)
    return TrainBatch(
        rows,
        torch.full((count,), 1 / trained),
        torch.linspace(-1, 1, count),
        torch.full((trained,), -math.log(sizes["vocab_size"])),
    )


def shared_prompts(name: str, rounds: int) -> dict[str, Any]:
    """Medians of processor seconds of a step with the layout and without, and the computed positions of both."""
    case = GROUPS[name]
    sizes, prompt_tokens, tokens, *_ = case
    # A group of 8 fits.
    room = max(DEFAULT_MICRO_BATCH_TOKENS, 8 * tokens + prompt_tokens)
    settings = EngineSettings(dtype="float32", warmup_steps=0, micro_batch_tokens=room)
    seconds: dict[str, list[float]] = {"once": [], "each": []}
    positions, norms, engines = dict[str, int](), dict[str, float](), dict[str, Engine]()
    for way in seconds:
        engines[way] = Engine(model(sizes), settings, torch.device("cpu"))
        if way == "each":
            engines[way]._checks._follows = False
        engines[way].step(group_batch(case, prompt_tokens + 4, 0), Cispo(5.0))
    for number in range(rounds):
        batch = group_batch(case, tokens, number + 1)
        for way, engine in engines.items():
            begun = time.process_time()
            stats = engine.step(batch, Cispo(5.0))
            seconds[way].append(time.process_time() - begun)
            assert stats.applied, stats.skipped
            positions[way], norms[way] = stats.tokens + stats.padding, stats.gradient_norm
        assert math.isclose(norms["once"], norms["each"], rel_tol=1e-3), norms
    for engine in engines.values():
        engine.close()
    assert positions["once"] < positions["each"], "the layout was not taken"
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    print(
        f"{name}: {medians['once']:.3f} s a step, {medians['each']:.3f} with each completion's prompt "
        f"({medians['once'] / medians['each']:.2f}×; positions {positions['once'] / positions['each']:.2f}×)",
        flush=True,
    )
    return {"processor_seconds": medians, "positions": positions}


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


def in_turn(
    make: Callable[..., Callable[[list[list[int]]], None]],
    sizes: dict[str, Any],
    longest: int,
    dtype: str,
    batches: list[list[list[int]]],
    begins: Measure,
    ends: Measure,
) -> None:
    """Steps of :func:`ours` or :func:`plain`."""
    step = make(sizes, longest, dtype, torch.device("cpu"))
    for batch in batches:
        begins()
        step(batch)
        ends()


def trl(
    sizes: dict[str, Any],
    longest: int,
    dtype: str,
    batches: list[list[list[int]]],
    begins: Measure,
    ends: Measure,
) -> None:
    sys.path.append(
        sys.path.pop(0)
    )  # this folder has a datasets.py, which is not the package that TRL imports
    from support import trl_step

    sys.path.insert(0, sys.path.pop())

    trl_step.train(
        model(sizes),
        batches,
        prompt_tokens=PROMPT_TOKENS,
        micro_batch=min(2, len(batches[0])),
        dtype=dtype,
        on_batch=begins,
        on_step=ends,
    )


def worker(case: dict[str, Any]) -> None:
    rank = Rank.from_environment(os.environ)
    torch.set_num_threads(1)
    init_process_group(rank, device="cpu", timeout_seconds=LIMIT_SECONDS)
    fsdp = {"engine": "FSDP2", "zero_stage": 3} if case["engine"] == "FSDP2" else {}
    steps = {"ours": partial(in_turn, partial(ours, **fsdp)), "plain": partial(in_turn, plain), "trl": trl}
    run, dtype, times = steps[case["side"]], case["dtype"], list[tuple[float, float]]()

    def now() -> None:
        torch.distributed.barrier()
        times.append((time.perf_counter(), time.process_time()))

    few = sequences(rank.rank, 128, case["count"], SMALL["vocab_size"])
    run(case["sizes"] | SMALL | {"num_attention_heads": 2}, 128, dtype, [few, few], now, now)
    gc.collect()
    base = resident(reset=True)[0]
    rows = sequences(rank.rank, case["longest"], case["count"], case["sizes"]["vocab_size"])
    beginnings = [row[: PROMPT_TOKENS + 64] for row in rows]
    run(case["sizes"], case["longest"], dtype, [beginnings, rows], now, now)
    seconds, processor = (end - begin for begin, end in zip(*times[-2:], strict=True))
    found = {
        "seconds": seconds,
        "processor": processor,
        "tokens": sum(map(len, rows)),
        "peak": resident()[1] - base,
    }
    print("RESULT " + json.dumps(found), flush=True)
    destroy_process_group()


def measure(side: str, name: str, dtype: str, engine: str) -> tuple[float, float, float]:
    """Tokens a second of all ranks, tokens a second of their processor time, and the larger peak in bytes."""
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
    tokens, processor = (sum(one[key] for one in found) for key in ("tokens", "processor"))
    return tokens / seconds, tokens / processor, max(one["peak"] for one in found)


def report(title: str, runs: dict[str, list[tuple[float, float, float]]]) -> dict[str, dict[str, float]]:
    """Print the medians of each side, and their ratios to others'; returns the medians."""
    speed, frugality, peak = (
        {side: statistics.median(one[i] for one in values) for side, values in runs.items()} for i in range(3)
    )
    print(f"{title}: {speed['ours']:.0f} tokens/s, peak {peak['ours'] / 2**20:.0f} MiB", flush=True)
    for side in list(runs)[1:]:
        print(
            f"  {side}: {speed[side]:.0f} tokens/s ({speed['ours'] / speed[side]:.2f}× by ours, {frugality['ours'] / frugality[side]:.2f}× "
            f"by processor time), peak {peak[side] / 2**20:.0f} MiB ({peak['ours'] / peak[side]:.2f}×)",
            flush=True,
        )
    return {"tokens_per_second": speed, "tokens_per_processor_second": frugality, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="cases, separated by semicolons")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--engine", choices=["DeepSpeed", "FSDP2"], default="DeepSpeed")
    parser.add_argument("--trl", action="store_true", help="beside TRL too (requirements/bench.txt)")
    parser.add_argument(
        "--prompts", action="store_true", help="prompts computed once, or with each completion"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    if arguments.prompts:
        torch.set_num_threads(1)
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed reads it
        init_process_group(Rank(0, 1, 0, "127.0.0.1", free_port()), device="cpu", timeout_seconds=60)
        names = arguments.only.split(";") if arguments.only else list(GROUPS)
        found = {name: shared_prompts(name, arguments.rounds) for name in names}
        destroy_process_group()
        print(json.dumps({"benchmark": "train_step, prompts", "figures": found}))
        return
    names = arguments.only.split(";") if arguments.only else QUICK if arguments.quick else list(CASES)
    figures: dict[str, Any] = {}
    sides = ["ours", "plain", *(["trl"] if arguments.trl else [])]
    for name in names:
        runs: dict[str, list[tuple[float, float, float]]] = {side: [] for side in sides}
        for _ in range(1 if arguments.quick else arguments.rounds):
            for side, values in runs.items():
                values.append(measure(side, name, arguments.dtype, arguments.engine))
                print(
                    f"  {name}, {side}: {values[-1][0]:.0f} tokens/s, {values[-1][2] / 2**20:.0f} MiB",
                    flush=True,
                )
        figures[name] = report(f"{name} tokens, {arguments.dtype}, {arguments.engine}", runs)
    options = {"dtype": arguments.dtype, "engine": arguments.engine}
    print(json.dumps({"benchmark": "train_step", **options, "figures": figures}))


if __name__ == "__main__":
    main()
