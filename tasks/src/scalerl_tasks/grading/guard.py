"""What a grader may not do, held by the interpreter itself.

Some scorers of reasoning-gym pass the model's text to ``eval`` or to ``sympy.parse_expr``, which is ``eval``
too. While something is graded, an audit hook (PEP 578; it sees every ``eval``, ``exec`` and ``compile``,
whoever calls) refuses to turn text into code, to start processes, and to reach for the network. A refusal is
remembered, because scorers like to swallow exceptions: a completion that caused one scores 0 with an error,
whatever the scorer made of it.

This is no sandbox for code; no code of the model's runs here. It keeps data from becoming code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scalerl_tasks.prompts import Prompt

_FORBIDDEN = frozenset(
    {
        "compile",
        "ctypes.dlopen",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "pty.spawn",
        "socket.bind",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.sendto",
        "subprocess.Popen",
    }
)
# latex2sympy has sympy read its numerals, which writes these two pieces of source and compiles them.
_NUMERAL_SOURCE = re.compile(rb"(?:Integer|Float|Rational) \('?[0-9.]+'? \)|from sympy import \*")
_MAX_NUMERAL_BYTES = 4096

_armed = False
_installed = False
_refused: str | None = None
_prompt: Prompt | None = None


class RefusedError(Exception):
    """Grading tried something that a grader may not do."""


def install() -> None:
    """Add the hook to this process, for good (hooks cannot be removed); idle outside :func:`guarded`."""
    global _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True


@contextmanager
def guarded(prompt: Prompt) -> Iterator[None]:
    """Refuse the forbidden inside the block, where a completion of ``prompt`` is graded.

    What the task itself put into the prompt's answer and metadata may be evaluated (``bitwise_arithmetic`` and
    ``number_sorting`` do that).

    Raises:
        RefusedError: at the end of the block, when anything was refused in it, even if that was swallowed.
    """
    global _armed, _refused, _prompt
    _armed, _refused, _prompt = True, None, prompt
    try:
        yield
    finally:
        _armed, _prompt = False, None
        if _refused is not None:
            raise RefusedError(_refused)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    global _refused
    if not _armed or event not in _FORBIDDEN:
        return
    if event == "compile" and (
        _is_numeral(arguments[0]) or _is_the_tasks_own(arguments[0]) or _inside_import()
    ):
        return
    what = "turn text into code" if event == "compile" else f"use {event}"
    _refused = f"grading tried to {what}, which is refused"
    raise RefusedError(_refused)


def _is_numeral(source: object) -> bool:
    return (
        isinstance(source, bytes)
        and len(source) <= _MAX_NUMERAL_BYTES
        and _NUMERAL_SOURCE.fullmatch(source.strip()) is not None
    )


def _is_the_tasks_own(source: object) -> bool:
    if not isinstance(source, bytes) or _prompt is None:
        return False
    own = [_prompt.answer, *_prompt.metadata.values()]
    return any(isinstance(text, str) and text.encode("utf-8", "replace") == source for text in own)


def _inside_import() -> bool:
    """Whether a module is being imported: a late import of the verifier's own, which may compile."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False
