"""What takes minutes says so: a line as it begins, one at least every 20 seconds, and one as it ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

EVERY_SECONDS = 20.0
_KEPT_LINES = 60
_began = time.monotonic()


@dataclass
class Step:
    """at: how far it is, in a few words."""

    what: str
    at: str = ""


@contextlib.contextmanager
def step(what: str) -> Iterator[Step]:
    """Print that ``what`` begins, continues and has ended, each line with the time since the program began."""
    made, over, began = Step(what), threading.Event(), time.monotonic()

    def go_on() -> None:
        while not over.wait(EVERY_SECONDS):
            _say(f"{what}: {time.monotonic() - began:.0f} s{made.at and f', {made.at}'}")

    _say(f"{what} ...")
    teller = threading.Thread(target=go_on, daemon=True)
    teller.start()
    try:
        yield made
    finally:
        over.set()
        teller.join()
    _say(f"{what}: done, {time.monotonic() - began:.0f} s")


def followed(
    step: Step,
    argv: Sequence[str],
    *,
    seconds: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    at: Callable[[str], str] = lambda line: line[:80],
) -> tuple[int, str]:
    """Run a command to its end, ``at`` of its last line being how far the step is; its exit code and last lines.

    It is killed after ``seconds``.
    """
    kept: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        watch = threading.Timer(seconds, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                kept.append(line)
                step.at = at(line.strip()) or step.at
            code = process.wait()
        finally:
            watch.cancel()
    return code, "".join(kept)


def _say(text: str) -> None:
    minutes, seconds = divmod(int(time.monotonic() - _began), 60)
    print(f"[{minutes}:{seconds:02d}] {text}", file=sys.stderr, flush=True)
