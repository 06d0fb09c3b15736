"""The work queue: which run is looked at next. One at a time a run, many runs at once, never hot, none lost."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Protocol

Key = tuple[str, str]


class QueueObserver(Protocol):
    """What a queue tells its metrics."""

    def finished(self, key: Key, result: str, seconds: float) -> None:
        """One pass over ``key`` ended: ``result`` is ``ok``, ``error`` or ``cancelled``."""


class WorkQueue:
    """Keys that are due, each handed to ``handler`` by at most one worker at a time.

    ``handler(key)`` returns the seconds until the key is looked at again, or None: only when woken. When it raises,
    the key comes back after ``base`` seconds, doubled with every failure in a row up to ``ceiling``, with jitter; an
    exception's ``retry_after`` lengthens that wait, its ``longest_wait`` is a lower ceiling. One pass may take
    ``limit`` seconds.

    The queue starts held: keys gather, nothing runs until :meth:`release` (a standby's queue stays held).
    """

    def __init__(
        self,
        handler: Callable[[Key], Awaitable[float | None]],
        *,
        workers: int = 8,
        base: float = 1.0,
        ceiling: float = 60.0,
        limit: float = 120.0,
        observer: QueueObserver | None = None,
        rng: random.Random | None = None,
    ) -> None:
        raise NotImplementedError

    def wake(self, key: Key, delay: float = 0.0) -> None:
        """``key`` is due in ``delay`` seconds, or sooner if it already was.

        While it is in work it is run once more afterwards. While it waits after a failure it is brought forward,
        but not closer than a few seconds to that failure.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Start handing out keys."""
        raise NotImplementedError

    async def halt(self) -> None:
        """Stop at once: no more keys, passes in work are cancelled and awaited. Keys stay due; ``release`` goes on."""
        raise NotImplementedError

    async def drain(self, timeout: float) -> list[Key]:
        """Stop in good order: no more keys, passes in work may finish; those that do not are cancelled and returned."""
        raise NotImplementedError

    def depth(self) -> int:
        """Keys that are due now and not in work."""
        raise NotImplementedError

    def in_work(self) -> int:
        """Keys that are in work."""
        raise NotImplementedError
