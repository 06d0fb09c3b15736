"""Past responses per second into the coordinator's store and out of it on one core, and whether its memory stays flat.

A store in this process, pinned to one core, on a real directory: groups of 16 responses of 512 tokens, prompt by prompt and
epoch by epoch. Three quarters of each response recur from epoch to epoch, and every group is compared with the one before, as
in a run, within the store's bound on the time for that. The last epoch is then looked up in random order, with checksums, and
the store is opened again.

    python benchmarks/history.py [--quick] [--groups N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from scalerl_api.history import HistoryLine
from scalerl_api.wire import PastResponse, PromptRef, Split
from scalerl_coordinator.response_store import PastGroup, ResponseStore

RESPONSES, TOKENS, RECURRING = 16, 512, 384
EPOCHS = 8
BATCH = 64
"""Groups that are queued at a time, 2 MiB."""
DIGEST = b"12345678"
IDENTITY = bytes(32)
WAIT_SECONDS = 120


def groups(prompts: int, count: int) -> Iterator[PastGroup]:
    """``count`` groups, every prompt once an epoch."""
    text = np.random.default_rng(0).integers(0, 150_000, 2**23).astype("<i4").tobytes()
    for number in range(count):
        prompt, epoch = number % prompts, number // prompts
        responses = []
        for at in range(RESPONSES):
            same = 4 * ((prompt * RESPONSES + at) * 8191 % (2**23 - TOKENS))
            new = 4 * ((number * RESPONSES + at) * 127 + epoch) % (4 * (2**23 - TOKENS))
            ids = text[same : same + 4 * RECURRING] + text[new : new + 4 * (TOKENS - RECURRING)]
            responses.append(PastResponse(epoch, ids))
        yield PastGroup(PromptRef(0, Split.TRAIN, prompt), DIGEST, responses)


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def drain(store: ResponseStore) -> None:
    if not store.drain(WAIT_SECONDS):
        raise SystemExit(f"the store did not write 2 MiB in {WAIT_SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="8,000 groups")
    parser.add_argument("--groups", type=int, default=64_000)
    parser.add_argument(
        "--directory", type=Path, help="where the store goes (default: a temporary directory)"
    )
    arguments = parser.parse_args()
    count = min(arguments.groups, 8_000) if arguments.quick else arguments.groups
    prompts = count // EPOCHS
    store_bytes = 2 * prompts * RESPONSES * TOKENS * 4  # two epochs
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        root = Path(directory)

        def opened() -> ResponseStore:
            store = ResponseStore(root / "history", IDENTITY, store_bytes, lines=root / "history.jsonl")
            store.start()
            drain(store)
            return store

        store = opened()
        rss: list[float] = []
        put_seconds: list[float] = []
        began, cpu = time.perf_counter(), time.process_time()
        for number, group in enumerate(groups(prompts, count), 1):
            begin = time.perf_counter()
            store.put(group)
            put_seconds.append(time.perf_counter() - begin)
            if number % BATCH == 0:
                drain(store)
                rss.append(rss_mib())
        drain(store)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        order = random.Random(0).sample(range(prompts), prompts)
        begin = time.perf_counter()
        for prompt in order:
            store.lookup(PromptRef(0, Split.TRAIN, prompt), DIGEST)
        lookup_seconds = time.perf_counter() - begin
        counters = store.counters
        store.close()
        begin = time.perf_counter()
        opened().close()
        open_seconds = time.perf_counter() - begin
        lines = [
            msgspec.json.decode(line, type=HistoryLine)
            for line in (root / "history.jsonl").read_bytes().splitlines()
        ]
    put_seconds.sort()
    figures = {
        "responses": count * RESPONSES,
        "tokens_per_response": TOKENS,
        "written_mib": round(count * RESPONSES * TOKENS * 4 / 2**20),
        "store_mib": round(store_bytes / 2**20),
        "responses_per_second": round(counters.stored / seconds),
        "responses_per_cpu_second": round(counters.stored / cpu),
        "put_p99_microseconds": round(1e6 * put_seconds[len(put_seconds) * 99 // 100], 1),
        "compared_share": round(sum(line.compared_tokens > 0 for line in lines) / max(1, len(lines)), 3),
        "prompts_looked_up_per_second": round(prompts / lookup_seconds),
        "found_share": round(counters.lookups["hit"] / prompts, 3),
        "open_milliseconds": round(1000 * open_seconds, 1),
        "rss_first_quarter_mib": round(max(rss[: len(rss) // 4]), 1),
        "rss_last_quarter_mib": round(max(rss[-len(rss) // 4 :]), 1),
        "dropped": dict(counters.dropped),
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):32} {f'{value:,}' if isinstance(value, int) else value}")
    print(json.dumps({"benchmark": "history", "figures": figures}))


if __name__ == "__main__":
    main()
