"""Drafts the next tokens of running completions from past responses and from each other; no vLLM types.

A paged token memory holds past responses, and running completions as they grow, including those of the same prompt
(:mod:`.compiled_drafts` has how a context is found in it). A draft grows while the estimated probability that all its tokens are
accepted is at least a given threshold; the estimate is calibrated on the acceptance of earlier drafts.

A full memory overwrites its oldest pages, so the responses of old weight versions are evicted first. Pages of a prompt with
running completions are overwritten only if there are no others: they are what those completions draft from, and the
responses of the last epoch are older than the completions themselves.

Shapes: ``r`` rows of a step, ``t`` tokens, ``s`` sequences, ``d`` tokens of a draft, ``m`` tokens of memory, ``p`` pages,
``o`` context orders, ``b`` buckets of calibration.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalerl_generator.drafts.compiled_drafts import (
    BUCKETS,
    FREE,
    MAX_CONTEXT,
    ORDERS,
    PAGE,
    SHARES,
    new_page,
    step,
    write,
)

Int32s = NDArray[np.int32]


class Memory(NamedTuple):
    """Paged tokens, and chains over them. ``-1`` means none."""

    tokens_m: Int32s
    next_p: Int32s
    previous_p: Int32s
    prompt_p: Int32s
    held_p: NDArray[np.bool_]
    """Pages that running completions write to."""
    pinned_p: NDArray[np.bool_]
    """Pages of prompts that have running completions."""
    evicted: NDArray[np.int64]
    """Overwritten pages, shape [2]: not pinned, and pinned."""
    heads: Int32s
    """Latest position of each context hash, shape [2 scopes, o, hashes]."""
    chains: Int32s
    """Previous position in the chain of each position, shape [2 scopes, o, m]."""
    cursor: Int32s
    """Next page to overwrite, and 1 while all pages are pinned, shape [2]."""


class Sequences(NamedTuple):
    """Running completions, and their last drafts."""

    position_s: Int32s
    """Memory position of the sequence's next token."""
    prompt_s: Int32s
    known_s: Int32s
    """Number of the sequence's tokens, prompt included, that are in memory."""
    drafted_s: Int32s
    draft_sd: Int32s
    bucket_sd: Int32s
    tally_skd: NDArray[np.int64]
    """Drafted and accepted tokens since the last :meth:`Drafter.take_tally`, shape [s, 2, d]."""


class Calibration(NamedTuple):
    """Trials and acceptances by bucket; a trial is a drafted token whose predecessors in the draft were all accepted."""

    tried_b: NDArray[np.float64]
    accepted_b: NDArray[np.float64]


