"""Checks a pushed group: whether it matches its lease, whether its values are valid, how old its tokens are.

A completion takes a few microseconds: its lengths are compared without decoding, and the two checks of all tokens
(log-probabilities finite, ids not negative) are one numpy reduction each over the received bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scalerl_api.wire import MASKED, MAX_ROUTED_BYTES, Completion, Group, Partial, PartialGroup, Verdicts
from scalerl_tasks import SCORE_RANGE

_MAX_LOGPROB = 0.01
"""Rounding can raise a log-probability this far above 0."""


class InvalidGroup(Exception):
    """The group cannot be used; the message names the completion and the reason."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Summary of a group's completions; fields as in :class:`~.journal_records.GroupAccepted`."""

    lengths: list[int]
    truncated: int
    oldest_version: int
    version_tokens: int
    newest_version: int
    ungraded: list[int]
    masked_tokens: list[int]
    unanswered: int


def summarize_group(
    group: Group, completions: int, max_tokens: int, newest: int, *, teacher: bool = False
) -> GroupSummary:
    """Check every completion of ``group`` and summarize them.

    Args:
        group: as pushed.
        completions: number of completions of its lease.
        max_tokens: maximum length of a completion of its lease.
        newest: the newest weight version that ever existed.
        teacher: whether each token must have a log-probability of the teacher as well.

    Raises:
        InvalidGroup: wrong count, wrong or impossible length, log-probability not finite or above 0, negative token id,
            version spans that do not cover the tokens in order, score outside its range, part that is not finite, verdicts
            of another number of completions.
    """
    if len(group.completions) != completions:
        raise InvalidGroup(f"{len(group.completions)} completions, leased for {completions}")
    if not group.prompt_token_ids or len(group.prompt_token_ids) % 4:
        raise InvalidGroup(
            f"prompt_token_ids has {len(group.prompt_token_ids)} bytes, not a positive multiple of 4"
        )
    _check_verdicts(group.verdicts, completions)
    if not all(0 <= seconds < math.inf for seconds in group.episode_seconds or ()):
        raise InvalidGroup(f"its episodes took {group.episode_seconds} seconds")
    lengths, truncated, version_tokens = [], 0, 0
    ungraded = group.verdicts.ungraded
    masked_tokens: list[int] = []
    oldest, latest = newest, -1
    for index, completion in enumerate(group.completions):
        try:
            _check_tokens(completion, max_tokens)
            if teacher:
                _check_logprobs(completion.teacher_logprobs, completion.tokens, "teacher's ")
            first, last, weighted, masked = _check_versions(completion, newest)
            _check_turns(completion, completion.tokens)
            _check_routed(completion, len(group.prompt_token_ids) // 4 + completion.tokens)
        except InvalidGroup as problem:
            raise InvalidGroup(f"completions[{index}]: {problem}") from None
        lengths.append(completion.tokens)
        truncated += completion.finish_reason == "length"
        oldest, latest = min(oldest, first), max(latest, last)
        masked_tokens.append(masked)
        if index not in group.verdicts.errors:
            version_tokens += weighted
    return GroupSummary(
        lengths,
        truncated,
        oldest,
        version_tokens,
        oldest if latest < 0 else latest,
        ungraded,
        masked_tokens if any(masked_tokens) else [],
        -1 if group.verdicts.unanswered is None else len({*group.verdicts.unanswered} - {*ungraded}),
    )


def _check_verdicts(verdicts: Verdicts, completions: int) -> None:
    low, high = SCORE_RANGE
    for name, column in (("score", verdicts.scores), *verdicts.parts.items()):
        if len(column) != completions:
            raise InvalidGroup(f"verdicts: {len(column)} values of {name!r} for {completions} completions")
        for index, value in enumerate(column):
            if name == "score" and not low <= value <= high:  # NaN is not
                raise InvalidGroup(f"completions[{index}]: score {value} is outside [{low:g}, {high:g}]")
            if not math.isfinite(value):
                raise InvalidGroup(
                    f"completions[{index}]: part {name!r} of its verdict is {value}, not finite"
                )
    if not verdicts.errors.keys() <= set(range(completions)):
        raise InvalidGroup(f"verdicts: errors of the completions {verdicts.ungraded}, of {completions}")
    if not {*(verdicts.unanswered or ())} <= set(range(completions)):
        raise InvalidGroup(f"verdicts: no answer in the completions {verdicts.unanswered}, of {completions}")


def check_partials(group: PartialGroup, completions: int, max_tokens: int, newest: int) -> None:
    """Check a report of unfinished completions; arguments as :func:`summarize_group`.

    Raises:
        InvalidGroup: as :func:`summarize_group`, except that a report may have no tokens.
    """
    if len(group.completions) != completions:
        raise InvalidGroup(f"{len(group.completions)} completions, leased for {completions}")
    for index, partial in enumerate(group.completions):
        try:
            if partial.start < 0:
                raise InvalidGroup(f"it starts at token {partial.start}")
            if partial.token_ids or partial.logprobs or partial.versions:
                _check_tokens(partial, max_tokens - partial.start)
                _check_versions(partial, newest)
            _check_turns(partial, partial.start + partial.tokens)
        except InvalidGroup as problem:
            raise InvalidGroup(f"completions[{index}]: {problem}") from None


def _check_tokens(completion: Completion | Partial, max_tokens: int) -> None:
    ids, logprobs = completion.token_ids, completion.logprobs
    if not ids or len(ids) % 4:
        raise InvalidGroup(f"token_ids has {len(ids)} bytes, not a positive multiple of 4")
    _check_logprobs(logprobs, len(ids) // 4)
    if len(ids) // 4 > max_tokens:
        raise InvalidGroup(f"{len(ids) // 4} tokens, leased for at most {max_tokens}")
    if np.frombuffer(ids, "<i4").min() < 0:
        raise InvalidGroup("a token id is negative")


def _check_turns(completion: Completion | Partial, tokens: int) -> None:
    """Check that the messages of an environment lie in order between its replies."""
    end = 0
    for turn in completion.turns:
        if not end < turn.start < turn.end <= tokens:
            raise InvalidGroup(f"its messages are not ascending inside its {tokens} tokens")
        if not -1 <= turn.reward <= 1:  # NaN is not
            raise InvalidGroup(f"a turn has the reward {turn.reward}, which is not in [-1, 1]")
        end = turn.end


def _check_routed(completion: Completion, tokens: int) -> None:
    """Check that the recorded experts are as many as their positions, which lie in order before the last of ``tokens``."""
    routed = completion.routed
    if routed is None:
        return
    end = 0
    for start, stop in routed.spans:
        if not end <= start < stop < tokens:
            raise InvalidGroup(
                f"its recorded experts are not of ascending positions before the last of {tokens}"
            )
        end = stop
    of_token = routed.layers * routed.chosen if min(routed.layers, routed.chosen) > 0 else 0
    sizes = (of_token, 2 * of_token)
    if not routed.experts or len(routed.experts) not in (size * routed.positions for size in sizes):
        raise InvalidGroup(
            f"{len(routed.experts)} bytes of experts are not {routed.chosen} in each of {routed.layers} layers for "
            f"{routed.positions} positions"
        )
    if len(routed.experts) > MAX_ROUTED_BYTES * routed.positions:
        raise InvalidGroup(f"its experts have more than {MAX_ROUTED_BYTES} bytes for a token")


def _check_logprobs(logprobs: bytes, tokens: int, whose: str = "") -> None:
    if len(logprobs) != 4 * tokens:
        raise InvalidGroup(f"{tokens} tokens but {len(logprobs) / 4:g} {whose}log-probabilities")
    values = np.frombuffer(logprobs, "<f4")
    low, high = float(values.min()), float(values.max())  # NaN anywhere makes both NaN
    if not (math.isfinite(low) and high <= _MAX_LOGPROB):
        raise InvalidGroup(f"{whose}log-probabilities from {low} to {high}: not finite, or above 0")


def _check_versions(completion: Completion | Partial, newest: int) -> tuple[int, int, int, int]:
    """Check the version spans.

    Returns:
        Oldest version, newest version and sum of versions of the unmasked tokens, and the number of masked tokens. If all
        tokens are masked, the oldest version is ``newest`` and the newest is -1.
    """
    spans, tokens = completion.versions, completion.tokens
    if not spans or spans[0].start != 0:
        raise InvalidGroup("its first version span does not start at token 0")
    weighted = masked = 0
    for at, span in enumerate(spans):
        end = spans[at + 1].start if at + 1 < len(spans) else tokens
        if end <= span.start:
            raise InvalidGroup(f"version spans are not ascending inside its {tokens} tokens")
        if span.version == MASKED:
            masked += end - span.start
            continue
        if not 0 <= span.version <= newest:
            raise InvalidGroup(f"version {span.version} is outside 0..{newest}")
        weighted += span.version * (end - span.start)
    versions = [span.version for span in spans if span.version != MASKED]
    return min(versions, default=newest), max(versions, default=-1), weighted, masked
