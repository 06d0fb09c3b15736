"""Finds completions that end in a loop, from their tokens.

A policy that degenerates repeats a pattern until the maximum length ("neural text degeneration", Holtzman et al.,
arXiv 1904.09751 [P]). The pattern is searched as vLLM's ``repetition_detection`` does, which ends such completions: the same tokens,
several times in a row, up to the end. A loop in which something changes, such as a number that counts up, is not found.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_PATTERN_TOKENS: Final = 512
"""Longer patterns are not searched."""
MIN_REPEATS: Final = 4
"""Occurrences of the pattern in a row."""
MIN_LOOP_TOKENS: Final = 64
"""Of all occurrences: shorter ends repeat for good reasons, such as the lines of a table or the zeros of a number."""
_COMPARED: Final = 8


def ends_in_loop(ids: NDArray[Any]) -> bool:
    """Whether ``ids [tokens]`` end with at least :data:`MIN_REPEATS` copies of a pattern of at most :data:`MAX_PATTERN_TOKENS`
    tokens, of at least :data:`MIN_LOOP_TOKENS` tokens together.

    >>> ends_in_loop(np.array([7, 8, 9] + 32 * [1, 2])), ends_in_loop(np.array(31 * [1, 2])), ends_in_loop(np.arange(100))
    (True, False, False)
    """
    backwards = ids[: -(MAX_PATTERN_TOKENS * MIN_REPEATS + 1) : -1]
    if len(backwards) < MIN_LOOP_TOKENS:
        return False
    patterns = np.arange(1, len(backwards) // MIN_REPEATS + 1)
    # Few patterns have the last tokens twice, and only these are compared as a whole.
    for at in range(_COMPARED):
        patterns = patterns[backwards[patterns + at] == backwards[at]]
        if not len(patterns):
            return False
    for pattern in patterns.tolist():
        tokens = pattern * max(MIN_REPEATS, -(-MIN_LOOP_TOKENS // pattern))
        if tokens <= len(backwards) and np.array_equal(
            backwards[pattern:tokens], backwards[: tokens - pattern]
        ):
            return True
    return False
