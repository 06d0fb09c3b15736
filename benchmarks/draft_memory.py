"""Acceptance length by thirds of a completion, when the running completions fill the drafter's memory.

Synthetic: a token of a response is, with probability ``--reuse``, the next one of a response to the same prompt in the epoch before,
else a random one. All responses have ``--tokens`` tokens, and all sequences run together, as after a synchronous start.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numba import njit
from numpy.typing import NDArray

from scalerl_generator.drafter import Drafter

GROUP = 16
PROMPT = 64
VOCABULARY = 50_000
MAX_DRAFT = 16
THRESHOLD = 0.2

Int32s = NDArray[np.int32]


@njit(cache=True)
def follow(past_gt: Int32s, reuse: float, response_t: Int32s) -> None:
    """Fill ``response_t`` from the past responses to its prompt: after a token that differs, another one of them is followed."""
    source = np.random.randint(len(past_gt))
    for t in range(len(response_t)):
        if np.random.random() < reuse:
            response_t[t] = past_gt[source, t]
        else:
            response_t[t] = np.random.randint(VOCABULARY)
            source = np.random.randint(len(past_gt))


@njit(cache=True)
def verify(rows_rt: Int32s, length_r: Int32s, draft_sd: Int32s, drafted_s: Int32s, slot_r: Int32s) -> None:
    """Add the tokens that a step yields to the lengths."""
    for r in range(len(length_r)):
        left = rows_rt.shape[1] - length_r[r]
        n = 0
        while (
            n < min(drafted_s[slot_r[r]], left - 1) and draft_sd[slot_r[r], n] == rows_rt[r, length_r[r] + n]
        ):
            n += 1
        length_r[r] += min(n + 1, left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--reuse", type=float, default=0.9)
    parser.add_argument("--memory-tokens", type=int, default=4_000_000)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    drafter = Drafter(given.sequences, given.memory_tokens, MAX_DRAFT)
    rows_rt = np.empty((given.sequences, PROMPT + given.tokens), np.int32)
    slots = []
    for prompt in range(given.sequences // GROUP):
        prompt_t = random.integers(0, VOCABULARY, PROMPT).astype(np.int32)
        first_t = random.integers(0, VOCABULARY, given.tokens).astype(np.int32)
        past_gt = np.empty((GROUP, given.tokens), np.int32)
        for response_t in past_gt:
            follow(first_t[None], given.reuse, response_t)
            drafter.remember(prompt, prompt_t, response_t)
        for row in range(prompt * GROUP, (prompt + 1) * GROUP):
            rows_rt[row, :PROMPT] = prompt_t
            follow(past_gt, given.reuse, rows_rt[row, PROMPT:])
            slots.append(drafter.begin(prompt, prompt_t))
    slot_r, row_r = np.array(slots, np.int32), np.arange(given.sequences, dtype=np.int32)
    length_r = np.full(given.sequences, PROMPT + 1, np.int32)
    steps, began = np.zeros(3, np.int64), time.perf_counter()
    seconds, calls = 0.0, 0
    while (running := np.flatnonzero(length_r < rows_rt.shape[1])).size:
        at, length = running.astype(np.int32), length_r[running]
        steps += np.bincount((length - PROMPT) * 3 // given.tokens, minlength=4)[:3]
        started = time.perf_counter()
        limit_r = np.full(len(at), MAX_DRAFT, np.int32)
        draft_sd, drafted_s, _, _ = drafter.propose(
            slot_r[at], row_r[at], rows_rt, length, limit_r, THRESHOLD
        )
        seconds += time.perf_counter() - started
        calls += len(at)
        verify(rows_rt[at] if len(at) < len(row_r) else rows_rt, length, draft_sd, drafted_s, slot_r[at])
        length_r[running] = length
    thirds = given.sequences * given.tokens / 3 / steps
    print(
        f"{given.memory_tokens:,} tokens of memory: acceptance length by thirds {np.round(thirds, 2).tolist()}",
        end="",
    )
    print(f", {1e6 * seconds / calls:.1f} us a row, {time.perf_counter() - began:.0f} s in all", end="")
    evicted = getattr(drafter, "evicted_tokens", None)
    print(f", evicted (idle, running) {evicted}" if evicted else "")


if __name__ == "__main__":
    main()
