"""Difficulty of a prompt, where its source provides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def arithmetic_operations(metadata: Mapping[str, Any]) -> int | None:
    """Operations needed for the answer: op(G), the difficulty of the Interplay paper (arXiv 2512.07783, §3)
    [P].

    Known for the reasoning-gym tasks that give the number of terms of an expression (``chain_sum``,
    ``basic_arithmetic``, ``products``, ``decimal_chain_sum``, …): a chain of n terms has n − 1 operations.
    None for all others. A curriculum by difficulty can use it; nothing here depends on it.

    >>> arithmetic_operations({"num_terms": 4})
    3
    >>> arithmetic_operations({"grid": "..."}) is None
    True
    """
    terms = metadata.get("num_terms")
    if isinstance(terms, int) and not isinstance(terms, bool) and terms >= 1:
        return terms - 1
    return None
