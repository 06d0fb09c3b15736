"""Runs the operator's ``main`` and measures each callback of its event loop: ``timed_operator.py FILE``.

At the end it writes the longest duration to FILE, in seconds of the thread's CPU time. Unlike the operator's own histogram
of its event loop's lag, CPU time does not depend on other processes on the same core.
"""

from __future__ import annotations

import sys
import time
from asyncio import events
from pathlib import Path

from scalerl_operator.main import main


def timed(file: Path) -> int:
    """Run ``main``; returns its exit code."""
    run = events.Handle._run
    longest = 0.0

    def clocked(self: events.Handle) -> None:
        nonlocal longest
        began = time.thread_time()
        run(self)
        longest = max(longest, time.thread_time() - began)

    events.Handle._run = clocked
    try:
        return main()
    finally:
        file.write_text(f"{longest}\n")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    sys.exit(timed(Path(sys.argv[1])))
