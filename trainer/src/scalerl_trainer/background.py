"""Work on threads beside the computation of a step.

The threads are daemons, so none keeps the process alive. What one raises is raised where its result is used, so a thread that
dies ends the step.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

import torch

from scalerl_trainer.coordinator_client import NotReady

T = TypeVar("T")
RETRY_SECONDS = 1.0
"""Between requests for a step that is not needed yet."""


def in_background(name: str, work: Callable[[], T], device: torch.device) -> Future[T]:
    """Start ``work`` on a new thread whose current device is ``device``; returns its future result or exception."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            with device_of_thread(device):
                result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class LimitedCalls:
    """Calls of a volume or a store with a limit on the time of each: of one that hangs, none returns.

    Args:
        seconds: of one call.
        total_seconds: of all calls together.
        what: is called, in error messages.
    """

    def __init__(self, seconds: float, total_seconds: float = math.inf, what: str = "volume") -> None:
        self._what = what
        self._limit, self._total, self._left = seconds, total_seconds, total_seconds
        self.hung = False
        """Whether a call has not returned in time. It may still take effect, on what it was given."""

    def __call__(self, call: Callable[[], T]) -> T:
        """The result of ``call``, or what it raises.

        Raises:
            TimeoutError: a limit has passed.
        """
        begin, limit = time.monotonic(), min(self._limit, self._left)
        result = in_background(self._what, call, torch.device("cpu"))
        self.hung = not wait([result], max(0.0, min(limit, threading.TIMEOUT_MAX))).done
        self._left -= time.monotonic() - begin
        if self.hung:
            if limit < self._limit:
                raise TimeoutError(f"the {self._what} is slow: {self._total:g} s have passed")
            raise TimeoutError(f"the {self._what} does not answer: a call has taken {limit:g} s")
        return result.result()


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A CUDA stream beside that of the steps; None on a CPU. The allocator keeps memory by stream, so make few."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def on_stream(work: Callable[[], T], stream: torch.cuda.Stream | None) -> Callable[[], T]:
    """``work`` on ``stream``, after everything that is queued on this thread's now."""
    if stream is None:
        return work
    queued = torch.cuda.current_stream(stream.device).record_event()

    def run() -> T:
        stream.wait_event(queued)
        with torch.cuda.stream(stream):
            return work()

    return run


def device_of_thread(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes ``device`` the current one of a new thread, which is otherwise the first: NCCL would create its communicator there,
    and pinned memory a context."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Prefetch(Generic[T]):
    """Fetches the next step while the present one is computed.

    Args:
        fetch: called with a step, on a thread. While that step is not closed, it may wait a while and raise ``NotReady``.
    """

    def __init__(self, fetch: Callable[[int], T], device: torch.device) -> None:
        self._fetch = fetch
        self._device = device
        self._step = -1
        self._needed = threading.Event()
        self._ahead: Future[T] | None = None

    def take(self, step: int) -> T:
        """The closed ``step``; begins to fetch the one after it. Raises what ``fetch`` raises."""
        ahead = self._ahead
        if ahead is None or self._step != step or (ahead.done() and ahead.exception() is not None):
            ahead = self._begin(step)
        self._needed.set()
        result = ahead.result()
        self._ahead = self._begin(step + 1)
        return result

    def _begin(self, step: int) -> Future[T]:
        needed = threading.Event()

        def work() -> T:
            while True:
                was_needed = needed.is_set()
                try:
                    return self._fetch(step)
                except NotReady:
                    if was_needed:  # the step was closed when it was requested
                        raise
                    needed.wait(RETRY_SECONDS)  # a coordinator whose volume is full does not wait

        self._step, self._needed = step, needed
        return in_background(f"fetch-{step}", work, self._device)
