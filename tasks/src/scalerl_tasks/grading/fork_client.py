"""The pool's side of the sockets to the fork server and to the graders."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import socket
import struct
import subprocess
import sys

from scalerl_processes.child import SOCKET, start_with_socket, wait_or_kill
from scalerl_processes.waiting import cancel
from scalerl_tasks.errors import GradingError, VerifierError
from scalerl_tasks.grading import protocol
from scalerl_tasks.grading.protocol import (
    CONTROL,
    LENGTH,
    MAX_PACKET_BYTES,
    POLL_SECONDS,
    RECORD,
    CheckRequest,
    Request,
    Setup,
)

_ANSWERED = {protocol.ANSWERED: True, protocol.UNANSWERED: False}
_READ_BYTES = 64 << 10  # what a pipe holds
_REPLY_SECONDS = 10.0
_EXIT_SECONDS = 30.0  # it ends what trusted code has started, which would outlive it
# Environment variables that a grading process needs to start; nothing secret.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "VIRTUAL_ENV")
# One grader uses one core; a library's thread pool would take cores of others, and threads make forks unsafe.
_SINGLE_THREADED = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)


class Grader(asyncio.Protocol):
    """A connection to one grader: sends requests, receives records in order.

    Args:
        records: the end of its pipe, not blocking; closed by :meth:`close`.
    """

    def __init__(self, records: int) -> None:
        self.pid = 0
        """Of the grader, once it has been forked."""
        self._records = records
        self.results: list[tuple[float, tuple[float, ...], bool | None, str | None, bytes]] = []
        """Score, parts, whether it has an answer, error and messages of an environment, of each completion."""
        self.ended = False
        """No more records will arrive: the grader retired or died."""
        self.retired = False
        self._buffer = bytearray()
        self._changed = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def send(self, request: Request | CheckRequest) -> None:
        assert self._transport is not None
        self.results = []
        body = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        self._transport.write(LENGTH.pack(len(body)) + body)  # at once: two would wake the grader twice

    async def changed(self, timeout_seconds: float) -> bool:
        """Wait for a record since the last call; False on timeout."""
        loop = asyncio.get_running_loop()
        left, deadline = timeout_seconds, loop.time() + timeout_seconds
        while not self._changed.is_set():
            if left <= 0:
                return False
            try:
                async with asyncio.timeout(min(left, POLL_SECONDS)):
                    await self._changed.wait()
            except TimeoutError:
                left = deadline - loop.time()
                self._read_records()  # the event loop itself may have been late: what has arrived was in time
        self._changed.clear()
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        if self._records >= 0:
            os.close(self._records)
            self._records = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read_records()

    def _read_records(self) -> None:
        buffer, at = self._buffer, 0
        with contextlib.suppress(BlockingIOError):
            while self._records >= 0 and (data := os.read(self._records, _READ_BYTES)):
                buffer += data
        while at + RECORD.size <= len(buffer):
            kind, score, count, length = RECORD.unpack_from(buffer, at)
            start = at + RECORD.size + 8 * count
            end = start + length
            if end > len(buffer):
                break
            if kind == protocol.RETIRED:
                self.retired = self.ended = True
            else:
                parts = struct.unpack_from(f"<{count}d", buffer, at + RECORD.size)
                text = bytes(buffer[start:end])
                error = text.decode("utf-8", "replace") if kind == protocol.FAILED else None
                messages = text if kind == protocol.CONTINUED else b""
                self.results.append((score, parts, _ANSWERED.get(kind), error, messages))
            at = end
        if at:
            del buffer[:at]
            self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._read_records()
        self.ended = True
        self._changed.set()


class ForkServer:
    """Client of the fork server's process. All calls from one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._tokens = itertools.count(1)
        self._replies: dict[int, asyncio.Future[int]] = {}
        self._reader: asyncio.Task[None] | None = None
        self.dead = False
        self.part_names: tuple[str, ...] = ()
        """Declared by the verifier."""
        self.whole = False
        """Whether the verifier scores the completions of a prompt together."""

    @classmethod
    async def start(cls, setup: Setup, timeout_seconds: float) -> ForkServer:
        """Start the process and wait until its verifier is open.

        Raises:
            VerifierError: the verifier cannot be opened there.
            GradingError: the process did not start, or not in time.
        """
        # -P: do not import from the working directory.
        command = [sys.executable, "-P", "-m", "scalerl_tasks.grading.fork_server", SOCKET, str(os.getpid())]
        try:
            process, control = start_with_socket(
                command, socket.SOCK_SEQPACKET, stdout=subprocess.DEVNULL, env=_environment()
            )
        except OSError as error:
            raise GradingError(f"the grading process cannot be started: {error}") from error
        control.setblocking(False)
        server = cls(process, control)
        try:
            await server._handshake(setup, timeout_seconds)
        except BaseException:
            await server.close()
            raise
        server._reader = asyncio.create_task(server._read_replies(), name="grading-fork-server-replies")
        return server

    async def fork(self) -> Grader:
        """A new grader, ready for requests.

        Raises:
            GradingError: it could not be forked.
        """
        loop = asyncio.get_running_loop()
        token = next(self._tokens)
        ours, theirs = socket.socketpair()
        records, written = os.pipe()
        os.set_blocking(records, False)
        grader = Grader(records)
        reply: asyncio.Future[int] = loop.create_future()
        self._replies[token] = reply
        try:
            with theirs:
                packet, descriptors = CONTROL.pack(protocol.FORK, token), [theirs.fileno(), written]
                socket.send_fds(self._control, [packet], descriptors)
            async with asyncio.timeout(_REPLY_SECONDS):
                grader.pid = await reply
            ours.setblocking(False)
            await loop.create_unix_connection(lambda: grader, sock=ours)
        except BaseException as error:
            ours.close()
            grader.close()  # it reads no more from the pipe's number, which may soon be another file's
            if isinstance(error, TimeoutError | OSError):
                self.dead = True  # or unresponsive: replace it
                raise GradingError(
                    f"the grading fork server does not answer: {error or 'timeout'}"
                ) from error
            raise
        finally:
            os.close(written)
            del self._replies[token]
        return grader

    def kill(self, grader: Grader) -> None:
        """Kill a grader, alive or not."""
        grader.close()
        try:
            self._control.send(CONTROL.pack(protocol.KILL, grader.pid))
        except OSError:
            # Either the fork server is dead, and its graders with it; or it no longer reads, and its replacement's start
            # kills them.
            self.dead = True

    async def close(self) -> None:
        """End the process and all its graders; returns when they have exited."""
        if self._reader is not None:
            await cancel(self._reader)
        self._control.close()
        # Its process group: the fork server and every grader.
        await asyncio.to_thread(wait_or_kill, self._process, _EXIT_SECONDS)

    async def _handshake(self, setup: Setup, timeout_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_seconds):
                await loop.sock_sendall(self._control, pickle.dumps(setup))
                packet = await loop.sock_recv(self._control, MAX_PACKET_BYTES)
        except TimeoutError:
            raise GradingError(
                f"the grading process did not open its verifier within {timeout_seconds:g} s; is the machine overloaded?"
            ) from None
        except OSError as error:
            raise GradingError(f"the grading process closed its socket while starting: {error}") from error
        if not packet:
            raise GradingError("the grading process died while starting; its stderr says why")
        kind, number = CONTROL.unpack_from(packet)
        text = packet[CONTROL.size :].decode("utf-8", "replace")
        if kind != protocol.READY:
            raise VerifierError(text)
        self.part_names, self.whole = tuple(text.split(",")) if text else (), bool(number)

    async def _read_replies(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while packet := await loop.sock_recv(self._control, MAX_PACKET_BYTES):
                kind, token = CONTROL.unpack_from(packet)
                reply = self._replies.get(token)
                if reply is None or reply.done():
                    continue
                rest = packet[CONTROL.size :]
                if kind == protocol.FORKED:
                    reply.set_result(LENGTH.unpack(rest)[0])
                else:
                    reply.set_exception(GradingError(f"a grader could not be forked: {rest.decode()}"))
        except OSError:
            pass  # a reset is handled as the end of the stream
        self.dead = True
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(GradingError("the grading fork server died"))


def _environment() -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith("PYTHON")
    }
    return kept | _SINGLE_THREADED
