"""``generator.adaptiveConcurrency`` against fixed limits, with completions of thousands of tokens, on a vLLM server whose KV cache
holds few of the sequences that it may run.

The actor's requests, by groups of eight completions: as many as a fixed number of sequences needs, or as many as the limit that follows the
cache. ``+.1`` is vLLM's own ``--watermark``: a tenth of the cache stays free when it admits a sequence; ``adaptive+.1`` is what the field
does. All arms sample the same lengths in the same order, and are measured between two numbers of sampled tokens, when sequences of all
ages run. Tokens a second, of time and of the server's processor time; preemptions.

    python benchmarks/adaptive_concurrency.py [--quick] [--only ARM,…]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from support.length_model import HEAD_SIZE, LAYERS, make_length_model
from support.vllm_process import VllmProcess

from scalerl_generator.rollouts.concurrency import Concurrency, cache_pressure
from scalerl_generator.rollouts.occupancy import Occupancy, groups_wanted
from scalerl_generator.vllm_client import VllmClient

MOST, COMPLETIONS = 256, 8
MEAN_TOKENS, MAX_TOKENS, CONTEXT, PROMPT = 2000, 6000, 8192, list(range(3, 13))
HIDDEN, KV_HEADS = 512, 2
"""13.6 M parameters and 2 KiB of KV cache a token: prefill is not negligible beside decoding. In a model of .9 M parameters it is."""
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_SIZE * 4
LONG_SECONDS = 36_000.0
MEASURE_SECONDS = 2.0


@dataclass
class Counters:
    """Of the server since its start, and its state now."""

    seconds: float
    cpu_seconds: float
    tokens: int
    preemptions: int
    running: int
    used: float


async def counters(server: VllmProcess) -> Counters:
    async with aiohttp.ClientSession(server.url) as session, session.get("/metrics") as reply:
        text = await reply.text()
    value = {name: float(x) for name, x in re.findall(r"^vllm:(\w+)\{.*\} (\S+)$", text, re.MULTILINE)}
    return Counters(
        time.monotonic(),
        server.cpu_seconds(),
        int(value["generation_tokens_total"]),
        int(value["num_preemptions_total"]),
        int(value["num_requests_running"]),
        value["kv_cache_usage_perc"],
    )


async def follow(concurrency: Concurrency, client: VllmClient) -> None:
    while True:
        concurrency.follow(await cache_pressure(client))
        await asyncio.sleep(MEASURE_SECONDS)


async def load(client: VllmClient, concurrency: Concurrency) -> None:
    """Keep the server busy as the actor does, until cancelled."""
    draw, occupancy = np.random.default_rng(1), Occupancy()
    occupancy.fraction = 0.4  # of eight exponential lengths
    groups: set[asyncio.Task[list[int]]] = set()

    async def group(number: int, lengths: list[int]) -> list[int]:
        prompt = [3 + number % 10, 3 + number // 10 % 10, *PROMPT]
        completions = [
            client.generate(prompt, n=1, max_tokens=tokens, timeout_seconds=LONG_SECONDS)
            for tokens in lengths
        ]
        await asyncio.gather(*completions)
        return lengths

    number = 0
    try:
        while True:
            held = len(groups)
            limit, at_server = concurrency.limit, held * COMPLETIONS
            for _ in range(groups_wanted(limit, COMPLETIONS, occupancy.fraction, at_server, held)):
                drawn = draw.exponential(MEAN_TOKENS, COMPLETIONS).clip(1, MAX_TOKENS)
                groups.add(asyncio.create_task(group(number, [int(one) for one in drawn])))
                number += 1
            done, groups = await asyncio.wait(groups, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                occupancy.observe(task.result())
    finally:
        for task in groups:
            task.cancel()
        await asyncio.gather(*groups, return_exceptions=True)


async def sample(server: VllmProcess, limit: int | None, begin: int, end: int) -> dict[str, float]:
    """Figures of one arm, between the tokens ``begin`` and ``end``; limit: None where it follows the cache."""
    concurrency = Concurrency(limit or MOST, COMPLETIONS, adaptive=limit is None)
    await server.ready()
    async with server.client() as client:
        tasks = [asyncio.create_task(load(client, concurrency))]
        if limit is None:
            tasks.append(asyncio.create_task(follow(concurrency, client)))
        rows: list[Counters] = []
        limits: list[int] = []
        try:
            while not rows or rows[-1].tokens < end:
                await asyncio.sleep(1.0)
                now = await counters(server)
                if now.tokens >= begin:
                    rows.append(now)
                    limits.append(concurrency.limit)
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    first, last = rows[0], rows[-1]
    tokens = last.tokens - first.tokens
    return {
        "tokens/s": tokens / (last.seconds - first.seconds),
        "of CPU": tokens / (last.cpu_seconds - first.cpu_seconds),
        "preemptions": last.preemptions - first.preemptions,
        "running": statistics.fmean(row.running for row in rows),
        "KV used": statistics.fmean(row.used for row in rows),
        "limit": statistics.fmean(limits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two arms of a minute")
    parser.add_argument("--only", default="256,16,256+.1,adaptive+.1", help="arms: limit[+watermark]")
    parser.add_argument("--cache-tokens", type=int, default=32_768)
    parser.add_argument("--begin", type=int, default=80_000, help="tokens")
    parser.add_argument("--end", type=int, default=240_000, help="tokens")
    options = parser.parse_args()
    if options.quick:
        options.only, options.begin, options.end = "256,adaptive+.1", 20_000, 40_000
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_length_model(model, 1e9, CONTEXT, HIDDEN, kv_heads=KV_HEADS)
        for arm in options.only.split(","):
            name, _, watermark = arm.partition("+")
            limit = None if name == "adaptive" else int(name)
            server = VllmProcess(
                model,
                *("--dtype", "float32", "--max-model-len", str(CONTEXT)),
                *("--max-num-seqs", str(limit or MOST), "--stats"),
                *("--kv-cache-bytes", str(options.cache_tokens * TOKEN_BYTES)),
                *("--watermark", watermark or "0"),
            )
            try:
                figures[arm] = asyncio.run(sample(server, limit, options.begin, options.end))
            finally:
                server.stop()
            print(f"{arm:10}" + "".join(f"{key:>12} {x:7.2f}" for key, x in figures[arm].items()), flush=True)
    print(json.dumps({"benchmark": "adaptive_concurrency", "figures": figures}))


if __name__ == "__main__":
    main()
