"""Restrictions of a grader, enforced by an audit hook of the interpreter.

Some scorers of reasoning-gym pass the model's text to ``eval`` or to ``sympy.parse_expr``, which is ``eval`` too. While a
completion is graded, an audit hook (PEP 578; it sees every ``eval``, ``exec`` and ``compile`` of any caller) refuses to
compile text, to start processes, and to use the network. A refusal is recorded, because some scorers swallow exceptions:
a completion that caused one scores 0 with an error, whatever the scorer returns.

This is not a sandbox for code; no code of the model runs here. It keeps data from becoming code.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
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
# sympy reads numerals, also those of its own tables such as "3/2", by creating these two pieces of source and compiling them.
_NUMERAL = rb"(?:Integer|Float|Rational) \('?[0-9.]+'? \)"
_NUMERAL_SOURCE = re.compile(rb"%s(?:/%s)?|from sympy import \*" % (_NUMERAL, _NUMERAL))
_MAX_NUMERAL_BYTES = 4096

_armed = False
_installed = False
_refused: str | None = None
_prompt: Prompt | None = None


class RefusedError(Exception):
    """Grading tried a forbidden operation."""


def install() -> None:
    """Add the hook to this process, permanently (hooks cannot be removed); inactive outside :func:`guarded`."""
    global _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True


@contextmanager
def guarded(prompt: Prompt) -> Iterator[None]:
    """Refuse forbidden operations inside the block, where a completion of ``prompt`` is graded.

    The prompt's own answer, the texts that it lists, solution and metadata may be compiled (``bitwise_arithmetic`` and
    ``number_sorting`` evaluate them; ``verifier.code`` reads assert statements).

    Raises:
        RefusedError: at the end of the block, if anything was refused in it, even if that was swallowed.
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
        _is_numeral(arguments[0]) or _is_from_task(arguments[0]) or _is_from_sympy() or _inside_import()
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


def _is_from_task(source: object) -> bool:
    if not isinstance(source, bytes) or _prompt is None:
        return False
    own = [_prompt.answer, _prompt.solution, *_prompt.metadata.values(), *_listed(_prompt.answer)]
    source = source.strip()
    return any(isinstance(text, str) and text.encode("utf-8", "replace").strip() == source for text in own)


def _listed(answer: str) -> list[Any]:
    try:
        data = json.loads(answer)
    except ValueError:
        return []
    return data if isinstance(data, list) else []


def _is_from_sympy() -> bool:
    """Whether sympy compiles the arithmetic of monomials (``(a0 + b0, a1 + b1)``), which depends on the number of variables and
    on no text.
    """
    frame = sys._getframe(2)
    return frame.f_code.co_name == "_build" and frame.f_code is _monomial_code()


def _monomial_code() -> CodeType | None:
    module = sys.modules.get("sympy.polys.monomials")
    return None if module is None else module.MonomialOps._build.__code__


def _inside_import() -> bool:
    """Whether a module is being imported: a late import of the verifier, which may compile."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False
