"""Lines of ``history.jsonl``: how the responses to a prompt differ from those of the epoch before."""

from __future__ import annotations

import msgspec


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training group whose prompt had responses in the store, against the newest of those."""

    task: int
    """Index in ``task.mix``, 0 of a run with one task."""
    prompt: int
    """Position in the task's training prompts."""
    visit: int
    """Groups of the prompt before it that the store counted: 1 in the second epoch."""
    version: int
    """The newest that sampled a token of it."""
    previous_version: int
    responses: int
    tokens: int
    """Of all responses."""
    previous_responses: int
    previous_tokens: int
    compared_tokens: int = 0
    """Tokens of the responses that were compared: those of all responses, or of the first ones; 0 where the comparison would
    have taken too much of the coordinator's time."""
    reused_tokens: int = 0
    """Those in a run of eight tokens or more that also occurs in a previous response."""
    drafted_tokens: int | None = None
    """Tokens that the generator drafted from history; None where it did not report them."""
    accepted_tokens: int | None = None
    """Those that the model accepted."""
    drafted_by_position: list[int] = []
    """Drafted tokens by position in their draft."""
    accepted_by_position: list[int] = []
    difficulty: float | None = None
    """Of the prompt, where its source has one."""
