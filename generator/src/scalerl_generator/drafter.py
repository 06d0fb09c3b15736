"""Drafts the next tokens of running completions from past responses and from each other; no vLLM types.

A memory of tokens in pages holds past responses, and running completions as they grow, the siblings of a prompt among them. Every
position is chained to earlier ones with the same 8, 4 or 2 tokens before it, as in LZ77: one set of chains within a prompt and
one over all prompts, since responses to different prompts share text. The positions found for a context vote for the token
that came next there: the longer the context they share, and the same prompt, the more (blended, as in prediction by partial
matching, rather than the longest match alone). A draft is extended while all its tokens are expected to be accepted with at least a
given probability, which is learned from what was accepted before.

A full memory overwrites its oldest pages, so the responses of old weight versions go first. Chains may then lead to other text:
every match is compared token by token.

Shapes: ``r`` rows of a step, ``t`` tokens, ``s`` sequences, ``d`` tokens of a draft, ``m`` tokens of memory, ``p`` pages,
``o`` context orders, ``b`` buckets of calibration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

PAGE = 64
ORDERS = (2, 4, 8)
MAX_CONTEXT = 12
"""Longest context that is compared."""
CHAIN = 8
"""Most positions read of a chain."""
FEW = 3
"""With fewer positions that agree with the draft so far, positions are looked up again."""
LENGTH_BASE = 1.6
PROMPT_WEIGHT = 4.0
SHARES, LENGTHS = 8, 6
BUCKETS = 2 * LENGTHS * SHARES
DECAY = 0.999
"""Of a bucket's counts at each trial: the weights change, and with them what is accepted."""

_FREE = -1
_CANDIDATES = 2 * len(ORDERS) * CHAIN

Int32s = NDArray[np.int32]
Function = TypeVar("Function", bound=Callable[..., object])


def _compiled(function: Function) -> Function:
    compiled: Function = njit(cache=True)(function)
    return compiled


class Memory(NamedTuple):
    """Tokens in pages, and chains over them. ``-1``: none."""

    tokens_m: Int32s
    next_p: Int32s
    previous_p: Int32s
    prompt_p: Int32s
    held_p: NDArray[np.bool_]
    """Pages that running completions write to."""
    heads: Int32s
    """Latest position of a context, shape [2 scopes, o, hashes]."""
    chains: Int32s
    """The position before it in its chain, shape [2 scopes, o, m]."""
    cursor: Int32s
    """The page to overwrite next, shape [1]."""


class Sequences(NamedTuple):
    """Running completions, and their last drafts."""

    position_s: Int32s
    """Where its next token goes."""
    prompt_s: Int32s
    known_s: Int32s
    """Tokens of its row that are in memory."""
    drafted_s: Int32s
    draft_sd: Int32s
    bucket_sd: Int32s
    tally_skd: NDArray[np.int64]
    """Drafted and accepted tokens since they were taken (:meth:`Drafter.take_tally`), shape [s, 2, d]."""


class Calibration(NamedTuple):
    """Drafted tokens that were verified, by bucket: all tokens before them in their draft were accepted."""

    tried_b: NDArray[np.float64]
    accepted_b: NDArray[np.float64]


