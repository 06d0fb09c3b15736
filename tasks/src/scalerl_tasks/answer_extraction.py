r"""Extracts the graded part of a completion.

Model output is hostile: every function takes time linear in the text, and none uses a regular expression that could
backtrack over it.
"""

from __future__ import annotations

_BOXED = "\\boxed{"
THOUGHT = "<think>"
THOUGHT_END = "</think>"


def ends_inside_thought(text: str) -> bool:
    """Whether ``text`` ends inside a thought.

    >>> ends_inside_thought("<|assistant|><think>\\n"), ends_inside_thought("<think>\\n\\n</think>\\n\\n")
    (True, False)
    """
    return THOUGHT in text.rpartition(THOUGHT_END)[2]


def extract_answer(completion: str) -> str:
    r"""The part of a completion that is graded, stripped.

    1. Only the text after the last ``</think>`` counts. After a ``<think>`` without ``</think>`` (a truncated
       thought), nothing counts.
    2. Of that, the last ``<answer>…</answer>``, if there is one.
    3. Of that, the last ``\boxed{…}`` with its braces balanced, if there is one.
    4. Otherwise the whole text.

    >>> extract_answer("<think>2?</think> It is <answer> \\boxed{\\frac{1}{2}} </answer>.")
    '\\frac{1}{2}'
    >>> extract_answer("just 4")
    'just 4'
    >>> extract_answer("<think>5, or")
    ''
    """
    _, closed, text = completion.rpartition(THOUGHT_END)
    if not closed and THOUGHT in text:
        return ""
    inside = _last_tagged(text)
    if inside is not None:
        text = inside
    inside = _last_boxed(text)
    if inside is not None:
        text = inside
    return text.strip()


def _last_tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    return None if start < 0 else text[start + len("<answer>") : end]


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth, at = 1, start
    while True:
        # From brace to brace with str.find: a megabyte without braces costs one step.
        closing = text.find("}", at)
        if closing < 0:
            return None
        depth += text.count("{", at, closing) - 1
        if depth == 0:
            return text[start:closing]
        at = closing + 1
