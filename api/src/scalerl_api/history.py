"""Lines of ``history.jsonl``: how the responses to a prompt differ from those of the previous epoch."""

from __future__ import annotations

import msgspec


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training group whose prompt had responses in the store, compared with the newest stored responses."""

    task: int
    """Index in ``task.mix``; 0 in a run with one task."""
    prompt: int
    """Position in the task's training prompts."""
    visit: int
    """Number of earlier groups of the prompt that the store counted: 1 in the second epoch."""
    version: int
    """Newest weight version that sampled a token of the group."""
    previous_version: int
    """Newest weight version that sampled a token of the stored responses."""
    responses: int
    tokens: int
    previous_responses: int
    previous_tokens: int
    compared_tokens: int = 0
    """Tokens of the compared responses: of all responses, or of the first ones; 0 if the comparison would have taken too
    much of the coordinator's time."""
    reused_tokens: int = 0
    """Compared tokens in a sequence of eight or more tokens that also occurs in a previous response."""
    drafted_tokens: int | None = None
    """Tokens that the generator drafted from history; None if it did not report them."""
    accepted_tokens: int | None = None
    """Drafted tokens that the model accepted."""
    drafted_by_position: list[int] = []
    """Drafted tokens by position in their draft."""
    accepted_by_position: list[int] = []
    """Accepted tokens by position in their draft."""
    difficulty: float | None = None
    """Difficulty of the prompt, if its source provides one."""
