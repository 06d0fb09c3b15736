"""The grader: a forked process that scores completions until it is closed, retires, or is killed."""

from __future__ import annotations

import os
import pickle
import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import BufferedReader
from typing import Any

from scalerl_processes.kernel import die_with_parent
from scalerl_tasks.environments.environment_verifier import EnvironmentVerifier
from scalerl_tasks.environments.protocol import Continued
from scalerl_tasks.errors import TaskError, VerifierError
from scalerl_tasks.grading import audit_guard, protocol
from scalerl_tasks.grading.protocol import (
    ANSWERED,
    CONTINUED,
    FAILED,
    LENGTH,
    RETIRED,
    SCORED,
    UNANSWERED,
    CheckRequest,
    Limits,
    Request,
    Setup,
)
from scalerl_tasks.programs.verifier import CodeVerifier
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.sandbox.kernel import no_new_privileges
from scalerl_tasks.verdict import NOT_APPLICABLE, SCORE_RANGE, as_verdict, declared_parts
from scalerl_tasks.verifiers import Verifier

_PAGE_BYTES = resource.getpagesize()


def run(connection: socket.socket, records: int, verifier: Verifier, setup: Setup, parent: int) -> None:
    """Serve one pool, whose requests come over ``connection``, with records into the pipe ``records``; returns when the grader should
    exit.
    """
    part_names, limits = declared_parts(verifier), setup.limits
    # Kept open: it is read after each item, and opening it takes longer than most items.
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    if isinstance(verifier, CodeVerifier | EnvironmentVerifier):
        verifier.open()
    _confine(limits, parent, _address_space_bytes(statm), trusted=_trusted(verifier))
    _redirect_output(shown=setup.show_output)
    requests = connection.makefile("rb")
    retire_above = _address_space_bytes(statm) + limits.memory_bytes // 2
    while True:
        try:
            request = _receive(requests)
        except MemoryError:
            # Only a completion that is alone in its request can be this large.
            _write(records, _out_of_memory(limits) + protocol.record(RETIRED))
            return
        if request is None:
            return
        for answer, reusable in _answers(request, verifier, part_names, limits):
            _write(records, answer)
            # Caches grow; they must not make the next item exceed the memory limit.
            if not reusable or _address_space_bytes(statm) > retire_above:
                _write(records, protocol.record(RETIRED))
                return
        connection.sendall(b"\0")


def _write(records: int, answer: bytes) -> None:
    """Write all of it: a signal, such as an alarm of the user's code, ends a write to a full pipe early."""
    left = memoryview(answer)
    while left:
        left = left[os.write(records, left) :]


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
    if getattr(verifier, "whole", False):
        yield _grade_group(verifier, part_names, request, limits)
        return
    for completion in request.completions:
        yield _grade(verifier, part_names, request.prompt, completion, limits)


def _grade(
    verifier: Verifier, part_names: Sequence[str], prompt: Prompt, completion: str, limits: Limits
) -> tuple[bytes, bool]:
    """The record of one completion, and whether this process may grade another."""
    try:
        with _guarded(verifier, prompt):
            found = verifier.score(prompt, completion)
    except MemoryError:
        return _out_of_memory(limits), False
    except audit_guard.RefusedError as error:
        return _failed(str(error)), True
    except BaseException as error:  # SystemExit included: no text can make a grader exit
        return _failed(_described(verifier, error)), True
    return _record(verifier, part_names, prompt, found), True


def _grade_group(
    verifier: Any, part_names: Sequence[str], request: Request, limits: Limits
) -> tuple[bytes, bool]:
    """The records of all completions of a request, which are scored together, and whether this process may grade others."""
    count = len(request.completions)
    try:
        with _guarded(verifier, request.prompt):
            found = verifier.score_group(request.prompt, request.completions)
    except MemoryError:
        return count * _out_of_memory(limits), False
    except audit_guard.RefusedError as error:
        return count * _failed(str(error)), True
    except BaseException as error:
        return count * _failed(_described(verifier, error)), True
    return b"".join(_record(verifier, part_names, request.prompt, one) for one in found), True


def _record(verifier: Verifier, part_names: Sequence[str], prompt: Prompt, found: Any) -> bytes:
    """The record of what a verifier gave for a completion."""
    if found is None:
        return _failed(NOT_APPLICABLE)
    if isinstance(found, VerifierError):
        return _failed(str(found))
    if isinstance(found, Continued):
        verdict = found.verdict
        return protocol.record(CONTINUED, verdict.score, list(verdict.parts.values()), messages=found.content)
    try:
        verdict = as_verdict(found, part_names, getattr(verifier, "range", SCORE_RANGE))
    except (ArithmeticError, TypeError, ValueError) as error:
        text, label = str(error), getattr(verifier, "label", "")
        if not label:
            return _failed(text)
        return _failed(
            f"{text.replace('the verifier', label, 1)} (verifier.range), for the prompt {prompt.id}"
        )
    answered = verdict.answered
    if answered is None and getattr(verifier, "finds_answers", False):
        answered = True
    kind = SCORED if answered is None else ANSWERED if answered else UNANSWERED
    return protocol.record(kind, verdict.score, list(verdict.parts.values()))


def _described(verifier: Verifier, error: BaseException) -> str:
    if isinstance(error, VerifierError) and (_trusted(verifier) or isinstance(verifier, EnvironmentVerifier)):
        return str(error)  # names its function and the prompt
    return f"the verifier failed: {type(error).__name__}: {_text(error)}"


def _trusted(verifier: object) -> bool:
    return bool(getattr(verifier, "trusted", False))


def _guarded(verifier: object, prompt: Prompt) -> AbstractContextManager[None]:
    return nullcontext() if _trusted(verifier) else audit_guard.guarded(prompt)


def _check(verifier: Verifier, prompt: Prompt, limits: Limits) -> tuple[bytes, bool]:
    """The record of one checked prompt, and whether this process may check another."""
    try:
        with _guarded(verifier, prompt):
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


def _confine(limits: Limits, parent: int, address_space: int, *, trusted: bool) -> None:
    """Set the limits: death with the parent, memory, no core dumps; unless trusted, no file writes and no child processes."""
    die_with_parent(parent)
    no_new_privileges()
    kinds = {resource.RLIMIT_AS: address_space + limits.memory_bytes, resource.RLIMIT_CORE: 0}
    if not trusted:
        kinds |= {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0}
    for kind, limit in kinds.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _redirect_output(*, shown: bool) -> None:
    """Redirect output to /dev/null: a library's warnings must not copy hostile text to the log. ``shown``: to standard error."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for descriptor in (1, 2):
        os.dup2(2 if shown else null, descriptor)
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


def _receive(requests: BufferedReader) -> Request | CheckRequest | None:
    """The next request; None at the end of the stream."""
    head = requests.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size: int = LENGTH.unpack(head)[0]
    body = requests.read(size)
    if len(body) < size:
        return None
    request: Any = pickle.loads(body)  # noqa: S301 - pickled by the pool; hostile text in it is a str
    assert isinstance(request, Request | CheckRequest)
    return request


def _text(error: BaseException) -> str:
    try:
        return str(error)[: protocol.MAX_ERROR_BYTES]
    except BaseException:  # an exception whose str() fails, such as a number with too many digits
        return "(no text)"
