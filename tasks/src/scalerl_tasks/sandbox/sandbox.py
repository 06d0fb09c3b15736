"""The caller's side: runs scripts and calls functions in the sandbox."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scalerl_processes.child import SOCKET, start_with_socket, wait_or_kill
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.sandbox import channel as messages
from scalerl_tasks.sandbox import launcher
from scalerl_tasks.sandbox.child import NOT_COMPILED
from scalerl_tasks.sandbox.confinement import Limits, missing_from_kernel
from scalerl_tasks.sandbox.values import pack

_START_SECONDS = 60.0
_REPLY_SECONDS = 10.0
_WALL_PER_CPU = 3
"""Wall-clock seconds of a test, in its CPU seconds: other processes use the cores too."""

TOOK_TOO_LONG = "took too long"
"""Why a program failed that reached its wall-clock limit."""
_ENDINGS = {
    launcher.TIMED_OUT: TOOK_TOO_LONG,
    launcher.TOO_MANY_THREADS: "had too many threads",
    launcher.TOO_MANY_FILES: "wrote too many files",
}


def check_kernel(
    what: str = "verifier.code", instead: str = ", or grade by a service (verifier.http)"
) -> None:
    """Check that programs can be run here. ``what`` runs them, and ``instead`` is what else to do.

    Raises:
        VerifierError: the kernel offers too little; the message names what is missing.
    """
    if missing := missing_from_kernel():
        raise VerifierError(
            f"{what} cannot run programs here: there is no {', and no '.join(missing)}; run on such a node{instead}"
        )


class ProgramError(Exception):
    """A program failed; the text says how."""


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """What a script did."""

    output: str
    problem: str = ""
    """Why it failed; empty if it ended by itself with status 0."""
    compiled: bool = True


class Process:
    """A process in the sandbox, with its socket."""

    def __init__(self, sandbox: Sandbox, token: int, channel: socket.socket, deadline: float) -> None:
        self._sandbox, self._token, self._channel, self._deadline = sandbox, token, channel, deadline
        self._ending: str | None = None

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            ProgramError: the process has ended, or does not read.
        """
        try:
            self._channel.settimeout(self._seconds())
            messages.send(self._channel, message)
        except OSError:
            raise ProgramError(self.end() or "ended") from None

    def receive(self) -> bytes:
        """The next message.

        Raises:
            ProgramError: there is none, in time and of the allowed size.
        """
        try:
            self._channel.settimeout(self._seconds())
            return messages.receive(self._channel, self._sandbox.limits.output_bytes)
        except TimeoutError:
            raise ProgramError(self.end("took too long")) from None
        except (messages.ChannelError, OSError) as error:
            raise ProgramError(self.end(str(error) if "limit" in str(error) else "") or "ended") from None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer, an object, within ``seconds``.

        Raises:
            ProgramError: as of :meth:`receive`; or it is no JSON object.
        """
        before = self._deadline
        self._deadline = min(before, time.monotonic() + seconds)
        self.send(pack(request))
        answer = self.answer()
        self._deadline = before
        return answer

    def answer(self) -> dict[str, Any]:
        """The next message, a JSON object.

        Raises:
            ProgramError: as of :meth:`receive`; or it is none.
        """
        try:
            answer = json.loads(self.receive())
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ProgramError(self.end("sent no message"))
        return answer

    def read(self) -> tuple[str, str]:
        """All that is sent until the end, as text, and why the process failed; empty if it did not."""
        found = bytearray()
        problem = ""
        limit = self._sandbox.limits.output_bytes
        try:
            while True:
                self._channel.settimeout(self._seconds())
                part = self._channel.recv(1 << 16)
                if not part:
                    break
                found += part
                if len(found) > limit:
                    problem = f"wrote more than {limit:,} bytes"
                    break
        except TimeoutError:
            problem = TOOK_TOO_LONG
        except OSError:
            pass
        return found[:limit].decode("utf-8", "replace"), self.end(problem)

    def end(self, problem: str = "") -> str:
        """Wait until the process has ended, killed if there is a problem; returns why it failed, empty if it ended with status 0."""
        self._channel.close()
        if self._ending is None:
            self._ending = "could not be started"
            self._ending = self._sandbox._end(self._token, problem, self._deadline)
        return self._ending

    def _seconds(self) -> float:
        return max(0.001, self._deadline - time.monotonic())


class Sandbox:
    """A launcher, and the programs that it runs for this process, one at a time with its tester.

    If the launcher dies, this process ends at once with status 3: it is a grader, which its pool replaces.
    """

    def __init__(self, control: socket.socket, launcher: subprocess.Popen[bytes], limits: Limits) -> None:
        self.limits = limits
        self._launcher = launcher
        self.namespaces = False
        """Whether the launcher has namespaces of its own."""
        self._control = control
        self._tokens = itertools.count(1)
        self._ended: dict[int, tuple[bytes, int]] = {}

    @classmethod
    def start(cls, limits: Limits, *, namespaces: bool = True, user: str = "verifier.code") -> Sandbox:
        """Start a launcher.

        Args:
            limits: of each program.
            namespaces: whether to use namespaces, if the kernel allows them.
            user: runs the programs, for messages.

        Raises:
            VerifierError: programs cannot be run here; the message names what is missing.
        """
        check_kernel(user)
        paths = sysconfig.get_paths()
        runtime = dict.fromkeys(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
        text = ",".join(str(getattr(limits, field.name)) for field in fields(limits))
        # No site, nothing from the working directory; hashes that do not vary, so that verdicts can be repeated. A session of its own: what
        # ends the caller's process group leaves time to clean up.
        command = [sys.executable, "-P", "-s", "-S", "-c", launcher.COMMAND, str(Path(__file__).parents[1])]
        command += [SOCKET, "" if namespaces else "-", tempfile.gettempdir(), text, *runtime]
        process, ours = start_with_socket(
            command, socket.SOCK_SEQPACKET, stdout=subprocess.DEVNULL, env={"PYTHONHASHSEED": "0"}
        )
        sandbox = cls(ours, process, limits)
        ours.settimeout(_START_SECONDS)
        packet = ours.recv(launcher.MAX_PACKET_BYTES)
        what, _, layers = launcher.REPLY.unpack_from(packet) if packet else (launcher.BROKEN, 0, 0)
        if what != launcher.READY:
            sandbox.close()
            text = packet[launcher.REPLY.size :].decode("utf-8", "replace") or "its process ended"
            raise VerifierError(f"{user}: the sandbox cannot be set up: {text}")
        sandbox.namespaces = bool(layers)
        return sandbox

    def close(self) -> None:
        self._control.close()
        wait_or_kill(self._launcher, _REPLY_SECONDS)

    @property
    def wall_seconds(self) -> float:
        """Wall-clock limit of a test."""
        return float(_WALL_PER_CPU * self.limits.cpu_seconds)

    def run(self, source: str, stdin: str, seconds: float) -> ScriptResult:
        """Run a script with an input, for ``seconds`` at most."""
        with self.process({"source": source, "stdin": stdin}, seconds) as process:
            output, problem = process.read()
        if problem == f"exited with status {NOT_COMPILED}":
            return ScriptResult("", "does not compile", compiled=False)
        return ScriptResult(output, problem)

    @contextlib.contextmanager
    def process(
        self, request: dict[str, Any], seconds: float, tests: int = 1, *, tester: bool = False
    ) -> Iterator[Process]:
        """A process that serves a request, killed at the end of the block.

        Raises:
            ProgramError: it could not be started.
        """
        token = next(self._tokens)
        deadline = time.monotonic() + seconds
        ours, theirs = socket.socketpair()
        what = launcher.TESTER if tester else launcher.PROGRAM
        with theirs:
            packet = launcher.REQUEST.pack(what, token, seconds, self.limits.cpu_seconds * tests)
            try:
                socket.send_fds(self._control, [packet], [theirs.fileno()])
            except OSError:
                os._exit(3)
        process = Process(self, token, ours, deadline)
        try:
            process.send(pack(request))
            yield process
        finally:
            process.end("is not needed any more")

    def _end(self, token: int, problem: str, deadline: float) -> str:
        try:
            if problem:
                self._control.send(launcher.REQUEST.pack(launcher.KILL, token, 0.0, 0))
            while token not in self._ended:
                self._control.settimeout(max(0.0, deadline - time.monotonic()) + _REPLY_SECONDS)
                packet = self._control.recv(launcher.MAX_PACKET_BYTES)
                what, ended, status = launcher.REPLY.unpack_from(packet)
                self._ended[ended] = (what, status)
        except (OSError, struct.error):
            os._exit(3)
        what, status = self._ended.pop(token)
        if what == launcher.NOT_STARTED:
            raise OSError(
                "no process could be forked for a program: the limit of processes, or of memory, is reached"
            )
        if problem:
            return problem
        if what in _ENDINGS:
            return _ENDINGS[what]
        if status < 0:
            return f"was killed by signal {-status}"
        return f"exited with status {status}" if status else ""
