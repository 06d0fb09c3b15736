"""Reads a record of decisions from the directory of a run, a file, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from scalerl_api.paths import RunPaths

KEY: Final = RunPaths(Path()).decisions.name


class RecordProblem(Exception):
    """The record cannot be read; the message has the reason and what to do."""


def recorded(source: Path) -> tuple[str, bytes]:
    """The name of the record for messages, and its content.

    source: the directory of a run, or a ``decisions.jsonl``; ``-`` is standard input.

    Raises:
        RecordProblem
    """
    try:
        if source.is_dir():
            source = source / KEY
        content = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
    except OSError as error:
        raise RecordProblem(
            f"{source}: {error.strerror}; a run writes its decisions with autoscaling.mode Advisory or Auto"
        ) from error
    return str(source), content
