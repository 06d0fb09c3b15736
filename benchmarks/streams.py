"""Tokens per second of one request a completion, against one request a group of 16, on a real vLLM server.

    python benchmarks/streams.py [--quick] [--rounds 3]

Both ways are the actor's own calls, interleaved, with five groups at a time and 64 sequences on the server. The model
ends no completion before its limit, and is so small that overhead binds: on a large one a request costs the same and a
token far more. ``group`` is one streamed answer a group, ``streams`` one a completion; the actor chooses by the
completions' longest length (:mod:`scalerl_generator.rollouts.completion_streams`). ``ratio`` is of tokens per second, ``cpu`` of
tokens per second of CPU in server and client together, which other work on the machine does not disturb. The recipe's
completions are longer than the longest here, where the ratio is nearer to 1.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import psutil
from publish import SIZES, make_model
from support.vllm_process import VllmProcess

from scalerl_generator.vllm_client import VllmClient, gather_all
from scalerl_generator.vllm_replies import Part

COMPLETIONS = 16
GROUPS_AT_ONCE = 5
CONTEXT_TOKENS = 2048
SHAPES = ((8, 6, 60), (64, 128, 30), (128, 1024, 5), (128, 1900, 5), (1024, 960, 5))
"""Prompt tokens, completion tokens, groups a round."""


class Totals(NamedTuple):
    """Of rounds."""

    tokens: int
    seconds: float
    cpu_seconds: float


Way = Callable[[VllmClient, list[int], int, str], Awaitable[int]]


async def as_group(server: VllmClient, prompt: list[int], max_tokens: int, salt: str) -> int:
    return await streamed(server, prompt, max_tokens, salt, COMPLETIONS)


async def as_streams(server: VllmClient, prompt: list[int], max_tokens: int, salt: str) -> int:
    return await streamed(server, prompt, max_tokens, salt, 1)


async def streamed(server: VllmClient, prompt: list[int], max_tokens: int, salt: str, n: int) -> int:
    parts: list[Part] = []
    await gather_all(
        server.stream(
            prompt, n=n, max_tokens=max_tokens, cache_salt=salt, on_part=lambda _, part: parts.append(part)
        )
        for _ in range(COMPLETIONS // n)
    )
    return sum(len(part.token_ids) for part in parts)


WAYS: dict[str, Way] = {"group": as_group, "streams": as_streams}


def cpu_seconds() -> float:
    """Of this process and all below it: the server and its engine."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(t.user + t.system for t in times)


async def load(server: VllmClient, way: Way, shape: tuple[int, int, int], salt: str) -> Totals:
    """One round; every group has a prompt of its own."""
    prompt_tokens, max_tokens, groups = shape
    gate = asyncio.Semaphore(GROUPS_AT_ONCE)

    async def group(number: int) -> int:
        prompt = [2 + (number * 7 + at) % 400 for at in range(prompt_tokens)]
        async with gate:
            return await way(server, prompt, max_tokens, salt)

    started, cpu = time.perf_counter(), cpu_seconds()
    tokens = sum(await gather_all(group(number) for number in range(groups)))
    return Totals(tokens, time.perf_counter() - started, cpu_seconds() - cpu)


async def measure(process: VllmProcess, rounds: int) -> list[dict[str, float]]:
    rows = []
    await process.ready()
    async with process.client() as server:
        for shape in SHAPES:
            await load(server, as_group, shape, "warm-up")
            totals = {name: Totals(0, 0.0, 0.0) for name in WAYS}
            for number in range(rounds):
                for name in list(WAYS)[:: 1 if number % 2 else -1]:
                    one = await load(server, WAYS[name], shape, f"{name} {number} {shape}")
                    totals[name] = Totals(*(a + b for a, b in zip(totals[name], one, strict=True)))
            group, streams = (totals[name] for name in WAYS)
            rates = {name: total.tokens / total.seconds for name, total in totals.items()}
            ratio = rates["streams"] / rates["group"]
            cpu = (streams.tokens / streams.cpu_seconds) / (group.tokens / group.cpu_seconds)
            rows.append({"prompt": shape[0], "completion": shape[1], **rates, "ratio": ratio, "cpu": cpu})
            print(
                f"{shape[0]:>6} {shape[1]:>10} {rates['group']:>9.0f} {rates['streams']:>9.0f} {ratio:>6.2f} {cpu:>6.2f}",
                flush=True,
            )
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="one round")
    p.add_argument("--rounds", type=int, default=3, help="of both ways, for each shape")
    given = p.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_model(model, SIZES[1])
        config = json.loads((model / "config.json").read_text())
        changes = {"max_position_embeddings": CONTEXT_TOKENS, "eos_token_id": None}
        (model / "config.json").write_text(json.dumps(config | changes))
        server = VllmProcess(
            model,
            *("--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "64"),
        )
        try:
            print(f"{'prompt':>6} {'completion':>10} {'group':>9} {'streams':>9} {'ratio':>6} {'cpu':>6}")
            rows = asyncio.run(measure(server, 1 if given.quick else given.rounds))
        finally:
            server.stop()
    print(json.dumps({"shapes": rows}))


if __name__ == "__main__":
    main()
