"""Chooses the sequences of a shard that a probe scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scalerl_api import wire
from scalerl_trainer.packing import Sequence
from scalerl_trainer.publish.probe import MIN_COMPARED_TOKENS, ProbeSequence

PROBE_TOKENS = 8192
"""Tokens of a probe besides the sequence with its longest completion, prompts included. A token counts at most ``OUTLIER_LIMITS`` = 20 times the limit, so a mean of k3
at the limit has a standard deviation of at most √(19 / n) of it: 5 % at this n. More only cost time."""
START_SEQUENCES = 32
"""Completions that the weights are compared on with those of the start."""
MIN_PROBED_TOKENS = 64
"""Of a completion, so that most of what is computed is also compared."""

_INT32 = np.dtype("<i4")


def probe_sequences(
    shard: wire.Shard, count: int, context_tokens: int, min_tokens: int = MIN_COMPARED_TOKENS
) -> list[ProbeSequence]:
    """Up to ``count`` evenly spaced sequences of the shard, for the probe after the next publish. One with masked tokens, as an episode
    of several turns has, ends after the longest part between them, which alone is compared.

    They are shorter than ``context_tokens``: a server scores a sequence as a prompt, which leaves room for one token.
    Of all but one, beginnings suffice; fewer than ``min_tokens`` tokens to compare are no probe (:func:`_shortened`).
    """
    usable = [
        (s, *of)
        for s in shard.sequences
        if (of := _longest_sampled(s))[0] < of[1]
        if len(s.prompt_token_ids) + of[1] * _INT32.itemsize < context_tokens * _INT32.itemsize
    ]
    chosen = [usable[i * len(usable) // count] for i in range(count)] if len(usable) > count else usable
    return _shortened(
        [
            ProbeSequence(
                np.concatenate(
                    [
                        np.frombuffer(s.prompt_token_ids, dtype=_INT32),
                        np.frombuffer(s.token_ids, dtype=_INT32)[:end],
                    ]
                ),
                len(s.prompt_token_ids) // _INT32.itemsize + start,
            )
            for s, start, end in chosen
        ],
        min_tokens,
    )


def _longest_sampled(sequence: wire.Sequence) -> tuple[int, int]:
    """Start and end, in tokens of the completion, of its longest part without masked tokens."""
    longest, start, tokens = (0, 0), 0, len(sequence.token_ids) // _INT32.itemsize
    ends = [*(span.start for span in sequence.versions[1:]), tokens]
    for span, end in zip(sequence.versions, ends, strict=False):
        start = end if span.version == wire.MASKED else start
        longest = max(longest, (start, end), key=lambda part: part[1] - part[0])
    return longest


def start_sequences(shard: wire.Shard, context_tokens: int) -> list[Sequence]:
    """The completions that later weights are compared on with those of the start, chosen as for a probe."""
    return [one.sequence for one in probe_sequences(shard, START_SEQUENCES, context_tokens, min_tokens=1)]


def _shortened(sequences: list[ProbeSequence], min_tokens: int) -> list[ProbeSequence]:
    """The sequence with the longest completion, whole, and of the others beginnings with :data:`PROBE_TOKENS` tokens in total, in
    their order; none if fewer than ``min_tokens`` tokens would be compared.

    The whole one covers all positions, the others as many contents as possible. Shorter ones leave their part to longer ones; one
    whose prompt leaves no room for :data:`MIN_PROBED_TOKENS` of its completion is left out, unless the minimum needs it.
    """
    totals = [len(s.token_ids) for s in sequences]
    prompts = [s.prompt_tokens for s in sequences]
    if sum(totals) - sum(prompts) < min_tokens:
        return []
    whole = max(range(len(sequences)), key=lambda i: (totals[i] - prompts[i], totals[i]))
    others = sorted((i for i in range(len(sequences)) if i != whole), key=totals.__getitem__)
    left, kept, omitted = PROBE_TOKENS, {whole: totals[whole]}, list[int]()
    for rank, i in enumerate(others):
        length = min(totals[i], max(left // (len(others) - rank), prompts[i] + MIN_PROBED_TOKENS))
        if length > left:
            omitted.append(i)
            continue
        left -= length
        kept[i] = length
    missing = min_tokens - sum(length - prompts[i] for i, length in kept.items())
    for i in omitted:
        if missing <= 0:
            break
        kept[i] = min(totals[i], prompts[i] + missing)
        missing -= kept[i] - prompts[i]
    return [replace(sequences[i], token_ids=sequences[i].token_ids[: kept[i]]) for i in sorted(kept)]
