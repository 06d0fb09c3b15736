"""Acceptance length by thirds of a completion, when the running completions fill the drafter's memory.

Synthetic: a token of a response is, with probability ``--reuse``, the next one of a response to the same prompt in the epoch before,
else a random one. All responses have ``--tokens`` tokens, and all sequences run together, as after a synchronous start.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from numba import njit
from numpy.typing import NDArray

from scalerl_generator.drafts.drafter import Drafter

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
def verify(
    rows_rt: Int32s, row_r: Int32s, length_r: Int32s, draft_sd: Int32s, drafted_s: Int32s, slot_r: Int32s
) -> None:
    """Add the tokens that a step yields to the lengths."""
    for r in range(len(length_r)):
        rest_t, slot = rows_rt[row_r[r], length_r[r] :], slot_r[r]
        n = 0
        while n < min(drafted_s[slot], len(rest_t) - 1) and draft_sd[slot, n] == rest_t[n]:
            n += 1
        length_r[r] += n + 1


def thirds(sequences: int, tokens: int, reuse: float, memory_tokens: int) -> dict[str, object]:
    """Tokens that a verification yields, by thirds of the completions; the time of drafting; what the memory has overwritten."""
    random = np.random.default_rng(0)
    drafter = Drafter(sequences, memory_tokens, MAX_DRAFT)
    rows_rt = np.empty((sequences, PROMPT + tokens), np.int32)
    slots = []
    for prompt in range(sequences // GROUP):
        prompt_t = random.integers(0, VOCABULARY, PROMPT).astype(np.int32)
        first_t = random.integers(0, VOCABULARY, tokens).astype(np.int32)
        past_gt = np.empty((GROUP, tokens), np.int32)
        for response_t in past_gt:
            follow(first_t[None], reuse, response_t)
            drafter.remember(prompt, prompt_t, response_t)
        for row in range(prompt * GROUP, (prompt + 1) * GROUP):
            rows_rt[row, :PROMPT] = prompt_t
            follow(past_gt, reuse, rows_rt[row, PROMPT:])
            slots.append(drafter.begin(prompt, prompt_t))
    slot_r, row_r = np.array(slots, np.int32), np.arange(sequences, dtype=np.int32)
    length_r = np.full(sequences, PROMPT + 1, np.int32)
    steps = np.zeros(3, np.int64)
    seconds, calls = 0.0, 0
    while (running := np.flatnonzero(length_r < rows_rt.shape[1])).size:
        length = length_r[running]
        steps += np.bincount((length - PROMPT) * 3 // tokens, minlength=4)[:3]
        limit_r = np.full(len(running), MAX_DRAFT, np.int32)
        started = time.process_time()
        draft_sd, drafted_s, _, _ = drafter.propose(
            slot_r[running], row_r[running], rows_rt, length, limit_r, THRESHOLD
        )
        seconds += time.process_time() - started
        calls += len(running)
        verify(rows_rt, row_r[running], length, draft_sd, drafted_s, slot_r[running])
        length_r[running] = length
    return {
        "memory_tokens": memory_tokens,
        "acceptance_length": np.round(sequences * tokens / 3 / steps, 2).tolist(),
        "microseconds_a_row": round(1e6 * seconds / calls, 1),
        "overwritten_tokens": list(getattr(drafter, "evicted_tokens", ())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--reuse", type=float, default=0.9)
    parser.add_argument("--quick", action="store_true", help="64 sequences of 8,192 tokens")
    given = parser.parse_args()
    sequences, tokens = (64, 8192) if given.quick else (given.sequences, given.tokens)
    running = sequences * tokens
    results = [thirds(sequences, tokens, given.reuse, size) for size in (int(0.954 * running), 2 * running)]
    for result in results:
        print(
            f"{result['memory_tokens']:>11,} tokens of memory: acceptance length by thirds {result['acceptance_length']}, "
            f"{result['microseconds_a_row']} us a row; overwritten (idle, running) {result['overwritten_tokens']}"
        )
    print(json.dumps({"sequences": sequences, "tokens": tokens, "reuse": given.reuse, "results": results}))


if __name__ == "__main__":
    main()
