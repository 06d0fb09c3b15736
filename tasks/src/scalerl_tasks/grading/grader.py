"""The grader: a forked process that scores completions until it is closed, retires, or is killed."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from scalerl_tasks.errors import TaskError
from scalerl_tasks.grading import audit_guard, protocol
from scalerl_tasks.grading.protocol import FAILED, LENGTH, RETIRED, SCORED, CheckRequest, Limits, Request
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import as_verdict, declared_parts
from scalerl_tasks.verifiers import Verifier

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PAGE_BYTES = resource.getpagesize()
_libc = ctypes.CDLL(None, use_errno=True)


def run(connection: socket.socket, verifier: Verifier, limits: Limits, parent: int) -> None:
    """Serve one pool over ``connection``; returns when the grader should exit."""
    part_names = declared_parts(verifier)
    # Kept open: it is read after each item, and opening it takes longer than most items.
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    _confine(limits, parent, _address_space_bytes(statm))
    _redirect_output()
    retire_above = _address_space_bytes(statm) + limits.memory_bytes // 2
    while True:
        try:
            request = _receive(connection)
        except MemoryError:
            # Only a completion that is alone in its request can be this large.
            connection.sendall(_out_of_memory(limits) + protocol.record(RETIRED))
            return
        if request is None:
            return
        for answer, reusable in _answers(request, verifier, part_names, limits):
            connection.sendall(answer)
            # Caches grow; they must not make the next item exceed the memory limit.
            if not reusable or _address_space_bytes(statm) > retire_above:
                connection.sendall(protocol.record(RETIRED))
                return


def _answers(
    request: Request | CheckRequest, verifier: Verifier, part_names: Sequence[str], limits: Limits
) -> Iterator[tuple[bytes, bool]]:
    """The records of a request, each with whether this process may make another."""
    if isinstance(request, CheckRequest):
        _limit_cpu_seconds(len(request.prompts) * limits.timeout_seconds)
        for prompt in request.prompts:
            yield _check(verifier, prompt, limits)
        return
    _limit_cpu_seconds(len(request.completions) * limits.timeout_seconds)
    for completion in request.completions:
        yield _grade(verifier, part_names, request.prompt, completion, limits)


def _grade(
    verifier: Verifier, part_names: Sequence[str], prompt: Prompt, completion: str, limits: Limits
) -> tuple[bytes, bool]:
    """The record of one completion, and whether this process may grade another."""
    try:
        with audit_guard.guarded(prompt):
            found = verifier.score(prompt, completion)
    except MemoryError:
        return _out_of_memory(limits), False
    except audit_guard.RefusedError as error:
        return _failed(str(error)), True
    except BaseException as error:  # SystemExit included: no text can make a grader exit
        return _failed(f"the verifier failed: {type(error).__name__}: {_text(error)}"), True
    try:
        verdict = as_verdict(found, part_names)
    except (ArithmeticError, TypeError, ValueError) as error:
        return _failed(str(error)), True
    return protocol.record(SCORED, verdict.score, list(verdict.parts.values())), True


def _check(verifier: Verifier, prompt: Prompt, limits: Limits) -> tuple[bytes, bool]:
    """The record of one checked prompt, and whether this process may check another."""
    try:
        with audit_guard.guarded(prompt):
            verifier.check(prompt)
    except MemoryError:
        return _out_of_memory(limits), False
    except (TaskError, audit_guard.RefusedError) as error:
        return _failed(str(error)), True
    except BaseException as error:  # SystemExit included: no answer can make a grader exit
        return _failed(f"the verifier failed: {type(error).__name__}: {_text(error)}"), True
    return protocol.record(SCORED), True


def _failed(error: str) -> bytes:
    return protocol.record(FAILED, error=error)


def _out_of_memory(limits: Limits) -> bytes:
    return _failed(f"grading needed more than {limits.memory_bytes:,} bytes of memory")


def _confine(limits: Limits, parent: int, address_space: int) -> None:
    """Set the limits: death with the parent, memory, no file writes, no core dumps, no child processes."""
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_NO_NEW_PRIVS, 1)):
        if _libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
    if os.getppid() != parent:
        raise SystemExit("the fork server died while its grader was starting")
    for kind, limit in (
        (resource.RLIMIT_AS, address_space + limits.memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _redirect_output() -> None:
    """Redirect output to /dev/null: a library's warnings must not copy hostile text to the log."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _limit_cpu_seconds(seconds: float) -> None:
    """A second limit: the pool's timeout acts first, unless the pool's process is stopped."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime + seconds) + 2
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


def _address_space_bytes(statm: int) -> int:
    """``statm``: a descriptor of /proc/self/statm, opened by this process."""
    return int(os.pread(statm, 128, 0).split()[0]) * _PAGE_BYTES


def _receive(connection: socket.socket) -> Request | CheckRequest | None:
    head = _exactly(connection, LENGTH.size)
    if head is None:
        return None
    body = _exactly(connection, LENGTH.unpack(head)[0])
    if body is None:
        return None
    request: Any = pickle.loads(body)  # noqa: S301 - pickled by the pool; hostile text in it is a str
    assert isinstance(request, Request | CheckRequest)
    return request


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    """``size`` bytes, or None at the end of the stream."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return buffer


def _text(error: BaseException) -> str:
    try:
        return str(error)[: protocol.MAX_ERROR_BYTES]
    except BaseException:  # an exception whose str() fails, such as a number with too many digits
        return "(no text)"
