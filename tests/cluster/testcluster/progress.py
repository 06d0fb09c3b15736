"""What takes minutes says so: a line as it begins, one at least every 20 seconds, and one as it ends.

Commands have no limit of time, but one of silence: a build on a slow machine takes as long as it takes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from testcluster.errors import ClusterError, EndedError, MissingError

_KEPT_LINES = 60
_began = time.monotonic()


@dataclass(frozen=True)
class Pace:
    """every_seconds: between two lines of a step.
    silent_seconds: the limit of silence. The longest that was seen, linking and unpacking, are a few minutes."""

    every_seconds: float = 20.0
    silent_seconds: float = 1200.0


PACE = Pace()


@dataclass
class Step:
    """at: how far it is, in a few words."""

    what: str
    at: str = ""
    pace: Pace = PACE


@contextlib.contextmanager
def step(what: str, pace: Pace = PACE) -> Iterator[Step]:
    """Print that ``what`` begins, continues and has ended, each line with the time since the program began."""
    made, over, began = Step(what, pace=pace), threading.Event(), time.monotonic()

    def go_on() -> None:
        while not over.wait(pace.every_seconds):
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
    silent_seconds: float | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    at: Callable[[str], str] = lambda line: line[:80],
) -> str:
    """Run a command to its end, ``at`` of its last line being how far the step is; returns its last lines.

    Raises:
        ClusterError: it failed, or printed nothing for ``silent_seconds`` (default: its pace's), for which it is
            killed with its children.
        EndedError: another work of :func:`together` failed, for which it is killed too.
    """
    limit = step.pace.silent_seconds if silent_seconds is None else silent_seconds
    kept: deque[str] = deque(maxlen=_KEPT_LINES)
    silent = False
    last_line = time.monotonic()
    with _commands.started(argv, cwd=cwd, env=env) as process:
        over = threading.Event()

        def watch() -> None:
            nonlocal silent
            while (left := last_line + limit - time.monotonic()) > 0:
                if over.wait(left):
                    return
            silent = True
            _kill(process)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last_line = time.monotonic()
                kept.append(line)
                step.at = at(line.strip()) or step.at
            code = process.wait()
        finally:
            over.set()
            watcher.join()
    said = "".join(kept)
    if code == 0:
        return said
    if _commands.ending:
        raise EndedError(f"{step.what}: ended, because something else failed")
    if silent:
        how = f"printed nothing for {limit:.0f} s and was ended"
    elif code < 0:
        out_of_memory = ", which is how a machine that is out of memory ends programs" if code == -9 else ""
        how = f"was ended by signal {-code}{out_of_memory}"
    else:
        how = f"exited {code}"
    raise ClusterError(f"{step.what}: `{' '.join(argv)[:300]}` {how}:\n{said[-4000:]}")


def together(*works: Callable[[], None]) -> None:
    """Run all at once. The first failure is printed and ends the commands of the others; what is missing here ends nothing.

    Raises the first failure, with those of other works that failed by themselves as notes.
    """
    with ThreadPoolExecutor(len(works)) as workers:
        running = [workers.submit(work) for work in works]
        failures: list[BaseException] = []
        try:
            for done in as_completed(running):
                error = done.exception()
                if isinstance(error, MissingError):
                    _say(f"not prepared, and what needs it is skipped: {error}")
                elif error is not None and not isinstance(error, EndedError):
                    _say(f"failed: {str(error).splitlines()[0]}" if str(error) else f"failed: {error!r}")
                    failures.append(error)
                    _commands.end()
        finally:  # also for who interrupts this one, which waits for the others
            _commands.end()
    _commands.ending = False
    if failures:
        for other in failures[1:]:
            failures[0].add_note(str(other))
        raise failures[0]


class _Commands:
    """The commands that run, each with its children in a process group."""

    def __init__(self) -> None:
        self.ending = False
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def started(
        self, argv: Sequence[str], *, cwd: Path | None, env: Mapping[str, str] | None
    ) -> Iterator[subprocess.Popen[str]]:
        with self._lock:
            if self.ending:
                raise EndedError(f"{argv[0]}: not started, because something else failed")
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            )
            self._running.add(process)
        try:
            with process:
                try:
                    yield process
                except BaseException:
                    _kill(process)
                    raise
        finally:
            with self._lock:
                self._running.remove(process)

    def end(self) -> None:
        """End those that run, and start no more."""
        with self._lock:
            self.ending = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


_commands = _Commands()


def _say(text: str) -> None:
    minutes, seconds = divmod(int(time.monotonic() - _began), 60)
    print(f"[{minutes}:{seconds:02d}] {text}", file=sys.stderr, flush=True)
