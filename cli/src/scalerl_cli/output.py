"""What the command says to whoever reads it. The reader may leave; the run must not notice."""

from __future__ import annotations

import os
import sys
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
