r"""Extracts the graded part of a completion.

Model output is hostile: every function takes time linear in the text, and none uses a regular expression that could
backtrack over it.
"""

from __future__ import annotations

from scalerl_tasks.text import THOUGHT, THOUGHT_END

_BOXED = "\\boxed{"


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
    text = after_thought(completion)
    inside = _last_tagged(text)
    if inside is not None:
        text = inside
    inside = _last_boxed(text)
    if inside is not None:
        text = inside
    return text.strip()


def after_thought(completion: str) -> str:
    """The text after the last ``</think>``; empty after a ``<think>`` without one.

    >>> after_thought("<think>5</think> 6"), after_thought("<think>5, or"), after_thought("6")
    (' 6', '', '6')
    """
    _, closed, text = completion.rpartition(THOUGHT_END)
    return "" if not closed and THOUGHT in text else text


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
