"""The work queue: which run is reconciled next. One at a time a run, many runs at once, none lost, never in a busy loop.

A key is in at most one of these places::

    due       waits for a free worker, first come first served
    waiting   a timer makes it due at a time; after a failure not before ``floor``
    in work   a pass over it is under way; a wake-up in the meantime makes it due again when the pass ends
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

SOONEST_AFTER_FAILURE_SECONDS: Final = 5.0
"""Something changed, so a failed key is retried before its back-off ends; but never sooner than this."""
SHORTEST_DELAY_SECONDS: Final = 0.1
"""A handler cannot ask for less: a mistake in it must not become a busy loop."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Timer:
    handle: asyncio.TimerHandle
    at: float
    floor: float
    """Not before this (the loop's clock), whatever wakes it."""


@dataclass(slots=True)
class _Pass:
    task: asyncio.Task[float | None]
    began: float
    woken: bool = False
    """A wake-up came during the pass: the key is processed once more."""
    patient: bool = True
    """All those wake-ups were."""


class WorkQueue:
    """Keys that are due, each handed to ``handler`` by at most one worker at a time.

    ``handler(key)`` returns the seconds until the key is due again, or None: only when woken. When it raises,
    the key comes back after ``base`` seconds, doubled with every failure in a row up to ``ceiling``, less up to a
    quarter by chance; an exception's ``retry_after`` lengthens that wait, its ``longest_wait`` is a lower ceiling.
    A pass that takes longer than ``limit`` seconds is a failure.

    ``on_pass(key, result, seconds)`` is called at the end of each pass; the result is ``ok``, ``error`` or ``cancelled``.

    The queue starts held: keys gather, nothing runs until :meth:`release` (a standby's queue stays held). All methods
    belong to the event loop's thread.
    """

    def __init__(
        self,
        handler: Callable[[Key], Awaitable[float | None]],
        *,
        workers: int = 8,
        base: float = 1.0,
        ceiling: float = 60.0,
        limit: float = 120.0,
        on_pass: Callable[[Key, str, float], None] = lambda key, result, seconds: None,
        rng: random.Random | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; a queue needs at least one")
        self._handler = handler
        self._workers = workers
        self._base = base
        self._ceiling = ceiling
        self._limit = limit
        self._on_pass = on_pass
        self._rng = rng or random.Random()
        self._held = True
        self._due: dict[Key, None] = {}
        self._waiting: dict[Key, _Timer] = {}
        self._passes: dict[Key, _Pass] = {}
        self._failures: dict[Key, int] = {}

    def wake(self, key: Key, *, patient: bool = False) -> None:
        """``key`` is due now; one in work is processed once more afterwards.

        After a failure it is brought forward, but not closer than
        ``SOONEST_AFTER_FAILURE_SECONDS`` to it; ``patient``: not at all, as what has changed is not what failed.
        """
        if (in_work := self._passes.get(key)) is not None:
            in_work.woken = True
            in_work.patient = in_work.patient and patient
        elif patient and key in self._failures and key in self._waiting:
            return
        elif key not in self._due:
            self._schedule(key, asyncio.get_running_loop().time())

    def release(self) -> None:
        """Hand out keys from now on."""
        self._held = False
        self._pump()

    async def halt(self) -> None:
        """Stop at once: nothing is handed out, passes in work are cancelled and awaited; their keys stay due."""
        self._held = True
        passes = dict(self._passes)
        for one in passes.values():
            one.task.cancel()
        await asyncio.gather(*(one.task for one in passes.values()), return_exceptions=True)

    async def drain(self, timeout: float) -> list[Key]:
        """Stop in good order: nothing more is handed out, passes in work may finish within ``timeout`` seconds.

        Those that do not are cancelled; their keys are returned.
        """
        self._held = True
        for timer in self._waiting.values():
            timer.handle.cancel()
        self._waiting.clear()
        passes = dict(self._passes)
        if passes:
            await asyncio.wait([one.task for one in passes.values()], timeout=timeout)
        late = [key for key in passes if key in self._passes]
        await self.halt()
        return late

    def depth(self) -> int:
        """Keys that are due and not in work."""
        return len(self._due)

    def in_work(self) -> int:
        """Keys that are in work."""
        return len(self._passes)

    def failing(self) -> int:
        """Keys whose last pass failed."""
        return len(self._failures)

    def _schedule(self, key: Key, at: float, floor: float = 0.0) -> None:
        """Make ``key`` due at ``at`` unless it is due sooner; ``floor`` holds against every later wake-up."""
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
        self._pump()

    def _pump(self) -> None:
        while self._due and not self._held and len(self._passes) < self._workers:
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
        """Where a key goes after its pass. A callback of the task: a task can be cancelled before it has begun."""
        now = asyncio.get_running_loop().time()
        over = self._passes.pop(key)
        floor = 0.0
        again: float | None
        if task.cancelled():
            # Stopped from outside, so not done: due again (by halt at once, else after a pause).
            result, again = "cancelled", now if self._held else now + self._base
        elif (error := task.exception()) is not None:
            result, wait = "error", self._back_off(key, error)
            again, floor = now + wait, now + min(wait, SOONEST_AFTER_FAILURE_SECONDS)
            self._log(key, error, wait)
        else:
            result, delay = "ok", task.result()
            self._failures.pop(key, None)
            again = None if delay is None else now + max(SHORTEST_DELAY_SECONDS, delay)
        if again is not None:
            self._schedule(key, again, floor)
        if over.woken and key not in self._due and not (over.patient and result == "error"):
            self._schedule(key, max(now, floor), floor)
        self._on_pass(key, result, now - over.began)
        self._pump()

    def _log(self, key: Key, error: BaseException, wait: float) -> None:
        """One line for an error of the API server, a traceback for an unexpected one."""
        expected = hasattr(error, "longest_wait")
        log.log(
            logging.WARNING if expected else logging.ERROR,
            "%s/%s: %s: %s; retried in %.1f s",
            *key, type(error).__name__, error, wait,
            exc_info=None if expected else error,
        )  # fmt: skip

    def _back_off(self, key: Key, error: BaseException) -> float:
        """Seconds until ``key`` is tried again after ``error``, and one more failure in its row."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        ceiling = min(self._ceiling, getattr(error, "longest_wait", None) or self._ceiling)
        wait = min(ceiling, self._base * 2.0 ** min(failures - 1, 30))
        return max(wait * self._rng.uniform(0.75, 1.0), getattr(error, "retry_after", None) or 0.0)
