"""Difficulty of a prompt, where its source provides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def arithmetic_operations(metadata: Mapping[str, Any]) -> int | None:
    """Number of operations that the answer needs: op(G), the difficulty of the Interplay paper (arXiv 2512.07783, §3) [P].

    It is known for reasoning-gym tasks that provide the number of terms of an expression (``chain_sum``,
    ``basic_arithmetic``, ``products``, ``decimal_chain_sum``, …): a chain of n terms has n − 1 operations. For all other
    tasks the result is None.

    >>> arithmetic_operations({"num_terms": 4})
    3
    >>> arithmetic_operations({"grid": "..."}) is None
    True
    """
    terms = metadata.get("num_terms")
    if isinstance(terms, int) and not isinstance(terms, bool) and terms >= 1:
        return terms - 1
    return None
