"""Waits of a supervisor that end with the first of several events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def pause(seconds: float, until: asyncio.Event) -> None:
    """Sleeps, no longer than until the event is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await until.wait()


async def first(*waits: Awaitable[_T]) -> _T:
    """The result of the wait that ends first, of several the earlier argument's. The others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task.done())
    finally:
        await cancel(*tasks)


@contextlib.asynccontextmanager
async def calling(function: Callable[[], None], seconds: float) -> AsyncIterator[None]:
    """Calls a function every so many seconds inside the block."""

    async def call() -> None:
        while True:
            await asyncio.sleep(seconds)
            function()

    task = asyncio.create_task(call())
    try:
        yield
    finally:
        await cancel(task)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits until they have ended; their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