@_compiled
def _after(memory: Memory, position: int) -> int:
    """The position after one, or -1."""
    if (position + 1) % PAGE:
        return position + 1
    page = memory.next_p[position // PAGE]
    return page * PAGE if page >= 0 else -1


@_compiled
def _before(memory: Memory, position: int) -> int:
    """The position before one, or -1."""
    if position % PAGE:
        return position - 1
    page = memory.previous_p[position // PAGE]
    return page * PAGE + PAGE - 1 if page >= 0 else -1


@_compiled
def _new_page(memory: Memory, previous: int, prompt: int) -> int:
    """Overwrite the oldest page that is not written to; returns its number."""
    pages = len(memory.next_p)
    page = int(memory.cursor[0])
    while memory.held_p[page]:  # there are more pages than sequences
        page = (page + 1) % pages
    memory.cursor[0] = (page + 1) % pages
    if memory.previous_p[page] >= 0:
        memory.next_p[memory.previous_p[page]] = -1
    if memory.next_p[page] >= 0:
        memory.previous_p[memory.next_p[page]] = -1
    memory.next_p[page] = -1
    memory.previous_p[page] = previous
    memory.prompt_p[page] = prompt
    memory.tokens_m[page * PAGE : (page + 1) * PAGE] = _FREE
    if previous >= 0:
        memory.next_p[previous] = page
    return page


@_compiled
def _bucket_of_hash(value: np.uint64, hashes: int) -> int:
    return int((value * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) % hashes


@_compiled
def _write(
    memory: Memory,
    position: int,
    text_t: Int32s,
    start: int,
    end: int,
    prompt: int,
    indexed: bool,
    held: bool,
) -> int:
    """Append ``text_t[start:end]`` at a position, and chain it by the tokens before; returns the position after it."""
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
            following = _new_page(memory, page, prompt)
            if held:
                memory.held_p[page] = False
                memory.held_p[following] = True
            position = following * PAGE
    return position


@_compiled
def _find(memory: Memory, text_t: Int32s, end: int, prompt: int, found: Int32s, length: Int32s) -> int:
    """Positions whose tokens before are the last ones of ``text_t[:end]``; returns how many.

    ``found`` and ``length`` are filled: the position, and the tokens in common before it, negative for those of the
    same prompt. Where a sequence itself continues there is no token yet.
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
        # Longer ones are in the next order's chain.
        longest = ORDERS[order + 1] if order + 1 < len(ORDERS) else MAX_CONTEXT + 1
        for kind in range(2):
            bucket = _bucket_of_hash(value ^ scope if kind else value, hashes)
            position = memory.heads[kind, order, bucket]
            for _ in range(CHAIN):
                if position < 0:
                    break
                if memory.tokens_m[position] != _FREE:
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
                if earlier == position:  # it was the latest one of its chain when it was overwritten
                    break
                position = earlier
        order += 1
    return count


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
    """Draft after ``context_t[:end]``, which has room for the draft; returns its length."""
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
        kept = 0
        for i in range(count):
            if memory.tokens_m[found[i]] == token:
                after = _after(memory, found[i])
                if after >= 0 and memory.tokens_m[after] != _FREE:
                    found[kept] = after
                    common = min(abs(length[i]) + 1, MAX_CONTEXT)
                    length[kept] = -common if length[i] < 0 else common
                    kept += 1
        count = kept
    return drafted


@_compiled
def _step(
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
    """Take in what was sampled since the last step, and draft; returns accepted and drafted tokens of the last drafts."""
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
        sequences.position_s[slot] = _write(
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


class Drafter:
    """Drafts for up to ``sequences`` running completions.

    Args:
        memory_tokens: tokens remembered, 56 bytes each; rounded up to pages, of which every sequence needs two.
        max_draft_tokens: longest draft.
    """

    def __init__(self, sequences: int, memory_tokens: int, max_draft_tokens: int) -> None:
        pages = max(-(-memory_tokens // PAGE), 2 * sequences + 2)
        size = pages * PAGE
        hashes = 1 << max(int(size - 1).bit_length() - 1, 10)
        self._memory = Memory(
            tokens_m=np.full(size, _FREE, np.int32),
            next_p=np.full(pages, -1, np.int32),
            previous_p=np.full(pages, -1, np.int32),
            prompt_p=np.full(pages, -1, np.int32),
            held_p=np.zeros(pages, np.bool_),
            heads=np.full((2, len(ORDERS), hashes), -1, np.int32),
            chains=np.full((2, len(ORDERS), size), -1, np.int32),
            cursor=np.zeros(1, np.int32),
        )
        by_sequence = {name: np.zeros(sequences, np.int32) for name in Sequences._fields[:4]}
        by_token = {
            name: np.zeros((sequences, max_draft_tokens), np.int32) for name in Sequences._fields[4:6]
        }
        tally_skd = np.zeros((sequences, 2, max_draft_tokens), np.int64)
        self._sequences = Sequences(**by_sequence, **by_token, tally_skd=tally_skd)
        # Before the first trials: half for matches of two tokens without agreement, nearly all where all agree.
        prior_b = np.tile(np.linspace(0.4, 0.95, SHARES), BUCKETS // SHARES)
        self._calibration = Calibration(np.full(BUCKETS, 4.0), 4.0 * prior_b)
        self._free = list(range(sequences))
        self._prompt_pages: dict[int, int] = {}
        self._compile()

    def _compile(self) -> None:
        """Compile for the types that come, which takes seconds that a step does not have."""
        nothing = np.zeros(0, np.int32)
        received = np.frombuffer(b"", np.int32)  # read-only
        self.propose(nothing, nothing, np.zeros((1, 1), np.int32), nothing, nothing, 1.0)
        self.remember(-2, received, received)  # -1: pages of no prompt
        self.end(self.begin(-2, nothing))

    def remember(self, prompt: int, prompt_t: Int32s, response_t: Int32s) -> None:
        """Take in a past response of a prompt."""
        page = self._begin(prompt, prompt_t)
        text_t = np.concatenate([prompt_t[-MAX_CONTEXT:], response_t])
        context = len(text_t) - len(response_t)
        _write(self._memory, page * PAGE + context, text_t, context, len(text_t), prompt, True, False)

    def begin(self, prompt: int, prompt_t: Int32s) -> int:
        """A sequence of a prompt begins; returns its slot.

        Raises IndexError if there are too many.
        """
        slot = self._free.pop()
        page = self._begin(prompt, prompt_t)
        self._memory.held_p[page] = True
        self._sequences.position_s[slot] = page * PAGE + len(prompt_t[-MAX_CONTEXT:])
        self._sequences.prompt_s[slot] = prompt
        self._sequences.known_s[slot] = len(prompt_t)
        self._sequences.drafted_s[slot] = 0
        self._sequences.tally_skd[slot] = 0
        return slot

    def _begin(self, prompt: int, prompt_t: Int32s) -> int:
        """A page that begins with the end of the prompt, the context of what comes; the prompt is remembered once."""
        memory = self._memory
        if memory.prompt_p[self._prompt_pages.get(prompt, 0)] != prompt:
            page = self._prompt_pages[prompt] = _new_page(memory, -1, prompt)
            _write(memory, page * PAGE, prompt_t, 0, len(prompt_t), prompt, True, False)
        page = _new_page(memory, -1, prompt)
        _write(
            memory,
            page * PAGE,
            prompt_t[-MAX_CONTEXT:],
            0,
            len(prompt_t[-MAX_CONTEXT:]),
            prompt,
            False,
            False,
        )
        return page

    def end(self, slot: int) -> None:
        """A sequence ends; its tokens stay in memory."""
        self._memory.held_p[self._sequences.position_s[slot] // PAGE] = False
        self._free.append(slot)

    def propose(
        self,
        slot_r: Int32s,
        row_r: Int32s,
        rows_rt: Int32s,
        length_r: Int32s,
        limit_r: Int32s,
        threshold: float,
    ) -> tuple[Int32s, Int32s, int, int]:
        """Draft for sequences that have just grown.

        Args:
            slot_r: the sequences; ``row_r``: their rows.
            rows_rt: token ids of a sequence, prompt included, at ``[row, : length]``.
            limit_r: longest draft of each.
            threshold: a draft ends before a token that is accepted, with all before it, less probably than this.

        Returns:
            Drafts of shape ``[s, d]`` and their lengths of shape ``[s]``, by slot, valid until the next call; how many tokens of
            the drafts before were accepted, and how many there were.
        """
        accepted, verified = _step(
            self._memory,
            self._sequences,
            self._calibration,
            slot_r,
            row_r,
            rows_rt,
            length_r,
            limit_r,
            threshold,
        )
        return self._sequences.draft_sd, self._sequences.drafted_s, accepted, verified

    def take_tally(self, slot: int) -> NDArray[np.int64]:
        """A sequence's drafted and accepted tokens by position in a draft, since the last call or since it began; shape [2, d]."""
        tally: NDArray[np.int64] = self._sequences.tally_skd[slot].copy()
        self._sequences.tally_skd[slot] = 0
        return tally
