"""What asking the coordinator can come to."""

from __future__ import annotations


class CoordinatorUnreachable(Exception):
    """No answer, or none that can be used; asking again later may help."""


class CoordinatorRefused(Exception):
    """An answer that asking again will not change."""
