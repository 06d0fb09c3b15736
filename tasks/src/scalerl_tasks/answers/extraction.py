r"""Extracts the graded part of a completion.

Model output is hostile: every function takes time linear in the text, and none uses a regular expression that could
backtrack over it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from scalerl_tasks.thoughts import THOUGHT, THOUGHT_END

_ANSWER, _ANSWER_END = "<answer>", "</answer>"
# Escaped characters are consumed, so that the braces of \{1, 2\} do not count.
_BRACE = re.compile(r"\\(?:boxed|fbox)\b[ \t]*(\{?)|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[ \t]{0,8}((?!\\(?:boxed|fbox)\b)[-+]?[0-9\\][^\s$]{0,255})")
_JOINTS = re.compile(
    r"[\s$]*(?:\\[()])?[\s$]*(?:,|;|,?\s*(?:and|or|\\text\{ ?(?:and|or) ?\}))?[\s$]*(?:\\[()])?[\s$]*"
)
_MAX_JOINT_CHARACTERS = 40
_MAX_JOINED = 32


class Extracted(NamedTuple):
    """The graded part of a completion.

    Attributes:
        text: stripped.
        enclosed: whether it stood in a box or an answer tag, so that all of it is the answer; otherwise it may be prose.
    """

    text: str
    enclosed: bool


def extract_answer(completion: str) -> str:
    r"""The part of a completion that is graded, stripped.

    1. Only the text after the last ``</think>`` counts. After a ``<think>`` without ``</think>`` (a truncated
       thought), nothing counts.
    2. Of that, the last ``<answer>…</answer>``, if there is one.
    3. Of that, the last ``\boxed{…}`` or ``\fbox{…}``, if there is one; of nested boxes the outer one.
    4. Otherwise the whole text.

    Nothing counts if the last box or the last tag is not closed: the answer was cut off, and an earlier one was not the
    answer.

    >>> extract_answer("<think>2?</think> It is <answer> \\boxed{\\frac{1}{2}} </answer>.")
    '\\frac{1}{2}'
    >>> extract_answer("just 4")
    'just 4'
    >>> extract_answer("<think>5, or"), extract_answer("\\boxed{1}, no: \\boxed{2")
    ('', '')
    """
    text, _ = _tagged(completion)
    boxes = _boxes(text)
    if boxes is not None:
        text = boxes[-1] if boxes else ""
    return text.strip()


def extract(completion: str) -> Extracted:
    r"""As :func:`extract_answer`, except that boxes side by side are one answer, a list.

    >>> extract("It is $\\boxed{1}$ and $\\boxed{2}$.")
    Extracted(text='1, 2', enclosed=True)
    """
    text, enclosed = _tagged(completion)
    boxes = _boxes(text)
    if boxes is not None:
        text, enclosed = ", ".join(dict.fromkeys(box.strip() for box in boxes)), True
    return Extracted(text.strip(), enclosed)


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}``, of several side by side as a list; None without one, or if it is not closed.

    >>> last_box("so \\boxed{\\frac{1}{2}}."), last_box("1/2")
    ('\\frac{1}{2}', None)
    """
    boxes = _boxes(text)
    return ", ".join(dict.fromkeys(box.strip() for box in boxes)) if boxes else None


def after_thought(completion: str) -> str:
    """The text after the last ``</think>``; empty after a ``<think>`` without one.

    >>> after_thought("<think>5</think> 6"), after_thought("<think>5, or"), after_thought("6")
    (' 6', '', '6')
    """
    _, closed, text = completion.rpartition(THOUGHT_END)
    return "" if not closed and THOUGHT in text else text


def _tagged(completion: str) -> tuple[str, bool]:
    """The text of the last answer tag, or all after the thought; and whether there was a tag."""
    text = after_thought(completion)
    end = text.rfind(_ANSWER_END)
    if text.find(_ANSWER, end + 1 if end >= 0 else 0) >= 0:
        return "", True
    start = text.rfind(_ANSWER, 0, end) if end >= 0 else -1
    return (text, False) if start < 0 else (text[start + len(_ANSWER) : end], True)


def _boxes(text: str) -> list[str] | None:
    """The last box, after those that are joined to it; None without a box, and empty if the last one is not closed."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    # Start and end, of the box and of what is in it; none in another.
    closed: list[tuple[int, int, int, int]] = []
    nesting: list[tuple[int, int] | None] = []  # for each open brace, start of a box and of its content
    last_start, last_closed = -1, -1
    for match in _BRACE.finditer(text):
        mark = match[0]
        if match[1] is not None:
            if match[1]:
                last_start = match.start()
                nesting.append((match.start(), match.end()))
            elif (bare := _BARE_BOX.match(text, match.end())) is not None:
                last_start = last_closed = match.start()
                closed.append((match.start(), bare.end(), bare.start(1), bare.end(1)))
        elif mark == "{":
            nesting.append(None)
        elif mark == "}" and nesting and (box := nesting.pop()) is not None:
            start, inside = box
            last_closed = max(last_closed, start)
            if closed and closed[-1][0] == inside and closed[-1][1] == match.start():
                closed[-1] = (start, match.end(), *closed[-1][2:])  # nothing but another box in it
                continue
            while closed and closed[-1][0] > start:
                closed.pop()
            closed.append((start, match.end(), inside, match.start()))
    if last_start < 0:
        return None
    if last_closed < last_start:
        return []
    first = len(closed) - 1
    while (
        first > 0
        and len(closed) - first < _MAX_JOINED
        and _joined(text, closed[first - 1][1], closed[first][0])
    ):
        first -= 1
    return [text[start:end] for _, _, start, end in closed[first:]]


def _joined(text: str, start: int, end: int) -> bool:
    return end - start <= _MAX_JOINT_CHARACTERS and _JOINTS.fullmatch(text, start, end) is not None
