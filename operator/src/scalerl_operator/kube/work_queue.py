"""The work queue of reconciles: at most one at a time per run, many runs at once, with back-off.

A key is in at most one of these places::

    due       waits for a free worker, first come first served
    waiting   becomes due by a timer; after a failure not before ``floor``
    in work   its reconcile (a pass) is running; if it is woken meanwhile, it is due again when the pass ends
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from scalerl_operator.kube.types import Key

FIRST_BACK_OFF_SECONDS: Final = 1.0
MAX_BACK_OFF_SECONDS: Final = 60.0
MIN_AFTER_FAILURE_SECONDS: Final = 5.0
"""Shortest back-off of a failed key that is woken."""
MIN_DELAY_SECONDS: Final = 0.1
"""Shortest delay that a handler can return: an error in it must not become a busy loop."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Timer:
    handle: asyncio.TimerHandle
    at: float
    floor: float
    """The earliest time for a wake-up, by the loop's clock."""


@dataclass(slots=True)
class _Pass:
    task: asyncio.Task[float | None]
    began: float
    woken: bool = False
    """The key was woken during the pass."""
    respect_backoff: bool = True
    """All those wake-ups respect the back-off."""


class WorkQueue:
    """Keys that are due, each processed by at most one worker at a time.

    ``handler(key)`` returns the seconds until the key is due again; None: only when woken. When it raises, or takes longer than
    ``limit`` seconds, the key is due again after a back-off, from :data:`FIRST_BACK_OFF_SECONDS` doubled with each consecutive failure up
    to :data:`MAX_BACK_OFF_SECONDS`, with a jitter of a quarter. An exception's ``longest_wait`` is a lower ceiling; its
    ``retry_after`` lengthens the back-off, also beyond the ceiling.

    ``on_pass(key, result, seconds)`` is called after each pass; the result is ``ok``, ``error`` or ``cancelled``.

    The queue starts paused: no pass begins before :meth:`release`.
    """

    def __init__(
        self,
        handler: Callable[[Key], Awaitable[float | None]],
        *,
        workers: int = 8,
        limit: float = 120.0,
        on_pass: Callable[[Key, str, float], None] = lambda key, result, seconds: None,
        rng: random.Random | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; a queue needs at least one")
        self._handler = handler
        self._workers = workers
        self._limit = limit
        self._on_pass = on_pass
        self._rng = rng or random.Random()
        self._paused = True
        self._due: dict[Key, None] = {}
        self._waiting: dict[Key, _Timer] = {}
        self._passes: dict[Key, _Pass] = {}
        self._failures: dict[Key, int] = {}

    def wake(self, key: Key, *, respect_backoff: bool = False) -> None:
        """Makes ``key`` due now, or after the pass that is in work.

        A wake-up shortens a back-off to :data:`MIN_AFTER_FAILURE_SECONDS`; respect_backoff: not at all, as the change is unrelated
        to the failure.
        """
        if (in_work := self._passes.get(key)) is not None:
            in_work.woken = True
            in_work.respect_backoff = in_work.respect_backoff and respect_backoff
        elif respect_backoff and key in self._failures and key in self._waiting:
            return
        elif key not in self._due:
            self._schedule(key, asyncio.get_running_loop().time())

    def release(self) -> None:
        """Starts to process keys."""
        self._paused = False
        self._start_passes()

    async def halt(self) -> None:
        """Begins no more passes, and cancels those in work; their keys stay due."""
        self._paused = True
        tasks = [one.task for one in self._passes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, timeout: float) -> list[Key]:
        """Begins no more passes; those in work have ``timeout`` seconds to end, and are then cancelled. Returns their keys."""
        self._paused = True
        for timer in self._waiting.values():
            timer.handle.cancel()
        self._waiting.clear()
        if self._passes:
            await asyncio.wait([one.task for one in self._passes.values()], timeout=timeout)
        late = list(self._passes)
        await self.halt()
        return late

    def depth(self) -> int:
        """Keys that are due and not in work."""
        return len(self._due)

    def in_work(self) -> int:
        """Keys in work."""
        return len(self._passes)

    def failing(self) -> int:
        """Keys whose last pass failed."""
        return len(self._failures)

    def _schedule(self, key: Key, at: float, floor: float = 0.0) -> None:
        """Makes ``key`` due at ``at`` unless it is due sooner; ``floor``: the earliest time for later wake-ups."""
        loop = asyncio.get_running_loop()
        before = self._waiting.get(key)
        if before is not None:
            floor = max(floor, before.floor)
            at = max(min(at, before.at), floor)
            if at >= before.at:
                return
            before.handle.cancel()
            del self._waiting[key]
        if at <= loop.time():
            self._make_due(key)
        else:
            self._waiting[key] = _Timer(loop.call_at(at, self._make_due, key), at, floor)

    def _make_due(self, key: Key) -> None:
        self._waiting.pop(key, None)
        self._due[key] = None
        self._start_passes()

    def _start_passes(self) -> None:
        while self._due and not self._paused and len(self._passes) < self._workers:
            key = next(iter(self._due))
            del self._due[key]
            task = asyncio.create_task(self._bounded(key), name=f"reconcile {'/'.join(key)}")
            self._passes[key] = _Pass(task, asyncio.get_running_loop().time())
            task.add_done_callback(functools.partial(self._ended, key))

    async def _bounded(self, key: Key) -> float | None:
        try:
            async with asyncio.timeout(self._limit) as limit:
                return await self._handler(key)
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(
                    f"the pass took longer than {self._limit:.0f} s and was stopped"
                ) from error
            raise

    def _ended(self, key: Key, task: asyncio.Task[float | None]) -> None:
        """Schedules the key after its pass. A callback of the task, which can be cancelled before it has begun."""
        now = asyncio.get_running_loop().time()
        over = self._passes.pop(key)
        floor = 0.0
        again: float | None
        if task.cancelled():
            # Not complete: due again, at once after halt().
            result, again = "cancelled", now if self._paused else now + FIRST_BACK_OFF_SECONDS
        elif (error := task.exception()) is not None:
            result, wait = "error", self._back_off(key, error)
            again, floor = now + wait, now + min(wait, MIN_AFTER_FAILURE_SECONDS)
            self._log(key, error, wait)
        else:
            result, delay = "ok", task.result()
            self._failures.pop(key, None)
            again = None if delay is None else now + max(MIN_DELAY_SECONDS, delay)
        if again is not None:
            self._schedule(key, again, floor)
        if over.woken and key not in self._due and not (over.respect_backoff and result == "error"):
            self._schedule(key, max(now, floor), floor)
        self._on_pass(key, result, now - over.began)
        self._start_passes()

    def _log(self, key: Key, error: BaseException, wait: float) -> None:
        """Logs a line for an error of the API server, a traceback for any other."""
        expected = hasattr(error, "longest_wait")
        log.log(
            logging.WARNING if expected else logging.ERROR,
            "%s/%s: %s: %s; retried in %.1f s",
            *key, type(error).__name__, error, wait,
            exc_info=None if expected else error,
        )  # fmt: skip

    def _back_off(self, key: Key, error: BaseException) -> float:
        """Counts a failure of ``key``. Returns the seconds until it is retried."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        ceiling = min(MAX_BACK_OFF_SECONDS, getattr(error, "longest_wait", None) or MAX_BACK_OFF_SECONDS)
        wait = min(ceiling, FIRST_BACK_OFF_SECONDS * 2.0 ** min(failures - 1, 30))
        return max(wait * self._rng.uniform(0.75, 1.0), getattr(error, "retry_after", None) or 0.0)
