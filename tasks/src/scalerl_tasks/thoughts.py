"""The marks of a model's thought."""

from __future__ import annotations

THOUGHT = "<think>"
THOUGHT_END = "</think>"


def ends_inside_thought(text: str) -> bool:
    """Whether ``text`` ends inside a thought.

    >>> ends_inside_thought("<|assistant|><think>\\n"), ends_inside_thought("<think>\\n\\n</think>\\n\\n")
    (True, False)
    """
    return THOUGHT in text.rpartition(THOUGHT_END)[2]
