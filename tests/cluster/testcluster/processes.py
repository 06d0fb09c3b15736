"""Child processes of one parent that reaps all that becomes its child, in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from pathlib import Path

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_KILL_SECONDS = 60.0
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """For a child between fork and exec: end when the parent does, however it ends."""
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


class Program:
    """One child."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen
        self.over = asyncio.Event()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.popen.returncode

    async def ended(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds)
        return self.over.is_set()

    async def stop(self, seconds: float) -> None:
        """Ask it to end, then make it."""
        await self._signal(signal.SIGTERM, seconds)
        await self.kill()

    async def kill(self) -> None:
        """End it without asking, as a crash would."""
        await self._signal(signal.SIGKILL, _KILL_SECONDS)

    async def _signal(self, number: signal.Signals, seconds: float) -> None:
        if not self.over.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            await self.ended(seconds)


class Children:
    """All children of this process, which the event loop tells about their ends."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Program] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def start(self, argv: list[str], log: Path, folder: Path) -> Program:
        """Start a program with its output at the end of ``log``."""
        with log.open("ab") as output:
            popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                preexec_fn=die_with_parent,
                start_new_session=True,
            )
        program = self._by_pid[popen.pid] = Program(popen)
        return program

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            program = self._by_pid.pop(pid, None)
            if program is not None:  # else an orphan that came to process 1
                program.popen.returncode = os.waitstatus_to_exitcode(status)
                program.over.set()
