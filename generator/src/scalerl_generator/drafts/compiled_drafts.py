"""What numba compiles of the drafter: the memory of tokens, the lookup of a context, a step.

It is one file, since numba's cache of a function does not follow what other files change.

Each position of the memory is chained to earlier positions preceded by the same 8, 4 or 2 tokens, as in LZ77: one set of chains
within a prompt and one over all prompts, since responses to different prompts share text. Each position found for a context
votes for the token at it; its vote has more weight the longer the shared context is and if it belongs to the same prompt
(blending, as in prediction by partial matching, rather than the longest match alone). An overwritten position leaves its chains,
which would otherwise end there and hide the older pages that are kept. Where a context is so common that this is too slow, a
chain may lead to unrelated text, so every match is compared token by token.

Shapes are those of :mod:`.drafter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from scalerl_generator.drafts.drafter import Calibration, Int32s, Memory, Sequences

PAGE = 64
ORDERS = (2, 4, 8)
MAX_CONTEXT = 12
"""Maximum number of context tokens compared."""
CHAIN = 8
"""Maximum number of positions read from a chain."""
FEW = 3
"""With fewer positions that agree with the draft so far, the lookup is repeated."""
LENGTH_BASE = 1.6
PROMPT_WEIGHT = 4.0
SHARES, LENGTHS = 8, 6
BUCKETS = 2 * LENGTHS * SHARES
DECAY = 0.999
"""Decay of a bucket's counts at each trial, because acceptance changes with the weights."""
FREE = -1
"""Token of a position that has none yet."""
_CANDIDATES = 2 * len(ORDERS) * CHAIN

Function = TypeVar("Function", bound=Callable[..., object])


def _compiled(function: Function) -> Function:
    compiled: Function = njit(cache=True)(function)
    return compiled


