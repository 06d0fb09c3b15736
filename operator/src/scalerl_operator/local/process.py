"""One child process behind its subreaper: start, watch, stop, kill."""

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
"""In the environment of a child and of all it starts: names the incarnation."""

MAX_LOG_BYTES: Final = 64 << 20
"""A log above this is put aside when its process is started again, in place of the one put aside before."""

_REAP_SECONDS = 10.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command:
    """What to run and how to hold it.

    argv: ``python`` as the first word means this interpreter.
    grace_seconds: from a stop to SIGKILL of the whole tree.
    orphan_grace_seconds: the same, when the runtime itself is gone.
    cpus: pin the tree to these CPUs.
    held: descriptors that the subreaper keeps open while any of the tree lives (the run's lock).
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
    """A running child. Make one with :meth:`start`, inside a running event loop."""

    def __init__(self, popen: subprocess.Popen[bytes], lifeline: socket.socket, command: Command) -> None:
        self._popen = popen
        self._lifeline = lifeline
        self._command = command
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self.pid: int | None = None
        """The child's own pid, once its subreaper has said it."""
        self._loop.add_reader(lifeline, self._on_lifeline)

    @classmethod
    def start(cls, command: Command) -> ChildProcess:
        """Start the subreaper, which starts the child.

        Raises:
            OSError: the log cannot be written, or the machine cannot start a process.
        """
        argv = [
            sys.executable if word == "python" and i == 0 else word for i, word in enumerate(command.argv)
        ]
        cpus = "-" if command.cpus is None else ",".join(map(str, command.cpus))
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            _bound(command.log)
            with command.log.open("ab", buffering=0) as log:
                stamp = datetime.now().astimezone().isoformat(timespec="seconds")
                log.write(f"--- {stamp} {command.mark}: {' '.join(argv)}\n".encode())
                popen = subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        subreaper.__file__,
                        str(theirs.fileno()),
                        str(command.grace_seconds),
                        str(command.orphan_grace_seconds),
                        cpus,
                        "--",
                        *argv,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**command.env, MARK: command.mark},
                    pass_fds=(theirs.fileno(), *command.held),
                    # A session of its own: Ctrl-C on the terminal is the runtime's to answer.
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(popen, ours, command)

    @property
    def ended(self) -> bool:
        return self._ended.done()

    async def wait(self) -> int:
        """Exit code as ``subprocess`` gives it: negative is the signal that ended the child."""
        return await asyncio.shield(self._ended)

    def stop(self) -> None:
        """Ask the child to end (SIGTERM); its subreaper kills what is left after the grace."""
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """End the whole tree now."""
        self.send(signal.SIGQUIT)

    def send(self, number: int) -> None:
        """Send a signal to the subreaper, which knows what to do with it."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def _on_lifeline(self) -> None:
        try:
            data = self._lifeline.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.pid = int(data)
            return
        self._loop.remove_reader(self._lifeline)
        self._lifeline.close()
        self._finish()

    def _finish(self) -> None:
        try:
            # The descriptor closes as the subreaper exits: this waits for microseconds.
            code = self._popen.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        if code == -signal.SIGKILL:
            # A subreaper that was itself killed could not sweep; then mark and log find what it left.
            try:
                kill_marked(MARK, self._command.mark, self._command.log)
            except TimeoutError as error:
                _LOG.error("%s", error)
        if not self._ended.done():
            self._ended.set_result(code)


def _bound(log: Path) -> None:
    """Restarts must not fill a disk: at most two logs a process, and what one life of it writes."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > MAX_LOG_BYTES:
            log.replace(log.with_name(log.name + ".1"))


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment children inherit from: ours, without what names another process of a run."""
    source = os.environ if base is None else base
    return {name: value for name, value in source.items() if not name.startswith("SCALERL_")}
