"""Printing that survives a closed pipe or a lost terminal, and atomic writing of files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from scalerl_analysis.problem import AnalysisProblem


def echo(text: str = "", *, error: bool = False) -> None:
    """Print a line to standard output or standard error. After a write error (closed pipe, lost terminal), output is discarded."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        mute(stream)


def mute(stream: TextIO) -> None:
    """Redirect ``stream`` to the null device, including buffered output that the interpreter flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def replace_text(path: Path, text: str) -> None:
    """Write a file, in a folder that is made, atomically: until the end of the write, readers see the previous content.

    Raises:
        AnalysisProblem: it cannot be written.
    """
    staging = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging.write_text(text, encoding="utf-8")
        os.replace(staging, path)
    except OSError as error:
        raise AnalysisProblem(f"{path}: {error.strerror}") from error


def shown(text: str) -> str:
    """Text of a model or a log for a terminal: characters that control it or the direction of its text are escaped.

    >>> shown("a\\x1b[2J\\tb\\u202ec")
    'a\\\\x1b[2J\\tb\\\\u202ec'
    """
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
