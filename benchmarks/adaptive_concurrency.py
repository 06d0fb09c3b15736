"""``generator.adaptiveConcurrency`` against fixed limits, on a vLLM server whose KV cache holds few of the sequences that it may run.

Completions are sampled in groups of eight, as the actor does for a limit: always 256, fewer, or as its limit follows the cache from
256 on. Tokens a second, preemptions, and the limit at the end.

    python benchmarks/adaptive_concurrency.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path

from support.length_model import make_length_model
from support.vllm_process import VllmProcess

from scalerl_generator.concurrency import Concurrency
from scalerl_generator.leasing import Occupancy, groups_wanted
from scalerl_generator.vllm_client import VllmClient

MOST, COMPLETIONS = 256, 8
MEAN_TOKENS, MAX_TOKENS, PROMPT = 300, 900, list(range(3, 13))
CACHE_BYTES = 32 << 20
"""8,192 tokens of this model: 27 completions of mean length."""
ARMS = {"adaptive": None, "always 256": 256, "always 64": 64, "always 32": 32, "always 16": 16}
MEASURE_SECONDS = 2.0


async def follow(concurrency: Concurrency, client: VllmClient) -> None:
    while True:
        await asyncio.sleep(MEASURE_SECONDS)
        concurrency.follow(await client.cache_pressure())


async def group(client: VllmClient, number: int) -> list[int]:
    """Lengths of a group's completions."""
    prompt = [3 + number % 10, *PROMPT]
    completions = await client.generate(prompt, n=COMPLETIONS, max_tokens=MAX_TOKENS)
    return [len(one.token_ids) for one in completions]


async def sample(server: VllmProcess, fixed: int | None, groups: int) -> dict[str, float]:
    """Figures of one arm; fixed: completions at once, or None."""
    concurrency = Concurrency(most=fixed or MOST, least=COMPLETIONS)
    running: set[asyncio.Task[list[int]]] = set()
    tokens, occupancy = 0, Occupancy()
    await server.ready()
    async with server.client() as client:
        following = asyncio.create_task(follow(concurrency, client)) if fixed is None else None
        begun = time.monotonic()
        while groups or running:
            held = len(running)
            wanted = groups_wanted(
                concurrency.limit, COMPLETIONS, occupancy.fraction, held * COMPLETIONS, held
            )
            for _ in range(min(wanted, groups)):
                running.add(asyncio.create_task(group(client, groups)))
                groups -= 1
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                occupancy.observe(task.result())
                tokens += sum(task.result())
        seconds = time.monotonic() - begun
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
        preemptions = (await client.cache_pressure()).preemptions
    return {"tokens_per_second": tokens / seconds, "preemptions": preemptions, "limit": concurrency.limit}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two arms, few groups")
    arguments = parser.parse_args()
    groups, arms = (16, list(ARMS)[:2]) if arguments.quick else (48, list(ARMS))
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_length_model(model, MEAN_TOKENS, 1024)
        for arm in arms:
            server = VllmProcess(
                model,
                *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", str(MOST)),
                *("--kv-cache-bytes", str(CACHE_BYTES), "--stats"),
            )
            try:
                figures[arm] = asyncio.run(sample(server, ARMS[arm], groups))
            finally:
                server.stop()
            print(
                f"{arm:12}" + "".join(f"{key:>20} {value:8.0f}" for key, value in figures[arm].items()),
                flush=True,
            )
    print(json.dumps({"benchmark": "adaptive_concurrency", "figures": figures}))


if __name__ == "__main__":
    main()
