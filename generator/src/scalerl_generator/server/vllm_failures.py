"""Why vLLM did not start: the exception of the process in which it happened, and whether another start would repeat it.

If an engine or worker process fails, vLLM's server process raises only "Engine core initialization failed. See root cause
above". The exception itself is in a log record of the other process. :func:`watch` makes that process write it to a file that the
server process reads. It also stores the cause of a failed start until the next one (:class:`LastFailure`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

CAUSES_FILE = "SCALERL_VLLM_CAUSES"
"""Environment variable with the file for exceptions of vLLM's processes; set by the server for its children."""
MAX_CAUSE_CHARACTERS = 600
MEMORY_SECONDS = 3600.0
"""How long the cause of a failed start is kept."""
_POINTER = re.compile(r"root cause", re.IGNORECASE)
"""In messages that only refer to the exception of another process."""
_TRANSIENT = re.compile(
    r"memory|CUDA|NCCL|driver|timed? ?out|connection|in use|no space|read-only|quota|device.{0,20}(busy|unavailable)",
    re.IGNORECASE,
)
"""In messages about the machine, which may change without a change of the input."""


class Cause(msgspec.Struct, frozen=True):
    """An exception as text."""

    text: str
    """Its type and message, in one line."""
    transient: bool
    """It depends on the machine: memory, devices, network, disk."""

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        message = str(error)
        errors = getattr(error, "errors", None)
        if callable(errors):  # pydantic: without the input, which may be the whole configuration
            with contextlib.suppress(Exception):
                message = "; ".join(str(one["msg"]) for one in errors())
        text = " ".join(f"{type(error).__name__}: {message}".split())
        missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        of_machine = isinstance(error, MemoryError | OSError) and not missing
        return cls(text[:MAX_CAUSE_CHARACTERS], of_machine or bool(_TRANSIENT.search(message)))


def watch() -> None:
    """Report exceptions that vLLM logs in this process, and in those forked from it. Call it in every process.

    By the factory of log records: an engine process configures vLLM's loggers again, which removes their handlers.
    """
    path = os.environ.get(CAUSES_FILE)
    if not path:
        try:
            descriptor, path = tempfile.mkstemp(prefix="vllm-causes-")
        except OSError:
            return
        os.close(descriptor)
        os.environ[CAUSES_FILE] = path
    make = logging.getLogRecordFactory()
    if isinstance(make, _Reporter):
        return
    logging.setLogRecordFactory(_Reporter(make, Path(path)))


@dataclass(frozen=True)
class _Reporter:
    """A factory of log records that appends the exception of each of vLLM's error records to a file."""

    make: Callable[..., logging.LogRecord]
    path: Path

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self.make(*args, **kwargs)
        error = record.exc_info[1] if record.exc_info else None
        of_vllm = record.name.startswith("vllm") and record.levelno >= logging.ERROR
        if of_vllm and error is not None and not _POINTER.search(str(error)):
            # After the start the file is gone, and errors of requests must not fill the disk.
            with contextlib.suppress(OSError), open(self.path, "ab", opener=_existing) as file:
                file.write(msgspec.json.encode(Cause.of(error)) + b"\n")
        return record


def _existing(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT)


def cause_of(error: Exception) -> Cause:
    """The cause of a failed start: ``error``, or the first exception of another process if ``error`` only refers to it."""
    if not _POINTER.search(str(error)):
        return Cause.of(error)
    with contextlib.suppress(OSError, KeyError, IndexError, msgspec.MsgspecError):
        return msgspec.json.decode(Path(os.environ[CAUSES_FILE]).read_bytes().splitlines()[0], type=Cause)
    # A process that was killed, most often for its memory, has reported nothing.
    return Cause(Cause.of(error).text, transient=True)


def forget_reports() -> None:
    """Remove the file of :func:`watch`."""
    with contextlib.suppress(OSError, KeyError):
        Path(os.environ[CAUSES_FILE]).unlink()


@dataclass(frozen=True)
class LastFailure:
    """The cause of the last failed start of a server, in a file. All methods are best effort: the disk may be full."""

    path: Path

    @classmethod
    def of_server(cls, cache: Path, *identity: str) -> LastFailure:
        """That of the server with this ``identity``: its run, replica and options."""
        name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
        return cls(cache / "start-failures" / name)

    def repeats(self, cause: Cause) -> bool:
        """Remember ``cause``; returns whether the last start, without a success since, failed for the same one, which does not
        depend on the machine."""
        text = re.sub(r"0x[0-9a-f]+|\d+", "#", cause.text)
        same = False
        with contextlib.suppress(OSError):
            recent = time.time() - self.path.stat().st_mtime < MEMORY_SECONDS
            same = recent and self.path.read_text() == text
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text)
        return same and not cause.transient

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
