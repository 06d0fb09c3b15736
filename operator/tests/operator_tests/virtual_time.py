"""An event loop whose time passes at once: minutes of waiting are tested in milliseconds, and always the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` starts at 1000 s and jumps to the next timer whenever nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        real_select = self._selector.select

        def select(timeout: float | None = None) -> Any:
            if timeout is None:
                raise RuntimeError("deadlock: every task waits and no timer is set")
            # A little more than asked for: a sum of floats may fall just short of the timer.
            self._now += timeout * (1 + 1e-12) + 1e-9 if timeout > 0 else 0.0
            return real_select(0)

        self._selector.select = select

    def time(self) -> float:
        return self._now


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
