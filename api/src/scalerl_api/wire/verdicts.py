"""What a verifier found of the completions of a group."""

from __future__ import annotations

from scalerl_api.wire.base import Struct


class Verdicts(Struct, frozen=True, kw_only=True):
    """Columns over the completions of a group, in their order."""

    scores: list[float]
    """In [0, 1]; 0 without a verdict."""
    parts: dict[str, list[float]] = {}
    """By the names that the verifier declares: finite numbers that explain the score; 0 without a verdict."""
    errors: dict[int, str] = {}
    """By index of a completion without a verdict: why. It is not trained on, and its group is judged without it."""

    @property
    def ungraded(self) -> list[int]:
        """Indices of the completions without a verdict."""
        return sorted(self.errors)
