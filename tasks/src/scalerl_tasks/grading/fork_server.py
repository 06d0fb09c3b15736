"""The process that forks graders: ``python -m scalerl_tasks.grading.fork_server CONTROL_DESCRIPTOR``.

It has a single thread, which makes forking safe. It imports the verifier before the first fork, so graders start warm.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import sys
import traceback

from scalerl_processes.kernel import reaped
from scalerl_tasks.environments.protocol import Continued
from scalerl_tasks.errors import TaskError, VerifierError
from scalerl_tasks.grading import audit_guard, grader, protocol
from scalerl_tasks.grading.protocol import CONTROL, LENGTH, MAX_PACKET_BYTES, Setup
from scalerl_tasks.programs.verifier import CodeVerifier
from scalerl_tasks.verdict import as_verdict, declared_parts
from scalerl_tasks.verifiers import Verifier, open_verifier

_PARENT_CHECK_SECONDS = 1.0


def main(descriptor: int, parent: int) -> int:
    """Serve the pool at the other end of ``descriptor`` until it closes; the exit status is 0 then."""
    with socket.socket(fileno=descriptor) as control, contextlib.suppress(ConnectionError):
        packet = control.recv(MAX_PACKET_BYTES)
        if not packet:
            return 0
        setup: Setup = pickle.loads(packet)  # noqa: S301 - from the pool, our parent
        try:
            verifier = _open(setup)
            part_names = declared_parts(verifier)
        except Exception as error:
            text = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"
            control.send(CONTROL.pack(protocol.BROKEN, 0) + text.encode("utf-8", "backslashreplace")[:4096])
            return 1
        gc.collect()
        gc.freeze()  # existing objects stay shared with the graders
        whole = int(getattr(verifier, "whole", False))
        control.send(CONTROL.pack(protocol.READY, whole) + ",".join(part_names).encode())
        _ForkServer(control, verifier, setup, parent).run()
    return 0


def _open(setup: Setup) -> Verifier:
    """Open and test the verifier, which also runs its late imports before the first fork."""
    verifier = open_verifier(setup.verifier)
    if getattr(verifier, "trusted", False):
        return verifier
    audit_guard.install()
    with verifier if isinstance(verifier, CodeVerifier) else contextlib.nullcontext():
        _test(verifier, setup)
    return verifier


def _test(verifier: Verifier, setup: Setup) -> None:
    """Grade the verifier's samples.

    Raises:
        VerifierError: it fails.
    """
    task = setup.verifier.task
    name = f"the verifier {setup.verifier.name!r}" + (f" of task {task.name!r}" if task else "")
    for prompt, completion in verifier.samples():
        try:
            with audit_guard.guarded(prompt):
                found = verifier.score(prompt, completion)
                assert found is not None
                assert not isinstance(found, Continued)
                as_verdict(found, declared_parts(verifier))
        except audit_guard.RefusedError as error:
            raise VerifierError(
                f"{name} evaluates answers as Python code, which is not allowed with a model's text ({error}); "
                f"use another verifier"
            ) from error
        except Exception as error:
            raise VerifierError(
                f"{name} fails on its own sample answer: {type(error).__name__}: {error}; use another verifier"
            ) from error


class _ForkServer:
    def __init__(self, control: socket.socket, verifier: Verifier, setup: Setup, parent: int) -> None:
        self._control = control
        self._verifier = verifier
        self._setup = setup
        self._parent = parent
        self._graders: set[int] = set()
        self._trusted = bool(getattr(verifier, "trusted", False))
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)

    def run(self) -> None:
        """Fork and kill graders on request, until the pool closes; then kill the rest."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_reader, select.POLLIN)
        try:
            while os.getppid() == self._parent:
                ready = dict(poll.poll(_PARENT_CHECK_SECONDS * 1000))
                if self._wake_reader.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_reader.recv(4096)
                self._reap()
                if self._control.fileno() in ready and not self._serve_one():
                    break
        finally:
            signal.set_wakeup_fd(-1)
            for pid in self._graders:
                self._kill(pid)

    def _serve_one(self) -> bool:
        packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 2)
        if not packet:
            return False
        kind, number = CONTROL.unpack_from(packet)
        if kind == protocol.KILL:
            if number in self._graders:  # not reaped yet, so the pid is still that process
                self._kill(number)
        elif kind == protocol.FORK:
            connection, records = descriptors
            self._control.send(self._fork(number, socket.socket(fileno=connection), records))
            os.close(records)
        return True

    def _fork(self, token: int, connection: socket.socket, records: int) -> bytes:
        with connection:
            server = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                return CONTROL.pack(protocol.FORK_FAILED, token) + (error.strerror or str(error)).encode()
            if pid == 0:
                self._run_grader(connection, records, server)
            if self._trusted:
                with contextlib.suppress(OSError):  # it has ended
                    os.setpgid(pid, pid)
            self._graders.add(pid)
            return CONTROL.pack(protocol.FORKED, token) + LENGTH.pack(pid)

    def _kill(self, pid: int) -> None:
        """Kill a grader; trusted code may have started processes, which are of its group."""
        if self._trusted:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)

    def _run_grader(self, connection: socket.socket, records: int, server: int) -> None:
        """Runs in the child; never returns."""
        status = 1
        try:
            if self._trusted:
                os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for held in (self._control, self._wake_reader, self._wake_writer):
                held.close()
            grader.run(connection, records, self._verifier, self._setup, server)
            status = 0
        except (ConnectionError, SystemExit):
            status = 0  # the pool no longer uses this grader, or the fork server is dead
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        self._graders.difference_update(pid for pid, _ in reaped())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
