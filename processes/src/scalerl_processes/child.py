"""Child processes with a socket to their parent, whose end says that the other has ended; one of them behind a subreaper."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from scalerl_processes import subreaper
from scalerl_processes.process_table import kill_marked

MARK: Final = "SCALERL_PROCESS"
"""Environment variable that identifies the start of a child; its descendants inherit it."""
SOCKET: Final = "{socket}"
"""Argument of a command in whose place :func:`start_with_socket` passes the descriptor of the child's end."""
MAX_LOG_BYTES: Final = 64 << 20
"""A longer log is renamed to ``.1`` at the next start of its process, so that logs do not fill the disk."""

_LOG = logging.getLogger(__name__)


def start_with_socket(
    argv: Sequence[str],
    kind: socket.SocketKind = socket.SOCK_STREAM,
    pass_fds: Sequence[int] = (),
    **options: Any,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a process without input and with a socket to this process; returns it and this end of the socket.

    It has a session of its own: only this process gets the terminal's Ctrl-C.

    Args:
        pass_fds: further descriptors that the process inherits.
        options: of ``subprocess.Popen``.

    Raises:
        OSError: the machine cannot start a process.
    """
    ours, theirs = socket.socketpair(type=kind)
    with theirs:
        try:
            process = subprocess.Popen(
                [str(theirs.fileno()) if word == SOCKET else word for word in argv],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *pass_fds),
                start_new_session=True,
                **options,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits until a process that leads its session has ended; kills its process group after so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        # Not reaped yet, so the process group is still its own.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Command:
    """A command and its limits.

    Attributes:
        argv: ``python`` as the first argument is this interpreter.
        mark: value of :data:`MARK`.
        grace_seconds: from a stop to SIGKILL of the process tree.
        orphan_grace_seconds: the same after the runtime was killed.
        cpus: CPU affinity of the process tree.
        pass_fds: descriptors that the subreaper keeps open while any process of the tree exists (the run's lock).
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    mark: str
    grace_seconds: float = 30.0
    orphan_grace_seconds: float = 5.0
    cpus: tuple[int, ...] | None = None
    pass_fds: tuple[int, ...] = ()


class ChildProcess:
    """A running child behind its subreaper. Create with :meth:`start`, inside a running event loop."""

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
        limits = (str(command.grace_seconds), str(command.orphan_grace_seconds), cpus)
        with _open_log(command.log, f"{command.mark}: {' '.join(argv)}") as log, _blocked(subreaper.HANDLED):
            popen, lifeline = start_with_socket(
                [sys.executable, "-I", "-S", subreaper.__file__, SOCKET, *limits, "--", *argv],
                pass_fds=command.pass_fds,
                stdout=log,
                stderr=log,
                env={**command.env, MARK: command.mark},
            )
        return cls(popen, lifeline, command)

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


@contextlib.contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Blocks signals for a process that is started inside, until it handles them: one that comes earlier is kept for it, also
    where this process ignores it (SIGQUIT below ``nohup ... &``)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _open_log(path: Path, title: str) -> IO[bytes]:
    """Opens a log for the output of a start, with a line that says so; one that is too long is set aside before."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_name(path.name + ".1"))
    log = path.open("ab", buffering=0)
    with contextlib.suppress(OSError):  # a full volume must not end the run
        log.write(f"--- {datetime.now().astimezone().isoformat(timespec='seconds')} {title}\n".encode())
    return log


def environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment that children inherit: that of this process, without the variables of a run."""
    return {name: value for name, value in base.items() if not name.startswith("SCALERL_")}