@_compiled
def _after(memory: Memory, position: int) -> int:
    """The position after ``position``, or -1."""
    if (position + 1) % PAGE:
        return position + 1
    page = memory.next_p[position // PAGE]
    return page * PAGE if page >= 0 else -1


@_compiled
def _before(memory: Memory, position: int) -> int:
    """The position before ``position``, or -1."""
    if position % PAGE:
        return position - 1
    page = memory.previous_p[position // PAGE]
    return page * PAGE + PAGE - 1 if page >= 0 else -1


@_compiled
def _bucket_of_hash(value: np.uint64, hashes: int) -> int:
    return int((value * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) % hashes


@_compiled
def _unlink(memory: Memory, kind: int, order: int, bucket: int, position: int) -> None:
    """Remove a position from a chain if it is among the first, which are those that are read."""
    earlier = memory.chains[kind, order, position]
    at = memory.heads[kind, order, bucket]
    if at == position:
        memory.heads[kind, order, bucket] = earlier
        return
    for _ in range(CHAIN):
        if at < 0:
            return
        following = memory.chains[kind, order, at]
        if following == position:
            memory.chains[kind, order, at] = earlier
            return
        at = following


@_compiled
def _unlink_page(memory: Memory, page: int) -> None:
    """Remove a page's positions from their chains, and those of the following page whose context begins in this one."""
    hashes = memory.heads.shape[2]
    scope = np.uint64(memory.prompt_p[page] + 1) * np.uint64(0xD6E8FEB86659FD93)
    longest = ORDERS[-1]
    text_t = np.full(longest + PAGE, FREE, np.int32)
    text_t[longest:] = memory.tokens_m[page * PAGE : (page + 1) * PAGE]
    before = page * PAGE
    for back in range(1, longest + 1):
        before = _before(memory, before)
        if before < 0:
            break
        text_t[longest - back] = memory.tokens_m[before]
    following = memory.next_p[page]
    for i in range(PAGE + longest if following >= 0 else PAGE):
        position = page * PAGE + i if i < PAGE else following * PAGE + i - PAGE
        if memory.tokens_m[position] == FREE:
            break
        value = np.uint64(0)
        order = 0
        for back in range(1, longest + 1):
            # Beyond the page: its last tokens, and the first of the following one.
            at = longest + i - back
            token = text_t[at] if at < len(text_t) else memory.tokens_m[following * PAGE + at - len(text_t)]
            if token == FREE:
                break
            value = value * np.uint64(1099511628211) + np.uint64(token + 1)
            if back == ORDERS[order]:
                _unlink(memory, 0, order, _bucket_of_hash(value, hashes), position)
                _unlink(memory, 1, order, _bucket_of_hash(value ^ scope, hashes), position)
                order += 1


@_compiled
def new_page(memory: Memory, previous: int, prompt: int) -> int:
    """Clear the oldest page that is not pinned, chain it after page ``previous``, and return its number.

    If all are pinned, it is the oldest that is not held.
    """
    pages = len(memory.next_p)
    page = int(memory.cursor[0])
    unseen = 0 if memory.cursor[1] else pages
    # There are more pages than sequences, each of which holds one.
    while memory.held_p[page] or (unseen > 0 and memory.pinned_p[page]):
        page = (page + 1) % pages
        unseen -= 1
        if unseen == 0:
            memory.cursor[1] = 1  # until a prompt's pages are released
    memory.cursor[0] = (page + 1) % pages
    if memory.tokens_m[page * PAGE] != FREE:
        _unlink_page(memory, page)
    if memory.prompt_p[page] >= 0:
        memory.evicted[int(memory.pinned_p[page])] += 1
    # Pages of a prompt are pinned together, and its running completions have one.
    memory.pinned_p[page] = previous >= 0 and memory.pinned_p[previous]
    if memory.previous_p[page] >= 0:
        memory.next_p[memory.previous_p[page]] = -1
    if memory.next_p[page] >= 0:
        memory.previous_p[memory.next_p[page]] = -1
    memory.next_p[page] = -1
    memory.previous_p[page] = previous
    memory.prompt_p[page] = prompt
    memory.tokens_m[page * PAGE : (page + 1) * PAGE] = FREE
    if previous >= 0:
        memory.next_p[previous] = page
    return page


@_compiled
def write(
    memory: Memory,
    position: int,
    text_t: Int32s,
    start: int,
    end: int,
    prompt: int,
    indexed: bool,
    held: bool,
) -> int:
    """Write ``text_t[start:end]`` from ``position`` on, and return the position after it.

    Args:
        indexed: add each position to the chains of its context.
        held: protect the written page from being overwritten.
    """
    hashes = memory.heads.shape[2]
    scope = np.uint64(prompt + 1) * np.uint64(0xD6E8FEB86659FD93)
    for at in range(start, end):
        memory.tokens_m[position] = text_t[at]
        if indexed:
            value = np.uint64(0)
            order = 0
            for back in range(1, min(at, ORDERS[-1]) + 1):
                value = value * np.uint64(1099511628211) + np.uint64(text_t[at - back] + 1)
                if back == ORDERS[order]:
                    shared = _bucket_of_hash(value, hashes)
                    memory.chains[0, order, position] = memory.heads[0, order, shared]
                    memory.heads[0, order, shared] = position
                    own = _bucket_of_hash(value ^ scope, hashes)
                    memory.chains[1, order, position] = memory.heads[1, order, own]
                    memory.heads[1, order, own] = position
                    order += 1
        page = position // PAGE
        if (position + 1) % PAGE:
            position += 1
        else:
            following = new_page(memory, page, prompt)
            if held:
                memory.held_p[page] = False
                memory.held_p[following] = True
            position = following * PAGE
    return position


@_compiled
def _find(memory: Memory, text_t: Int32s, end: int, prompt: int, found: Int32s, length: Int32s) -> int:
    """Find the positions preceded by the last tokens of ``text_t[:end]``; returns their number.

    Fills ``found`` with the positions, and ``length`` with the number of matching tokens before each, negated for positions
    of the same prompt. The next position of a running sequence is skipped, since it has no token yet.
    """
    hashes = memory.heads.shape[2]
    scope = np.uint64(prompt + 1) * np.uint64(0xD6E8FEB86659FD93)
    count = 0
    value = np.uint64(0)
    order = 0
    for back in range(1, min(end, ORDERS[-1]) + 1):
        value = value * np.uint64(1099511628211) + np.uint64(text_t[end - back] + 1)
        if back != ORDERS[order]:
            continue
        # Longer matches are in the chain of the next order.
        longest = ORDERS[order + 1] if order + 1 < len(ORDERS) else MAX_CONTEXT + 1
        for kind in range(2):
            bucket = _bucket_of_hash(value ^ scope if kind else value, hashes)
            position = memory.heads[kind, order, bucket]
            for _ in range(CHAIN):
                if position < 0:
                    break
                if memory.tokens_m[position] != FREE:
                    in_prompt = memory.prompt_p[position // PAGE] == prompt
                    if in_prompt == (kind == 1):
                        common = 0
                        before = _before(memory, position)
                        while (
                            before >= 0
                            and common < min(MAX_CONTEXT, end)
                            and memory.tokens_m[before] == text_t[end - 1 - common]
                        ):
                            common += 1
                            before = _before(memory, before)
                        if back <= common < longest:
                            found[count] = position
                            length[count] = -common if kind else common
                            count += 1
                earlier = memory.chains[kind, order, position]
                if earlier == position:  # the position was the head of its chain when it was overwritten
                    break
                position = earlier
        order += 1
    return count


@_compiled
def _follow(memory: Memory, found: Int32s, length: Int32s, count: int, token: int) -> int:
    """Move the first ``count`` positions in ``found`` on by one and drop those without ``token``; returns how many are left."""
    kept = 0
    for i in range(count):
        if memory.tokens_m[found[i]] == token:
            after = _after(memory, found[i])
            if after >= 0 and memory.tokens_m[after] != FREE:
                found[kept] = after
                common = min(abs(length[i]) + 1, MAX_CONTEXT)
                length[kept] = -common if length[i] < 0 else common
                kept += 1
    return kept


@_compiled
def _draft(
    memory: Memory,
    calibration: Calibration,
    context_t: Int32s,
    end: int,
    prompt: int,
    limit: int,
    threshold: float,
    draft_d: Int32s,
    bucket_d: Int32s,
) -> int:
    """Fill ``draft_d`` with a draft after ``context_t[:end]``, and return its length.

    ``context_t`` has room for the draft after ``end``. ``bucket_d`` receives the calibration bucket of each token.
    """
    found = np.empty(_CANDIDATES, np.int32)
    length = np.empty(_CANDIDATES, np.int32)
    tokens = np.empty(_CANDIDATES, np.int32)
    votes = np.empty(_CANDIDATES, np.float64)
    count = 0
    expected = 1.0
    drafted = 0
    while drafted < limit:
        if count < FEW:
            count = _find(memory, context_t, end + drafted, prompt, found, length)
            if count == 0:
                break
        different = 0
        total = 0.0
        for i in range(count):
            token = memory.tokens_m[found[i]]
            weight = LENGTH_BASE ** abs(length[i]) * (PROMPT_WEIGHT if length[i] < 0 else 1.0)
            total += weight
            for k in range(different):
                if tokens[k] == token:
                    votes[k] += weight
                    break
            else:
                tokens[different] = token
                votes[different] = weight
                different += 1
        best = 0
        for k in range(1, different):
            if votes[k] > votes[best]:
                best = k
        token = tokens[best]
        longest = 0
        in_prompt = 0
        for i in range(count):
            if memory.tokens_m[found[i]] == token:
                longest = max(longest, abs(length[i]))
                if length[i] < 0:
                    in_prompt = 1
        share = min(int(SHARES * votes[best] / total), SHARES - 1)
        bucket = (in_prompt * LENGTHS + min(longest // 2, LENGTHS) - 1) * SHARES + share
        expected *= calibration.accepted_b[bucket] / calibration.tried_b[bucket]
        if expected < threshold:
            break
        draft_d[drafted] = token
        bucket_d[drafted] = bucket
        context_t[end + drafted] = token
        drafted += 1
        count = _follow(memory, found, length, count, token)
    return drafted


@_compiled
def step(
    memory: Memory,
    sequences: Sequences,
    calibration: Calibration,
    slot_r: Int32s,
    row_r: Int32s,
    rows_rt: Int32s,
    length_r: Int32s,
    limit_r: Int32s,
    threshold: float,
) -> tuple[int, int]:
    """Store the tokens sampled since the last step, and draft; returns the accepted and drafted tokens of the last drafts."""
    context_t = np.empty(MAX_CONTEXT + sequences.draft_sd.shape[1], np.int32)
    accepted = verified = 0
    for r in range(len(slot_r)):
        slot, text_t, end = slot_r[r], rows_rt[row_r[r]], length_r[r]
        known, prompt = sequences.known_s[slot], sequences.prompt_s[slot]
        drafted = sequences.drafted_s[slot]
        verified += drafted
        sequences.tally_skd[slot, 0, :drafted] += 1
        for d in range(min(drafted, end - known)):
            bucket = sequences.bucket_sd[slot, d]
            right = text_t[known + d] == sequences.draft_sd[slot, d]
            calibration.tried_b[bucket] = DECAY * calibration.tried_b[bucket] + 1
            calibration.accepted_b[bucket] = DECAY * calibration.accepted_b[bucket] + right
            if not right:
                break
            accepted += 1
            sequences.tally_skd[slot, 1, d] += 1
        sequences.position_s[slot] = write(
            memory, sequences.position_s[slot], text_t, known, end, prompt, True, True
        )
        sequences.known_s[slot] = end
        context = min(end, MAX_CONTEXT)
        context_t[:context] = text_t[end - context : end]
        sequences.drafted_s[slot] = _draft(
            memory,
            calibration,
            context_t,
            context,
            prompt,
            min(limit_r[r], sequences.draft_sd.shape[1]),
            threshold,
            sequences.draft_sd[slot],
            sequences.bucket_sd[slot],
        )
    return accepted, verified
