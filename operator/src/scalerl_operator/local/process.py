"""One child process behind its subreaper: start, wait, stop, kill."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from scalerl_operator.local import subreaper
from scalerl_operator.local.procfs import kill_marked

MARK: Final = "SCALERL_PROCESS"
"""Environment variable that identifies the start of a child; its descendants inherit it."""
MAX_LOG_BYTES: Final = 64 << 20
"""A longer log is renamed to ``.1`` at the next start of its process, so that logs do not fill the disk."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command:
    """A command and its limits.

    argv: ``python`` as the first argument is this interpreter.
    mark: value of :data:`MARK`.
    grace_seconds: from a stop to SIGKILL of the process tree.
    orphan_grace_seconds: the same after the runtime was killed.
    cpus: CPU affinity of the process tree.
    held: descriptors that the subreaper keeps open while any process of the tree exists (the run's lock).
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    mark: str
    grace_seconds: float = 30.0
    orphan_grace_seconds: float = 5.0
    cpus: tuple[int, ...] | None = None
    held: tuple[int, ...] = ()


class ChildProcess:
    """A running child. Create with :meth:`start`, inside a running event loop."""

    def __init__(self, popen: subprocess.Popen[bytes], lifeline: socket.socket, command: Command) -> None:
        self._popen = popen
        self._lifeline = lifeline
        self._command = command
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        # The subreaper writes nothing, so its socket becomes readable when it exits.
        self._loop.add_reader(lifeline, self._on_exit)

    @classmethod
    def start(cls, command: Command) -> ChildProcess:
        """Start the subreaper, which starts the child.

        Raises:
            OSError: the log cannot be written, or the machine cannot start a process.
        """
        argv = list(command.argv)
        if argv[0] == "python":
            argv[0] = sys.executable
        cpus = "-" if command.cpus is None else ",".join(map(str, command.cpus))
        ours, theirs = socket.socketpair()
        limits = (str(theirs.fileno()), str(command.grace_seconds), str(command.orphan_grace_seconds), cpus)
        try:
            with contextlib.suppress(FileNotFoundError):
                if command.log.stat().st_size > MAX_LOG_BYTES:
                    command.log.replace(command.log.with_name(command.log.name + ".1"))
            with command.log.open("ab", buffering=0) as log:
                stamp = datetime.now().astimezone().isoformat(timespec="seconds")
                with contextlib.suppress(OSError):  # a full volume must not end the run
                    log.write(f"--- {stamp} {command.mark}: {' '.join(argv)}\n".encode())
                popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", subreaper.__file__, *limits, "--", *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**command.env, MARK: command.mark},
                    pass_fds=(theirs.fileno(), *command.held),
                    # A session of its own: only the runtime gets the terminal's Ctrl-C.
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(popen, ours, command)

    async def wait(self) -> int:
        """Exit code as ``subprocess`` gives it: negative is the signal that ended the child."""
        return await asyncio.shield(self._ended)

    def stop(self) -> None:
        """Sends SIGTERM to the child; its subreaper kills the remaining processes after the grace period."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the whole process tree."""
        self._send(signal.SIGQUIT)

    def _send(self, number: int) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._lifeline)
        self._lifeline.close()
        code = self._popen.wait()
        if code == -signal.SIGKILL:
            # A subreaper that was killed itself has not killed its tree.
            try:
                kill_marked(MARK, self._command.mark, self._command.log)
            except TimeoutError as error:
                _LOG.error("%s", error)
        self._ended.set_result(code)


def environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment that children inherit: that of this process, without the variables of a run."""
    return {name: value for name, value in base.items() if not name.startswith("SCALERL_")}
