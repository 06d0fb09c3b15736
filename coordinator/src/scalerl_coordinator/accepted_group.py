"""An accepted training group, as the state keeps it: all but its tokens, which stay in the journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from scalerl_api.wire import PromptRef, trained_tokens
from scalerl_coordinator import journal_records as r

Value = TypeVar("Value")


class Accepted(msgspec.Struct, array_like=True):
    """An accepted group, or the place of a slot that was given up.

    Fields without a comment are those of :class:`~.journal_records.GroupAccepted`.
    """

    lease_id: str
    prompt_tokens: int
    lengths: list[int]
    scores: list[float]
    truncated: int
    oldest_version: int
    version_tokens: int
    filtered: bool = False
    """Dropped by the zero-variance filter, which runs when the group's step closes."""
    grading_errors: int = 0
    ungraded: list[int] = []
    masked_tokens: list[int] = []
    given_up: str = ""
    """The :class:`~.journal_records.GiveUpReason` of a slot that was given up, which has no completions."""
    given_up_rollouts: int = 0
    """Number of completions that a given-up slot would have had."""
    rewards: list[float] = []
    """The reward of each completion in training."""
    parts: dict[str, list[float]] = {}
    unusable_tokens: int = 0
    looped: int = -1
    unanswered: int = -1
    distinct: int = 0
    turns: list[int] = []
    returns: list[list[float]] = []
    message_tokens: int = 0
    episode_seconds: tuple[float, float] | None = None
    equal_turns: bool = False

    @classmethod
    def of_record(cls, record: r.GroupAccepted) -> Accepted:
        return cls(**{name: getattr(record, name) for name in _OF_RECORD})

    @property
    def rollouts(self) -> int:
        return len(self.lengths)

    def graded(self, values: Sequence[Value]) -> list[Value]:
        """Those of ``values``, one for each completion, whose completion has a verdict."""
        return [value for i, value in enumerate(values) if i not in self.ungraded]

    @property
    def trained_tokens(self) -> list[int]:
        """Number of tokens of each completion that contribute to the gradient unless the group is filtered."""
        return trained_tokens(self.lengths, self.masked_tokens, self.ungraded)


_OF_RECORD: Final = tuple(
    name for name in Accepted.__struct_fields__ if name in r.GroupAccepted.__struct_fields__
)


class Try(msgspec.Struct, array_like=True, frozen=True):
    """A filtered group whose slot was refilled: issued again with another prompt."""

    prompt: PromptRef
    group: Accepted
