"""Looking at a pushed group: does it fit its lease, is it sound, how old is it.

Costs a few microseconds a completion: lengths are compared as lengths, and the two things that have to be looked
at token by token (log-probabilities finite, ids not negative) are one numpy reduction each over the bytes as they
came.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scalerl_api.wire import MASKED, Completion, Group

_LARGEST_LOGPROB = 0.01
"""A log-probability may exceed 0 by rounding, not by more."""


class BadGroup(Exception):
    """The group cannot be used; the message says which completion and why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the coordinator keeps of a group's completions."""

    lengths: list[int]
    scores: list[float]
    truncated: int
    oldest_version: int
    version_tokens: int
    """Sum over the tokens to be trained on of the version that sampled each."""
    newest_version: int
    ungraded: list[int]
    """Completions whose verifier failed: their score says nothing about them."""
    masked_tokens: list[int]
    """Of each completion; empty where none has any."""


def measure(group: Group, completions: int, max_tokens: int, newest: int) -> Measured:
    """Check every completion of ``group``, and sum up.

    Args:
        group: as pushed.
        completions: how many its lease asked for.
        max_tokens: longest completion its lease allowed.
        newest: the newest version that any weights ever had.

    Raises:
        BadGroup: wrong count, wrong or impossible length, log-probability not finite or above 0, negative token id,
            version spans that do not cover the tokens in order, score outside [0, 1].
    """
    if len(group.completions) != completions:
        raise BadGroup(f"{len(group.completions)} completions, leased for {completions}")
    if not group.prompt_token_ids or len(group.prompt_token_ids) % 4:
        raise BadGroup(
            f"prompt_token_ids has {len(group.prompt_token_ids)} bytes, not a positive multiple of 4"
        )
    lengths, scores, truncated, version_tokens = [], [], 0, 0
    ungraded: list[int] = []
    masked_tokens: list[int] = []
    oldest, latest = newest, -1
    for index, completion in enumerate(group.completions):
        try:
            _check_tokens(completion, max_tokens)
            first, last, weighted, masked = _check_versions(completion, newest)
        except BadGroup as problem:
            raise BadGroup(f"completions[{index}]: {problem}") from None
        if not 0.0 <= completion.score <= 1.0:  # NaN is not
            raise BadGroup(f"completions[{index}]: score {completion.score} is outside [0, 1]")
        lengths.append(completion.tokens)
        scores.append(completion.score)
        truncated += completion.finish_reason == "length"
        oldest, latest = min(oldest, first), max(latest, last)
        masked_tokens.append(masked)
        if completion.grading_error is None:
            version_tokens += weighted
        else:
            ungraded.append(index)
    return Measured(
        lengths,
        scores,
        truncated,
        oldest,
        version_tokens,
        oldest if latest < 0 else latest,
        ungraded,
        masked_tokens if any(masked_tokens) else [],
    )


def _check_tokens(completion: Completion, max_tokens: int) -> None:
    ids, logprobs = completion.token_ids, completion.logprobs
    if not ids or len(ids) % 4:
        raise BadGroup(f"token_ids has {len(ids)} bytes, not a positive multiple of 4")
    if len(logprobs) != len(ids):
        raise BadGroup(f"{len(ids) // 4} tokens but {len(logprobs) / 4:g} log-probabilities")
    if len(ids) // 4 > max_tokens:
        raise BadGroup(f"{len(ids) // 4} tokens, leased for at most {max_tokens}")
    values = np.frombuffer(logprobs, "<f4")
    low, high = float(values.min()), float(values.max())  # NaN anywhere makes both NaN
    if not (math.isfinite(low) and high <= _LARGEST_LOGPROB):
        raise BadGroup(f"log-probabilities from {low} to {high}: not finite, or above 0")
    if np.frombuffer(ids, "<i4").min() < 0:
        raise BadGroup("a token id is negative")


def _check_versions(completion: Completion, newest: int) -> tuple[int, int, int, int]:
    """Of the tokens that are not masked: oldest and newest version, sum of versions. And how many are masked.

    With every token masked, the newest is -1 and the oldest the newest there is.
    """
    spans, tokens = completion.versions, completion.tokens
    if not spans or spans[0].start != 0:
        raise BadGroup("its first version span does not start at token 0")
    weighted = masked = 0
    for at, span in enumerate(spans):
        end = spans[at + 1].start if at + 1 < len(spans) else tokens
        if end <= span.start:
            raise BadGroup(f"version spans are not ascending inside its {tokens} tokens")
        if span.version == MASKED:
            masked += end - span.start
            continue
        if not 0 <= span.version <= newest:
            raise BadGroup(f"version {span.version} is outside 0..{newest}")
        weighted += span.version * (end - span.start)
    versions = [span.version for span in spans if span.version != MASKED]
    return min(versions, default=newest), max(versions, default=-1), weighted, masked
