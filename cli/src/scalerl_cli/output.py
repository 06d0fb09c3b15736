"""What the command says, to a reader who may leave without the run noticing; and how it writes files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO


def say(text: str = "", *, error: bool = False) -> None:
    """A line to standard output, or to standard error. With its reader gone (a closed pipe, a lost terminal), to nobody."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        mute(stream)


def mute(stream: TextIO) -> None:
    """Send nowhere what was and will be written to ``stream``, also what the interpreter flushes at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: whoever reads it meanwhile has the one before.

    Raises:
        OSError: it cannot be written.
    """
    staging = path.with_name(f"{path.name}.new")
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)
