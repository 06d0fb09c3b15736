"""The process that forks programs, watches them, and kills them at their limits. It never reads a program or its input.

It is a new interpreter with few modules (:data:`COMMAND`): a fork copies page tables and, on write, pages, so the time of a fork grows
with the memory of the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from scalerl_tasks.sandbox import child, confinement
from scalerl_tasks.sandbox.confinement import Confinement, Limits

REQUEST = struct.Struct("<cQdI")
"""What, token, wall-clock seconds, CPU seconds; with the socket of a program that is started."""
PROGRAM = b"P"
TESTER = b"T"
KILL = b"K"
REPLY = struct.Struct("<cQi")
"""What, token, exit status as of :func:`os.waitstatus_to_exitcode`; with text for :data:`BROKEN`."""
READY = b"R"
BROKEN = b"B"
ENDED = b"E"
TIMED_OUT = b"O"
TOO_MANY_THREADS = b"H"
TOO_MANY_FILES = b"F"
NOT_STARTED = b"N"
MAX_PACKET_BYTES = 4096

# The package's own __init__ imports what no program needs. What modules do after a fork is for processes with threads, and for random
# numbers that differ; it would take a third of the time of a small program, whose random numbers are better repeatable.
COMMAND = """
import os, sys, types
os.register_at_fork = lambda **functions: None
package = types.ModuleType("scalerl_tasks")
package.__path__ = [sys.argv[1]]
sys.modules["scalerl_tasks"] = package
from scalerl_tasks.sandbox import launcher
launcher.main(sys.argv[2:])
"""
"""Source of ``python -c``; its arguments are the folder of this package, and those of :func:`main`."""

_WATCH_MILLISECONDS = 20


def main(arguments: list[str]) -> NoReturn:
    """Serve the caller until it closes; then kill what runs, and remove the programs' folder.

    ``arguments``: descriptor of the control socket; ``-`` without namespaces; the folder for temporary files; the limits as text; and
    the folders of the standard library and of installed modules.
    """
    descriptor, namespaces, temporary, text, *runtime = arguments
    # At the lowest free number: programs close those up to a limit, which the number that a caller with many files gives exceeds.
    control = socket.socket(fileno=os.dup(int(descriptor)))
    os.close(int(descriptor))
    limits = Limits(*map(int, text.split(",")))
    sys.path += [path for path in runtime if path not in sys.path]
    layers = None
    try:
        layers = Confinement(temporary, runtime, limits, namespaces=not namespaces)
        child.warm_up()
        layers.limit_launcher()
        confinement.settle()
        control.send(REPLY.pack(READY, 0, int(layers.namespaces)))
        _Launcher(control, layers, limits).run()
    except ConnectionError:
        pass
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}".encode()[:1000]
        with contextlib.suppress(OSError):
            control.send(REPLY.pack(BROKEN, 0, 0) + problem)
    finally:
        if layers is not None:
            layers.remove_folder()
        os._exit(0)


@dataclass(slots=True)
class _Running:
    token: int
    pid: int
    deadline: float
    is_program: bool
    ending: bytes = ENDED


class _Launcher:
    def __init__(self, control: socket.socket, layers: Confinement, limits: Limits) -> None:
        self._control = control
        self._layers = layers
        self._limits = limits
        self._running: dict[int, _Running] = {}
        """By descriptor of the process, which is readable when it has ended."""
        self._poll = select.poll()

    def run(self) -> None:
        self._poll.register(self._control, select.POLLIN)
        control = self._control.fileno()
        watched = time.monotonic()
        try:
            while True:
                ready = [at for at, _ in self._poll.poll(_WATCH_MILLISECONDS if self._running else None)]
                for at in ready:
                    if at != control:
                        self._reap(at)
                if control in ready and not self._serve_one():
                    return
                if (now := time.monotonic()) - watched > _WATCH_MILLISECONDS / 1000:
                    watched = now
                    self._watch(now)
        finally:
            for one in self._running.values():
                os.kill(one.pid, signal.SIGKILL)
            for at in list(self._running):
                self._reap(at)

    def _serve_one(self) -> bool:
        packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        if not packet:
            return False
        what, token, seconds, cpu_seconds = REQUEST.unpack(packet)
        if what == KILL:
            for one in self._running.values():
                if one.token == token:
                    os.kill(one.pid, signal.SIGKILL)
            return True
        launcher = os.getpid()
        with socket.socket(fileno=descriptors[0]) as channel:
            try:
                pid = os.fork()
            except OSError:
                self._control.send(REPLY.pack(NOT_STARTED, token, 0))
                return True
            if pid == 0:
                self._run_child(channel, launcher, cpu_seconds, is_program=what == PROGRAM)
        at = os.pidfd_open(pid)
        self._poll.register(at, select.POLLIN)
        self._running[at] = _Running(token, pid, time.monotonic() + seconds, what == PROGRAM)
        return True

    def _run_child(
        self, channel: socket.socket, launcher: int, cpu_seconds: int, *, is_program: bool
    ) -> NoReturn:
        try:
            channel = self._layers.enter(channel, launcher, cpu_seconds, own_folder=is_program)
            child.main(channel, self._layers.enter_filter, self._limits.output_bytes)
        finally:
            os._exit(child.FAILED)

    def _watch(self, now: float) -> None:
        for one in self._running.values():
            if one.ending != ENDED:
                continue
            if now > one.deadline:
                one.ending = TIMED_OUT
            elif _threads(one.pid) > self._limits.threads:
                one.ending = TOO_MANY_THREADS
            elif one.is_program and not self._layers.namespaces and _over_limit(self._layers.folder, one.pid):
                one.ending = TOO_MANY_FILES
            if one.ending != ENDED:
                os.kill(one.pid, signal.SIGKILL)

    def _reap(self, at: int) -> None:
        one = self._running.pop(at)
        self._poll.unregister(at)
        os.close(at)
        _, status = os.waitpid(one.pid, 0)
        if one.is_program:
            self._layers.empty_folder()
        with contextlib.suppress(OSError):
            self._control.send(REPLY.pack(one.ending, one.token, os.waitstatus_to_exitcode(status)))


def _threads(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[17])
    except (OSError, IndexError):  # it has ended
        return 0


def _over_limit(folder: str, pid: int) -> bool:
    """Whether a program's files are too many: those in its folder, and deleted ones that it holds open. None may be mapped when deleted:
    such a file has no descriptor.
    """
    paths = [os.path.join(folder, name) for name in os.listdir(folder)]
    files: dict[int, int] = {}
    with contextlib.suppress(OSError):  # the process has ended
        paths += [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        with open(f"/proc/{pid}/maps", errors="surrogateescape") as maps:
            if any(f" {folder}/" in line and line.endswith(" (deleted)\n") for line in maps):
                return True
    for path in paths:
        with contextlib.suppress(OSError):  # deleted, or closed, since
            if path.startswith(folder) or os.readlink(path).startswith(f"{folder}/"):
                status = os.stat(path)
                files[status.st_ino] = status.st_blocks
    return len(files) > confinement.MAX_FILES or 512 * sum(files.values()) > confinement.MAX_FILES_BYTES
