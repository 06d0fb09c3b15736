"""Results of a verifier for the completions of a group."""

from __future__ import annotations

from scalerl_api.wire.base import Struct


class Verdicts(Struct, frozen=True, kw_only=True):
    """Verdicts of the completions of a group, as columns in the order of the completions."""

    scores: list[float]
    """Score of each completion, in [0, 1]; 0 without a verdict."""
    parts: dict[str, list[float]] = {}
    """Parts of the score by the names that the verifier declares: one finite number per completion; 0 without a verdict."""
    errors: dict[int, str] = {}
    """Why a completion has no verdict, by index of the completion. It is not trained on, and means over its group exclude
    it."""
    unanswered: list[int] | None = None
    """Indices of the completions without an answer, right or wrong; None if the verifier cannot tell."""

    @property
    def ungraded(self) -> list[int]:
        """Indices of the completions without a verdict."""
        return sorted(self.errors)