class Drafter:
    """Drafts for up to ``sequences`` running completions.

    Args:
        memory_tokens: capacity in tokens, 56 bytes each; rounded up to whole pages, at least two for each sequence.
        max_draft_tokens: maximum length of a draft.
    """

    def __init__(self, sequences: int, memory_tokens: int, max_draft_tokens: int) -> None:
        pages = max(-(-memory_tokens // PAGE), 2 * sequences + 2)
        size = pages * PAGE
        hashes = 1 << max(int(size - 1).bit_length() - 1, 10)
        self._memory = Memory(
            tokens_m=np.full(size, FREE, np.int32),
            next_p=np.full(pages, -1, np.int32),
            previous_p=np.full(pages, -1, np.int32),
            prompt_p=np.full(pages, -1, np.int32),
            held_p=np.zeros(pages, np.bool_),
            pinned_p=np.zeros(pages, np.bool_),
            evicted=np.zeros(2, np.int64),
            heads=np.full((2, len(ORDERS), hashes), -1, np.int32),
            chains=np.full((2, len(ORDERS), size), -1, np.int32),
            cursor=np.zeros(2, np.int32),
        )
        by_sequence = {name: np.zeros(sequences, np.int32) for name in Sequences._fields[:4]}
        by_token = {
            name: np.zeros((sequences, max_draft_tokens), np.int32) for name in Sequences._fields[4:6]
        }
        tally_skd = np.zeros((sequences, 2, max_draft_tokens), np.int64)
        self._sequences = Sequences(**by_sequence, **by_token, tally_skd=tally_skd)
        # Prior acceptance before the first trials, by agreement of the votes: from .4 to .95.
        prior_b = np.tile(np.linspace(0.4, 0.95, SHARES), BUCKETS // SHARES)
        self._calibration = Calibration(np.full(BUCKETS, 4.0), 4.0 * prior_b)
        self._free = list(range(sequences))
        self._prompt_pages: dict[int, int] = {}
        self._running: Counter[int] = Counter()
        """Running sequences by prompt."""
        self._compile()

    def _compile(self) -> None:
        """Compile for the argument types in use, because compilation takes seconds and would delay the first step."""
        nothing = np.zeros(0, np.int32)
        received = np.frombuffer(b"", np.int32)  # read-only
        self.propose(nothing, nothing, np.zeros((1, 1), np.int32), nothing, nothing, 1.0)
        self.remember(-2, received, received)  # not -1, which marks pages without a prompt
        self.end(self.begin(-2, nothing))

    def remember(self, prompt: int, prompt_t: Int32s, response_t: Int32s) -> None:
        """Store a past response to a prompt."""
        page = self._begin(prompt, prompt_t)
        text_t = np.concatenate([prompt_t[-MAX_CONTEXT:], response_t])
        context = len(text_t) - len(response_t)
        write(self._memory, page * PAGE + context, text_t, context, len(text_t), prompt, True, False)

    def begin(self, prompt: int, prompt_t: Int32s) -> int:
        """Add a running sequence of a prompt, and return its slot.

        Raises ``IndexError`` if all slots are in use.
        """
        slot = self._free.pop()
        page = self._begin(prompt, prompt_t)
        self._running[prompt] += 1
        if self._running[prompt] == 1:
            self._memory.pinned_p[self._memory.prompt_p == prompt] = True
        self._memory.held_p[page] = True
        self._sequences.position_s[slot] = page * PAGE + len(prompt_t[-MAX_CONTEXT:])
        self._sequences.prompt_s[slot] = prompt
        self._sequences.known_s[slot] = len(prompt_t)
        self._sequences.drafted_s[slot] = 0
        self._sequences.tally_skd[slot] = 0
        return slot

    def _begin(self, prompt: int, prompt_t: Int32s) -> int:
        """Allocate a page that begins with the end of the prompt, as context; the prompt itself is indexed once."""
        memory = self._memory
        if memory.prompt_p[self._prompt_pages.get(prompt, 0)] != prompt:
            page = self._prompt_pages[prompt] = new_page(memory, -1, prompt)
            memory.pinned_p[page] = prompt in self._running
            write(memory, page * PAGE, prompt_t, 0, len(prompt_t), prompt, True, False)
        page = new_page(memory, -1, prompt)
        memory.pinned_p[page] = prompt in self._running
        write(
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
        """Release the slot of a finished sequence; its tokens stay in memory."""
        self._memory.held_p[self._sequences.position_s[slot] // PAGE] = False
        prompt = int(self._sequences.prompt_s[slot])
        self._running[prompt] -= 1
        if not self._running[prompt]:
            del self._running[prompt]
            self._memory.pinned_p[self._memory.prompt_p == prompt] = False
            self._memory.cursor[1] = 0
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
        """Draft for sequences that have new tokens.

        Args:
            slot_r: slots of the sequences.
            row_r: their rows in ``rows_rt``.
            rows_rt: token ids; those of a sequence, prompt included, are at ``[row, :length]``.
            length_r: number of tokens of each sequence.
            limit_r: maximum draft length of each sequence.
            threshold: least probability that a token and all before it in the draft are accepted; the draft ends before a
                token below it.

        Returns:
            Drafts, shape ``[s, d]``, and their lengths, shape ``[s]``, by slot, both valid until the next call; then the numbers
            of accepted and of drafted tokens of the previous drafts.
        """
        accepted, verified = step(
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

    @property
    def evicted_tokens(self) -> tuple[int, int]:
        """Capacity of the pages overwritten so far, in tokens: of prompts without and with running sequences."""
        idle, running = (PAGE * self._memory.evicted).tolist()
        return idle, running

    def take_tally(self, slot: int) -> NDArray[np.int64]:
        """Drafted and accepted tokens of a sequence by draft position, int64 ``[2, d]``; resets both."""
        tally: NDArray[np.int64] = self._sequences.tally_skd[slot].copy()
        self._sequences.tally_skd[slot] = 0
        return tally
